"""Ranges as sets of sequences, the watermark case by case, and times to the nanosecond."""

import itertools
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.domain.positions import (
    SequenceRange,
    clock_is_ahead,
    format_rfc3339_ns,
    merge_ranges,
    missing,
    parse_rfc3339_ns,
    retention_begins_ns,
    retention_clock_ns,
    watermark,
)

S = 1_000_000_000
HOUR = 3_600 * S
RANGES = st.tuples(st.integers(0, 60), st.integers(0, 30)).map(lambda pair: SequenceRange(pair[0], pair[0] + pair[1]))


def sequences(ranges: list[SequenceRange]) -> set[int]:
    return {sequence for covered in ranges for sequence in range(covered.first, covered.next)}


@given(RANGES, st.integers(1, 40))
def test_split_covers_the_range_in_order_in_even_parts(whole: SequenceRange, parts: int) -> None:
    cut = whole.split(parts)
    assert len(cut) == min(parts, len(whole))
    assert [sequence for part in cut for sequence in range(part.first, part.next)] == list(
        range(whole.first, whole.next)
    )
    assert all(len(part) for part in cut)
    assert max(map(len, cut), default=0) - min(map(len, cut), default=0) <= 1


@given(st.lists(RANGES))
def test_merged_ranges_are_disjoint_and_hold_the_same_sequences(ranges: list[SequenceRange]) -> None:
    merged = merge_ranges(ranges)
    assert sequences(merged) == sequences(ranges)
    assert all(before.next < after.first for before, after in itertools.pairwise(merged))
    assert merge_ranges(merged) == merged


@given(RANGES, st.lists(st.integers(0, 100)).map(sorted))
def test_missing_is_the_complement_of_the_present_sequences(wanted: SequenceRange, present: list[int]) -> None:
    holes = missing(wanted, present)
    assert sequences(holes) == sequences([wanted]) - set(present)
    assert merge_ranges(holes) == holes


def test_range_has_length_and_members_and_rejects_reversed_bounds() -> None:
    covered = SequenceRange(3, 5)
    assert len(covered) == 2
    assert [sequence in covered for sequence in (2, 3, 4, 5)] == [False, True, True, False]
    with pytest.raises(ValueError, match="from 5 to 3"):
        SequenceRange(5, 3)


@pytest.mark.parametrize(
    ("ts", "last", "replicas", "warning", "caught_up", "mirror", "previous", "expected"),
    (
        (100 * S, 90 * S, 1, 60 * S, True, False, None, 99 * S),
        (100 * S, 90 * S, 3, 60 * S, True, False, None, 95 * S),
        (100 * S, 90 * S, 3, 4 * S, True, False, None, 98 * S),
        (100 * S, 90 * S, 3, None, True, False, None, 95 * S),
        (100 * S, 90 * S, 1, 60 * S, False, False, None, 90 * S),
        (100 * S, 90 * S, 1, 60 * S, True, True, None, 90 * S),
        (None, 90 * S, 1, 60 * S, True, False, None, 90 * S),
        (None, None, 1, 60 * S, True, False, None, None),
        (None, None, 1, 60 * S, True, False, 7, 7),
        (100 * S, None, 1, 60 * S, True, False, 100 * S, 100 * S),
        (100 * S, 90 * S, 1, 60 * S, False, False, 91 * S, 91 * S),
        (100 * S, None, 1, 60 * S, True, False, None, 99 * S),
    ),
)
def test_watermark_is_the_source_clock_only_when_caught_up(
    ts: int | None,
    last: int | None,
    replicas: int,
    warning: int | None,
    caught_up: bool,
    mirror: bool,
    previous: int | None,
    expected: int | None,
) -> None:
    mark = watermark(
        ts,
        last,
        replicas=replicas,
        warning_ns=warning,
        caught_up=caught_up,
        mirror=mirror,
        previous_ns=previous,
        own_clock_ns=100 * S,
    )
    assert mark == (expected, caught_up and not mirror and ts is not None, False)


@pytest.mark.parametrize(
    ("ts", "last", "own_clock", "ahead"),
    (
        (HOUR + 10, 9, 10, False),
        (HOUR + 11, 9, 10, True),
        (HOUR + 11, 10, 9, True),
        (HOUR + 11, 11, 9, False),
        (HOUR + 11, None, 10, True),
        (HOUR + 10, None, 10, False),
        (None, 9, 10, False),
        (9, HOUR + 11, 10, False),
    ),
)
def test_clock_over_an_hour_ahead_is_ignored(ts: int | None, last: int | None, own_clock: int, ahead: bool) -> None:
    assert clock_is_ahead(ts, last, own_clock) is ahead
    mark = watermark(
        ts, last, replicas=1, warning_ns=None, caught_up=True, mirror=False, previous_ns=7, own_clock_ns=own_clock
    )
    assert mark.clock_ahead is ahead
    if ahead:
        assert mark == (max(7, last or 0), False, True)


def test_retention_clock_is_the_earlier_clock_or_none() -> None:
    assert [retention_clock_ns(ns, 10) for ns in (9, 10, 11, None)] == [9, 10, 10, None]


def test_retention_start_advances_in_hundredths() -> None:
    assert [retention_begins_ns(now_ns, 1000) for now_ns in (5000, 5009, 5010, 5011)] == [4000, 4000, 4010, 4010]
    assert retention_begins_ns(50, 7) == 43


@given(st.integers(0, 4_000_000_000 * S))
def test_time_round_trips_to_the_nanosecond(ns: int) -> None:
    text = format_rfc3339_ns(ns)
    assert len(text) == 30
    assert parse_rfc3339_ns(text) == ns
    assert parse_rfc3339_ns(text[:-1].rstrip("0").rstrip(".") + "Z") == ns


@pytest.mark.parametrize(
    ("text", "seconds", "ns"),
    (
        ("2022-03-15T13:48:10Z", "2022-03-15T13:48:10", 0),
        ("2022-03-15T13:48:10.000000000Z", "2022-03-15T13:48:10", 0),
        ("2022-03-15T13:48:10.5Z", "2022-03-15T13:48:10", 500_000_000),
        ("2022-03-15T13:48:10.123456789Z", "2022-03-15T13:48:10", 123_456_789),
        ("2022-03-15T13:48:10.1234567891Z", "2022-03-15T13:48:10", 123_456_789),
        ("2022-03-15t13:48:10z", "2022-03-15T13:48:10", 0),
        ("2022-03-15T15:48:10.1+02:00", "2022-03-15T13:48:10", 100_000_000),
        ("2022-03-15T08:18:10-05:30", "2022-03-15T13:48:10", 0),
        ("1969-12-31T23:59:59.5Z", "1969-12-31T23:59:59", 500_000_000),
        ("0001-01-01T00:00:00Z", "0001-01-01T00:00:00", 0),
    ),
)
def test_times_are_parsed_exactly(text: str, seconds: str, ns: int) -> None:
    whole = round(
        (datetime.fromisoformat(seconds).replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
    )
    assert parse_rfc3339_ns(text) == whole * S + ns


@pytest.mark.parametrize(
    "text", ("", "2022-03-15", "2022-03-15T13:48:10", "2022-13-15T13:48:10Z", "now", "2022-03-15T13:48:10.Z")
)
def test_invalid_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_rfc3339_ns(text)
