"""The daily tables of a large fleet, computed in this process and compared with the same tables computed in SQL."""

from __future__ import annotations

import time
from contextlib import closing
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any, Final

import duckdb
from pyarrow import parquet

from sr_assets.adapters.published.compaction import describe
from sr_assets.adapters.published.fleet_file import Run
from sr_assets.adapters.published.history import stream_folder
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.published.stream_status import PublishedStream
from sr_assets.adapters.spark.run_session import HomeEngine, SparkConnection
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.days import dates_between, day_of
from sr_assets.stages.daily_computation import AVAILABILITY_STAGE, INVENTORY_STAGE
from sr_assets_bench.rig import SITE, PeakMemory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sr_assets.settings import Settings
    from sr_assets.stages.daily_computation import DailyStage
    from sr_assets_bench.rig import Bench

_STREAM: Final = "NODES"
_AVAILABILITY_DAYS: Final = 30
_INVENTORY_DAYS: Final = 7
_FIRST: Final = date(2026, 1, 1)
#: A node is silent once every two days, for up to ten hours: thirty transitions a month.
_TRANSITIONS: Final = """
INSERT INTO transitions BY NAME
SELECT 'e' || i || '/' || k AS event_id, $stream AS stream, 'node' || i || '.example.net' AS node,
    CASE k % 2 WHEN 0 THEN 'timeout' ELSE 'recover' END AS event, CASE k % 2 WHEN 0 THEN 'up' ELSE 'timeout' END AS previous,
    $first + (k // 2) * 172800000000000 + hash(i, k // 2) % 136800000000000
        + k % 2 * (1 + hash(k // 2, i) % 36000000000000)::BIGINT AS event_ns,
    event_ns AS detected_ns, k + 2 AS transition, 1 AS epoch, false AS outbox
FROM range($count) AS nodes (i), range(2 * $outages) AS changes (k)
"""
_NODES: Final = """
INSERT INTO nodes BY NAME SELECT $stream AS stream, 'node' || i || '.example.net' AS node,
    $first - 1000000000 AS first_seen_ns, $first AS seen_ns, i AS sequence, 'up' AS status, $first AS status_since_ns,
    0 AS times_retired, 31 AS transition FROM range($count) AS t (i)
"""
#: A registration of each node on most days, and two on some days, during the rollout of an agent.
_MESSAGES: Final = """
COPY (
    SELECT 'node' || i || '.example.net' AS node, 2 * i + k + 1 AS sequence,
        make_timestamptz($first_us + (hash(i, k, $day) % 86400000000)::BIGINT) AS stored_at, 'registration' AS subject,
        900 AS payload_bytes, '{}' AS payload, NULL::BLOB AS payload_raw,
        format('{{"agents":[{{"name":"puppet","version":"2.{0}"}},{{"name":"rpcutil"}}],"classes":["base","role_{1}"],'
            || '"build_info":{{"version":"0.{0}"}},"facts":{{"country":"c{2}","os":{{"family":"f{3}"}},"more":"{4}"}}}}',
            (hash(i) % 9 < $day)::INTEGER, hash(i, 'r') % 40, hash(i, 'c') % 50, hash(i) % 3, repeat('x', 700)) AS metadata
    FROM range($count) AS nodes (i), range(2) AS messages (k) WHERE hash($day, k, i) % 10 < CASE k WHEN 0 THEN 9 ELSE 1 END
) TO '{file}' (FORMAT parquet, COMPRESSION zstd)
"""
#: Each outage with each day that it touches.
_AVAILABILITY_IN_SQL: Final = """
WITH outages AS (
    SELECT node, max(event_ns) FILTER (event = 'timeout') AS since, max(event_ns) FILTER (event = 'recover') AS until
    FROM node_advisories GROUP BY node, (transition - 2) // 2
), days AS (
    SELECT date '2026-01-01' + i::INTEGER AS date, $first + i * 86400000000000 AS first_ns, first_ns + 86400000000000 AS next_ns
    FROM range($days) AS t (i)
), split AS (
    SELECT node, date, sum(least(until, next_ns) - greatest(since, first_ns)) / 1e9 AS seconds
    FROM outages JOIN days ON since < next_ns AND until > first_ns GROUP BY ALL
)
SELECT count(*) FROM (SELECT node, date, timeout_seconds, up_seconds FROM availability_daily) AS computed
FULL JOIN split USING (node, date)
WHERE abs(coalesce(timeout_seconds, -1) - coalesce(split.seconds, 0)) > 1e-9
    OR abs(up_seconds + timeout_seconds - 86400) > 1e-9
"""
#: Each node with each day, and its newest message of that day or of the two hours before it.
_INVENTORY_IN_SQL: Final = """
WITH days AS (
    SELECT date '2026-01-01' + i::INTEGER AS date, make_timestamptz(($first / 1000 + i * 86400000000)::BIGINT) AS begins
    FROM range($days + 1) AS t (i)
), newest AS (
    SELECT node, days.date, arg_max(metadata, stored_at) AS says FROM node_snapshot_history JOIN days
        ON stored_at >= begins - INTERVAL 2 HOURS AND stored_at < begins + INTERVAL 24 HOURS GROUP BY ALL
), held AS (
    SELECT node, date, unnest([
        ('class', says ->> '$.classes[0]'), ('class', says ->> '$.classes[1]'),
        ('agent', 'puppet ' || (says ->> '$.agents[0].version')), ('agent', says ->> '$.agents[1].name'),
        ('agent_version', says ->> '$.build_info.version'), ('os_family', says ->> '$.facts.os.family'),
        ('facts.country', says ->> '$.facts.country')]) AS held
    FROM (SELECT node, date FROM node_availability, days) LEFT JOIN newest USING (node, date)
), beside AS (
    SELECT date, held, coalesce(lag(date) OVER in_order = date - 1, false) AS was,
        coalesce(lead(date) OVER in_order = date + 1, false) AS stays
    FROM (SELECT DISTINCT * FROM held) WINDOW in_order AS (PARTITION BY node, held ORDER BY date)
), counted AS (
    SELECT date, held[1] AS property, held[2] AS value, sum(nodes) AS nodes, sum(came) AS came, sum(went) AS went FROM (
        SELECT date, held, 1 AS nodes, (NOT was)::INTEGER AS came, 0 AS went FROM beside
        UNION ALL SELECT date + 1, held, 0, 0, 1 FROM beside WHERE NOT stays)
    WHERE date > date '2026-01-01' AND date <= date '2026-01-01' + $days::INTEGER GROUP BY ALL
)
SELECT count(*) FROM inventory_daily AS i FULL JOIN counted AS c
    ON i.date = c.date AND i.property = c.property AND i.value IS NOT DISTINCT FROM c.value
WHERE (i.nodes, i.came, i.went) IS DISTINCT FROM (c.nodes, c.came, c.went)
"""


