"""Where a stream begins, and what happens when the source, the target or the state is not what it was."""

import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import duckdb
import pytest

from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.state.records import StreamState
from sr_assets.domain.positions import format_rfc3339_ns
from sr_assets.stages.clock import Clock
from sr_assets.stages.source.position import START_VARIABLE, _move_to_new_source, advance, epoch_at
from sr_assets.stages.source.reading import Ends, reading_end
from sr_assets_tests.rig import SITE, Rig, Sent


def numbered(rig: Rig, count: int, *, first: int = 1) -> list[Sent]:
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
def test_a_new_stream_begins_where_the_first_option_that_is_set_says(
    rig: Rig, entry: dict[str, Any], first: int | None
) -> None:
    stream = rig.make()
    rig.create(stream, rig.target)
    rig.publish(stream, numbered(rig, 6))
    rig.add(stream, **entry)
    rig.drain()
    assert payloads(rig, stream) == ([] if first is None else list(range(first, 7)))
    rig.entries[0] |= {"start_sequence": 1}
    rig.publish(stream, numbered(rig, 1, first=7))
    rig.drain()
    later = [7] if entry.get("start_sequence") != 99 else []
    assert payloads(rig, stream) == ([] if first is None else list(range(first, 7))) + later
    assert not rig.rows("gaps")


def test_start_time_begins_with_the_first_message_stored_at_or_after_it(rig: Rig) -> None:
    stream = rig.make()
    for n in range(6):
        rig.publish(stream, numbered(rig, 1, first=n + 1))
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
def test_a_source_that_was_made_again_is_treated_as_on_source_reset_says(
    rig: Rig, policy: str, expected: list[int]
) -> None:
    stream = rig.make()
    rig.add(stream, on_source_reset=policy)
    rig.publish(stream, numbered(rig, 3))
    rig.drain()
    rig.api(f"STREAM.DELETE.{stream}")
    rig.create(stream)
    rig.publish(stream, numbered(rig, 3, first=11))
    if policy == "stop":
        assert "on_source_reset" in rig.failure()
        assert "on_source_reset" in rig.row("replication")["last_error"]
    else:
        rig.drain()
    rig.publish(stream, numbered(rig, 1, first=14))
    rig.run()
    assert payloads(rig, stream) == expected
    if policy != "stop":
        assert rig.row("replication")["next_sequence"] == 5
        assert len({copy.headers for copy in rig.copies(stream)}) == len(expected)


def test_a_lost_state_stops_a_stream_whose_target_has_our_copies(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(rig, 3))
    rig.drain()
    shutil.rmtree(rig.home / "sites")
    assert f"sr-assets recover --stream {SITE}/{stream}" in rig.failure()
    assert payloads(rig, stream) == [1, 2, 3]


