"""Numbers of the last day by hour, as a chain of runs carries them on.

Not here: which numbers (`assets.entries`), their picture (`assets.pictures`).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Hour, as in `2026-01-31T12`, UTC → name of a number → its value.
Hours = dict[str, dict[str, int]]
HOURS: Final = 24


def hour_at(time_ns: int) -> str:
    """Return the hour that a time lies in."""
    return datetime.fromtimestamp(time_ns // 10**9, UTC).strftime("%Y-%m-%dT%H")


def hours_until(time_ns: int) -> list[str]:
    """Return the 24 hours that end with the hour of a time."""
    last = datetime.fromtimestamp(time_ns // 10**9, UTC)
    return [(last - timedelta(hours=ago)).strftime("%Y-%m-%dT%H") for ago in range(HOURS - 1, -1, -1)]


def carried_on(earlier: Hours, time_ns: int, sums: Mapping[str, int], levels: Mapping[str, int]) -> Hours:
    """Return the hours of the last day with a run's numbers in the hour of a time.

    `sums` are added to what was counted in that hour, `levels` take the place of what was there.
    """
    kept = {hour: dict(earlier[hour]) for hour in hours_until(time_ns) if hour in earlier}
    now = kept.setdefault(hour_at(time_ns), {})
    now.update({name: now.get(name, 0) + number for name, number in sums.items()})
    now.update(levels)
    return kept