def measure_availability(bench: Bench, nodes: int) -> dict[str, Any]:
    """Measure `nodes` nodes over 30 days, with 30 transitions each."""
    _publish_history(bench, nodes, _AVAILABILITY_DAYS)
    dates = list(dates_between(_FIRST, _FIRST + timedelta(days=_AVAILABILITY_DAYS - 1)))
    measured = _compute(bench, AVAILABILITY_STAGE, dates, _AVAILABILITY_IN_SQL)
    return {"nodes": nodes, "days": len(dates), "transitions": nodes * len(dates), **measured}


def measure_inventory(bench: Bench, nodes: int) -> dict[str, Any]:
    """Measure `nodes` nodes over a week, with one message a day each."""
    messages = _publish_history(bench, nodes, _INVENTORY_DAYS + 1, messages=True)
    dates = list(dates_between(_FIRST + timedelta(days=1), _FIRST + timedelta(days=_INVENTORY_DAYS)))
    measured = _compute(bench, INVENTORY_STAGE, dates, _INVENTORY_IN_SQL)
    return {"nodes": nodes, "days": len(dates), "messages": messages, **measured}


def _settings(bench: Bench) -> Settings:
    stream = {"stream": _STREAM, "inspect_field": "sender", "inspect_duration": "1h", "target_subject_prefix": "a"}
    return bench.settings([stream], inventory={"facts": ["country"]})


def _publish_history(bench: Bench, nodes: int, days: int, *, messages: bool = False) -> int:
    """Publish nodes with their transitions and messages; return the number of both."""
    first_ns, until_ns = (day_of(_FIRST + timedelta(days=number)).first_ns for number in (0, days))
    with SiteState(bench.home / "sites" / SITE) as state:
        with state.transaction():
            state.save_stream(StreamState(_STREAM, 1, nodes, watermark_ns=until_ns, as_of_ns=until_ns))
            values = {"stream": _STREAM, "first": first_ns, "count": nodes}
            state.connection.execute(_NODES, values)
            state.connection.execute(_TRANSITIONS, {**values, "outages": days // 2})
            files = list(_write_messages(bench, nodes, days)) if messages else []
            state.snapshot_index(_STREAM).add(1, 2 * nodes, [*map(describe, files)])
        published = [PublishedStream(_STREAM, None, tracked=True)]
        publish_site(bench.home, SITE, state, published, sites=[SITE], run=Run(until_ns, "bench"))
    return sum(parquet.read_metadata(file).num_rows for file in files)


def _write_messages(bench: Bench, nodes: int, days: int) -> Iterator[Path]:
    """Write a file of messages for each day into the history."""
    for number in range(days):
        day = day_of(_FIRST + timedelta(days=number))
        file = stream_folder(bench.home.resolve(), SITE, _STREAM) / f"date={day.date}" / f"1-{2 * nodes}.parquet"
        file.parent.mkdir(parents=True)
        values = {"first_us": day.first_ns // 1000, "day": number, "count": nodes}
        duckdb.execute(_MESSAGES.replace("{file}", str(file)), values)
        yield file


def _compute(bench: Bench, stage: DailyStage, dates: list[date], independent: str) -> dict[str, Any]:
    """Measure the computation of days.

    `differing_rows` is the number of rows that differ from a computation in SQL.
    """
    settings = _settings(bench)
    with closing(SparkConnection(HomeEngine(settings.spark, bench.home), None, "daily")) as spark:
        stage.compute_days(settings, dates[:1], spark)
        with PeakMemory(bench.home) as peak:
            started = time.perf_counter()
            rows, _ = stage.compute_days(settings, dates, spark)
            seconds = time.perf_counter() - started
    with closing(duckdb.connect(str(bench.home / "fleet.duckdb"), read_only=True)) as fleet:
        query = {"first": day_of(_FIRST).first_ns, "days": len(dates)}
        ((differing,),) = fleet.execute(independent, query).fetchall()
    return {
        "rows": sum(rows.values()),
        "differing_rows": differing,
        "seconds": round(seconds, 1),
        "peak_mib": peak.most_bytes >> 20,
    }
