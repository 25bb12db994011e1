"""The copy queue between watching and copying: order, losses at the source, pauses, and a recreated source."""

import json
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyarrow import parquet

from sr_assets.adapters.state.operator_settings import set_paused
from sr_assets.domain.messages import last_origin
from sr_assets.stages.replication.batch import CopyBatch
from sr_assets.stages.report import Stage
from sr_assets.stages.run import StreamWork
from sr_assets.stages.source.source_reading import Ends
from sr_assets_tests.rig import PATIENCE_SECONDS, SITE, Rig, Sent

TRACKED = {"inspect_field": "sender", "inspect_duration": "10h", "inspect_force_field": "force"}
#: Changes of an entry's settings while a batch is open.
CHANGES = (
    {"target_subject_prefix": "other"},
    {"filter_subject": "{stream}.other"},
    {"target_stream": "{stream}_RENAMED", "target_subject_prefix": "renamed"},
)
WATCHING = (Stage.NODE_STATE,)


def forced(first: int, after: int, nodes: int = 7, **more: Any) -> list[Sent]:
    """Return messages that are all due for copying."""
    bodies = ({"sender": f"n{n % nodes}", "force": True, "n": n, **more} for n in range(first, after))
    return [Sent(json.dumps(body).encode()) for body in bodies]


def numbers(rig: Rig, stream: str) -> list[int]:
    return [json.loads(copy.payload)["n"] for copy in rig.copies(stream)]


def history(rig: Rig, stream: str) -> list[int]:
    """Return the message numbers in a stream's history."""
    files = (rig.home / "snapshots" / f"name={SITE}" / f"stream={stream}").rglob("*.parquet")
    payloads = [text for file in files for text in parquet.read_table(file, partitioning=None)["payload"].to_pylist()]
    return sorted(json.loads(text)["n"] for text in payloads)


def assert_counters_add_up(rig: Rig) -> dict[str, Any]:
    row = rig.row("replication")
    parts = ("copied_messages", "skipped_messages", "too_old_messages", "parked_messages", "queued_messages")
    assert row["seen_messages"] == sum(row[part] for part in parts), row
    return row


def test_long_queue_drains_in_source_order_without_lost_messages(rig: Rig) -> None:
    stream, count, lost = rig.make(), 2_000, 500
    rig.publish(stream, forced(0, count))
    rig.add(stream, batch_messages=300, **TRACKED)
    rig.drain(stages=WATCHING)
    row = rig.row("replication")
    assert (row["queued_messages"], row["copied_messages"], row["lag_messages"]) == (count, 0, 0)
    assert_counters_add_up(rig)
    rig.api(f"STREAM.PURGE.{stream}", {"seq": lost + 1})
    (report,) = rig.drain().values()
    assert numbers(rig, stream) == list(range(lost, count))
    gaps = rig.rows("SELECT first_sequence, last_sequence, messages, reason FROM gaps ORDER BY 1")
    assert {gap["reason"] for gap in gaps} == {"lost"}
    assert sum(gap["messages"] for gap in gaps) == lost == report.gap_messages
    assert (gaps[0]["first_sequence"], gaps[-1]["last_sequence"]) == (1, lost)
    assert assert_counters_add_up(rig)["queued_messages"] == 0


def test_drain_continues_while_an_ended_batch_leaves_queued_copies(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = rig.make()
    rig.add(stream, batch_messages=10, **TRACKED)
    rig.publish(stream, forced(0, 60))
    rig.drain(stages=WATCHING)
    step = StreamWork.step

    def step_then_join(work: StreamWork, ends: Ends) -> bool:
        """End each batch before the round checks for remaining work."""
        busy = step(work, ends)
        if work._copy_step is not None:
            work._copy_step.exception(PATIENCE_SECONDS)
        return busy

    monkeypatch.setattr(StreamWork, "step", step_then_join)
    rig.drain()
    assert numbers(rig, stream) == list(range(60))
    assert assert_counters_add_up(rig)["queued_messages"] == 0


def test_lag_counts_the_messages_that_wait_for_a_paused_stream(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(b"1")])
    rig.add(stream)
    rig.drain()
    settings = rig.settings()
    set_paused(settings, settings.streams[0], True)
    rig.publish(stream, [Sent(b"x")] * 50)
    (report,) = rig.drain().values()
    row = rig.row("replication")
    assert (row["paused"], row["lag_messages"], row["copied_messages"], report.lag_messages) == (True, 50, 1, 50)
    assert row["lag_seconds"] > 0
    set_paused(settings, settings.streams[0], False)
    rig.drain()
    row = rig.row("replication")
    assert (row["paused"], row["lag_messages"], row["copied_messages"]) == (False, 0, 51)


