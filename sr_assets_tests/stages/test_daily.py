"""The daily tables: availability and inventory against a separate computation for each node and day."""

from __future__ import annotations

import glob
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import duckdb
import pytest

from sr_assets.adapters.published import availability, daily_rows, inventory
from sr_assets.adapters.published.daily_tables import AVAILABILITY, INVENTORY
from sr_assets.adapters.published.queries import unfinished_dates
from sr_assets.adapters.spark import daily_jobs
from sr_assets.adapters.spark.engine import stop_engine
from sr_assets.adapters.spark.jobs import try_links
from sr_assets.adapters.spark.run_session import GivenEngine, HomeEngine, SparkConnection
from sr_assets.adapters.state.operator_settings import add_windows
from sr_assets.automation.jobs import due_days
from sr_assets.domain.days import Day, dates_between, day_of
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.tracking.maintenance import Window
from sr_assets.settings import Settings, SparkSettings
from sr_assets.stages import daily_computation
from sr_assets.stages.daily_computation import AVAILABILITY_STAGE, INVENTORY_STAGE, DailyStage
from sr_assets_tests.histories import (
    AFTER,
    BEGIN_NS,
    CODES,
    DAY_NS,
    FIRST,
    HOUR,
    SECOND,
    SITE,
    STREAM,
    Change,
    Histories,
    Message,
    configured,
    publish,
    publish_centre,
    random_histories,
    random_messages,
    varied_home,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: A message of the site in `histories` is valid for two intervals of one hour.
HELD_NS = 2 * HOUR
PROPERTIES = ("class", "agent", "agent_version", "os_family", "facts.country", r"facts.a\.b.0")


@pytest.fixture
def spark(engine_home: Path) -> Iterator[SparkConnection]:
    """Spark computes the tables of any number of nodes."""
    with closing(SparkConnection(HomeEngine(SparkSettings(), engine_home), 0, "daily")) as connection:
        yield connection


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return configured(tmp_path, inventory=r"{facts: [country, 'a\.b.0']}")


@pytest.fixture
def no_spark(tmp_path: Path) -> SparkConnection:
    """Spark that no test may start."""

    class Refusing(HomeEngine):
        def opened(self) -> Any:
            raise AssertionError("Spark is needed")

    return SparkConnection(Refusing(SparkSettings(), tmp_path), None, "daily")


def compute(stage: DailyStage, settings: Settings, dates: Sequence[date], spark: SparkConnection) -> dict[Any, Any]:
    """Compute some days; return the table's rows by key, whose number must be the number of rows written."""
    written, _ = stage.compute_days(settings, dates, spark)
    assert list(written) == list(dates)
    rows = availability_rows(settings.home) if stage is AVAILABILITY_STAGE else inventory_rows(settings.home)
    assert sum(written.values()) == sum(key[0] in written for key in rows)
    return rows


@pytest.mark.parametrize(
    ("stage", "earliest"),
    ((AVAILABILITY_STAGE, date(2026, 5, 19)), (INVENTORY_STAGE, date(2026, 5, 20))),
    ids=("availability", "inventory"),
)
def test_missing_or_expired_history_is_an_error(
    settings: Settings, no_spark: SparkConnection, stage: DailyStage, earliest: date
) -> None:
    with pytest.raises(RunError, match="nothing is published yet"):
        stage.compute_days(settings, [FIRST], no_spark)
    publish(settings.home, {}, BEGIN_NS + 200 * DAY_NS)
    with pytest.raises(ConfigurationError, match=rf"has expired \(advisories.retention\); the earliest .* {earliest}"):
        stage.compute_days(settings, [FIRST], no_spark)
    assert stage.first_date(settings, BEGIN_NS + 200 * DAY_NS) == earliest
    # A fleet without nodes has days without rows.
    assert compute(stage, settings, [FIRST + timedelta(days=199)], no_spark) == {}


@pytest.mark.parametrize("stage", (AVAILABILITY_STAGE, INVENTORY_STAGE), ids=("availability", "inventory"))
def test_pause_longer_than_the_retention_costs_only_expired_days(
    tmp_path: Path, no_spark: SparkConnection, stage: DailyStage
) -> None:
    settings = configured(tmp_path, advisories="{retention: 5d}", snapshots="{retention: 5d}")
    histories = {"a": [Change(BEGIN_NS, "new", None)]}
    # The first day is half over when the platform stops for 20 days.
    messages = [Message("a", BEGIN_NS + HOUR, {"build_info": {"version": "0.31.0"}})]
    publish(settings.home, histories, BEGIN_NS + 12 * HOUR, messages=messages)
    assert list(stage.compute_days(settings, [FIRST], no_spark).rows) == [FIRST]
    now_ns = BEGIN_NS + 20 * DAY_NS + HOUR
    publish(settings.home, histories, now_ns, messages=messages)
    today, earliest = FIRST + timedelta(days=20), stage.earliest_input(settings, now_ns)
    assert FIRST + timedelta(days=1) < earliest < today
    assert due_days(settings, stage, now_ns) == (FIRST + timedelta(days=1), today)
    due = list(dates_between(FIRST + timedelta(days=1), today))
    assert list(stage.compute_days(settings, due, no_spark).rows) == list(dates_between(earliest, today))
    # The expired days are not due again, nor is the first one, which stays as it was computed.
    first, last = due_days(settings, stage, now_ns + HOUR)
    assert (first > earliest, last) == (True, today)
    assert FIRST in stage.table.computed_dates(settings.home)


def availability_of(
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


def availability_rows(
    home: Path, site: tuple[str, ...] = (SITE, STREAM, "US-EAST")
) -> dict[tuple[date, str], tuple[Any, ...]]:
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


def merge(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for since, until in sorted(spans):
        if merged and since <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], until))
        else:
            merged.append((since, until))
    return merged


