"""The log of a run: every batch while it catches up, one line a minute after."""

import time

import pytest

from sr_assets.domain.positions import SequenceRange
from sr_assets.stages.progress import LongWork, Progress


def test_batches_of_a_stream_that_is_caught_up_are_one_line_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    caplog.set_level("INFO")
    log = Progress("site/STREAM", "messages")
    for first in range(1, 100):
        log.note(SequenceRange(first, first + 1), 1, 0.01, "0 left", caught_up=True)
        clock[0] += 1.5
    assert caplog.messages == [
        "site/STREAM: [1, 2) 1 messages, 100/s, 0 left",
        "site/STREAM: [2, 42) 40 messages in 40 batches, 100/s, 0 left",
        "site/STREAM: [42, 82) 40 messages in 40 batches, 100/s, 0 left",
    ]


def test_every_batch_of_a_stream_that_is_behind_is_a_line_with_what_waited_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    log = Progress("site/STREAM", "copied")
    for first, left in ((1, True), (11, True), (21, False), (31, True)):
        share = 0.25 if first == 11 else 1.0
        log.note(SequenceRange(first, first + 10), 10, 1.0, "some left", caught_up=not left, share_done=share)
    assert caplog.messages == [
        "site/STREAM: [1, 11) 10 copied, 10/s, some left",
        "site/STREAM: [11, 21) 10 copied, 10/s, some left, 3 s to go",
        "site/STREAM: [21, 41) 20 copied in 2 batches, 10/s, some left",
    ]


def test_a_long_look_is_a_line_every_ten_seconds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    caplog.set_level("INFO")
    work = LongWork("looking", SequenceRange(1_001, 11_001))
    said = []
    for sequence in range(1_100, 2_101, 100):
        clock[0] += 2.5
        said.append(work.reached(sequence))
    assert [number for number, one in enumerate(said, 1) if one] == [4, 8]
    assert caplog.messages == ["looking: 400 of 10000, 40/s, 4 min to go", "looking: 800 of 10000, 40/s, 4 min to go"]
