"""A source whose server's clock is two days ahead for some seconds, as seen through every time that it reports."""

import json
import time
from typing import Any

import pytest

from sr_assets.adapters import jetstream
from sr_assets.adapters.copying import fetching
from sr_assets.adapters.nats import stream_info
from sr_assets.adapters.wire import frames
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import parse_rfc3339_ns
from sr_assets_tests.rig import Rig, Sent

pytestmark = pytest.mark.process

DAYS_NS = 48 * 3600 * 10**9
ENTRY = {"inspect_field": "sender", "inspect_duration": "10h", "warn_duration": "5s"}


class WrongClock:
    """The server's clock: real times in `wrong` are reported two days ahead."""

    def __init__(self) -> None:
        self.wrong: list[list[int]] = []

    def begin(self) -> None:
        """Set the clock ahead."""
        self.wrong.append([time.time_ns(), 1 << 62])

    def end(self) -> None:
        """Correct the clock."""
        self.wrong[-1][1] = time.time_ns()

    def reported(self, real_ns: int) -> int:
        """Return the clock's time at a real time."""
        return real_ns + DAYS_NS * any(since <= real_ns < until for since, until in self.wrong)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WrongClock:
    clock, parse = WrongClock(), stream_info._time_ns

    def time_ns(text: str | None) -> int | None:
        real_ns = parse(text)
        return None if real_ns is None else clock.reported(real_ns)

    class Reported(Message):
        def __new__(cls, sequence: int, stored_ns: int, *rest: Any) -> Message:  # type: ignore[misc]
            return Message(sequence, clock.reported(stored_ns), *rest)

    def collect(parser: frames.DirectParser) -> None:
        # The parser avoids the constructor.
        parser.messages += [Reported(*message) for message in parser.take()]

    monkeypatch.setattr(stream_info, "_time_ns", time_ns)
    monkeypatch.setattr(frames, "Message", Reported)
    monkeypatch.setattr(frames.DirectParser, "collect", collect)
    for module in (fetching, jetstream):
        monkeypatch.setattr(module, "parse_rfc3339_ns", lambda text: clock.reported(parse_rfc3339_ns(text)))
    return clock


def send(rig: Rig, stream: str, *nodes: str) -> None:
    rig.publish(stream, [Sent(json.dumps({"sender": node}).encode()) for node in nodes])


def events(rig: Rig, node: str) -> list[str]:
    rows = rig.rows(f"SELECT event FROM node_advisories WHERE node = '{node}' ORDER BY transition")
    return [row["event"] for row in rows]


def wait_for(rig: Rig, stream: str, seconds: float) -> None:
    """Let nodes a, b and, from then on, c report for some seconds, with a run after each message."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        send(rig, stream, "a", "b", "c")
        rig.drain()
        time.sleep(0.5)


@pytest.mark.parametrize("at_start", (False, True), ids=("later", "from_the_first_message"))
def test_clock_far_ahead_causes_no_false_transition(rig: Rig, clock: WrongClock, at_start: bool) -> None:
    stream = rig.make()
    rig.add(stream, **ENTRY)
    if not at_start:
        send(rig, stream, "a", "b")
        rig.drain()
    clock.begin()
    wait_for(rig, stream, 7)
    (report,) = rig.drain().values()
    assert report.wrong_clock is not None
    assert "more than an hour ahead of this machine's" in report.wrong_clock
    assert {node: events(rig, node) for node in "abc"} == {"a": ["new"], "b": ["new"], "c": ["new"]}
    clock.end()
    # One node does not report again: its silence counts from the first credible time.
    corrected = time.time()
    while events(rig, "b") == ["new"]:
        assert time.time() - corrected < 60
        send(rig, stream, "a", "c", "d")
        (report,) = rig.drain().values()
        time.sleep(0.3)
    assert report.wrong_clock is None
    assert {node: events(rig, node) for node in "abcd"} == {
        "a": ["new"],
        "b": ["new", "timeout"],
        "c": ["new"],
        "d": ["new"],
    }
    timed_out = rig.row("SELECT epoch(event_time) AS at FROM node_advisories WHERE event = 'timeout'")["at"]
    assert corrected + 3 < timed_out < time.time()
    assert rig.row("replication")["blind_seconds"] >= 5
    # Every message was copied once, although its stored time is wrong.
    assert len(rig.copies(stream)) == rig.row("replication")["copied_messages"]


def test_first_messages_of_a_wrong_clock_are_no_later_than_the_next(rig: Rig, clock: WrongClock) -> None:
    """A new state reads them long afterwards, in small batches: dated now, they would put each node's silence in the past."""
    stream = rig.make()
    rig.add(stream, **ENTRY, batch_messages=3)
    clock.begin()
    send(rig, stream, "a", "b")
    clock.end()
    began = time.monotonic()
    while time.monotonic() < began + 6:
        send(rig, stream, "a", "b", "c")
        time.sleep(0.3)
    rig.drain()
    assert {node: events(rig, node) for node in "abc"} == {"a": ["new"], "b": ["new"], "c": ["new"]}


def test_watermark_far_ahead_returns_after_a_correction(
    rig: Rig, clock: WrongClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine's clock is ahead as well, so the jump is believed; then both are corrected."""
    stream, real_ns = rig.make(), time.time_ns
    rig.add(stream, **ENTRY)
    send(rig, stream, "a")
    rig.drain()
    clock.begin()
    monkeypatch.setattr("sr_assets.stages.clock.Clock.own_ns", staticmethod(lambda: clock.reported(real_ns())))
    send(rig, stream, "a")
    rig.drain()
    assert rig.row("SELECT epoch(watermark) AS at FROM replication")["at"] > time.time() + 40 * 3600
    clock.end()
    for _ in range(3):
        send(rig, stream, "a", "late")
        rig.drain()
    assert rig.row("SELECT epoch(watermark) AS at FROM replication")["at"] < time.time() + 1
    before = events(rig, "a")
    assert events(rig, "late") == ["new"]
    send(rig, stream, "a", "late")
    rig.drain()
    assert (events(rig, "a"), events(rig, "late")) == (before, ["new"])
