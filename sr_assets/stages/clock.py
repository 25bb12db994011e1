"""The servers' time during a run: the last reported time, advanced by the monotonic clock."""

from pathlib import Path

from sr_assets.adapters import times
from sr_assets.adapters.state.status_file import read_status
from sr_assets.domain.positions import is_credible


class Clock:
    """The current time of the servers, shared by all work of a run; `folder` is the site's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: tuple[int, float] | None = None
        self._reported = False

    def set(self, ts_ns: int | None) -> None:
        """Set the time to a server's clock (unix ns); None, or a clock far ahead, changes nothing."""
        if (credible_ns := self.credible_ns(ts_ns)) is not None:
            self._known, self._reported = (credible_ns, times.monotonic()), True

    @classmethod
    def credible_ns(cls, ts_ns: int | None) -> int | None:
        """Return a server's time (unix ns), or None if it is unknown or more than an hour ahead of this machine's."""
        return ts_ns if ts_ns is not None and is_credible(ts_ns, cls.own_ns()) else None

    @staticmethod
    def own_ns() -> int:
        """Return this machine's time (unix ns), which bounds servers' clocks and retentions, and dates metrics."""
        return times.time_ns()

    def servers_ns(self) -> int:
        """Return the servers' time (unix ns), or 0 before a server has reported it to this process."""
        return self.now_ns() if self._reported else 0

    def now_ns(self) -> int:
        """Return the servers' time (unix ns): before the first response, the last run's status or this machine's time."""
        if self._known is None:
            status = read_status(self._folder)
            if status.age_seconds is None:
                return times.time_ns()
            self._known = (status.committed_at_ns, times.monotonic() - status.age_seconds)
        ts_ns, at = self._known
        return ts_ns + int((times.monotonic() - at) * 1e9)
