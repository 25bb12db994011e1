"""A state behind its streams, such as a restored backup: the site catches up, and the result is as if it had never stopped."""

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from sr_assets.adapters import crash_points
from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.state.operator_settings import set_paused
from sr_assets.stages.operator_commands import act_on_node
from sr_assets_tests.axes import every_pair
from sr_assets_tests.rig import Rig, Sent

pytestmark = pytest.mark.process

PLAIN: dict[str, Any] = {}
TRACKED: dict[str, Any] = {"inspect_field": "sender", "inspect_duration": "10h", "size_trigger": 1}
FORCED: dict[str, Any] = {**TRACKED, "inspect_force_field": "force"}
HOUR = 3_600 * 10**9
#: 17:00 UTC, on any day.
EVENING_SECONDS = 17 * 3_600
#: The parts of a home that a backup may contain; the history of snapshots may have stayed.
STATE, HOME = ("sites",), ("sites", "snapshots")


def numbered(first: int, after: int, nodes: int = 4) -> list[Sent]:
    """Return messages of changing sizes: a tracked stream copies most of them."""
    bodies = [{"sender": f"n{n % nodes}", "n": n, "pad": "x" * (n % 3), "force": True} for n in range(first, after)]
    return [Sent(json.dumps(body).encode()) for body in bodies]


def numbers(rig: Rig, stream: str) -> list[int]:
    return [json.loads(copy.payload)["n"] for copy in rig.copies(stream)]


def back_up(rig: Rig, parts: tuple[str, ...]) -> None:
    for part in parts:
        if (rig.home / part).exists():
            shutil.copytree(rig.home / part, rig.home / "backup" / part)


def put_back(rig: Rig, parts: tuple[str, ...]) -> None:
    for part in parts:
        shutil.rmtree(rig.home / part, ignore_errors=True)
        if (rig.home / "backup" / part).exists():
            shutil.copytree(rig.home / "backup" / part, rig.home / part)


def results(rig: Rig) -> dict[str, Any]:
    """Return the rows that must be the same as without an older state."""
    columns = ", ".join(
        name for name in rig.row("SELECT * FROM replication") if name not in {"as_of", "watermark", "next_deadline"}
    )
    return {
        "counts": rig.row(f"SELECT {columns} FROM replication"),
        "gaps": rig.rows("SELECT * EXCLUDE (noticed_at) FROM gaps ORDER BY ALL"),
        "advisories": rig.rows(
            "SELECT node, event, event_time, published_at IS NULL FROM node_advisories ORDER BY ALL"
        ),
        "history": rig.rows("SELECT node, sequence, payload FROM node_snapshot_history ORDER BY sequence"),
        "newest": rig.rows("SELECT node, sequence, payload FROM node_snapshots ORDER BY node"),
    }


@pytest.mark.parametrize(
    ("entry", "parts"),
    (
        pytest.param(PLAIN, STATE, id="plain-state"),
        pytest.param(TRACKED, HOME, id="tracked-home"),
        pytest.param(PLAIN, HOME, id="plain-home", marks=pytest.mark.nightly),
        pytest.param(TRACKED, STATE, id="tracked-state", marks=pytest.mark.nightly),
    ),
)
def test_older_state_makes_no_copy_twice(rig: Rig, entry: dict[str, Any], parts: tuple[str, ...]) -> None:
    stream = rig.make()
    configured = rig.add(stream, batch_messages=7, **entry)
    rig.publish(stream, numbered(1, 11))
    rig.drain()
    back_up(rig, parts)
    for first, after in ((11, 23), (23, 31), (31, 40)):
        rig.publish(stream, numbered(first, after))
        rig.drain()
    before, copies = results(rig), numbers(rig, stream)
    put_back(rig, parts)
    # The same decisions, in other batches.
    configured["batch_messages"] = 5
    reports = rig.drain()
    assert reports[stream].copied - reports[stream].found == 0
    assert numbers(rig, stream) == copies
    assert results(rig) == before
    assert len(copies) > 25
    rig.publish(stream, numbered(40, 50))
    rig.drain()
    in_the_end = numbers(rig, stream)
    assert in_the_end[: len(copies)] == copies
    assert len(in_the_end) > len(copies)
    assert len(set(in_the_end)) == len(in_the_end)


class CrashError(Exception):
    """A crash at a checkpoint."""


