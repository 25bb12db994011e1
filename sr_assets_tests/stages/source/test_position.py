"""Where a stream starts, its next range, and how it continues after the source, the target or the state changed."""

import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import pytest

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.nats.stream_info import StreamInfo, parse_stream_info
from sr_assets.adapters.state.records import StreamState
from sr_assets.domain.positions import SequenceRange, format_rfc3339_ns
from sr_assets.settings import load_settings
from sr_assets.stages.source.position import START_VARIABLE, _move_to_new_source, advance, epoch_at
from sr_assets.stages.source.source_reading import Ends, next_range, reading_end
from sr_assets_tests.rig import SITE, Rig, Sent


def numbered(count: int, *, first: int = 1) -> list[Sent]:
    return [Sent(b"%d" % n) for n in range(first, first + count)]


def payloads(rig: Rig, stream: str) -> list[int]:
    return [int(copy.payload) for copy in rig.copies(stream)]


@pytest.mark.parametrize(
    ("entry", "first"),
    (
        ({}, 1),
        ({"start_sequence": 4}, 4),
        ({"start_sequence": 99}, None),
        ({"start_at_end": True}, None),
        ({"start_at_end": True, "start_sequence": 3}, None),
        ({"start_sequence": 3, "start_delta": "1h"}, 3),
        ({"start_delta": "1h"}, 1),
    ),
)
def test_new_stream_starts_at_the_first_start_option_set(rig: Rig, entry: dict[str, Any], first: int | None) -> None:
    stream = rig.make()
    rig.create(stream, rig.target)
    rig.publish(stream, numbered(6))
    rig.add(stream, **entry)
    rig.drain()
    assert payloads(rig, stream) == ([] if first is None else list(range(first, 7)))
    rig.entries[0] |= {"start_sequence": 1}
    rig.publish(stream, numbered(1, first=7))
    rig.drain()
    later = [7] if entry.get("start_sequence") != 99 else []
    assert payloads(rig, stream) == ([] if first is None else list(range(first, 7))) + later
    assert not rig.rows("gaps")


def test_start_time_begins_at_the_first_message_not_before_it(rig: Rig) -> None:
    stream = rig.make()
    for n in range(6):
        rig.publish(stream, numbered(1, first=n + 1))
    rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 3})
    stored = rig.stored(stream)
    assert all(a.stored_ns < b.stored_ns for a, b in pairwise(stored))
    for at_ns, expected in (
        (stored[3].stored_ns, [5, 6]),
        (stored[2].stored_ns + 1, [5, 6]),
        (stored[1].stored_ns + 1, [4, 5, 6]),
        (stored[0].stored_ns - 1, [1, 2, 4, 5, 6]),
    ):
        target = rig.unique("T")
        rig.entries.clear()
        rig.__post_init__()
        rig.add(stream, start_time=format_rfc3339_ns(at_ns), target_stream=target, target_subject_prefix=target)
        rig.drain()
        assert payloads(rig, target) == expected


@pytest.mark.parametrize(
    ("policy", "expected"), (("stop", [1, 2, 3]), ("recopy", [1, 2, 3, 11, 12, 13, 14]), ("skip_to_now", [1, 2, 3, 14]))
)
def test_recreated_source_follows_on_source_reset(rig: Rig, policy: str, expected: list[int]) -> None:
    stream = rig.make()
    rig.add(stream, on_source_reset=policy)
    rig.publish(stream, numbered(3))
    rig.drain()
    rig.api(f"STREAM.DELETE.{stream}")
    rig.create(stream)
    rig.publish(stream, numbered(3, first=11))
    if policy == "stop":
        assert "on_source_reset" in rig.failure()
        assert "on_source_reset" in rig.row("replication")["last_error"]
    else:
        rig.drain()
    rig.publish(stream, numbered(1, first=14))
    rig.run()
    assert payloads(rig, stream) == expected
    if policy != "stop":
        assert rig.row("replication")["next_sequence"] == 5
        assert len({copy.headers for copy in rig.copies(stream)}) == len(expected)


def test_lost_state_stops_a_stream_whose_target_holds_copies(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(3))
    rig.drain()
    shutil.rmtree(rig.home / "sites")
    assert f"sr-assets recover --stream {SITE}/{stream}" in rig.failure()
    assert payloads(rig, stream) == [1, 2, 3]


