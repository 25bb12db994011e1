"""Partitioned streams between real servers: one logical stream that several lanes copy."""

import json

import pytest

from sr_assets.adapters import crash_points
from sr_assets.adapters.crash_points import Point
from sr_assets_tests.partitioned import SENDERS, assert_exact, rounds, sequences
from sr_assets_tests.rig import ALL_ON_SPARK, Command, Rig, Sent, wait_until


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


# Lanes on Spark copy in the test above.
@pytest.mark.parametrize("spark", (pytest.param(ALL_ON_SPARK, marks=pytest.mark.nightly), {}))
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


def crash(rig: Rig, monkeypatch: pytest.MonkeyPatch, point: Point) -> None:
    """Run the site until it reaches a point, and end it there as a kill does."""

    def end(reached: Point) -> None:
        if reached is point:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(crash_points, "hook", end)
        with pytest.raises(KeyboardInterrupt):
            rig.run()


def test_new_lanes_finish_the_batch_of_a_crashed_run(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.spark = ALL_ON_SPARK
    stream = rig.make()
    rig.publish(stream, rounds(30, 2))
    partitions = {"count": 2, "filter": f"{stream}.{{p}}.>"}
    rig.add(stream, partitions=partitions, target_stream=f"{stream}_T", batch_messages=200)
    for point in (Point.PLANNED, Point.PUBLISHED, Point.COMMITTING):
        crash(rig, monkeypatch, point)
    assert len(rig.copies(f"{stream}_T")) == 200
    # The senders move to other partitions.
    rig.publish(stream, rounds(5, 3, first=30))
    partitions["count"] = 3
    rig.drain()
    assert_exact(rig, stream, f"{stream}_T")
    row = rig.row("replication")
    assert (row["copied_messages"], row["gap_messages"], row["lag_messages"]) == (420, 0, 0)


def test_next_run_finds_copies_of_lanes_whose_originals_are_lost(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.spark = ALL_ON_SPARK
    stream = rig.make()
    rig.publish(stream, rounds(20, 2))
    rig.add(stream, partitions={"count": 2, "filter": f"{stream}.{{p}}.>"}, target_stream=f"{stream}_T")
    crash(rig, monkeypatch, Point.PUBLISHED)
    for sequence in (3, 4, 150):
        rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    rig.drain()
    assert sorted(sequences(rig.copies(f"{stream}_T"))) == list(range(1, 241))
    row = rig.row("replication")
    assert (row["copied_messages"], row["copied_bytes"], row["gap_messages"]) == (
        240,
        sum(len(copy.payload) for copy in rig.copies(f"{stream}_T")),
        0,
    )


def test_streams_with_a_number_in_their_names_are_combined_and_divided(rig: Rig) -> None:
    parts = [rig.make(f"PART{number}") for number in range(2)]
    for number, part in enumerate(parts):
        rig.publish(part, [Sent(b'{"sender": "n%d", "turn": %d}' % (number, turn), "m") for turn in range(30)])
    sources = [
        {"name": part, "subject_transforms": [{"src": f"{part}.>", "dest": f"lane.{number}.{part}.>"}]}
        for number, part in enumerate(parts)
    ]
    stream = rig.unique("WHOLE")
    rig.create(stream, subjects=[], sources=sources)
    wait_until(lambda: rig.info(stream).messages == 60, "the native stream to be filled")
    partitions = {"count": 2, "filter": "lane.{p}.>"}
    rig.add(stream, partitions=partitions, target_stream=f"{stream}_T", target_subject_prefix=stream)
    rig.drain()
    assert_exact(rig, stream, f"{stream}_T")
    assert rig.row("replication")["copied_messages"] == 60


def test_lanes_that_change_before_the_first_copy_leave_out_older_messages(
    rig: Rig, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(rig.home / "replication.yaml"))
    rig.spark = ALL_ON_SPARK
    stream = rig.make()
    rig.publish(stream, rounds(2, 3))
    partitions = {"count": 3, "filter": f"{stream}.{{p}}.>"}
    entry = rig.add(stream, partitions=partitions, target_stream=f"{stream}_T", paused=True)
    rig.drain()
    rig.publish(stream, rounds(2, 2, first=2))
    partitions["count"] = 2
    assert checked(rig, command) == (
        "new partitions after message 48, which is in one; the others are copied without them"
    )
    entry["paused"] = False
    rig.drain()
    rig.publish(stream, rounds(2, 2, first=4))
    rig.drain()
    assert_exact(rig, stream, f"{stream}_T")
    assert {lane["begins"] for lane in rig.rows("replication_partitions")} == {49}
    assert checked(rig, command).startswith("24 newest messages, each in a partition")
    rig.publish(stream, [Sent(subject="2.n1"), Sent(subject="0.n1")])
    rig.settings()
    assert f"message 73 with subject {stream}.2.n1, which no partition takes" in command("check", "--connect")[2]


def test_changed_lanes_leave_out_messages_of_a_source_put_back(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, rounds(1, 3))
    partitions = {"count": 3, "filter": f"{stream}.{{p}}.>"}
    rig.add(stream, partitions=partitions, target_stream=f"{stream}_T", batch_messages=6, on_source_reset="recopy")
    rig.drain()
    rig.publish(stream, rounds(1, 2, first=1))
    partitions["count"] = 2
    rig.drain()
    rig.api(f"STREAM.DELETE.{stream}")
    rig.create(stream)
    rig.publish(stream, rounds(1, 3, first=2))
    rig.drain()
    rig.publish(stream, rounds(1, 2, first=3))
    rig.drain()
    assert sorted(sequences(rig.copies(f"{stream}_T"))) == sorted([*range(1, 25), *range(1, 25)])


def checked(rig: Rig, command: Command) -> str:
    """Return the result of the check of the only stream's partitions."""
    rig.settings()
    output = command("check", "--connect", "--format", "json")[1]
    learned: dict[str, str] = {probe["tried"]: probe["learned"] for probe in json.loads(output)}
    return learned["a partition of each sender"]


def test_check_finds_a_sender_in_two_partitions(rig: Rig, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(rig.home / "replication.yaml"))
    stream = rig.make()
    rig.publish(stream, rounds(2, 3))
    sender = {"inspect_field": "sender", "inspect_duration": "1h"}
    entry = rig.add(stream, partitions={"count": 3, "filter": f"{stream}.{{p}}.>"}, **sender)
    rig.settings()
    assert checked(rig, command) == "24 newest messages of 12 senders, each sender in one partition"
    rig.publish(stream, [Sent(b'{"sender": "n1"}', "2.n1")])
    code, _, errors = command("check", "--connect")
    assert code == 1
    assert f"sender n1 is in partition 1 (subject {stream}.1.n1) and in partition 2 (subject {stream}.2.n1)" in errors
    entry["partitions"]["count"] = 2
    rig.settings()
    code, _, errors = command("check", "--connect")
    assert code == 1
    assert f"with subject {stream}.2.n" in errors
    assert "which no partition takes; add the subject to partitions" in errors
    entry["partitions"] = {"subjects": ["elsewhere.>"]}
    rig.settings()
    assert f"take no message of subject '{stream}.>'" in command("check", "--connect")[2]
    assert f"take no message of subject '{stream}.>'" in rig.failure()
