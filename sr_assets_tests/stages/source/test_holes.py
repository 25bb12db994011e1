"""Sources with gaps, short retention, rollbacks, and wrong clocks."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from sr_assets.adapters import crash_points
from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.stages.report import Stage
from sr_assets.stages.source import holes
from sr_assets_tests.rig import Rig, Sent

TRACKED = {"inspect_field": "sender", "inspect_duration": "10h", "inspect_force_field": "force"}
SHORT = {"inspect_field": "sender", "inspect_duration": "10h", "warn_duration": "5h"}
SECOND = 10**9
ENTRIES = pytest.mark.parametrize("entry", ({}, TRACKED), ids=("plain", "sampled"))


def message_of(name: str, **more: Any) -> Sent:
    return Sent(json.dumps({"sender": name, **more}).encode(), name)


def forced(first: int, after: int) -> list[Sent]:
    return [message_of(f"n{n % 3}", force=True, n=n) for n in range(first, after)]


def numbers(rig: Rig, stream: str) -> list[int]:
    return [json.loads(copy.payload)["n"] for copy in rig.copies(stream)]


def events(rig: Rig, node: str) -> list[str]:
    rows = rig.rows(f"SELECT event FROM node_advisories WHERE node = '{node}' ORDER BY transition")
    return [row["event"] for row in rows]


@ENTRIES
def test_gap_of_a_billion_sequences_is_one_step(rig: Rig, entry: dict[str, Any]) -> None:
    stream, next_sequence = rig.make(), 10**9
    rig.add(stream, batch_messages=100, **entry)
    rig.publish(stream, forced(0, 3))
    rig.drain()
    rig.api(f"STREAM.PURGE.{stream}", {"seq": next_sequence})
    rig.publish(stream, forced(3, 5))
    (report,) = rig.drain().values()
    assert report.batches == 1
    assert numbers(rig, stream) == list(range(5))
    gap = rig.row("SELECT first_sequence, last_sequence, messages, reason FROM gaps")
    assert tuple(gap.values()) == (4, next_sequence - 1, next_sequence - 4, "overtaken")
    assert rig.row("replication")["next_sequence"] == next_sequence + 2


@ENTRIES
def test_sparse_source_is_read_in_few_batches(rig: Rig, entry: dict[str, Any]) -> None:
    stream, count, step = rig.make(max_msgs_per_subject=1), 20_000, 200
    messages = (
        Sent(forced(n, n + 1)[0].payload, f"kept{n}") if n % step == 0 else Sent(b"{}", "replaced")
        for n in range(count)
    )
    rig.publish(stream, messages)
    rig.add(stream, batch_messages=50, **entry)
    (report,) = rig.drain().values()
    assert report.batches <= 6
    copied = [json.loads(copy.payload).get("n") for copy in rig.copies(stream)]
    assert [n for n in copied if n is not None] == list(range(0, count, step))
    row = rig.row("replication")
    assert (row["next_sequence"], row["lag_messages"], row["seen_messages"]) == (count + 1, 0, count // step + 1)
    assert row["gap_messages"] == count - count // step - 1


@ENTRIES
def test_wide_gap_between_two_messages_is_skipped(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any]
) -> None:
    stream = rig.make(max_msgs_per_subject=1)
    rig.publish(stream, [Sent(forced(0, 1)[0].payload, "first")])
    rig.publish(stream, (Sent(b"{}", "replaced") for _ in range(5_000)))
    rig.publish(stream, [Sent(forced(1, 2)[0].payload, "replaced")])
    monkeypatch.setattr("sr_assets.stages.source.holes._WIDEST", 1_000)
    rig.add(stream, batch_messages=10, **entry)
    (report,) = rig.drain().values()
    assert report.batches <= 2
    assert numbers(rig, stream) == [0, 1]
    row = rig.row("replication")
    assert (row["next_sequence"], row["gap_messages"], row["seen_messages"]) == (5_003, 5_000, 2)
    assert {gap["reason"] for gap in rig.rows("gaps")} == {"per_subject_limit"}


@pytest.mark.parametrize(
    "entries",
    (
        pytest.param(({}, {"filter_subject": ">"}), id="limited stream filtered"),
        pytest.param(({"filter_subject": ">"}, {}), id="purged stream filtered", marks=pytest.mark.nightly),
    ),
)
def test_messages_the_source_dropped_do_not_count_as_silence(rig: Rig, entries: tuple[dict[str, str], ...]) -> None:
    """One stream loses them by a purge, the other by a limit per subject."""
    purged, _ = streams = [rig.make(max_msgs_per_subject=limit) for limit in (-1, 1)]
    for stream, entry in zip(streams, entries, strict=True):
        rig.add(stream, **SHORT, **entry)

    def publish(*nodes: str) -> None:
        for stream in streams:
            rig.publish(stream, [message_of(node) for node in nodes])

    def events_of(node: str) -> dict[str, list[str]]:
        rows = rig.rows(f"SELECT stream, event FROM node_advisories WHERE node = '{node}' ORDER BY transition")
        return {stream: [row["event"] for row in rows if row["stream"] == stream] for stream in streams}

    rig.drain()
    publish("alive", "dies")
    rig.drain()
    for _ in range(2):
        rig.travel(hours=6)
        publish("alive")
    rig.api(f"STREAM.PURGE.{purged}")
    publish("alive")
    rig.drain()
    assert events_of("alive") == events_of("dies") == {stream: ["new"] for stream in streams}
    assert [round(row["blind_seconds"] / 3_600) for row in rig.rows("replication")] == [12] * len(streams)
    for _ in range(3):
        rig.travel(hours=4)
        # Read each message before the next one replaces it.
        publish("alive")
        rig.drain()
    assert events_of("alive") == {stream: ["new"] for stream in streams}
    assert events_of("dies") == {stream: ["new", "timeout", "expire"] for stream in streams}
    rows = rig.rows(
        "SELECT epoch(event_time) - epoch(seen) AS silent FROM node_advisories WHERE event = 'timeout' AND node = 'dies'"
    )
    assert [round(row["silent"] / 3_600) for row in rows] == [12 + 5] * len(streams)


def test_only_deleted_messages_of_a_filtered_stream_are_lost(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that the filter excludes are no holes, unless they may have been deleted as well."""
    stream = rig.make()
    rig.add(stream, **{**TRACKED, "filter_subject": f"{stream}.node.>"})

    def publish(*subjects: str) -> None:
        rig.publish(stream, [Sent(json.dumps({"sender": subject}).encode(), subject) for subject in subjects])

    def lost() -> list[tuple[Any, ...]]:
        columns = "first_sequence, last_sequence, messages, reason"
        return [
            tuple(row.values()) for row in rig.rows(f"SELECT {columns} FROM gaps WHERE reason <> 'filtered' ORDER BY 1")
        ]

    def blind_spans() -> int:
        with rig.open() as site:
            return len(site.state.nodes(stream).blind_spans())

    publish("node.a", "other", "other", "node.b", "other", "node.a")
    rig.drain()
    assert (lost(), blind_spans()) == ([], 0)
    assert rig.row("SELECT sum(messages) AS messages FROM gaps") == {"messages": 3}
    publish("node.a", "other", "node.lost", "other", "other", "node.b")
    for sequence in (9, 11):
        assert rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})["success"]
    rig.drain()
    assert lost() == [(9, 9, 1, "deleted"), (11, 11, 1, "deleted")]
    assert rig.row("SELECT sum(messages) AS messages FROM gaps WHERE reason = 'filtered'") == {"messages": 5}
    assert blind_spans() == 1
    # A stream with many deleted messages: they are counted before they are listed.
    monkeypatch.setattr(holes, "_FEW", 1)
    publish("node.a", "other", "node.b")
    rig.drain()
    assert (len(lost()), blind_spans()) == (2, 1)
    # Too many to be listed: every absent sequence of a range that has lost some counts as lost.
    monkeypatch.setattr(holes, "_MANY", 1)
    publish("node.a", "other", "node.lost", "node.b")
    assert rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 18})["success"]
    rig.drain()
    assert lost()[2:] == [(17, 18, 2, "deleted")]


