"""Days in a time zone, and the days that are due."""

from datetime import date

import pytest

from sr_assets.domain.days import MAX_DUE_DAYS, date_at, dates_between, day_of, due_dates

HOUR_NS = 3600 * 10**9
TODAY = date(2026, 3, 10)


@pytest.mark.parametrize(
    ("zone", "when", "hours"),
    (
        ("UTC", date(2026, 3, 29), 24),
        ("Europe/London", date(2026, 3, 28), 24),
        ("Europe/London", date(2026, 3, 29), 23),
        ("Europe/London", date(2026, 10, 25), 25),
    ),
)
def test_day_lasts_from_local_midnight_to_midnight(zone: str, when: date, hours: int) -> None:
    day = day_of(when, zone)
    assert day.next_ns - day.first_ns == hours * HOUR_NS
    assert date_at(day.first_ns, zone) == date_at(day.next_ns - 1, zone) == when
    assert date_at(day.first_ns - 1, zone) < when < date_at(day.next_ns, zone)


@pytest.mark.parametrize(
    ("last", "unfinished", "due"),
    (
        (None, [], (date(2026, 3, 9), TODAY)),
        (TODAY, [], (TODAY, TODAY)),
        (date(2026, 3, 9), [], (TODAY, TODAY)),
        (date(2026, 3, 6), [], (date(2026, 3, 7), TODAY)),
        (TODAY, [date(2026, 3, 8)], (date(2026, 3, 8), TODAY)),
        (date(2025, 3, 1), [], (date(2026, 2, 8), TODAY)),
    ),
    ids=(
        "nothing_computed",
        "today_computed",
        "yesterday_computed",
        "days_missed",
        "day_unfinished",
        "year_missed",
    ),
)
def test_due_dates_are_today_and_missing_or_unfinished_days(
    last: date | None, unfinished: list[date], due: tuple[date, date]
) -> None:
    assert due_dates(TODAY, last, unfinished) == due
    assert len(list(dates_between(*due))) <= MAX_DUE_DAYS
