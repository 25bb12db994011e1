"""The log of what takes long: a stream's batches, each a line while a run catches up, and one line a minute after; a look
through a whole stream, a line every ten seconds.

Not here: what is recorded in Dagster (`assets.recording`), the counters (`report`).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sr_assets.domain.positions import SequenceRange

logger = logging.getLogger(__name__)

_PERIOD_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 10.0


class Progress:
    """The log lines of one kind of batch of one stream, for the time of a run."""

    def __init__(self, label: str, noun: str) -> None:
        """Take the stream's label and the word for what is counted."""
        self._label, self._noun = label, noun
        self._first: int | None = None
        self._count, self._batches, self._seconds = 0, 0, 0.0
        self._logged_at: float | None = None

    def note(
        self,
        covered: SequenceRange,
        count: int,
        seconds: float,
        left: str,
        *,
        caught_up: bool,
        share_done: float = 1.0,
    ) -> None:
        """Log a batch of `count` messages done in `seconds`, with those before it that are not logged; `left` ends the line.

        One after which the stream has caught up waits, unless the last line is a minute old. `share_done` is what the batch
        was of all there was to do before it: what is left takes so long again.
        """
        self._first = covered.first if self._first is None else self._first
        self._count, self._batches, self._seconds = self._count + count, self._batches + 1, self._seconds + seconds
        now = time.monotonic()
        if caught_up and self._logged_at is not None and now - self._logged_at < _PERIOD_SECONDS:
            return
        if 0.0 < share_done < 1.0:
            left = f"{left}, {_time(seconds * (1.0 - share_done) / share_done)}"
        batches = f" in {self._batches} batches" if self._batches > 1 else ""
        logger.info(
            "%s: [%d, %d) %d %s%s, %.0f/s, %s",
            self._label,
            self._first,
            covered.next,
            self._count,
            self._noun,
            batches,
            self._count / max(self._seconds, 1e-9),
            left,
        )
        self._first, self._count, self._batches, self._seconds = None, 0, 0, 0.0
        self._logged_at = now


class LongWork:
    """The log lines of a look through a range of a stream: how far it is, how fast, and how long it still takes."""

    def __init__(self, what: str, wanted: SequenceRange) -> None:
        """Say what is done, and name the range."""
        self._what, self._wanted = what, wanted
        self._began_at = self._logged_at = time.monotonic()

    def reached(self, sequence: int) -> bool:
        """Note that the look has come to a sequence; returns whether that was worth a line, one every ten seconds."""
        now = time.monotonic()
        if now - self._logged_at < _LOOK_SECONDS:
            return False
        done, seconds = sequence + 1 - self._wanted.first, now - self._began_at
        left = len(self._wanted) - done
        rate = done / seconds
        logger.info(
            "%s: %d of %d, %.0f/s, %s", self._what, done, len(self._wanted), rate, _time(left / max(rate, 1e-9))
        )
        self._logged_at = now
        return True


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s to go" if seconds < 120 else f"{seconds / 60:.0f} min to go"