def test_shorter_duration_takes_effect_in_the_next_run(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, inspect_field="sender", inspect_duration="10h", warn_duration="1h")
    rig.publish(stream, [message_of("a")])
    rig.drain()
    rig.entries[0] |= {"inspect_duration": "30m", "warn_duration": "10m"}
    rig.travel(minutes=40)
    rig.drain()
    assert events(rig, "a") == ["new", "timeout", "expire"]
    rows = rig.rows("SELECT epoch(event_time) - epoch(seen) AS s FROM node_advisories WHERE event <> 'new' ORDER BY 1")
    assert [round(row["s"]) for row in rows] == [600, 1_800]


def test_clock_once_a_day_ahead_is_logged_and_ignored(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = rig.make()
    rig.add(stream, **SHORT)
    rig.publish(stream, [message_of(f"n{n}") for n in range(25)])
    rig.drain()
    stream_info = Cluster.stream_info

    def ahead(self: Cluster, name: str, **options: Any) -> StreamInfo:
        info = stream_info(self, name, **options)
        return replace(info, ts_ns=(info.ts_ns or 0) + 86_400 * SECOND) if name == stream else info

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(Cluster, "stream_info", ahead)
        rig.drain()
    assert sum("these times are not used" in record.getMessage() for record in caplog.records) == 1
    rig.drain()
    assert rig.row("SELECT count(*) AS n FROM node_advisories")["n"] == 25
    assert rig.row("site_summary")["up"] == 25
    with rig.open() as site:
        state = site.state.load_stream(stream)
    assert state is not None
    assert state.ahead_clocks >= 1


@pytest.mark.parametrize(
    ("policy", "entry", "queued"),
    [
        pytest.param(
            policy,
            entry,
            queued,
            id=f"{policy}-{name}",
            # Each policy and each kind of stream is once in the gate.
            marks=()
            if (policy, name) in (("stop", "plain"), ("recopy", "sampled"), ("skip_to_now", "queued"))
            else pytest.mark.nightly,
        )
        for policy in ("stop", "recopy", "skip_to_now")
        for name, entry, queued in (("plain", {}, False), ("sampled", TRACKED, False), ("queued", TRACKED, True))
    ],
)
def test_source_rollback_is_detected_after_it_outgrew_the_position(
    rig: Rig, restore_source: Callable[[str], None], entry: dict[str, Any], policy: str, queued: bool
) -> None:
    stream = rig.make()
    rig.add(stream, on_source_reset=policy, **entry)
    rig.publish(stream, forced(0, 10))
    rig.drain()
    restore_source("save")
    rig.publish(stream, forced(10, 20))
    rig.drain(stages=[Stage.NODE_STATE]) if queued else rig.drain()
    restore_source("restore")
    rig.publish(stream, forced(100, 125))
    before = list(range(10 if queued else 20))
    if policy == "stop":
        assert "was rolled back and has grown since" in rig.failure()
        assert numbers(rig, stream) == before
        return
    rig.drain()
    rig.publish(stream, forced(125, 127))
    rig.drain()
    again = [*range(10), *range(100, 127)] if policy == "recopy" else [125, 126]
    assert numbers(rig, stream) == before + again
    lost = rig.row("SELECT coalesce(sum(messages), 0) AS n FROM gaps WHERE reason = 'lost'")["n"]
    assert lost == (10 if queued else 0)
    row = rig.row("replication")
    assert (row["next_sequence"], row["last_error"]) == (38, None)


def test_source_rollback_changes_no_node_status(rig: Rig, restore_source: Callable[[str], None]) -> None:
    stream = rig.make()
    rig.add(stream, on_source_reset="recopy", **SHORT)
    rig.publish(stream, [message_of("gone")])
    restore_source("save")
    for _ in range(3):
        rig.publish(stream, [message_of("alive")])
        rig.drain()
        rig.travel(hours=4)
    rig.drain()
    assert events(rig, "gone") == ["new", "timeout", "expire"]
    # No run reads these messages before they are lost.
    for _ in range(2):
        rig.publish(stream, [message_of("alive")])
        rig.travel(hours=4)
    restore_source("restore")
    rig.publish(stream, [message_of("alive")])
    rig.drain()
    assert events(rig, "alive") == ["new"]
    assert events(rig, "gone") == ["new", "timeout", "expire"]


def test_messages_lost_while_they_are_read_are_blind_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source with a short retention: in each run it loses messages after it was planned; the first run knows no message."""
    stream, lost = rig.make(), dict[int, int]()
    rig.add(stream, **SHORT)

    def send() -> None:
        rig.publish(stream, [message_of(f"n{node}") for node in range(3)])

    def lose(first: int) -> None:
        *older, last = rig.stored(stream)
        rig.api(f"STREAM.PURGE.{stream}", {"seq": last.sequence})
        lost.update({message.sequence: message.stored_ns for message in older if message.sequence >= first})

    unread = 1
    # The message that remains: the last of the plan, or a later one.
    for later in (False, True, False):
        for _ in range(6):
            send()
            rig.travel(hours=1)
        points = iter([Point.PLANNED])

        def lose_once(
            point: Point, points: Iterator[Point] = points, first: int = unread, *, later: bool = later
        ) -> None:
            if point is Point.PLANNED and next(points, None):
                if later:
                    send()
                lose(first)

        with monkeypatch.context() as patched:
            patched.setattr(crash_points, "hook", lose_once)
            rig.drain()
        unread = rig.row("replication")["next_sequence"]
    spans = [(row["since_ns"], row["until_ns"]) for row in rig.rows("blind_spans")]
    assert len(lost) == 3 * (6 + 7 + 6) - 2, spans
    passed = [ns for sequence, ns in lost.items() if sequence < unread]
    assert [ns for ns in passed if not any(since <= ns < until for since, until in spans)] == []
    assert {row["event"] for row in rig.rows("node_advisories")} == {"new"}