def test_pause_stops_only_copying(rig: Rig) -> None:
    stream, advisories = rig.make(), rig.make("ADV")
    rig.add(stream, advisory={"subject": f"{advisories}.%s.%v", "reliable": True}, **TRACKED)
    rig.publish(stream, forced(0, 10))
    rig.drain()
    settings = rig.settings()
    assert set_paused(settings, settings.streams[0], True)
    rig.publish(stream, forced(10, 30, nodes=20))
    rig.drain()
    row = assert_counters_add_up(rig)
    assert (row["paused"], row["queued_messages"], row["copied_messages"]) == (True, 20, 10)
    assert len(rig.stored(advisories)) == 20
    assert numbers(rig, stream) == list(range(10))
    assert set_paused(settings, settings.streams[0], False)
    rig.drain()
    row = assert_counters_add_up(rig)
    assert (row["paused"], row["queued_messages"], row["copied_messages"]) == (False, 0, 30)
    assert numbers(rig, stream) == list(range(30))


@pytest.mark.parametrize("policy", ("stop", "recopy", pytest.param("skip_to_now", marks=pytest.mark.nightly)))
def test_queued_copies_never_come_from_a_recreated_source(rig: Rig, policy: str) -> None:
    stream = rig.make()
    rig.add(stream, on_source_reset=policy, **TRACKED)
    rig.publish(stream, forced(0, 5))
    rig.drain()
    rig.publish(stream, forced(5, 9))
    rig.drain(stages=WATCHING)
    rig.api(f"STREAM.DELETE.{stream}")
    rig.create(stream)
    rig.publish(stream, forced(100, 120))
    if policy == "stop":
        for _ in range(2):
            assert rig.failure().count("on_source_reset") == 1
        assert numbers(rig, stream) == list(range(5))
        assert rig.row("replication")["queued_messages"] == 4
        rig.entries[0] |= {"on_source_reset": "recopy"}
    rig.drain()
    rig.publish(stream, forced(120, 122))
    rig.drain()
    first = 120 if policy == "skip_to_now" else 100
    assert numbers(rig, stream) == [*range(5), *range(first, 122)]
    gap = rig.row("SELECT first_sequence, last_sequence, messages, reason FROM gaps")
    assert tuple(gap.values()) == (6, 9, 4, "lost")
    row = assert_counters_add_up(rig)
    assert (row["queued_messages"], row["last_error"]) == (0, None)