@pytest.mark.parametrize("seed", (1, 2))
def test_availability_matches_each_node_history(
    seed: int, settings: Settings, spark: SparkConnection, no_spark: SparkConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blind spans, by Spark in portions of days and nodes; without blind spans, in one portion of this process."""
    chosen = spark if seed > 1 else no_spark
    if seed > 1:
        monkeypatch.setattr(daily_computation, "_HELD_ROWS", 130)
        monkeypatch.setattr(daily_rows, "PORTION_ROWS", 200)
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
    rows = compute(AVAILABILITY_STAGE, settings, dates, chosen)
    merged = merge(spans)
    for local_date in dates:
        day = day_of(local_date)
        for node, changes in histories.items():
            expected_row = availability_of(changes, merged, day.first_ns, day.next_ns, watermark_ns)
            assert rows.get((local_date, node)) == expected_row, (local_date, node)
        assert availability.wrong_sums(settings.home, day) == 0
        assert availability.missing_nodes(settings.home, day) == 0


def test_maintenance_seconds_are_the_union_of_the_windows(settings: Settings, no_spark: SparkConnection) -> None:
    """Of known time: node b appears in the middle of the second window, and only one window is about it."""
    histories = {"a": [Change(BEGIN_NS, "new", None)], "b": [Change(BEGIN_NS + 26 * HOUR, "new", None)]}
    publish(settings.home, histories, BEGIN_NS + 40 * HOUR)
    windows = [
        Window("1", ("a",), BEGIN_NS + HOUR, BEGIN_NS + 3 * HOUR),
        Window("2", ("a",), BEGIN_NS + 2 * HOUR, BEGIN_NS + 4 * HOUR),
        Window("3", (), BEGIN_NS + 23 * HOUR, BEGIN_NS + 27 * HOUR),
        Window("4", ("a",), BEGIN_NS + 39 * HOUR, BEGIN_NS + 48 * HOUR),
    ]
    add_windows(settings.home / "sites" / SITE, windows)
    rows = compute(AVAILABILITY_STAGE, settings, list(dates_between(FIRST, FIRST + timedelta(days=1))), no_spark)
    with duckdb.connect(str(settings.home / "fleet.duckdb"), read_only=True) as connection:
        query = "SELECT date, node, maintenance_seconds // 3600 FROM availability_daily"
        hours = {(when, node): value for when, node, value in connection.execute(query).fetchall()}
    second = FIRST + timedelta(days=1)
    assert hours == {(FIRST, "a"): 4, (second, "a"): 4, (second, "b"): 1}
    assert rows[FIRST, "a"][0] == 24 * HOUR


def test_centre_computes_availability_from_advisories(settings: Settings, no_spark: SparkConnection) -> None:
    """Include a node whose last change was before these days."""
    watermark_ns = BEGIN_NS + 4 * DAY_NS + 7 * HOUR
    histories = random_histories(3, 30, watermark_ns) | {"steady": [Change(BEGIN_NS - 40 * DAY_NS, "new", None)]}
    publish_centre(settings.home, histories, watermark_ns)
    dates = list(dates_between(FIRST + timedelta(days=2), FIRST + timedelta(days=3)))
    AVAILABILITY_STAGE.compute_days(settings, dates, no_spark)
    rows = availability_rows(settings.home, ("paris", STREAM, "EU"))
    for local_date in dates:
        day = day_of(local_date)
        for node, changes in histories.items():
            expected_row = availability_of(changes, [], day.first_ns, day.next_ns, watermark_ns)
            assert rows.get((local_date, node)) == expected_row, (local_date, node)


def test_recomputed_availability_replaces_its_rows_and_becomes_final(
    settings: Settings, no_spark: SparkConnection
) -> None:
    noon_ns = BEGIN_NS + DAY_NS // 2
    histories: Histories = {"a": [Change(BEGIN_NS, "new", None)]}
    publish(settings.home, histories, noon_ns)
    assert compute(AVAILABILITY_STAGE, settings, [FIRST], no_spark) == {
        (FIRST, "a"): (12 * HOUR, 0, 0, 0, 1, 0, 0, False)
    }
    assert unfinished_dates(settings.home, AVAILABILITY) == [(FIRST, noon_ns)]
    histories["a"].append(Change(BEGIN_NS + 18 * HOUR, "timeout", "up"))
    publish(settings.home, histories, BEGIN_NS + 2 * DAY_NS)
    assert unfinished_dates(settings.home, AVAILABILITY) == [(FIRST, BEGIN_NS + 2 * DAY_NS)]
    assert compute(AVAILABILITY_STAGE, settings, [FIRST], no_spark) == {
        (FIRST, "a"): (18 * HOUR, 6 * HOUR, 0, 0, 2, 1, 6 * HOUR, True)
    }
    assert unfinished_dates(settings.home, AVAILABILITY) == []


def test_availability_days_begin_at_local_midnight(tmp_path: Path, no_spark: SparkConnection) -> None:
    settings = configured(tmp_path, availability="{timezone: Europe/London}")
    changed = date(2026, 3, 29)
    day = day_of(changed, "Europe/London")
    publish(settings.home, {"a": [Change(day.first_ns - 1, "new", None)]}, day.next_ns)
    assert compute(AVAILABILITY_STAGE, settings, [changed], no_spark) == {
        (changed, "a"): (23 * HOUR, 0, 0, 0, 0, 0, 0, True)
    }


@pytest.fixture
def varied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    return varied_home(tmp_path, monkeypatch)


def daily_files(settings: Settings, stage: DailyStage) -> dict[date, tuple[str, list[Any], int]]:
    """Return the schema, the sorted rows and the permissions of each day's file; there is no other."""
    files = {
        when: settings.home / stage.table.folder / f"{when}.parquet"
        for when in stage.table.computed_dates(settings.home)
    }
    listed = {file.name for file in (settings.home / stage.table.folder).iterdir()}
    assert listed == {file.name for file in files.values()} | {f"0000-00-00-{len(stage.table.kinds)}.parquet"}
    with duckdb.connect() as connection:
        read = {when: connection.read_parquet(glob.escape(str(file))) for when, file in files.items()}
        return {
            when: (
                str(list(zip(rows.columns, rows.types, strict=True))),
                sorted(rows.fetchall(), key=repr),
                files[when].stat().st_mode & 0o777,
            )
            for when, rows in read.items()
        }


@pytest.mark.parametrize("stage", (AVAILABILITY_STAGE, INVENTORY_STAGE), ids=("availability", "inventory"))
def test_spark_writes_the_same_files_as_the_process_of_the_run(
    varied: Settings,
    spark: SparkConnection,
    no_spark: SparkConnection,
    stage: DailyStage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dates = list(dates_between(FIRST - timedelta(days=4), FIRST + timedelta(days=4)))
    here = stage.compute_days(varied, dates, no_spark)
    expected = daily_files(varied, stage)
    assert [len(rows) for _, rows, _ in expected.values()] == list(here.rows.values())
    assert (here.rows[dates[0]], here.in_spark) == (0, False)
    killed = varied.home / stage.table.folder / ".spark-killed"
    (killed / "rows").mkdir(parents=True)
    os.utime(killed, ns=(0, 0))
    # Several groups of nodes.
    monkeypatch.setattr(daily_jobs, "PORTION_ROWS", 1_000)
    for when in dates:
        (varied.home / stage.table.folder / f"{when}.parquet").unlink()
    assert stage.compute_days(varied, dates, spark) == (here.rows, True)
    assert daily_files(varied, stage) == expected


class Given(NamedTuple):
    """A user's resource `spark`."""

    spark_session: SparkSession


@pytest.fixture
def foreign_spark(spark: SparkConnection, engine_home: Path) -> Iterator[SparkConnection]:
    """Spark that the home did not start: the package is shipped to it.

    The workers of its Python then import the package again, without a hook of `faults`. So the engine ends with the test.
    """
    yield spark
    stop_engine(engine_home)


def test_given_session_computes_days_if_it_has_the_files_of_the_home(
    settings: Settings,
    foreign_spark: SparkConnection,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The session of a Connect server may run its tasks on any machine."""
    publish(settings.home, {"a": [Change(BEGIN_NS, "new", None)]}, BEGIN_NS + 2 * DAY_NS)
    given = SparkConnection(GivenEngine(Given(foreign_spark.session()), settings.home), None, "daily")
    assert AVAILABILITY_STAGE.compute_days(settings, [FIRST], given) == ({FIRST: 1}, True)

    def try_elsewhere(session: SparkSession, links: Any, cores: int, folder: str) -> Any:
        """Give the executors another path than the driver."""
        return try_links(session, links, cores, f"{folder}-elsewhere")

    monkeypatch.setattr(daily_jobs, "try_links", try_elsewhere)
    assert AVAILABILITY_STAGE.compute_days(settings, [FIRST], given) == ({FIRST: 1}, False)
    assert (
        "availability in the run's process: the executors cannot use the files of the home (executor on" in caplog.text
    )
    assert f"for Spark, mount {settings.home} there" in caplog.text


def inventory_rows(home: Path) -> dict[tuple[date, str, str | None], tuple[int, int, int, int, bool]]:
    with duckdb.connect(str(home / "fleet.duckdb"), read_only=True) as connection:
        rows = connection.execute(
            "SELECT date, property, value, nodes, came, went, all_nodes, final, name, stream FROM inventory_daily"
        ).fetchall()
    assert {row[-2:] for row in rows} <= {(SITE, STREAM)}
    by_key = {row[:3]: row[3:8] for row in rows}
    assert len(by_key) == len(rows)
    return by_key


def values_of(content: Any) -> set[tuple[str, str | None]]:
    """Return the properties in a message of `random_messages`; None stands for a node without a recent message."""
    if content is None:
        return {(name, None) for name in PROPERTIES}
    version, classes = content["build_info"]["version"], content["classes"]
    single = (version, content["facts"]["os"]["family"], content["facts"]["country"], "7")
    return {
        *(("class", name) for name in classes or [None]),
        *(("agent", name) for name in (f"rpcutil {version}", "puppet")),
        *zip(PROPERTIES[2:], single, strict=True),
    }


def held_on(day: Day, changes: list[Change], messages: list[Message], watermark_ns: int) -> set[tuple[str, str | None]]:
    """Return a node's properties on a day, or an empty set if it was not part of the fleet."""
    end_ns = min(day.next_ns, watermark_ns)
    ends = [*(change.at_ns for change in changes[1:]), end_ns]
    if not any(
        AFTER[change.event] != "retired" and max(change.at_ns, day.first_ns) < min(until, end_ns)
        for change, until in zip(changes, ends, strict=True)
    ):
        return set()
    recent = [message for message in messages if day.first_ns - HELD_NS <= message.at_ns < day.next_ns]
    return values_of(max(recent, key=lambda message: message.at_ns).content if recent else None)


@pytest.mark.parametrize("seed", (1, pytest.param(2, marks=pytest.mark.nightly)))
def test_inventory_matches_a_count_of_each_node(
    seed: int, settings: Settings, spark: SparkConnection, no_spark: SparkConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All days in one portion of this process, or by Spark in portions of days and nodes."""
    chosen = spark if seed > 1 else no_spark
    if seed > 1:
        monkeypatch.setattr(daily_computation, "_HELD_ROWS", 200)
        monkeypatch.setattr(daily_rows, "PORTION_ROWS", 4_000)
    chance = random.Random(seed)
    watermark_ns = BEGIN_NS + 4 * DAY_NS + 7 * HOUR
    histories = random_histories(seed, 60, watermark_ns)
    histories = {
        node: [change._replace(at_ns=change.at_ns // 1000 * 1000) for change in of_node]
        for node, of_node in histories.items()
    }
    messages = random_messages(chance, histories, watermark_ns)
    messages = [message._replace(at_ns=message.at_ns // 1000 * 1000) for message in messages]
    publish(settings.home, histories, watermark_ns, messages=messages)
    dates = list(dates_between(FIRST, FIRST + timedelta(days=4)))
    rows = compute(INVENTORY_STAGE, settings, dates, chosen)
    by_node = {node: [message for message in messages if message.node == node] for node in histories}
    for local_date in dates:
        day, eve = day_of(local_date), day_of(local_date - timedelta(days=1))
        now = {node: held_on(day, changes, by_node[node], watermark_ns) for node, changes in histories.items()}
        before = {node: held_on(eve, changes, by_node[node], watermark_ns) for node, changes in histories.items()}
        nodes = Counter(value for held in now.values() for value in held)
        came = Counter(value for node, held in now.items() for value in held - before[node])
        went = Counter(value for node, held in before.items() for value in held - now[node])
        all_nodes = sum(map(bool, now.values()))
        expected = {
            (local_date, *value): (nodes[value], came[value], went[value], all_nodes, day.next_ns <= watermark_ns)
            for value in nodes.keys() | went.keys()
        }
        assert {key: row for key, row in rows.items() if key[0] == local_date} == expected
        assert inventory.wrong_sums(settings.home, day) == 0
        assert inventory.missing_nodes(settings.home, day) == 0


def test_messages_of_any_shape_are_counted(settings: Settings, no_spark: SparkConnection) -> None:
    shapes: dict[str, tuple[object, bool]] = {
        "plain": ({"classes": "web", "agents": "none", "country": "uk"}, False),
        "facts": ({"country": {"code": "fr"}, "osfamily": "Suse"}, True),
        "nulls": ({"classes": [None], "facts": {"country": None}, "agents": [{}, 3]}, True),
        "list": (["web"], True),
    }
    at_ns = BEGIN_NS + HOUR
    publish(
        settings.home,
        {node: [Change(at_ns, "new", None)] for node in shapes},
        BEGIN_NS + DAY_NS,
        messages=[Message(node, at_ns, content, registration) for node, (content, registration) in shapes.items()],
    )
    nodes = {key[1:]: row[0] for key, row in compute(INVENTORY_STAGE, settings, [FIRST], no_spark).items()}
    assert nodes == {
        ("class", "web"): 1,
        ("class", None): 3,
        ("agent", None): 4,
        ("agent_version", None): 4,
        ("os_family", "Suse"): 1,
        ("os_family", None): 3,
        ("facts.country", "uk"): 1,
        ("facts.country", '{"code":"fr"}'): 1,
        ("facts.country", None): 2,
        (r"facts.a\.b.0", None): 4,
    }
    assert inventory.wrong_sums(settings.home, day_of(FIRST)) == 0
    assert inventory.values_of_day(settings.home, FIRST, 1).values[0] == ("agent", None, 4, 4, 0)


def test_local_day_is_final_once_all_its_messages_are_copied(tmp_path: Path, no_spark: SparkConnection) -> None:
    settings = configured(tmp_path, inventory="{timezone: America/New_York}")
    day = day_of(FIRST, "America/New_York")
    messages = [
        Message("a", day.first_ns - SECOND, {"classes": ["old"]}),
        Message("a", day.next_ns - SECOND, {"classes": ["new"]}),
    ]
    publish(settings.home, {"a": [Change(day.first_ns - SECOND, "new", None)]}, day.next_ns - 1, messages=messages)
    rows = compute(INVENTORY_STAGE, settings, [FIRST], no_spark)
    assert rows[FIRST, "class", "new"] == (1, 1, 0, 1, False)
    assert rows[FIRST, "class", "old"] == (0, 0, 1, 1, False)
    assert unfinished_dates(settings.home, INVENTORY) == [(FIRST, (day.next_ns - 1) // 1000 * 1000)]
    publish(settings.home, {"a": [Change(day.first_ns - SECOND, "new", None)]}, day.next_ns)
    assert compute(INVENTORY_STAGE, settings, [FIRST], no_spark)[FIRST, "class", "new"] == (1, 1, 0, 1, True)
    assert unfinished_dates(settings.home, INVENTORY) == []