def test_an_ephemeral_stream_is_copied_again_once_per_start(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = rig.make()
    rig.add(stream, ephemeral=True)
    rig.publish(stream, numbered(rig, 2))
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


def test_a_target_that_was_made_again_goes_on_with_what_is_new_or_stops(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(rig, 2))
    rig.drain()
    rig.api(f"STREAM.DELETE.{stream}", server=rig.target)
    rig.publish(stream, numbered(rig, 2, first=3))
    rig.drain()
    assert payloads(rig, stream) == [3, 4]
    rig.entries[0] |= {"on_target_reset": "stop"}
    rig.drain()
    rig.api(f"STREAM.DELETE.{stream}", server=rig.target)
    rig.publish(stream, numbered(rig, 1, first=5))
    assert "on_target_reset" in rig.failure()


@pytest.mark.parametrize(("policy", "expected"), (("stop", [1, 2, 3]), ("skip_to_now", [1, 2, 3, 14])))
def test_a_source_that_went_back_behind_the_position_is_treated_as_one_that_was_made_again(
    rig: Rig, policy: str, expected: list[int]
) -> None:
    stream = rig.make()
    rig.add(stream, on_source_reset=policy)
    rig.publish(stream, numbered(rig, 3))
    rig.drain()
    # As after a source was restored from a backup, or by a hand that edited the state.
    with duckdb.connect(str(rig.home / "sites" / SITE / "state.duckdb")) as state:
        state.execute("UPDATE streams SET next_sequence = 40")
    if policy == "stop":
        assert "ends at 3, before 39" in rig.failure()
        with duckdb.connect(str(rig.home / "sites" / SITE / "state.duckdb")) as state:
            assert state.execute("SELECT next_sequence FROM streams").fetchall() == [(40,)]
    else:
        rig.drain()
    rig.publish(stream, numbered(rig, 1, first=14))
    rig.run()
    assert payloads(rig, stream) == expected


def test_silence_is_known_until_the_last_message_read_when_a_source_begins_anew(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, on_source_reset="recopy")
    state = StreamState(stream, 1, next_sequence=5, watermark_ns=7, last_stored_ns=9, mark_sequence=4, mark_ns=9)
    _move_to_new_source(rig.settings().streams[0], state, rig.info(stream), "it went back")
    assert (state.watermark_ns, state.last_stored_ns, state.hole_open, state.next_sequence) == (9, 9, True, 1)


def test_a_source_that_lost_what_was_not_read_yet_is_caught_up_and_watched_again(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, inspect_field="sender", inspect_duration="10h")
    rig.publish(stream, [Sent(b'{"sender": "n"}')])
    rig.drain()
    watermark = rig.row("replication")["watermark"]
    # As after a run that saw more than it read, of a source that was then restored from a copy.
    with duckdb.connect(str(rig.home / "sites" / SITE / "state.duckdb")) as state:
        state.execute("UPDATE streams SET source_last_sequence = 40")
    rig.drain()
    row = rig.row("replication")
    assert (row["source_last_sequence"], row["lag_messages"], row["next_sequence"]) == (1, 0, 2)
    assert row["watermark"] > watermark


def test_stream_info_that_jumps_backwards_moves_nothing_backwards_and_lets_no_time_pass(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that fell behind says its clock with an old state: what it does not know of was not silent."""
    stream, target = rig.make(), rig.unique("T")
    rig.add(stream, target_stream=target, target_subject_prefix="to", inspect_field="sender", inspect_duration="10m")
    rig.publish(stream, [Sent(json.dumps({"sender": f"n{n}"}).encode()) for n in range(10)])
    rig.drain()
    columns = "next_sequence, source_last_sequence, watermark, lag_messages, copied_messages"
    before = rig.row(f"SELECT {columns} FROM replication")
    assert (before["next_sequence"], before["source_last_sequence"], before["lag_messages"]) == (11, 10, 0)
    asked, old = Cluster.stream_info, iter((4,))

    def once_behind(self: Cluster, name: str, **options: Any) -> StreamInfo:
        info = asked(self, name, **options)
        last = next(old, info.last_sequence) if name == stream else info.last_sequence
        return replace(info, last_sequence=last)

    rig.publish(stream, [Sent(json.dumps({"sender": f"n{n}"}).encode()) for n in range(5)])
    with monkeypatch.context() as patched:
        patched.setattr(Cluster, "stream_info", once_behind)
        rig.drain()
    assert next(old, None) is None
    meanwhile = rig.row(f"SELECT {columns} FROM replication")
    processed = datetime.fromtimestamp(rig.stored(stream)[9].stored_ns / 1e9, UTC)
    assert before["watermark"] <= meanwhile["watermark"] <= max(before["watermark"], processed)
    assert [meanwhile[column] for column in ("next_sequence", "copied_messages")] == [11, 10]
    rig.drain()
    after = rig.row(f"SELECT {columns} FROM replication")
    assert (after["next_sequence"], after["source_last_sequence"], after["copied_messages"]) == (16, 15, 10)
    assert after["watermark"] > before["watermark"]


def test_what_an_info_that_fell_behind_does_not_know_is_neither_read_nor_silent(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, numbered(rig, 6))
    known = rig.info(stream)
    ends: Ends = {}
    drained = StreamState(stream, known.created_ns, 1)
    infos = [replace(known, last_sequence=last) for last in (6, 4, 9)]
    assert [reading_end(ends, drained, info) for info in infos] == [6, 4, 6]
    # Another source, which has another beginning, ends elsewhere.
    assert [reading_end(ends, replace(drained, starts=1), info) for info in infos[1:]] == [4, 4]
    assert [reading_end(None, drained, info) for info in infos] == [6, 4, 9]
    assert known.ts_ns is not None
    stored_ns = known.ts_ns - 60_000_000_000
    assert epoch_at(known) == known.ts_ns
    # A state that begins under a clock far ahead is outranked by one that begins later under a right one.
    ahead_ns = known.ts_ns + 40 * 86_400 * 10**9
    for wrong in (replace(known, ts_ns=ahead_ns), replace(known, ts_ns=None)):
        assert epoch_at(wrong) < known.ts_ns + 3_600 * 10**9
    state = StreamState(stream, known.created_ns, next_sequence=5, last_stored_ns=stored_ns, seen_messages=4)
    advance(state, known, warning_ns=None, caught_up=False, own_clock_ns=Clock.own_ns())
    assert (state.source_last_sequence, state.lag_messages, state.watermark_ns) == (6, 2, stored_ns)
    # It ends where we stand: that looks caught up.
    advance(state, replace(known, last_sequence=4), warning_ns=None, caught_up=True, own_clock_ns=Clock.own_ns())
    assert (state.source_last_sequence, state.lag_messages, state.watermark_ns) == (6, 2, stored_ns)
    state.next_sequence = 7
    advance(state, known, warning_ns=None, caught_up=True, own_clock_ns=Clock.own_ns())
    assert (state.lag_messages, state.watermark_ns) == (0, known.ts_ns - 1_000_000_000)
    # A position that `start_sequence` put ahead of its source knows nothing of it.
    ahead = StreamState(stream, known.created_ns, next_sequence=99)
    advance(ahead, known, warning_ns=None, caught_up=True, own_clock_ns=Clock.own_ns())
    advance(ahead, known, warning_ns=None, caught_up=True, own_clock_ns=Clock.own_ns())
    assert (ahead.source_last_sequence, ahead.lag_messages, ahead.watermark_ns) == (6, 0, known.ts_ns - 1_000_000_000)