def crash_before_noting_copies(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until a batch has made its copies, then crash before it records them."""

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(CopyBatch, "_note_copies", crash)
        with pytest.raises(KeyboardInterrupt):
            rig.run()


@pytest.mark.parametrize("entry", (TRACKED | {"target_subject_prefix": "up"}, {}), ids=("tracked", "plain"))
def test_copies_of_an_open_batch_count_after_the_source_is_deleted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any]
) -> None:
    stream = rig.make()
    rig.add(stream, on_source_reset="recopy", batch_messages=10, **entry)
    rig.publish(stream, forced(0, 25))
    if entry:
        rig.drain(stages=WATCHING)
    crash_before_noting_copies(rig, monkeypatch)
    assert numbers(rig, stream) == list(range(10))
    stored = rig.stored(stream)
    rig.api(f"STREAM.DELETE.{stream}")
    rig.create(stream)
    rig.publish(stream, forced(100, 105))
    rig.drain()
    assert numbers(rig, stream) == [*range(10), *range(100, 105)]
    # Queued messages without a copy are lost; unread messages were never seen.
    lost = 15 if entry else None
    assert rig.row("SELECT sum(messages) AS n FROM gaps WHERE reason = 'lost'")["n"] == lost
    row = assert_counters_add_up(rig)
    assert (row["seen_messages"], row["copied_messages"], row["gap_messages"]) == (15, 15, lost or 0)
    assert row["copied_bytes"] == sum(len(copy.payload) for copy in rig.copies(stream))
    if not entry:
        return
    # These messages now exist only in the target.
    assert history(rig, stream) == [*range(10), *range(100, 105)]
    newest = rig.rows("SELECT sequence, subject, stored_at, payload FROM node_snapshots WHERE node IN ('n0', 'n1')")
    for row, original in zip(sorted(newest, key=lambda row: row["sequence"]), stored[7:9], strict=True):
        assert row["payload"] == original.payload.decode()
        assert (row["sequence"], row["subject"]) == (original.sequence, original.subject)
        assert int(row["stored_at"].timestamp() * 1_000) == original.stored_ns // 1_000_000


def test_history_holds_open_batch_copies_that_the_source_lost(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = rig.make()
    rig.add(stream, batch_messages=10, **TRACKED)
    rig.publish(stream, forced(0, 25))
    crash_before_noting_copies(rig, monkeypatch)
    rig.api(f"STREAM.PURGE.{stream}", {"seq": 13})
    rig.drain()
    assert numbers(rig, stream) == history(rig, stream) == [*range(10), *range(12, 25)]
    row = assert_counters_add_up(rig)
    assert (row["copied_messages"], row["gap_messages"]) == (23, 2)
    assert row["copied_bytes"] == sum(len(copy.payload) for copy in rig.copies(stream))


def test_history_records_a_recreated_source_at_the_same_sequences(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, on_source_reset="recopy", **TRACKED)
    rig.publish(stream, forced(0, 10))
    rig.drain()
    for restart in (1, 2):
        rig.api(f"STREAM.DELETE.{stream}")
        rig.create(stream)
        rig.publish(stream, forced(100 * restart, 100 * restart + 3))
        rig.drain()
        rig.drain()
    rows = rig.rows("SELECT CAST(payload->>'n' AS INTEGER) AS n FROM node_snapshots ORDER BY n")
    assert [row["n"] for row in rows][-3:] == [200, 201, 202]
    files = list((rig.home / "snapshots").rglob("*.parquet"))
    assert len(files) == 3
    history = duckdb.execute(f"SELECT count(*) FROM read_parquet({list(map(str, files))})").fetchall()
    assert history == [(16,)]


def test_queue_is_copied_after_tracking_is_removed(rig: Rig) -> None:
    stream = rig.make()
    entry = rig.add(stream, **TRACKED)
    rig.publish(stream, forced(0, 6))
    rig.drain(stages=WATCHING)
    for key in TRACKED:
        del entry[key]
    rig.publish(stream, forced(6, 9))
    rig.drain()
    assert numbers(rig, stream) == list(range(9))
    row = assert_counters_add_up(rig)
    assert (row["queued_messages"], row["seen_messages"], row["copied_messages"]) == (0, 9, 9)


@pytest.mark.parametrize(
    ("entry", "change"),
    (
        *((TRACKED, change) for change in CHANGES),
        *(pytest.param({}, change, marks=pytest.mark.nightly) for change in CHANGES),
        (TRACKED, {"inspect_field": "n"}),
        (TRACKED, {"inspect_duration": "1s"}),
        ({}, TRACKED),
    ),
    ids=str,
)
def test_open_batch_is_finished_exactly_after_a_settings_change(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any], change: dict[str, str]
) -> None:
    stream = rig.make()
    rig.create(stream, rig.target, subjects=[f"{stream}.>", f"other.{stream}.>"])
    rig.add(stream, batch_messages=10, **entry)
    rig.publish(stream, forced(0, 25))
    if entry:
        # Decide which messages are due before the settings change.
        rig.run(stages=(Stage.NODE_STATE,))

    crash_before_noting_copies(rig, monkeypatch)
    assert numbers(rig, stream) == list(range(10))
    changed = {key: value.format(stream=stream) for key, value in change.items()}
    rig.entries[0] |= changed
    if "filter_subject" in change:
        rig.publish(stream, [Sent(message.payload, "other") for message in forced(25, 28)])
    rig.drain()
    target = changed.get("target_stream", stream)
    copies = numbers(rig, target)
    if target == stream:
        assert copies[:10] == list(range(10))
    assert len(copies) == len(set(copies))
    expected = range(25)
    if not entry and "filter_subject" in change:
        expected = range(25, 28)
    assert set(expected) <= set(copies) | set(numbers(rig, stream))
    assert copies == sorted(copies)
    sequences = [last_origin(copy.headers) for copy in rig.copies(target)]
    assert all(origin is not None and origin.sequence > 0 for origin in sequences)


def test_queue_front_is_at_most_one_batch(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, **TRACKED)
    with rig.open() as site:
        queue = site.state.copy_queue(stream)
        sequences = range(1, 200_001)
        due = pa.table(
            {
                "sequence": pa.array(reversed(sequences), pa.int64()),
                "node": pa.array(["n"] * len(sequences)),
                "payload_bytes": pa.array([100] * len(sequences), pa.int64()),
            }
        )
        with site.state.transaction():
            queue.append(due, 1, 0)
        seen = 0
        while (front := queue.front(50_000, 1 << 40)) is not None:
            assert front.covered.first == seen + 1
            assert front.rows.num_rows == 50_000
            with site.state.transaction():
                queue.remove(front.covered, front.starts)
            seen += front.rows.num_rows
        assert (seen, queue.size()) == (200_000, 0)
        with site.state.transaction():
            queue.append(due, 1, 0)
        small_front = queue.front(50_000, 1_000)
        assert small_front is not None
        assert small_front.rows["sequence"].to_pylist() == list(range(1, 11))
    assert (rig.home / "sites" / SITE / "state.duckdb").stat().st_size < 64 << 20
