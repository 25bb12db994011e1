"""Partitioned streams between real servers: one logical stream that several lanes copy."""

from collections.abc import Iterable
from itertools import groupby

import pytest

from sr_assets.domain.messages import Message, last_origin
from sr_assets_tests.rig import ALL_ON_SPARK, Rig, Sent

SENDERS = 12


def rounds(count: int, lanes: int, *, first: int = 0, senders: int = SENDERS) -> list[Sent]:
    """Return messages of nodes in turn, whose number decides the partition: subject `<partition>.n<number>`."""
    return [
        Sent(b'{"sender": "n%d", "turn": %d}' % (node, turn), f"{node % lanes}.n{node}")
        for turn in range(first, first + count)
        for node in range(senders)
    ]


def sequences(copies: Iterable[Message]) -> list[int]:
    """Return the source sequence of each copy."""
    origins = [last_origin(copy.headers) for copy in copies]
    return [origin.sequence for origin in origins if origin is not None]


def assert_exact(rig: Rig, stream: str, target: str) -> None:
    """Assert that every message of the source has one copy, and each sender's copies are in order."""
    copies = rig.copies(target)
    assert sorted(sequences(copies)) == [message.sequence for message in rig.stored(stream)]
    by_sender = sorted(copies, key=lambda copy: copy.payload.partition(b",")[0])
    for sender, own in groupby(by_sender, key=lambda copy: copy.payload.partition(b",")[0]):
        order = sequences(own)
        assert order == sorted(order), sender


@pytest.mark.parametrize("spark", (ALL_ON_SPARK, {}))
def test_lanes_copy_every_message_once_in_each_senders_order(rig: Rig, spark: dict[str, int]) -> None:
    rig.spark = dict(spark)
    stream = rig.make()
    rig.publish(stream, rounds(20, 3))
    for sequence in (5, 6, 7, 100, 240):
        rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    rig.add(
        stream, partitions={"count": 3, "filter": f"{stream}.{{p}}.>"}, target_stream=f"{stream}_T", batch_messages=90
    )
    (report,) = rig.drain().values()
    assert_exact(rig, stream, f"{stream}_T")
    row = rig.row("replication")
    assert (row["copied_messages"], row["gap_messages"], row["lag_messages"]) == (235, 5, 0)
    assert report.parked == report.disordered == 0
    lanes = rig.rows("SELECT * FROM replication_partitions ORDER BY partition")
    assert [(lane["partition"], lane["subject"], lane["next_sequence"]) for lane in lanes] == [
        (number, f"{stream}.{number}.>", 241) for number in range(3)
    ]
    assert {(lane["lag_messages"], lane["watermark"]) for lane in lanes} == {(0, row["watermark"])}


@pytest.mark.parametrize("spark", (ALL_ON_SPARK, {}))
def test_message_of_no_partition_stops_the_stream_until_one_takes_it(rig: Rig, spark: dict[str, int]) -> None:
    rig.spark = dict(spark)
    stream = rig.make()
    rig.publish(stream, rounds(2, 3))
    partitions = {"count": 2, "filter": f"{stream}.{{p}}.>"}
    entry = rig.add(stream, partitions=partitions, target_stream=f"{stream}_T")
    assert f"holds message 3 with subject {stream}.2.n2, which no partition takes" in rig.failure()
    assert rig.row("SELECT count(*) AS n FROM replication_partitions")["n"] == 2
    entry["partitions"] = {**partitions, "count": 3}
    rig.drain()
    assert_exact(rig, stream, f"{stream}_T")
    assert rig.row("SELECT count(*) AS n FROM replication_partitions")["n"] == 3


def test_partitions_of_a_paused_stream_count_their_own_lag(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, rounds(1, 3, senders=3))
    entry = rig.add(stream, partitions={"subjects": [f"{stream}.{n}.>" for n in range(3)]}, target_stream=f"{stream}_T")
    rig.drain()
    entry["paused"] = True
    rig.publish(stream, rounds(2, 3, senders=4))
    rig.drain()
    lags = rig.rows("SELECT lag_messages FROM replication_partitions ORDER BY partition")
    assert [lag["lag_messages"] for lag in lags] == [4, 2, 2]


@pytest.mark.parametrize("spark", (ALL_ON_SPARK, {}))
def test_tracked_lanes_share_the_nodes_when_their_count_changes(rig: Rig, spark: dict[str, int]) -> None:
    rig.spark = dict(spark)
    stream = rig.make()
    rig.publish(stream, rounds(3, 2))
    partitions = {"count": 2, "filter": f"{stream}.{{p}}.>"}
    entry = rig.add(
        stream,
        partitions=partitions,
        target_stream=f"{stream}_T",
        inspect_field="sender",
        inspect_duration="1h",
        inspect_force_field="turn",
    )
    rig.drain()
    rig.publish(stream, rounds(3, 3, first=3))
    entry["partitions"] = {**partitions, "count": 3}
    rig.drain()
    assert len(rig.rows("replication")) == 1
    assert len(rig.rows("replication_partitions")) == 3
    assert rig.row("SELECT count(*) AS n FROM last_seen_nodes")["n"] == SENDERS
    assert rig.row("SELECT count(*) AS n FROM node_advisories")["n"] == SENDERS
    assert len(sequences(rig.copies(f"{stream}_T"))) == SENDERS
