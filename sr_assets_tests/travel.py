"""Tests move time: the platform's clocks, and the times that servers report to this process."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from sr_assets.adapters import jetstream, lease_bucket, times
from sr_assets.adapters.copying import copier
from sr_assets.adapters.nats import administration, stream_info
from sr_assets.adapters.wire import frames
from sr_assets.domain.messages import Message


def report_times(monkeypatch: pytest.MonkeyPatch, reported: Callable[[int], int]) -> None:
    """Let every server report `reported(ns)` instead of a time (unix ns) that it has reported so far, to this process."""
    read = vars(jetstream)["parse_rfc3339_ns"]
    make: type[Message] = vars(frames)["Message"]

    class Reported(Message):
        def __new__(cls, sequence: int, stored_ns: int, *rest: Any) -> Message:  # type: ignore[misc]
            message = make(sequence, stored_ns, *rest)
            return message._replace(stored_ns=reported(message.stored_ns))

    def collect(parser: frames.MessageParser) -> None:
        # The parser avoids the constructor.
        parser.messages += [Reported(*message) for message in parser.take()]

    monkeypatch.setattr(frames, "Message", Reported)
    monkeypatch.setattr(frames.MessageParser, "collect", collect)
    for module in (administration, lease_bucket, copier, jetstream, stream_info):
        monkeypatch.setattr(module, "parse_rfc3339_ns", lambda text: reported(read(text)))


class Travel:
    """The moves of a test's clocks: the platform's, and the servers' as this process sees them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        #: Since when (real unix ns) the clocks are moved by how much (ns).
        self._moves: list[tuple[int, int]] = []

    def forward(self, delta: timedelta) -> None:
        """Move the clocks from now on; what the servers stored before keeps its time."""
        if not self._moves:
            report_times(self._monkeypatch, self._reported)
        moved_ns = times.moved_ns + delta // timedelta(microseconds=1) * 1_000
        self._moves.append((time.time_ns(), moved_ns))
        self._monkeypatch.setattr(times, "moved_ns", moved_ns)

    def begin(self, at_ns: int) -> None:
        """Let it be `at_ns` (unix ns) from now on; call it first, for a time before or after the real one.

        Clocks that tell no time of day follow only the later moves: they are never negative.
        """
        self.forward(timedelta(microseconds=(at_ns - times.time_ns()) // 1_000))
        began_seconds = times.moved_ns / 1e9
        for name in ("monotonic", "boot_seconds"):
            moved: Callable[[], float] = getattr(times, name)
            self._monkeypatch.setattr(times, name, lambda moved=moved: moved() - began_seconds)

    def _reported(self, real_ns: int) -> int:
        return real_ns + max((moved_ns for since, moved_ns in self._moves if since <= real_ns), default=0)