def test_ephemeral_stream_is_recopied_once_per_start(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = rig.make()
    rig.add(stream, ephemeral=True)
    rig.publish(stream, numbered(2))
    monkeypatch.setenv(START_VARIABLE, "first")
    rig.drain()
    rig.drain()
    assert payloads(rig, stream) == [1, 2]
    monkeypatch.setenv(START_VARIABLE, "second")
    rig.drain()
    rig.drain()
    assert payloads(rig, stream) == [1, 2, 1, 2]
    monkeypatch.setenv(START_VARIABLE, "third")
    rig.drain()
    assert payloads(rig, stream) == [1, 2] * 3


def test_recreated_target_gets_new_messages_or_stops_the_stream(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(2))
    rig.drain()
    rig.api(f"STREAM.DELETE.{stream}", server=rig.target)
    rig.publish(stream, numbered(2, first=3))
    rig.drain()
    assert payloads(rig, stream) == [3, 4]
    rig.entries[0] |= {"on_target_reset": "stop"}
    rig.drain()
    rig.api(f"STREAM.DELETE.{stream}", server=rig.target)
    rig.publish(stream, numbered(1, first=5))
    assert "on_target_reset" in rig.failure()


def test_source_behind_the_position_is_skipped_to_now(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, on_source_reset="skip_to_now")
    rig.publish(stream, numbered(3))
    rig.drain()
    # As after a restore of the source from a backup.
    with duckdb.connect(str(rig.home / "sites" / SITE / "state.duckdb")) as state:
        state.execute("UPDATE streams SET next_sequence = 40")
    rig.drain()
    rig.publish(stream, numbered(1, first=14))
    rig.drain()
    assert payloads(rig, stream) == [1, 2, 3, 14]


def test_new_source_opens_a_hole_after_the_last_message_read(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, on_source_reset="recopy")
    state = StreamState(stream, 1, next_sequence=5, watermark_ns=7, last_stored_ns=9, mark_sequence=4, mark_ns=9)
    _move_to_new_source(rig.settings().streams[0], state, rig.info(stream), "it went back")
    assert (state.watermark_ns, state.last_stored_ns, state.hole_open, state.next_sequence) == (9, 9, True, 1)


def test_source_that_lost_unread_messages_is_caught_up(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, inspect_field="sender", inspect_duration="10h")
    rig.publish(stream, [Sent(b'{"sender": "n"}')])
    rig.drain()
    watermark = rig.row("replication")["watermark"]
    # As after a run that saw more messages than it read, from a source that was then restored.
    with duckdb.connect(str(rig.home / "sites" / SITE / "state.duckdb")) as state:
        state.execute("UPDATE streams SET source_last_sequence = 40")
    rig.drain()
    row = rig.row("replication")
    assert (row["source_last_sequence"], row["lag_messages"], row["next_sequence"]) == (1, 0, 2)
    assert row["watermark"] > watermark


def test_stale_stream_info_moves_nothing_backwards(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lagging server may return its clock with an old state; the messages it lacks are not silence."""
    stream, target = rig.make(), rig.unique("T")
    rig.add(stream, target_stream=target, target_subject_prefix="to", inspect_field="sender", inspect_duration="10m")
    rig.publish(stream, [Sent(json.dumps({"sender": f"n{n}"}).encode()) for n in range(10)])
    rig.drain()
    columns = "next_sequence, source_last_sequence, watermark, lag_messages, copied_messages"
    before = rig.row(f"SELECT {columns} FROM replication")
    assert (before["next_sequence"], before["source_last_sequence"], before["lag_messages"]) == (11, 10, 0)
    stream_info, stale_end = Cluster.stream_info, iter((4,))

    def once_behind(self: Cluster, name: str, **options: Any) -> StreamInfo:
        info = stream_info(self, name, **options)
        last = next(stale_end, info.last_sequence) if name == stream else info.last_sequence
        return replace(info, last_sequence=last)

    rig.publish(stream, [Sent(json.dumps({"sender": f"n{n}"}).encode()) for n in range(5)])
    with monkeypatch.context() as patched:
        patched.setattr(Cluster, "stream_info", once_behind)
        rig.drain()
    assert next(stale_end, None) is None
    meanwhile = rig.row(f"SELECT {columns} FROM replication")
    processed = datetime.fromtimestamp(rig.stored(stream)[9].stored_ns / 1e9, UTC)
    assert before["watermark"] <= meanwhile["watermark"] <= max(before["watermark"], processed)
    assert [meanwhile[column] for column in ("next_sequence", "copied_messages")] == [11, 10]
    rig.drain()
    after = rig.row(f"SELECT {columns} FROM replication")
    assert (after["next_sequence"], after["source_last_sequence"], after["copied_messages"]) == (16, 15, 10)
    assert after["watermark"] > before["watermark"]


def test_reading_end_stays_at_the_first_end_of_the_run(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(6))
    info = rig.info(stream)
    ends: Ends = {}
    drained = StreamState(stream, info.created_ns, 1)
    infos = [replace(info, last_sequence=last) for last in (6, 4, 9)]
    assert [reading_end(ends, drained, info) for info in infos] == [6, 4, 6]
    # A restarted source has an end of its own.
    assert [reading_end(ends, replace(drained, starts=1), info) for info in infos[1:]] == [4, 4]
    assert [reading_end(None, drained, info) for info in infos] == [6, 4, 9]


def test_epoch_ignores_a_clock_that_is_far_ahead(rig: Rig) -> None:
    info = rig.info(rig.make())
    assert info.ts_ns is not None
    assert epoch_at(info) == info.ts_ns
    # A later epoch under a correct clock outranks an epoch from a clock far ahead.
    ahead_ns = info.ts_ns + 40 * 86_400 * 10**9
    for wrong in (replace(info, ts_ns=ahead_ns), replace(info, ts_ns=None)):
        assert epoch_at(wrong) < info.ts_ns + 3_600 * 10**9


def test_advance_holds_the_watermark_under_stale_stream_info(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, numbered(6))
    info = rig.info(stream)
    assert info.ts_ns is not None
    stored_ns = info.ts_ns - 60_000_000_000
    state = StreamState(stream, info.created_ns, next_sequence=5, last_stored_ns=stored_ns, seen_messages=4)
    advance(state, info, warning_ns=None, caught_up=False)
    assert (state.source_last_sequence, state.lag_messages, state.watermark_ns) == (6, 2, stored_ns)
    # The stale end equals the position, so the stream seems caught up.
    advance(state, replace(info, last_sequence=4), warning_ns=None, caught_up=True)
    assert (state.source_last_sequence, state.lag_messages, state.watermark_ns) == (6, 2, stored_ns)
    state.next_sequence = 7
    advance(state, info, warning_ns=None, caught_up=True)
    assert (state.lag_messages, state.watermark_ns) == (0, info.ts_ns - 1_000_000_000)
    # A position that `start_sequence` set past the end says nothing about the source.
    ahead = StreamState(stream, info.created_ns, next_sequence=99)
    advance(ahead, info, warning_ns=None, caught_up=True)
    advance(ahead, info, warning_ns=None, caught_up=True)
    assert (ahead.source_last_sequence, ahead.lag_messages, ahead.watermark_ns) == (6, 0, info.ts_ns - 1_000_000_000)


@pytest.mark.parametrize("batch_messages", (50_000, 500_000, 3_000_000))
@pytest.mark.parametrize("catch_up_messages", (1, 500_000))
def test_tracked_range_never_exceeds_the_limit_of_the_fold(
    tmp_path: Path, batch_messages: int, catch_up_messages: int
) -> None:
    servers = {"source_url": "nats://a:1", "target_url": "nats://b:1", "target_stream": "COPY"}
    sizes = {"batch_messages": batch_messages, "catch_up_messages": catch_up_messages}
    file = tmp_path / "replication.yaml"
    file.write_text(json.dumps({"name": "london", "streams": [{"stream": "REG", **servers, **sizes}]}))
    entry = load_settings(file, {"SR_ASSETS_HOME": str(tmp_path)}).streams[0]
    config = {
        "name": "REG",
        "subjects": ["reg.>"],
        "retention": "limits",
        "num_replicas": 1,
        "max_msgs_per_subject": -1,
    }
    state = {"first_seq": 1, "last_seq": 10_000_000, "messages": 10_000_000, "bytes": 1_000_000_000}
    source = parse_stream_info({"config": config, "created": "2026-01-01T00:00:00Z", "state": state}, (2, 11, 0))
    size = batch_messages if catch_up_messages == 1 else 500_000
    tracked = next_range(entry, 1, source, 10_000_000, payloads=False, cores=lambda: 64)
    assert tracked == SequenceRange(1, 1 + min(size, 500_000))
    assert next_range(entry, 1, source, 10_000_000, payloads=False) == SequenceRange(1, 1 + batch_messages)
    plain = next_range(entry, 1, source, 10_000_000, copied_per_second=1e6)
    assert plain == SequenceRange(1, 1 + max(batch_messages, catch_up_messages))
