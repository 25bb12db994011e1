"""A run's log: each batch while it catches up, then one entry per minute; and the calls to a progress display."""

import time

import pytest

from sr_assets.adapters.progress_lines import LongWork, Progress, show_on, tracked
from sr_assets.domain.positions import SequenceRange


def test_caught_up_stream_logs_once_a_minute(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    caplog.set_level("INFO")
    log = Progress("site/STREAM", "messages")
    for first in range(1, 100):
        log.note(SequenceRange(first, first + 1), 1, 0.01, "0 left", caught_up=True, done=1, left=0)
        clock[0] += 1.5
    assert caplog.messages == [
        "site/STREAM: [1, 2) 1 messages, 100/s, 0 left",
        "site/STREAM: [2, 42) 40 messages in 40 batches, 100/s, 0 left",
        "site/STREAM: [42, 82) 40 messages in 40 batches, 100/s, 0 left",
    ]


def test_stream_behind_logs_every_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    log = Progress("site/STREAM", "copied")
    for first, left in ((1, True), (11, True), (21, False), (31, True)):
        remaining = 30 if first == 11 else 0
        log.note(SequenceRange(first, first + 10), 10, 1.0, "some left", caught_up=not left, done=10, left=remaining)
    assert caplog.messages == [
        "site/STREAM: [1, 11) 10 copied, 10/s, some left",
        "site/STREAM: [11, 21) 10 copied, 10/s, some left, 3 s to go",
        "site/STREAM: [21, 41) 20 copied in 2 batches, 10/s, some left",
    ]


def test_long_work_logs_every_ten_seconds(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    caplog.set_level("INFO")
    logged_steps = []
    with LongWork("scanning", 10_000) as work:
        for done in range(100, 1_101, 100):
            clock[0] += 2.5
            logged_steps.append(work.reached(done))
    assert [number for number, logged in enumerate(logged_steps, 1) if logged] == [4, 8]
    assert caplog.messages == ["scanning: 400 of 10000, 40/s, 4 min to go", "scanning: 800 of 10000, 40/s, 4 min to go"]


def test_work_of_unknown_size_logs_no_remaining_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    caplog.set_level("INFO")
    with LongWork("publishing") as work:
        clock[0] += 10.0
        assert work.reached(400)
    assert caplog.messages == ["publishing: 400, 40/s"]


class RecordingDisplay:
    """A display that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def show(self, work: str, done: int, total: int | None, step: str = "") -> None:
        """Record the call."""
        self.calls.append((work, done, total, *filter(None, [step])))

    def end(self, work: str) -> None:
        """Record the call."""
        self.calls.append((work,))


def test_display_replaces_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log, display = Progress("site/STREAM", "messages"), RecordingDisplay()
    with show_on(display):
        for done, left in ((10, 20), (10, 10), (10, 0)):
            log.note(SequenceRange(1, 11), done, 1.0, "", caught_up=not left, done=done, left=left)
        with LongWork("scanning", 50) as work:
            work.reached(20)
        assert [*tracked("exporting", ["gaps", "nodes"], str.upper)] == ["gaps", "nodes"]
    assert display.calls == [
        ("site/STREAM: messages", 10, 30),
        ("site/STREAM: messages", 20, 30),
        ("site/STREAM: messages",),
        ("scanning", 0, 50),
        ("scanning", 20, 50),
        ("scanning",),
        ("exporting", 0, 2),
        ("exporting", 0, 2, "GAPS"),
        ("exporting", 1, 2, "NODES"),
        ("exporting",),
    ]
    # The log entry for a caught-up stream follows a minute later.
    assert not caplog.messages
    with LongWork("scanning", 50) as work:
        work.reached(20)
    assert len(display.calls) == 10
