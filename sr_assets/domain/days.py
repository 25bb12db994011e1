"""Calendar days of a time zone as spans of unix nanoseconds, and the due days of a daily table."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from sr_assets.domain.positions import SECOND_NS

#: Maximum number of days that schedules recompute; a longer pause needs a backfill.
MAX_DUE_DAYS: Final = 31


@dataclass(frozen=True, slots=True)
class Day:
    """A calendar day, half-open from `first_ns` to `next_ns`; 23 to 25 hours long with daylight saving time."""

    date: date
    first_ns: int
    next_ns: int


def day_of(when: date, timezone: str = "UTC") -> Day:
    """Return a calendar day of a time zone."""
    return Day(when, _midnight_ns(when, timezone), _midnight_ns(when + timedelta(days=1), timezone))


def date_at(time_ns: int, timezone: str = "UTC") -> date:
    """Return the calendar day of a time."""
    return datetime.fromtimestamp(time_ns // SECOND_NS, ZoneInfo(timezone)).date()


def dates_between(first: date, last: date) -> Iterator[date]:
    """Yield the dates of an inclusive range; none if it is reversed."""
    for number in range((last - first).days + 1):
        yield first + timedelta(days=number)


def due_dates(today: date, last: date | None, unfinished: Iterable[date]) -> tuple[date, date]:
    """Return the first and last due date of a daily table, at most `MAX_DUE_DAYS` apart.

    `last` is the newest computed date; without one, today and yesterday are due. `unfinished` are dates that were
    computed before they were over, and are over now.
    """
    since = today - timedelta(days=1) if last is None else last + timedelta(days=1)
    first = min((*unfinished, since, today))
    return max(first, today - timedelta(days=MAX_DUE_DAYS - 1)), today


def _midnight_ns(when: date, timezone: str) -> int:
    midnight = datetime(when.year, when.month, when.day, tzinfo=ZoneInfo(timezone))
    return int(midnight.astimezone(UTC).timestamp()) * SECOND_NS
