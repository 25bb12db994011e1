"""Daily availability: Spark's result against a separate fold of each node's history."""

import random
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pytest

from sr_assets.adapters.published.availability import missing_nodes, wrong_sums
from sr_assets.adapters.published.daily import AVAILABILITY
from sr_assets.adapters.published.queries import unfinished_dates
from sr_assets.adapters.spark.engine import KEEP_SECONDS, use_engine
from sr_assets.adapters.spark.session import leave_session, open_session
from sr_assets.domain.days import dates_between, day_of
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.settings import Settings, SparkSettings
from sr_assets.stages import daily
from sr_assets.stages.daily import AVAILABILITY_STAGE
from sr_assets_tests.histories import (
    AFTER,
    BEGIN_NS,
    CODES,
    DAY_NS,
    FIRST,
    HOUR,
    SITE,
    STREAM,
    Change,
    Histories,
    configured,
    publish,
    publish_centre,
    random_histories,
)


@pytest.fixture(scope="module")
def spark(engine_home: Path) -> Iterator[Callable[[], Any]]:
    session = open_session(SparkSettings(), engine_home, "availability")
    with use_engine(engine_home, KEEP_SECONDS):
        yield lambda: session
    leave_session(session)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return configured(tmp_path)


def expected(
    changes: list[Change], spans: list[tuple[int, int]], first_ns: int, next_ns: int, watermark_ns: int
) -> tuple[Any, ...] | None:
    """Return a node's row of one day, in ns, from each interval of its history."""
    end_ns = min(next_ns, watermark_ns)
    lengths, blind, down, longest = dict.fromkeys(CODES, 0), 0, 0, 0
    ends = [change.at_ns for change in changes[1:]] + [max(end_ns, changes[-1].at_ns)]
    for change, until_ns in zip(changes, ends, strict=True):
        since, until = max(change.at_ns, first_ns), min(until_ns, end_ns)
        covered = sum(max(0, min(until, b) - max(since, a)) for a, b in spans) if since < until else 0
        length = max(0, until - since)
        status = AFTER[change.event]
        lengths[status] += length - covered
        blind += covered
        down = 0 if status == "up" and change.at_ns < until_ns else down + (length - covered) * (status != "up")
        longest = max(longest, down)
    if not sum(lengths.values()) + blind:
        return None
    within = [change for change in changes if first_ns <= change.at_ns < end_ns]
    outages = sum(change.previous in (None, "up") and AFTER[change.event] != "up" for change in within)
    return (*lengths.values(), blind, len(within), outages, longest, watermark_ns >= next_ns)


def rows_of(home: Path, site: tuple[str, ...] = (SITE, STREAM, "US-EAST")) -> dict[tuple[date, str], tuple[Any, ...]]:
    with duckdb.connect(str(home / "fleet.duckdb"), read_only=True) as connection:
        rows = connection.execute(
            """
            SELECT date, node, up_seconds, timeout_seconds, retired_seconds, blind_seconds, transitions, outages,
                longest_outage_seconds, final, name, stream, replicator FROM availability_daily
            """
        ).fetchall()
    assert {row[-3:] for row in rows} <= {site}
    by_key = {
        (row[0], row[1]): (*(round(value * 1e9) for value in row[2:6]), *row[6:8], round(row[8] * 1e9), row[9])
        for row in rows
    }
    assert len(by_key) == len(rows)
    return by_key


