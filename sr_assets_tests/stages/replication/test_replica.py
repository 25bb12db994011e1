"""Copied messages, byte for byte, and their counters, with a real source and a real target."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters import crash_points
from sr_assets.adapters.crash_points import Point
from sr_assets.domain.messages import last_origin
from sr_assets.stages.replication.batch import CopyBatch
from sr_assets_tests.rig import SITE, Rig, Sent, wait_until
from sr_assets_tests.servers import NatsServer

TRACKED = {"inspect_field": "sender", "inspect_duration": "10m"}
#: Headers that a copy drops.
CONTROL_HEADERS = (
    "Nats-Msg-Id: one",
    "nats-msg-id: two",
    "Nats-Expected-Stream: {stream}",
    "NATS-EXPECTED-FOO: 1",
    "nats-batch-foo: 1",
    "nats-schedule: @at 2030-01-01T00:00:00Z",
    "nats-scheduler: s",
    "nats-ttl: 5s",
    "nats-rollup: all",
    "nats-incr: 5",
    "nats-stream-source: x",
    "Nats-Required-Api-Level: 0",
    "Nats-Stream: FORGED",
    "Nats-Subject: forged",
    "Nats-Sequence: 4711",
    "Nats-Time-Stamp: 2001-01-01T00:00:00Z",
    "Nats-Num-Pending: 3",
    "Nats-Last-Sequence: 9",
)
COPIED_HEADERS = ("Nats-Foo: 1", "Choria-SR-Source: S 7 R N 12", "A: 1", "A: 2", "a:\t3 ", "Odd : x", "X-Nats-TTL: 1")


def block(*lines: str) -> bytes:
    return ("NATS/1.0\r\n" + "".join(f"{line}\r\n" for line in lines) + "\r\n").encode("latin-1")


def sender(name: str, **more: Any) -> bytes:
    return json.dumps({"sender": name, **more}).encode()


def headers_added_by_the_copy(rig: Rig, stream: str, sequence: int, stored_ns: int) -> bytes:
    created_ns = rig.info(stream).created_ns
    return (
        f"Choria-SR-Source: {stream} {sequence} {SITE} {SITE} {stored_ns // 1_000_000}\r\n"
        f"Nats-Msg-Id: {SITE}/{SITE}/{stream}/{created_ns}/{sequence}\r\n\r\n"
    ).encode()


@pytest.mark.parametrize("direct", (True, False))
@pytest.mark.parametrize("entry", ({}, TRACKED), ids=("plain", "sampled"))
def test_copies_are_identical_except_for_control_headers(rig: Rig, direct: bool, entry: dict[str, Any]) -> None:
    stream = rig.make(allow_direct=direct)
    mixed = [line for pair in zip(COPIED_HEADERS, CONTROL_HEADERS, strict=False) for line in pair] + list(
        CONTROL_HEADERS[7:]
    )
    sent = [
        Sent(b"", headers=b""),
        Sent(bytes(range(256)) * 3, headers=block("X: \xff\xfe\xa0", "Y:")),
        Sent(b"not json\r\n\r\n", headers=block(*(line.format(stream=stream) for line in mixed))),
        Sent(b"\xff" * 1_000_000, headers=block("Z: z")),
        Sent(b'{"sender": true}', headers=block()),
        Sent(b'{"no": "sender"}', headers=block("Nats-Stream: FORGED")),
        Sent(b'[{"sender": "x"}]'),
        Sent(b'{"sender": ""}'),
        Sent(b'\xef\xbb\xbf{"sender": "bom"}'),
        Sent(b'{"sender": "latin \xe9"}'),
        Sent(b'{"sender": "' + b"x" * 256 + b'"}'),
    ]
    rig.publish(stream, sent)
    rig.add(stream, **entry)
    rig.drain()
    stored, copies = rig.stored(stream), rig.copies(stream)
    assert [copy.payload for copy in copies] == [original.payload for original in sent]
    assert [copy.subject for copy in copies] == [f"{stream}.m"] * len(sent)
    copied_headers = [b""] * len(sent)
    copied_headers[1] = b"X: \xff\xfe\xa0\r\nY:\r\n"
    copied_headers[2] = "".join(f"{line}\r\n" for line in COPIED_HEADERS).encode()
    copied_headers[3] = b"Z: z\r\n"
    for copy, message, lines in zip(copies, stored, copied_headers, strict=True):
        added_headers = headers_added_by_the_copy(rig, stream, message.sequence, message.stored_ns)
        assert copy.headers == b"NATS/1.0\r\n" + lines + added_headers
    counted = rig.row("replication")
    assert counted["copied_messages"] == counted["seen_messages"] == len(sent)
    assert counted["copied_bytes"] == sum(len(original.payload) for original in sent)
    assert counted["no_sender_messages"] == (len(sent) if entry else 0)


def test_second_hop_appends_its_origin_header(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(b"x", headers=block("Choria-SR-Source: CITY 5 LONDON city 1", "Nats-Msg-Id: city/5"))])
    rig.add(stream)
    rig.drain()
    (copy,) = rig.copies(stream)
    assert copy.headers.count(b"Choria-SR-Source:") == 2
    assert copy.headers.count(b"Nats-Msg-Id:") == 1
    origin = last_origin(copy.headers)
    assert origin is not None
    assert (origin.stream, origin.sequence) == (stream, 1)


def test_subjects_are_prefixed_then_shortened(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(b"1", "in.a.b"), Sent(b"2", "in.c"), Sent(b"3", "d.in.e")])
    target = rig.unique("T")
    rig.add(stream, target_stream=target, target_subject_prefix="eu.west", target_subject_remove="in.")
    rig.drain()
    assert [copy.subject for copy in rig.copies(target)] == [f"eu.west.{stream}.{rest}" for rest in ("a.b", "c", "d.e")]
    assert rig.info(target, rig.target).subjects == (f"eu.west.{stream}.>",)


def test_small_batches_keep_the_order(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(b"%d" % n * 100) for n in range(50)])
    rig.add(stream, batch_messages=20)
    (report,) = rig.drain().values()
    assert report.batches == 3
    assert [copy.payload for copy in rig.copies(stream)] == [b"%d" % n * 100 for n in range(50)]
    rig.publish(stream, [Sent(b"x" * 1000) for _ in range(30)])
    rig.entries[0] |= {"batch_messages": 50_000, "batch_bytes": 500}
    (report,) = rig.drain().values()
    assert report.batches >= 2
    assert len(rig.copies(stream)) == 80


@pytest.mark.parametrize("order", ("sender", "none"))
def test_two_workers_copy_each_message_once_in_sender_order(rig: Rig, order: str) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(sender(f"n{n % 9}", force=True, n=n)) for n in range(600)])
    rig.add(stream, workers=2, order=order, inspect_force_field="force", batch_messages=400, **TRACKED)
    rig.drain()
    copies = [json.loads(copy.payload) for copy in rig.copies(stream)]
    assert Counter(copy["n"] for copy in copies) == Counter(range(600))
    if order == "sender":
        by_sender: dict[str, list[int]] = {}
        for copy in copies:
            by_sender.setdefault(copy["sender"], []).append(copy["n"])
        assert len(by_sender) == 9
        assert all(a < b for numbers in by_sender.values() for a, b in pairwise(numbers))
    assert rig.row("replication")["copied_messages"] == 600


def test_two_workers_share_an_untracked_stream(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(b"%d" % n) for n in range(300)])
    rig.add(stream, workers=2, order="none")
    rig.drain()
    assert Counter(int(copy.payload) for copy in rig.copies(stream)) == Counter(range(300))


def test_filtered_messages_are_one_gap_across_batches(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(b"%d" % n, "keep" if n % 3 == 0 else "drop") for n in range(30)])
    rig.add(stream, filter_subject=f"{stream}.keep", batch_messages=20)
    rig.drain()
    assert [int(copy.payload) for copy in rig.copies(stream)] == list(range(0, 30, 3))
    assert rig.info(stream, rig.target).subjects == (f"{stream}.keep",)
    rig.publish(stream, [Sent(b"30", "keep"), *[Sent(b"", "drop")] * 5])
    rig.drain()
    gap = rig.row(
        """
        SELECT min(first_sequence) AS first, max(last_sequence) AS last, sum(messages) AS messages,
            list_distinct(list(reason)) AS reasons, count(*) - count(DISTINCT noticed_at::DATE) AS more_than_one_a_day
        FROM gaps
        """
    )
    assert gap == {"first": 2, "last": 36, "messages": 25, "reasons": ["filtered"], "more_than_one_a_day": 0}
    counted = rig.row("replication")
    assert (counted["seen_messages"], counted["copied_messages"], counted["next_sequence"]) == (11, 11, 37)


@pytest.mark.parametrize("entry", ({}, TRACKED), ids=("plain", "sampled"))
def test_adjacent_deleted_messages_are_one_gap(rig: Rig, entry: dict[str, Any]) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(b"%d" % n) for n in range(1, 13)])
    for sequence in (1, 2, 5, 6, 7, 10, 12):
        assert rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})["success"]
    rig.add(stream, **entry)
    rig.drain()
    assert [int(copy.payload) for copy in rig.copies(stream)] == [3, 4, 8, 9, 11]
    gaps = rig.rows("SELECT first_sequence, last_sequence, messages, reason FROM gaps ORDER BY first_sequence")
    assert [tuple(gap.values()) for gap in gaps] == [
        (5, 7, 3, "deleted"),
        (10, 10, 1, "deleted"),
        (12, 12, 1, "deleted"),
    ]
    counted = rig.row("replication")
    assert (counted["next_sequence"], counted["gap_messages"], counted["seen_messages"]) == (13, 5, 5)
    assert counted["lag_messages"] == 0


def test_messages_purged_between_runs_are_an_overtaken_gap(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, [Sent(b"1"), Sent(b"2")])
    rig.drain()
    rig.publish(stream, [Sent(b"%d" % n) for n in range(3, 9)])
    rig.api(f"STREAM.PURGE.{stream}", {"seq": 7})
    rig.drain()
    assert [int(copy.payload) for copy in rig.copies(stream)] == [1, 2, 7, 8]
    gap = rig.row("SELECT first_sequence, last_sequence, messages, reason FROM gaps")
    assert tuple(gap.values()) == (3, 6, 4, "overtaken")


def test_purged_source_is_caught_up(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, [Sent(b"1"), Sent(b"2"), Sent(b"3")])
    rig.api(f"STREAM.PURGE.{stream}")
    rig.drain()
    counted = rig.row("replication")
    assert (counted["next_sequence"], counted["lag_messages"], counted["lag_seconds"]) == (4, 0, 0)
    rig.publish(stream, [Sent(b"4")])
    rig.drain()
    assert [copy.payload for copy in rig.copies(stream)] == [b"4"]


def test_per_subject_limit_makes_one_gap_per_batch(rig: Rig) -> None:
    stream = rig.make(max_msgs_per_subject=1)
    rig.publish(stream, [Sent(b"%d" % n, f"s{n % 3}") for n in range(1, 13)])
    rig.publish(stream, [Sent(b"x", "s9"), Sent(b"y", "s0"), Sent(b"z", "s0")])
    rig.add(stream)
    rig.drain()
    assert [copy.payload for copy in rig.copies(stream)] == [b"10", b"11", b"x", b"z"]
    gaps = rig.rows("SELECT messages, reason FROM gaps WHERE reason <> 'overtaken'")
    assert [tuple(gap.values()) for gap in gaps] == [(2, "per_subject_limit")]


@pytest.mark.parametrize("limit", ({"max_msgs_per_subject": 1}, {"max_msgs": 3}), ids=("per_subject", "in_all"))
def test_repeated_batch_counts_copies_that_the_target_deleted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, limit: dict[str, int]
) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(b"%d" % n, f"s{n % 3}") for n in range(1, 13)])
    rig.add(stream, target=limit)

    def end(reached: Point) -> None:
        if reached is Point.PUBLISHED:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(crash_points, "hook", end)
        with pytest.raises(KeyboardInterrupt):
            rig.run()
    assert [copy.payload for copy in rig.copies(stream)] == [b"10", b"11", b"12"]
    rig.drain()
    assert [copy.payload for copy in rig.copies(stream)] == [b"10", b"11", b"12"]
    assert rig.info(stream, rig.target).last_sequence == 12
    counts = rig.row("SELECT copied_messages, parked_messages, gap_messages FROM replication")
    assert tuple(counts.values()) == (12, 0, 0)


@pytest.mark.parametrize("entry", ({}, TRACKED), ids=("plain", "sampled"))
def test_messages_older_than_max_age_are_skipped_and_counted(rig: Rig, entry: dict[str, Any]) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(sender("a")), Sent(b"stranger")])
    rig.travel(minutes=2)
    rig.add(stream, max_age="1m", **entry)
    rig.drain()
    counted = rig.row("replication")
    assert (counted["seen_messages"], counted["too_old_messages"], counted["copied_messages"]) == (2, 2, 0)
    assert not rig.copies(stream)
    if entry:
        assert [row["event"] for row in rig.rows("node_advisories")] == ["new"]
        assert rig.row("last_seen_nodes")["last_copied"] is None


def test_message_that_the_target_rejects_is_parked(rig: Rig) -> None:
    stream = rig.make()
    rig.create(stream, rig.target, max_msg_size=1000)
    rig.publish(stream, [Sent(sender("a")), Sent(sender("b", x="y" * 2000)), Sent(sender("c"))])
    rig.add(stream, **TRACKED)
    rig.drain()
    assert [json.loads(copy.payload)["sender"] for copy in rig.copies(stream)] == ["a", "c"]
    parked = rig.row("parked_messages")
    assert (parked["sequence"], parked["subject"]) == (2, f"{stream}.m")
    assert parked["payload_bytes"] == len(sender("b", x="y" * 2000))
    assert "10054" in parked["reason"]
    assert abs(parked["stored_at"].timestamp() - rig.stored(stream)[1].stored_ns / 1e9) < 0.002
    counted = rig.row("replication")
    assert (counted["seen_messages"], counted["copied_messages"], counted["parked_messages"]) == (3, 2, 1)
    assert rig.row("SELECT count(*) AS nodes FROM last_seen_nodes WHERE last_copied IS NOT NULL")["nodes"] == 3


def test_message_of_max_payload_is_parked_when_headers_do_not_fit(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(b"x" * (1 << 20)), Sent(b"after")])
    rig.add(stream)
    rig.drain()
    assert [copy.payload for copy in rig.copies(stream)] == [b"after"]
    assert "max_payload" in rig.row("parked_messages")["reason"]


def test_flood_of_messages_that_the_target_rejects_is_parked(rig: Rig) -> None:
    stream, flood = rig.make(), 1_100
    rig.create(stream, rig.target, subjects=[f"{stream}.m"])
    rig.publish(stream, [*(Sent(b"x", "other" + "y" * 1_000) for _ in range(flood)), Sent(b"after")])
    rig.add(stream)
    rig.drain()
    assert [copy.payload for copy in rig.copies(stream)] == [b"after"]
    row = rig.row(
        "SELECT count(*) AS parked, max(length(subject)) AS longest, min(length(subject)) AS shortest FROM parked_messages"
    )
    assert (row["parked"], row["longest"] > 1_000, row["shortest"]) == (flood, True, 200)


def test_on_poison_stop_waits_until_the_target_accepts_the_message(rig: Rig) -> None:
    stream = rig.make()
    rig.create(stream, rig.target, max_msg_size=1000)
    rig.publish(stream, [Sent(b"1"), Sent(b"2" * 2000), Sent(b"3")])
    rig.add(stream, on_poison="stop")
    assert "on_poison" in rig.failure()
    assert rig.row("replication")["next_sequence"] == 1
    rig.api(
        f"STREAM.UPDATE.{stream}",
        {"name": stream, "subjects": [f"{stream}.>"], "allow_direct": True, "max_msg_size": 5000},
        rig.target,
    )
    rig.drain()
    assert sorted(copy.payload[:1] for copy in rig.copies(stream)) == [b"1", b"2", b"3"]
    assert rig.row("replication")["last_error"] is None


def test_each_message_of_a_run_counts_once_by_outcome(rig: Rig) -> None:
    stream = rig.make()
    rig.create(stream, rig.target, max_msg_size=3000)
    names = [f"n{n % 5}" for n in range(40)]
    rig.publish(stream, [Sent(sender(name)) for name in names])
    rig.publish(stream, [Sent(b""), Sent(b"?"), Sent(sender("big", x="y" * 4000))])
    rig.add(stream, **TRACKED)
    rig.drain()
    counted = rig.row("replication")
    assert counted["seen_messages"] == 43
    assert counted["copied_messages"] == 5 + 2
    assert counted["skipped_messages"] == 35
    assert counted["parked_messages"] == 1
    assert counted["no_sender_messages"] == 2


def test_subject_that_is_not_utf8_is_copied_unchanged(rig: Rig) -> None:
    stream = rig.make()
    with_umlaut = Sent(b"1", "größe.☃")
    rig.publish(stream, [with_umlaut, Sent(b"2", "\udcff\udcfe")])
    rig.add(stream, inspect_subject_token=3, inspect_duration="10m")
    rig.drain()
    assert [copy.subject for copy in rig.copies(stream)] == [f"{stream}.größe.☃", f"{stream}.\udcff\udcfe"]
    assert [row["node"] for row in rig.rows("last_seen_nodes")] == ["☃"]


def test_repeated_batch_keeps_its_age_cutoff(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(sender("a"))])
    rig.add(stream, max_age="5h", **TRACKED)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(CopyBatch, "run", crash)
        with pytest.raises(KeyboardInterrupt):
            rig.run()
    rig.travel(hours=6)
    rig.drain()
    counted = rig.row("replication")
    assert (counted["too_old_messages"], counted["copied_messages"]) == (0, 1)
    assert len(rig.copies(stream)) == 1


def test_mirror_source_takes_its_watermark_from_its_last_message(rig: Rig) -> None:
    origin, mirror = rig.make(), rig.unique("MIRROR")
    rig.publish(origin, [Sent(sender("a")), Sent(sender("b"))])
    answer = rig.api(f"STREAM.CREATE.{mirror}", {"name": mirror, "mirror": {"name": origin}, "allow_direct": True})
    assert "error" not in answer
    wait_until(lambda: rig.info(mirror).last_sequence == 2, "the mirror to catch up")
    rig.add(mirror, **TRACKED)
    rig.drain()
    last_ns = rig.stored(mirror)[-1].stored_ns
    assert len(rig.copies(mirror)) == 2
    assert rig.row("SELECT epoch_us(watermark) AS us FROM replication") == {"us": last_ns // 1000}
    rig.drain()
    assert rig.row("SELECT epoch_us(watermark) AS us FROM replication") == {"us": last_ns // 1000}


def test_source_and_target_may_be_one_cluster(rig: Rig) -> None:
    stream, target = rig.make(), rig.unique("T")
    rig.publish(stream, [Sent(sender("a")), Sent(b"x")])
    rig.add(
        stream,
        target_url=rig.source.url,
        target_stream=target,
        target_subject_prefix="copy",
        filter_subject=f"{stream}.>",
    )
    rig.drain()
    rig.drain()
    assert [copy.subject for copy in rig.stored(target)] == [f"copy.{stream}.m"] * 2
    assert rig.info(stream).last_sequence == 2


def test_message_before_the_watermark_is_copied_and_counted_as_late(rig: Rig) -> None:
    """As after a server's clock was set back; only an edit of the state can simulate that here."""
    stream = rig.make()
    rig.add(stream, **TRACKED)
    rig.publish(stream, [Sent(sender("a"))])
    rig.drain()
    with rig.open() as site, site.state.transaction():
        state = site.state.load_stream(stream)
        assert state is not None
        assert state.watermark_ns is not None
        ahead_ns = state.watermark_ns = state.watermark_ns + 3600 * 10**9
        site.state.save_stream(state)
    rig.publish(stream, [Sent(sender("a")), Sent(sender("b"))])
    rig.drain()
    counted = rig.row("SELECT *, epoch_us(watermark) AS us FROM replication")
    assert counted["late_sightings"] == 2
    assert counted["us"] == ahead_ns // 1000
    assert {json.loads(copy.payload)["sender"] for copy in rig.copies(stream)} == {"a", "b"}


def test_server_without_jetstream_fails_with_its_address(rig: Rig, tmp_path: Path) -> None:
    with NatsServer(tmp_path, "plain", jetstream=False) as plain:
        rig.add("ANY", source_url=plain.url)
        assert plain.address in rig.failure()
