"""The progress of long work: a stream's batches, each a line of the log while a run catches up, and one line a
minute after; a look through a whole stream, a line every ten seconds.

On a terminal it is shown as bars instead (`show_on`). Not here: the bars (`operate.bars`), what is recorded in Dagster
(`assets.recording`), the counters (`report`).
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sr_assets.domain.positions import SequenceRange

logger = logging.getLogger(__name__)

_PERIOD_SECONDS: Final = 60.0
#: What a machine may want of a batch's line.
_NUMBERS: Final = ("first", "next", "count", "per_second", "left")
_LOOK_SECONDS: Final = 10.0


class Display(Protocol):
    """Where progress is shown while it lasts; called from several threads."""

    def show(self, work: str, done: int, total: int) -> None:
        """Show how much of a work is done."""

    def end(self, work: str) -> None:
        """Show a work no more, if it was shown."""


_display: Display | None = None


@contextmanager
def show_on(display: Display) -> Iterator[None]:
    """Show the progress of all work of this process there inside the block; its log lines are of level debug meanwhile."""
    global _display  # noqa: PLW0603  a process has one terminal
    _display = display
    try:
        yield
    finally:
        _display = None


class Progress:
    """The log lines of one kind of batch of one stream, for the time of a run."""

    def __init__(self, label: str, noun: str) -> None:
        """Take the stream's label and the word for what is counted."""
        self._label, self._noun = label, noun
        self._first: int | None = None
        self._count, self._batches, self._seconds = 0, 0, 0.0
        self._logged_at: float | None = None
        self._done = 0

    def note(
        self,
        covered: SequenceRange,
        count: int,
        seconds: float,
        text: str,
        *,
        caught_up: bool,
        done: int,
        left: int,
    ) -> None:
        """Log a batch of `count` messages done in `seconds`, with those before it that are not logged; `text` ends the line.

        Once the stream has caught up, a batch is logged only when the last line is a minute old, with those since.
        `done` and `left` are the batch's part of the work and what remains of it, for the estimate of the time to go.
        """
        shown = self._show(done, left, caught_up=caught_up)
        self._first = covered.first if self._first is None else self._first
        self._count, self._batches, self._seconds = self._count + count, self._batches + 1, self._seconds + seconds
        now = time.monotonic()
        if caught_up and self._logged_at is not None and now - self._logged_at < _PERIOD_SECONDS:
            return
        if done and left:
            text = f"{text}, {_time(seconds * left / done)}"
        batches = f" in {self._batches} batches" if self._batches > 1 else ""
        per_second = self._count / max(self._seconds, 1e-9)
        logger.log(
            logging.DEBUG if shown else logging.INFO,
            "%s: [%d, %d) %d %s%s, %.0f/s, %s",
            self._label,
            self._first,
            covered.next,
            self._count,
            self._noun,
            batches,
            per_second,
            text,
            extra=dict(
                zip(_NUMBERS, (self._first, covered.next, self._count, round(per_second, 1), left), strict=True)
            ),
        )
        self._first, self._count, self._batches, self._seconds = None, 0, 0, 0.0
        self._logged_at = now

    def _show(self, done: int, left: int, *, caught_up: bool) -> bool:
        """Show how far it is where that is shown; returns whether it is."""
        work = f"{self._label}: {self._noun}"
        if _display is None:
            return False
        if caught_up:
            self._done = 0
            _display.end(work)
            return False
        self._done += done
        _display.show(work, self._done, self._done + left)
        return True


class LongWork:
    """One work of known size, used by `with`: how far it is, how fast, and how long it still takes."""

    def __init__(self, label: str, total: int) -> None:
        """Take what the work is called, and its size."""
        self._label, self._total = label, total
        self._began_at = self._logged_at = time.monotonic()

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """End, however much is done."""
        if _display is not None:
            _display.end(self._label)

    def reached(self, done: int) -> bool:
        """Note how much is done; returns whether that was worth a line, one every ten seconds."""
        if _display is not None:
            _display.show(self._label, done, self._total)
        now = time.monotonic()
        if now - self._logged_at < _LOOK_SECONDS:
            return False
        rate = done / (now - self._began_at)
        logger.log(
            logging.INFO if _display is None else logging.DEBUG,
            "%s: %d of %d, %.0f/s, %s",
            self._label,
            done,
            self._total,
            rate,
            _time((self._total - done) / max(rate, 1e-9)),
        )
        self._logged_at = now
        return True


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s to go" if seconds < 120 else f"{seconds / 60:.0f} min to go"
