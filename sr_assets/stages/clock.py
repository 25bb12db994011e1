"""The servers' time during a run: the last reported time, advanced by the monotonic clock."""

import time
from pathlib import Path

from sr_assets.adapters.state.status_file import read_status, status_age_seconds


class Clock:
    """The current time of the servers, shared by all work of a run; `folder`, the site's, has `status.json`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: tuple[int, float] | None = None

    def set(self, ts_ns: int | None) -> None:
        """Set the time to a server's clock (unix ns); None changes nothing."""
        if ts_ns is not None:
            self._known = (ts_ns, time.monotonic())

    @staticmethod
    def own_ns() -> int:
        """Return this machine's time (unix ns), which bounds servers' clocks and retentions, and dates metrics."""
        return time.time_ns()

    def now_ns(self) -> int:
        """Return the servers' time (unix ns): before the first response, the last run's status or this machine's time."""
        if self._known is None:
            status = read_status(self._folder)
            age_seconds = status_age_seconds(status)
            if age_seconds is None:
                return time.time_ns()
            self._known = (status["committed_at_ns"], time.monotonic() - age_seconds)
        ts_ns, at = self._known
        return ts_ns + int((time.monotonic() - at) * 1e9)
