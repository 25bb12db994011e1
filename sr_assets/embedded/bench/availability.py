"""The workload of availability: a month of a large fleet computed by day, and the same in SQL.

Here: the history as runs would have left it, the computation, the comparison. Not here: the runs themselves.
"""

from __future__ import annotations

import time
from contextlib import closing
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any, Final

import duckdb

from sr_assets.adapters.published.index import Run
from sr_assets.adapters.published.publishing import publish_site
from sr_assets.adapters.published.site_files import PublishedStream
from sr_assets.adapters.spark.engine import KEEP_SECONDS, use_engine
from sr_assets.adapters.spark.session import leave_session, open_session
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.days import dates_between, day_of
from sr_assets.embedded.bench.rig import SITE, PeakMemory
from sr_assets.stages.availability import AVAILABILITY_STAGE

if TYPE_CHECKING:
    from sr_assets.embedded.bench.rig import Bench

_STREAM: Final = "NODES"
_DAYS: Final = 30
_FIRST: Final = date(2026, 1, 1)
#: A node is silent once every two days, for up to ten hours: thirty transitions a month.
_OUTAGES: Final = _DAYS // 2
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
#: Each outage beside each day that it touches.
_INDEPENDENT: Final = """
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


def measure_availability(bench: Bench, nodes: int) -> dict[str, Any]:
    """Measure `nodes` nodes over 30 days, of which each has 30 transitions; the Spark session is warm.

    `differing_rows` are those in which a computation in SQL finds another time.
    """
    stream = {"stream": _STREAM, "inspect_field": "sender", "inspect_duration": "1h", "target_subject_prefix": "a"}
    settings = bench.settings([stream])
    first_ns = day_of(_FIRST).first_ns
    until_ns = day_of(_FIRST + timedelta(days=_DAYS)).first_ns
    with SiteState(bench.home / "sites" / SITE) as state:
        with state.transaction():
            state.save_stream(StreamState(_STREAM, 1, nodes, watermark_ns=until_ns, as_of_ns=until_ns))
            values = {"stream": _STREAM, "first": first_ns, "count": nodes}
            state.connection.execute(_NODES, values)
            state.connection.execute(_TRANSITIONS, {**values, "outages": _OUTAGES})
        published = [PublishedStream(_STREAM, None, tracked=True)]
        publish_site(bench.home, SITE, state, published, sites=[SITE], run=Run(until_ns, "bench"))
    dates = list(dates_between(_FIRST, _FIRST + timedelta(days=_DAYS - 1)))
    session = open_session(settings.spark, bench.home, "availability")
    try:
        with use_engine(bench.home, KEEP_SECONDS):
            AVAILABILITY_STAGE.compute_days(settings, dates[:1], lambda: session)
            with PeakMemory(bench.home) as peak:
                started = time.perf_counter()
                rows = AVAILABILITY_STAGE.compute_days(settings, dates, lambda: session)
                seconds = time.perf_counter() - started
    finally:
        leave_session(session)
    with closing(duckdb.connect(str(bench.home / "fleet.duckdb"), read_only=True)) as fleet:
        query = {"first": first_ns, "days": _DAYS}
        ((differing,),) = fleet.execute(_INDEPENDENT, query).fetchall()
    return {
        "nodes": nodes,
        "days": _DAYS,
        "transitions": nodes * 2 * _OUTAGES,
        "rows": sum(rows.values()),
        "differing_rows": differing,
        "seconds": round(seconds, 1),
        "peak_mib": peak.most_bytes >> 20,
    }
