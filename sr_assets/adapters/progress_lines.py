"""Progress of long work: a log line per batch while a run catches up, then one per minute; a line every ten seconds for
a scan.

On a terminal, `show_on` draws bars instead.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol, Self, TypeVar

from sr_assets.adapters import times
from sr_assets.domain.positions import SequenceRange

logger = logging.getLogger(__name__)

T = TypeVar("T")
_PERIOD_SECONDS: Final = 60.0
#: Fields of a batch's line in JSON logs.
_NUMBERS: Final = ("first", "next", "count", "per_second", "left")
_LOOK_SECONDS: Final = 10.0


class Display(Protocol):
    """A display of progress, called from several threads."""

    def show(self, work: str, done: int, total: int | None, step: str = "") -> None:
        """Show the progress of a task, and its present step; `total` is None if it is unknown."""

    def end(self, work: str) -> None:
        """Stop showing a task."""


_display: Display | None = None


@contextmanager
def show_on(display: Display | None) -> Iterator[None]:
    """Show the progress of this process's work on a display inside the block; its log lines get the level debug.

    None hides it, in a copy of a process that has a display.
    """
    global _display  # noqa: PLW0603  a process has one terminal
    _display = display
    try:
        yield
    finally:
        _display = None


class Progress:
    """The log lines of one kind of batch of one stream during a run."""

    def __init__(self, label: str, noun: str) -> None:
        self._label, self._noun = label, noun
        self._first: int | None = None
        self._count, self._batches, self._seconds = 0, 0, 0.0
        self._logged_at: float | None = None
        self._done = 0

    def note(
        self, covered: SequenceRange, count: int, seconds: float, text: str, *, caught_up: bool, done: int, left: int
    ) -> None:
        """Log a batch of `count` messages done in `seconds`, together with unlogged earlier ones; `text` ends the line.

        Once the stream has caught up, a line is logged at most once a minute. `done` and `left` are the batch's part of
        the work and the remaining work, for the estimate of the remaining time.
        """
        shown = self._show(done, left, caught_up=caught_up)
        self._first = covered.first if self._first is None else self._first
        self._count, self._batches, self._seconds = self._count + count, self._batches + 1, self._seconds + seconds
        now = times.monotonic()
        if caught_up and self._logged_at is not None and now - self._logged_at < _PERIOD_SECONDS:
            return
        if done and left:
            text = f"{text}, {_time(seconds * left / done)}"
        batches = f" in {self._batches} batches" if self._batches > 1 else ""
        per_second = self._count / max(self._seconds, 1e-9)
        span, level = (self._first, covered.next, self._count), logging.DEBUG if shown else logging.INFO
        numbers = dict(zip(_NUMBERS, (*span, round(per_second, 1), left), strict=True))
        noun = f"{self._noun}{batches}"
        logger.log(level, "%s: [%d, %d) %d %s, %.0f/s, %s", self._label, *span, noun, per_second, text, extra=numbers)
        self._first, self._count, self._batches, self._seconds = None, 0, 0, 0.0
        self._logged_at = now

    def _show(self, done: int, left: int, *, caught_up: bool) -> bool:
        """Update the display, if any; return whether there is one."""
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
    """A task, used with `with`: its progress, speed and, if its size is known, remaining time."""

    def __init__(self, label: str, total: int | None = None) -> None:
        self._label, self._total = label, total
        self._began_at = self._logged_at = times.monotonic()

    def __enter__(self) -> Self:
        if _display is not None and self._total != 0:
            _display.show(self._label, 0, self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if _display is not None:
            _display.end(self._label)

    def reached(self, done: int, step: str = "") -> bool:
        """Record the progress; return whether a line was logged, at most every ten seconds."""
        if _display is not None:
            _display.show(self._label, done, self._total, step)
        now = times.monotonic()
        if now - self._logged_at < _LOOK_SECONDS:
            return False
        rate = done / (now - self._began_at)
        text = f"{done}, {rate:.0f}/s"
        if self._total is not None:
            text = f"{done} of {self._total}, {rate:.0f}/s, {_time((self._total - done) / max(rate, 1e-9))}"
        logger.log(logging.INFO if _display is None else logging.DEBUG, "%s: %s", self._label, text)
        self._logged_at = now
        return True


def tracked(work: str, items: Sequence[T], name: Callable[[T], str] = str) -> Iterator[T]:
    """Yield items as a task: their number is its size, and the name of the yielded one is its step."""
    with LongWork(work, len(items)) as progress:
        for done, item in enumerate(items):
            progress.reached(done, name(item))
            yield item


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s to go" if seconds < 120 else f"{seconds / 60:.0f} min to go"