@pytest.mark.parametrize("seed", (1, 2))
def test_daily_rows_match_each_node_history(
    seed: int, settings: Settings, spark: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blind spans, in portions of days and nodes, or without blind spans in one portion."""
    if seed > 1:
        monkeypatch.setattr(daily, "_HELD_ROWS", 130)
        monkeypatch.setattr(daily, "_JOB_ROWS", 200)
    watermark_ns = BEGIN_NS + 4 * DAY_NS + 7 * HOUR + 123_456_000
    histories = random_histories(seed, 60, watermark_ns)
    chance = random.Random(seed)
    spans = []
    for _ in range(6 * (seed - 1)):
        since = BEGIN_NS + chance.randrange(4 * DAY_NS)
        spans.append((since, since + chance.randrange(1, 5 * HOUR)))
    publish(settings.home, histories, watermark_ns, spans)
    with duckdb.connect(str(settings.home / "fleet.duckdb"), read_only=True) as connection:
        published_spans = connection.execute("SELECT since_ns, until_ns FROM blind_spans ORDER BY ALL").fetchall()
    assert bool(published_spans) == (seed > 1)
    dates = list(dates_between(FIRST, FIRST + timedelta(days=4)))
    written = AVAILABILITY_STAGE.compute_days(settings, dates, spark)
    rows = rows_of(settings.home)
    assert sum(written.values()) == len(rows)
    merged = merge(spans)
    for local_date in dates:
        day = day_of(local_date)
        for node, changes in histories.items():
            expected_row = expected(changes, merged, day.first_ns, day.next_ns, watermark_ns)
            assert rows.get((local_date, node)) == expected_row, (local_date, node)
        assert wrong_sums(settings.home, day) == 0
        assert missing_nodes(settings.home, day) == 0


def merge(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for since, until in sorted(spans):
        if merged and since <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], until))
        else:
            merged.append((since, until))
    return merged


def test_centre_computes_availability_from_advisories(settings: Settings, spark: Callable[[], Any]) -> None:
    """Include a node whose last change was before these days."""
    watermark_ns = BEGIN_NS + 4 * DAY_NS + 7 * HOUR
    histories = random_histories(3, 30, watermark_ns) | {"steady": [Change(BEGIN_NS - 40 * DAY_NS, "new", None)]}
    publish_centre(settings.home, histories, watermark_ns)
    dates = list(dates_between(FIRST + timedelta(days=2), FIRST + timedelta(days=3)))
    AVAILABILITY_STAGE.compute_days(settings, dates, spark)
    rows = rows_of(settings.home, ("paris", STREAM, "EU"))
    for local_date in dates:
        day = day_of(local_date)
        for node, changes in histories.items():
            expected_row = expected(changes, [], day.first_ns, day.next_ns, watermark_ns)
            assert rows.get((local_date, node)) == expected_row, (local_date, node)


def test_recomputed_day_replaces_its_rows_and_becomes_final(settings: Settings, spark: Callable[[], Any]) -> None:
    noon_ns = BEGIN_NS + DAY_NS // 2
    histories: Histories = {"a": [Change(BEGIN_NS, "new", None)]}
    publish(settings.home, histories, noon_ns)
    AVAILABILITY_STAGE.compute_days(settings, [FIRST], spark)
    assert rows_of(settings.home) == {(FIRST, "a"): (12 * HOUR, 0, 0, 0, 1, 0, 0, False)}
    assert unfinished_dates(settings.home, AVAILABILITY) == [(FIRST, noon_ns)]
    histories["a"].append(Change(BEGIN_NS + 18 * HOUR, "timeout", "up"))
    publish(settings.home, histories, BEGIN_NS + 2 * DAY_NS)
    assert unfinished_dates(settings.home, AVAILABILITY) == [(FIRST, BEGIN_NS + 2 * DAY_NS)]
    AVAILABILITY_STAGE.compute_days(settings, [FIRST], spark)
    assert rows_of(settings.home) == {(FIRST, "a"): (18 * HOUR, 6 * HOUR, 0, 0, 2, 1, 6 * HOUR, True)}
    assert unfinished_dates(settings.home, AVAILABILITY) == []


def test_days_begin_at_local_midnight_across_a_clock_change(tmp_path: Path, spark: Callable[[], Any]) -> None:
    settings = configured(tmp_path, availability="{timezone: Europe/London}")
    changed = date(2026, 3, 29)
    day = day_of(changed, "Europe/London")
    publish(settings.home, {"a": [Change(day.first_ns - 1, "new", None)]}, day.next_ns)
    AVAILABILITY_STAGE.compute_days(settings, [changed], spark)
    assert rows_of(settings.home) == {(changed, "a"): (23 * HOUR, 0, 0, 0, 0, 0, 0, True)}


def test_empty_fleet_has_days_without_rows(settings: Settings, spark: Callable[[], Any]) -> None:
    publish(settings.home, {}, BEGIN_NS + DAY_NS)
    assert AVAILABILITY_STAGE.compute_days(settings, [FIRST], spark) == {FIRST: 0}
    assert rows_of(settings.home) == {}


def test_missing_or_expired_history_is_an_error(settings: Settings, spark: Callable[[], Any]) -> None:
    with pytest.raises(RunError, match="nothing is published yet"):
        AVAILABILITY_STAGE.compute_days(settings, [FIRST], spark)
    publish(settings.home, {}, BEGIN_NS + 200 * DAY_NS)
    with pytest.raises(
        ConfigurationError, match=r"has expired \(advisories.retention\); the earliest day .* 2026-05-19"
    ):
        AVAILABILITY_STAGE.compute_days(settings, [FIRST], spark)
    assert AVAILABILITY_STAGE.first_date(settings, BEGIN_NS + 200 * DAY_NS) == date(2026, 5, 19)
