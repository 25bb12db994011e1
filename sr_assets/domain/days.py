"""Calendar days of a time zone as spans of unix nanoseconds, and which days of a daily history are due.

Not here: what is computed of a day (`stages.daily`), when a run is requested (`automation.daily`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Final
from zoneinfo import ZoneInfo

from sr_assets.domain.positions import SECOND_NS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: The most days that are computed again of themselves; a longer pause is filled by a backfill.
MAX_DUE_DAYS: Final = 31


@dataclass(frozen=True, slots=True)
class Day:
    """A calendar day: half-open from `first_ns` to `next_ns`, which is 23 to 25 hours later where clocks are changed."""

    date: date
    first_ns: int
    next_ns: int


def day_of(when: date, timezone: str = "UTC") -> Day:
    """Return a calendar day of a time zone."""
    return Day(when, _midnight_ns(when, timezone), _midnight_ns(when + timedelta(days=1), timezone))


def date_at(time_ns: int, timezone: str = "UTC") -> date:
    """Return the calendar day that a time lies in."""
    return datetime.fromtimestamp(time_ns // SECOND_NS, ZoneInfo(timezone)).date()


def dates_between(first: date, last: date) -> Iterator[date]:
    """Yield the dates from one to another, both included; none when they are in the wrong order."""
    for number in range((last - first).days + 1):
        yield first + timedelta(days=number)


def due_dates(today: date, last: date | None, unfinished: Iterable[date]) -> tuple[date, date]:
    """Return the first and the last date of a daily history that have to be computed, at most `MAX_DUE_DAYS`.

    `last` is the newest date that was computed, None when there is none: then today and yesterday are due. `unfinished` are
    earlier dates that were computed before they were over everywhere, and are over now.
    """
    since = today - timedelta(days=1) if last is None else last + timedelta(days=1)
    first = min((*unfinished, since, today))
    return max(first, today - timedelta(days=MAX_DUE_DAYS - 1)), today


def _midnight_ns(when: date, timezone: str) -> int:
    midnight = datetime(when.year, when.month, when.day, tzinfo=ZoneInfo(timezone))
    return int(midnight.astimezone(UTC).timestamp()) * SECOND_NS