@pytest.fixture
def crash(monkeypatch: pytest.MonkeyPatch) -> Callable[[Point | None], None]:
    """Return a function that lets the process crash at the next passing of a point, or no more."""

    def at(point: Point | None) -> None:
        def hook(reached: Point) -> None:
            if reached == point:
                monkeypatch.setattr(crash_points, "hook", None)
                raise CrashError

        monkeypatch.setattr(crash_points, "hook", hook)

    return at


def announce(rig: Rig, stream: str, nodes: range) -> None:
    rig.publish(stream, [Sent(json.dumps({"sender": f"n{node}"}).encode()) for node in nodes])
    rig.drain()


def announced(rig: Rig, feed: str) -> list[str]:
    return [json.loads(message.payload)["value"] for message in rig.stored(feed)]


@pytest.mark.parametrize("is_older", (True, False), ids=("older_state", "late_advisories"))
def test_advisories_deleted_since_count_as_published_by_a_later_state_only(rig: Rig, is_older: bool) -> None:
    """The advisory stream's first message is younger than the events in the outbox."""
    stream, feed = rig.make(), rig.make("FEED", duplicate_window=100_000_000)
    rig.add(stream, **TRACKED, advisory={"subject": f"{feed}.%s.%v", "reliable": True})
    announce(rig, stream, range(2))
    back_up(rig, STATE)
    if not is_older:
        # These events wait while the stream accepts nothing, and others use it afterwards.
        limits = {"name": feed, "subjects": [f"{feed}.>"], "allow_direct": True, "discard": "new"}
        rig.api(f"STREAM.UPDATE.{feed}", {**limits, "max_msgs": 2})
        rig.publish(stream, [Sent(json.dumps({"sender": f"n{node}"}).encode()) for node in range(2, 6)])
        rig.run()
        rig.api(f"STREAM.UPDATE.{feed}", limits)
        rig.api(f"STREAM.PURGE.{feed}")
        rig.publish(feed, [Sent(b"{}")])
        rig.drain()
        assert sorted(json.loads(each.payload).get("value", "") for each in rig.stored(feed)) == [
            "",
            *["n2", "n3", "n4", "n5"],
        ]
        return
    announce(rig, stream, range(2, 6))
    announce(rig, stream, range(6, 8))
    rig.api(f"STREAM.PURGE.{feed}", {"keep": 1})
    assert announced(rig, feed) == ["n7"]
    put_back(rig, STATE)
    announce(rig, stream, range(8, 9))
    assert announced(rig, feed) == ["n7", "n8"]
    assert [row["node"] for row in rig.rows("SELECT node FROM node_advisories WHERE published_at IS NULL")] == []


@pytest.mark.parametrize("deletes", ("retention", "purge"))
def test_waiting_advisory_is_sent_after_published_ones_were_deleted(rig: Rig, deletes: str) -> None:
    """That this state no longer knows stored advisories does not prove a later state of it."""
    stream, feed = rig.make(), rig.make("FEED", duplicate_window=100_000_000)
    rig.add(stream, **TRACKED, advisory={"subject": f"{feed}.%s.%v", "reliable": True})
    announce(rig, stream, range(2))
    # The watermark is a second behind the clock.
    rig.travel(seconds=2)
    act_on_node(rig.settings(), "retire", "n1", None)
    if deletes == "retention":
        announce(rig, stream, range(1, 2))
    # The stream has deleted others' messages from before these; the first event was held back.
    rig.api(f"STREAM.PURGE.{feed}", {"keep": 2})
    assert set(announced(rig, feed)) == {"n1"}
    with rig.open() as site, site.state.transaction():
        connection = site.state.connection
        connection.execute("UPDATE transitions SET published_ns = NULL WHERE node = 'n0'")
        now_ns = rig.clock_ns(stream)
        if deletes == "purge":
            site.state.nodes(stream).purge_retired(now_ns)
        else:
            site.state.forget_history(stream, gaps_ns=0, transitions_ns=now_ns)
    rig.drain()
    assert announced(rig, feed)[2:] == ["n0"]


