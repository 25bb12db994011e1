"""The log of a stream's batches: each line while a run catches up, one line a minute after.

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


class Progress:
    """The log lines of one kind of batch of one stream, for the time of a run."""

    def __init__(self, label: str, noun: str) -> None:
        """Take the stream's label and the word for what is counted."""
        self._label, self._noun = label, noun
        self._first: int | None = None
        self._count, self._batches, self._seconds = 0, 0, 0.0
        self._logged_at: float | None = None

    def note(self, covered: SequenceRange, count: int, seconds: float, left: str, *, caught_up: bool) -> None:
        """Log a batch of `count` messages done in `seconds`, with those before it that are not logged; `left` ends the line.

        One after which the stream has caught up waits, unless the last line is a minute old.
        """
        self._first = covered.first if self._first is None else self._first
        self._count, self._batches, self._seconds = self._count + count, self._batches + 1, self._seconds + seconds
        now = time.monotonic()
        if caught_up and self._logged_at is not None and now - self._logged_at < _PERIOD_SECONDS:
            return
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
