"""How old the assets may become, from the durations of the configuration."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Final, NamedTuple

import dagster as dg

from sr_assets.settings import Entry, Settings

#: A run records a shared table again after this time even if it has not changed, for assets that wait for all their sources.
TABLE_REPEATED: Final = timedelta(hours=1)
#: Dagster's shortest window.
_SHORTEST: Final = timedelta(minutes=1)


class _Window(NamedTuple):
    """The ages from which an asset is late, and from which it fails."""

    warn: timedelta
    fail: timedelta

    def policy(self) -> dg.FreshnessPolicy:
        return dg.FreshnessPolicy.time_window(warn_window=self.warn, fail_window=self.fail)


#: A site's heartbeat announces the next one within a day at most; sites with nodes that report write far more often.
_FEED: Final = _Window(timedelta(hours=1), timedelta(days=1))
#: The day before is computed in the first hours of a day, by the schedule or by a user's own.
DAILY: Final = _Window(timedelta(hours=25), timedelta(hours=49)).policy()


def entry_freshness(settings: Settings, entry: Entry) -> dg.FreshnessPolicy | None:
    """Return the policy of what a run makes from an entry, or None for a stream that may be quiet for any time."""
    window = _window(settings, entry)
    return window.policy() if window else None


def table_freshness(settings: Settings, entries: Iterable[Entry]) -> dg.FreshnessPolicy | None:
    """Return the policy of a shared table with rows of some entries: that of the busiest, after the last repetition."""
    windows = [window for entry in entries if (window := _window(settings, entry))]
    if not windows:
        return None
    return _Window(*(min(ages) + TABLE_REPEATED for ages in zip(*windows, strict=True))).policy()


def _window(settings: Settings, entry: Entry) -> _Window | None:
    """Return the window of an entry; None without tracking.

    A healthy node reports within `warn_duration`, and is copied within `inspect_duration`. A sensor then requests a run, which
    records its results when it has caught up and, at the latest, at the end of its budget.
    """
    if entry.kind == "feed":
        return _FEED
    if entry.policy is None or entry.shortest_warning_ns is None:
        return None
    recorded_ns = settings.sensor.interval_ns + settings.run_budget_ns
    warn = max(_timedelta(entry.shortest_warning_ns + recorded_ns), _SHORTEST)
    return _Window(warn, max(_timedelta(entry.policy.interval_ns + recorded_ns), warn + _SHORTEST))


def _timedelta(duration_ns: int) -> timedelta:
    return timedelta(seconds=duration_ns // 10**9)