@pytest.mark.parametrize(
    ("entry", "paused", "created"),
    # A paused plain stream reads nothing, so its state equals an empty one.
    (
        pytest.param(PLAIN, False, "by_others", id="plain-empty-by_others"),
        pytest.param(FORCED, False, "by_us", id="tracked-empty-by_us"),
        pytest.param(FORCED, True, "by_others", id="tracked-paused-by_others"),
        pytest.param(PLAIN, False, "by_us", id="plain-empty-by_us", marks=pytest.mark.nightly),
        pytest.param(FORCED, False, "by_others", id="tracked-empty-by_others", marks=pytest.mark.nightly),
        pytest.param(FORCED, True, "by_us", id="tracked-paused-by_us", marks=pytest.mark.nightly),
    ),
)
def test_state_before_the_first_copy_makes_no_copy_twice(
    rig: Rig, entry: dict[str, Any], created: str, paused: bool
) -> None:
    """The stream has a position, but its source was empty, or its copying paused."""
    stream = rig.make()
    configured = rig.add(stream, **entry)
    if created == "by_others":
        rig.create(stream, rig.target, duplicate_window=100_000_000)
        # Another site's copies on a shared target.
        rig.publish(stream, [Sent(b"foreign")] * 3, rig.target)
    foreign = 3 if created == "by_others" else 0
    if paused:
        settings = rig.settings()
        set_paused(settings, settings.streams[0], True)
        rig.publish(stream, numbered(1, 9))
    rig.drain()
    back_up(rig, STATE)
    if paused:
        set_paused(settings, settings.streams[0], False)
    rig.publish(stream, numbered(9, 30))
    rig.drain()
    made = len(rig.copies(stream))
    assert made == foreign + (29 if paused else 21)
    put_back(rig, STATE)
    if paused:
        set_paused(settings, settings.streams[0], False)
    configured["batch_messages"] = 7
    rig.publish(stream, numbered(30, 33))
    rig.drain()
    copies = [json.loads(copy.payload)["n"] for copy in rig.copies(stream)[foreign:]]
    assert sorted(set(copies)) == sorted(copies)
    assert len(copies) > made - foreign
    assert rig.row("replication")["copied_messages"] == len(copies)


@pytest.mark.nightly
@every_pair(
    {
        "entry": {"plain": PLAIN, "tracked": FORCED},
        "position": {"before": "before", "after": "after"},
        "followed": {"later_state_stopped": False, "later_state_followed": True},
    }
)
def test_state_older_than_a_rollback_of_its_source_copies_each_message(
    rig: Rig, restore_source: Callable[[str], None], entry: dict[str, Any], position: str, followed: bool
) -> None:
    """Copies of the messages that the source lost have the sequences of its new ones."""
    stream = rig.make()
    rig.add(stream, on_source_reset="recopy", **entry)
    rig.create(stream, rig.target, duplicate_window=100_000_000)
    rig.publish(stream, numbered(1, 5))
    rig.drain()
    if position == "before":
        back_up(rig, STATE)
    rig.publish(stream, numbered(5, 9))
    restore_source("save")
    rig.publish(stream, numbered(9, 13))
    rig.drain()
    if position == "after":
        back_up(rig, STATE)
    rig.publish(stream, numbered(13, 21))
    rig.drain()
    restore_source("restore")
    rig.publish(stream, numbered(109, 115))
    if followed:
        rig.drain()
    before = Counter(numbers(rig, stream))
    put_back(rig, STATE)
    rig.drain()
    after = Counter(numbers(rig, stream))
    # A restart copies the messages again that the source still holds.
    assert {n: count for n, count in after.items() if n > 100} == dict.fromkeys(range(109, 115), 1)
    assert set(range(1, 9)) <= set(after)
    if followed:
        assert after == before


def test_restart_counts_an_open_batch_for_the_earlier_source_only(
    rig: Rig, restore_source: Callable[[str], None], crash: Callable[[Point | None], None]
) -> None:
    """The copies of an interrupted batch count before the restart, which copies the source's remaining messages again."""
    stream = rig.make()
    rig.add(stream, on_source_reset="recopy", **FORCED)
    rig.create(stream, rig.target, duplicate_window=100_000_000)
    rig.publish(stream, numbered(1, 9))
    restore_source("save")
    rig.publish(stream, numbered(9, 13))
    crash(Point.PUBLISHED)
    with contextlib.suppress(CrashError):
        rig.run()
    crash(None)
    assert numbers(rig, stream) == list(range(1, 13))
    restore_source("restore")
    rig.publish(stream, numbered(109, 115))
    rig.drain()
    assert numbers(rig, stream) == [*range(1, 13), *range(1, 9), *range(109, 115)]
    assert rig.row("replication")["copied_messages"] == 26
