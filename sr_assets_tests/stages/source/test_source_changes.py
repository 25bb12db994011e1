"""Sources that are recreated or rolled back during a run: copies and nodes keep the positions of their own messages."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sr_assets.adapters import crash_points
from sr_assets.adapters.crash_points import Point
from sr_assets.domain.provenance import Identity, find_copy
from sr_assets_tests.rig import SITE, Rig, Sent

TRACKED = {"inspect_field": "sender", "inspect_duration": "10h", "inspect_force_field": "force"}
FOLD, COPY = "MainThread", "copying"
#: The change of the source, and its moment: a checkpoint, the thread that reaches it, and the number of times. The
#: second batch ends after the saved disk's last message; the third begins there.
MOMENTS: tuple[tuple[bool, dict[str, Any], Point, str, int], ...] = (
    (False, TRACKED, Point.PLANNED, FOLD, 3),
    (False, TRACKED, Point.PLANNED, COPY, 1),
    (False, {}, Point.PLANNED, COPY, 2),
    (True, TRACKED, Point.PLANNED, FOLD, 3),
    (True, TRACKED, Point.PUBLISHED, COPY, 2),
    (True, {}, Point.PLANNED, COPY, 3),
    (True, {}, Point.COMMITTED, COPY, 2),
)


def forced(first: int, after: int) -> list[Sent]:
    bodies = ({"sender": f"n{n % 7}", "force": True, "n": n} for n in range(first, after))
    return [Sent(json.dumps(body).encode()) for body in bodies]


class SourceChange:
    """A change of the source at one checkpoint; it records the source's messages before and after."""

    def __init__(self, rig: Rig, stream: str, change: Callable[[], None]) -> None:
        self._rig, self._stream, self._change = rig, stream, change
        self.applied = False
        #: Position of each message by its number: sequence, stored time in ms, created time of its stream.
        self.positions: dict[int, tuple[int, int, int]] = {}

    def record_positions(self) -> None:
        """Record the position of each message."""
        created_ns = self._rig.info(self._stream).created_ns
        for message in self._rig.stored(self._stream):
            position = (message.sequence, message.stored_ns // 1_000_000, created_ns)
            self.positions[json.loads(message.payload)["n"]] = position

    def apply(self) -> None:
        """Change the source."""
        self.record_positions()
        self._change()
        self.record_positions()
        self.applied = True

    def at(self, point: Point, thread: str, count: int) -> Callable[[Point], None]:
        """Return a hook that changes the source when a thread reaches a checkpoint for the n-th time."""
        remaining = [count]

        def hook(reached: Point) -> None:
            if reached is point and threading.current_thread().name.startswith(thread):
                remaining[0] -= 1
                if remaining[0] == 0:
                    self.apply()

        return hook


def recreate_source(rig: Rig, stream: str) -> Callable[[], None]:
    def change() -> None:
        rig.api(f"STREAM.DELETE.{stream}")
        rig.create(stream)
        rig.publish(stream, forced(100, 170))

    return change


def assert_copies_match_positions(rig: Rig, stream: str, change: SourceChange) -> list[int]:
    """Assert that copies and nodes match message positions and all counters add up; return the numbers of the copies."""
    copied = []
    for copy in rig.copies(stream):
        origin, number = find_copy(copy.headers, Identity(stream, SITE, SITE)), json.loads(copy.payload)["n"]
        assert origin is not None
        assert origin[:3] == change.positions[number], number
        copied.append(number)
    seen = {position[:2] for position in change.positions.values()}
    for node in rig.rows("last_seen_nodes"):
        assert (node["last_sequence"], int(node["last_seen"].timestamp() * 1_000)) in seen, node
    row = rig.row("replication")
    parts = ("copied_messages", "skipped_messages", "too_old_messages", "parked_messages", "queued_messages")
    assert row["seen_messages"] == sum(row[part] for part in parts), row
    assert row["copied_messages"] == len(copied), row
    return copied


@pytest.mark.parametrize(("rolled_back", "entry", "point", "thread", "count"), MOMENTS)
def test_changed_source_is_followed_and_never_mixed_with_the_old(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    restore_source: Callable[[str], None],
    rolled_back: bool,
    entry: dict[str, Any],
    point: Point,
    thread: str,
    count: int,
) -> None:
    stream = rig.make()
    rig.add(stream, on_source_reset="recopy", batch_messages=20, **entry)
    rig.publish(stream, forced(0, 30))
    if rolled_back:
        restore_source("save")
    rig.publish(stream, forced(30, 60))

    def roll_back() -> None:
        restore_source("restore")
        rig.publish(stream, forced(130, 170))

    change = SourceChange(rig, stream, roll_back if rolled_back else recreate_source(rig, stream))
    with monkeypatch.context() as patched:
        patched.setattr(crash_points, "hook", change.at(point, thread, count))
        rig.run()
    assert change.applied
    rig.drain()
    rig.drain()
    copied = assert_copies_match_positions(rig, stream, change)
    new = [*range(30), *range(130, 170)] if rolled_back else [*range(100, 170)]
    assert copied[-len(new) :] == new
    # Before them come only copies from the old source, once each; messages of both sources were copied from each.
    assert copied[: -len(new)] == list(range(len(copied) - len(new)))
    assert not [gap for gap in rig.rows("gaps") if gap["reason"] != "lost"]


def test_rollback_under_an_open_batch_restarts_the_stream_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, restore_source: Callable[[str], None]
) -> None:
    stream = rig.make()
    entry = rig.add(stream, on_source_reset="recopy", batch_messages=20)
    rig.publish(stream, forced(0, 10))
    restore_source("save")
    rig.publish(stream, forced(10, 60))

    def crash(reached: Point) -> None:
        if reached is Point.PLANNED:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(crash_points, "hook", crash)
        with pytest.raises(KeyboardInterrupt):
            rig.run()
    restore_source("restore")
    rig.publish(stream, forced(130, 190))
    target_url, entry["target_url"] = entry["target_url"], "nats://127.0.0.1:1"
    for _ in range(2):
        assert "127.0.0.1:1" in rig.failure()
    entry["target_url"] = target_url
    rig.drain()
    with rig.open() as site:
        state = site.state.load_stream(stream)
    assert state is not None
    assert state.starts == 1
    assert [json.loads(copy.payload)["n"] for copy in rig.copies(stream)] == [*range(10), *range(130, 190)]


@pytest.mark.parametrize("entry", (TRACKED, {}), ids=("tracked", "plain"))
def test_rollback_is_detected_when_the_last_message_read_was_replaced(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, restore_source: Callable[[str], None], entry: dict[str, Any]
) -> None:
    """The source keeps one message per subject, so the sequence of the last message read is empty."""
    monkeypatch.setattr("sr_assets.stages.source.position.CLOCKS_DIFFER_NS", 0)
    stream = rig.make(max_msgs_per_subject=1)
    rig.add(stream, on_source_reset="recopy", **entry)

    def publish(first: int, after: int, *rare: Sent) -> None:
        often = [Sent(message.payload, f"often{n % 7}") for n, message in enumerate(forced(first, after))]
        rig.publish(stream, [*rare, *often])

    publish(0, 20)
    restore_source("save")
    publish(20, 60)
    rig.drain()
    restore_source("restore")
    publish(201, 270, Sent(forced(200, 201)[0].payload, "rare"))
    rig.drain()
    assert 200 in [json.loads(copy.payload)["n"] for copy in rig.copies(stream)]
    assert rig.row("replication")["lag_messages"] == 0
