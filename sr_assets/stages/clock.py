"""The servers' time, as far as a run knows it: our own time of day is never written down.

Here: the last time a server said, and how long ago by a clock that nobody sets. Not here: the watermark (`domain`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sr_assets.adapters.state.status_file import read_status, status_age_seconds

if TYPE_CHECKING:
    from pathlib import Path


class Clock:
    """What time it is at the servers; shared by everything a run does."""

    def __init__(self, folder: Path) -> None:
        """Name the site's folder, whose status tells the time as long as no server has."""
        self._folder = folder
        self._known: tuple[int, float] | None = None

    def set(self, ts_ns: int | None) -> None:
        """Take a server's clock (unix ns); None tells nothing."""
        if ts_ns is not None:
            self._known = (ts_ns, time.monotonic())

    @staticmethod
    def own_ns() -> int:
        """Return this machine's own time in unix ns: only to tell a server's clock that is far ahead."""
        return time.time_ns()

    def now_ns(self) -> int:
        """Return the servers' time in unix ns; as long as none answered, by what the last run knew."""
        if self._known is None:
            status = read_status(self._folder)
            age_seconds = status_age_seconds(status)
            if age_seconds is None:
                return time.time_ns()
            self._known = (status["committed_at_ns"], time.monotonic() - age_seconds)
        ts_ns, at = self._known
        return ts_ns + int((time.monotonic() - at) * 1e9)
