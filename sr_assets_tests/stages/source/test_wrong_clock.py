"""A source whose server's clock is two days ahead for some seconds, as seen through every time that it reports."""

import json

import pytest

from sr_assets.adapters import times
from sr_assets_tests.rig import Rig, Sent
from sr_assets_tests.travel import report_times

pytestmark = pytest.mark.process

DAYS_NS = 48 * 3600 * 10**9
ENTRY = {"inspect_field": "sender", "inspect_duration": "10h", "warn_duration": "1h"}


class WrongClock:
    """The server's clock: times in `wrong` are reported two days ahead."""

    def __init__(self) -> None:
        self.wrong: list[list[int]] = []

    def begin(self) -> None:
        """Set the clock ahead."""
        self.wrong.append([times.time_ns(), 1 << 62])

    def end(self) -> None:
        """Correct the clock."""
        self.wrong[-1][1] = times.time_ns()

    def reported(self, right_ns: int) -> int:
        """Return the clock's time at a time."""
        return right_ns + DAYS_NS * any(since <= right_ns < until for since, until in self.wrong)


@pytest.fixture
def clock(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> WrongClock:
    # The wrong clock travels too: its times are wrong by two days from those of the travelled one.
    rig.travel()
    clock = WrongClock()
    report_times(monkeypatch, clock.reported)
    return clock


def send(rig: Rig, stream: str, *nodes: str) -> None:
    rig.publish(stream, [Sent(json.dumps({"sender": node}).encode()) for node in nodes])


def events(rig: Rig, node: str) -> list[str]:
    rows = rig.rows(f"SELECT event FROM node_advisories WHERE node = '{node}' ORDER BY transition")
    return [row["event"] for row in rows]


@pytest.mark.parametrize("at_start", (False, True), ids=("later", "from_the_first_message"))
def test_clock_far_ahead_causes_no_false_transition(rig: Rig, clock: WrongClock, at_start: bool) -> None:
    stream = rig.make()
    rig.add(stream, **ENTRY)
    if not at_start:
        send(rig, stream, "a", "b")
        rig.drain()
    clock.begin()
    for _ in range(4):
        send(rig, stream, "a", "b", "c")
        rig.drain()
        rig.travel(minutes=25)
    (report,) = rig.drain().values()
    assert report.wrong_clock is not None
    assert "more than an hour ahead of this machine's" in report.wrong_clock
    assert {node: events(rig, node) for node in "abc"} == {"a": ["new"], "b": ["new"], "c": ["new"]}
    clock.end()
    # One node does not report again: its silence counts from the first credible time.
    corrected = times.time()
    for _ in range(4):
        send(rig, stream, "a", "c", "d")
        (report,) = rig.drain().values()
        rig.travel(minutes=25)
    assert report.wrong_clock is None
    assert {node: events(rig, node) for node in "abcd"} == {
        "a": ["new"],
        "b": ["new", "timeout"],
        "c": ["new"],
        "d": ["new"],
    }
    timed_out = rig.row("SELECT epoch(event_time) AS at FROM node_advisories WHERE event = 'timeout'")["at"]
    assert corrected + 3_590 < timed_out < corrected + 3_700
    assert rig.row("replication")["blind_seconds"] >= 3_600
    # Every message was copied once, although its stored time is wrong.
    assert len(rig.copies(stream)) == rig.row("replication")["copied_messages"]


def test_first_messages_of_a_wrong_clock_are_no_later_than_the_next(rig: Rig, clock: WrongClock) -> None:
    """A new state reads them long afterwards, in small batches: dated now, they would put each node's silence in the past."""
    stream = rig.make()
    rig.add(stream, **ENTRY, batch_messages=3)
    clock.begin()
    send(rig, stream, "a", "b")
    clock.end()
    for _ in range(8):
        send(rig, stream, "a", "b", "c")
        rig.travel(minutes=10)
    rig.drain()
    assert {node: events(rig, node) for node in "abc"} == {"a": ["new"], "b": ["new"], "c": ["new"]}


def test_watermark_far_ahead_returns_after_a_correction(
    rig: Rig, clock: WrongClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine's clock is ahead as well, so the jump is believed; then both are corrected."""
    stream, real_ns = rig.make(), times.time_ns
    rig.add(stream, **ENTRY)
    send(rig, stream, "a")
    rig.drain()
    clock.begin()
    monkeypatch.setattr("sr_assets.stages.clock.Clock.own_ns", staticmethod(lambda: clock.reported(real_ns())))
    send(rig, stream, "a")
    rig.drain()
    assert rig.row("SELECT epoch(watermark) AS at FROM replication")["at"] > times.time() + 40 * 3600
    clock.end()
    for _ in range(3):
        send(rig, stream, "a", "late")
        rig.drain()
    assert rig.row("SELECT epoch(watermark) AS at FROM replication")["at"] < times.time() + 1
    before = events(rig, "a")
    assert events(rig, "late") == ["new"]
    send(rig, stream, "a", "late")
    rig.drain()
    assert (events(rig, "a"), events(rig, "late")) == (before, ["new"])
