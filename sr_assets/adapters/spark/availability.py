"""The availability of nodes by day, computed by Spark: how long each was up, silent, retired, unwatched.

Here: the computation, exact to the nanosecond. Not here: where its input comes from and its rows go
(`published.availability_history`), which days are computed (`stages.availability`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession

    from sr_assets.adapters.published.availability_history import History
    from sr_assets.domain.days import Day

# A node's points: what it was when the days begin, or when it was first seen, and its changes since. `is_change` tells them
# apart. Of the changes after the watermark the first still says what the node was before.
_POINTS: Final = """
    WITH earliest AS (SELECT key, min_by(before, ordinal) AS before FROM {changes} GROUP BY key),
    begun AS (
        SELECT n.key, greatest(n.first_ns, {first_ns}) AS at_ns, 0 AS ordinal, false AS is_change,
            CASE WHEN e.key IS NULL THEN n.status ELSE e.before END AS status
        FROM {nodes} AS n LEFT JOIN earliest AS e ON e.key = n.key)
    SELECT * FROM begun WHERE status IS NOT NULL
    UNION ALL SELECT key, at_ns, ordinal, true, after FROM {changes}
    """
# From each point to the next; `stretch` counts how often a node was up so far, so that what follows until it is up again, and
# nothing else, shares its number.
_SEGMENTS: Final = """
    SELECT key, stream, at_ns AS from_ns, least(until_ns, coalesce(lead(at_ns) OVER in_order, until_ns)) AS next_ns, status,
        is_change, is_change AND status <> 0 AND coalesce(lag(status) OVER in_order, 0) = 0 AS begins_outage,
        sum(if(status = 0, 1, 0)) OVER in_order AS stretch
    FROM {points} JOIN (SELECT key, stream, least(until_ns, {next_ns}) AS until_ns FROM {nodes}) USING (key)
    WHERE at_ns < until_ns
    WINDOW in_order AS (PARTITION BY key ORDER BY at_ns, ordinal)
    """
_PIECES: Final = """
    SELECT /*+ BROADCAST(d) */ key, stream, day, stretch, status, greatest(from_ns, d.first_ns) AS from_ns,
        least(s.next_ns, d.next_ns) AS next_ns
    FROM {segments} AS s JOIN {days} AS d ON s.from_ns < d.next_ns AND s.next_ns > d.first_ns
    WHERE from_ns < s.next_ns
    """
_BLIND: Final = """
    SELECT /*+ BROADCAST(b) */ key, day, stretch, status, least(p.next_ns, b.next_ns) - greatest(p.from_ns, b.first_ns) AS ns
    FROM {pieces} AS p JOIN {spans} AS b ON p.stream = b.stream AND p.from_ns < b.next_ns AND p.next_ns > b.first_ns
    """
_DAILY: Final = """
    WITH lengths AS (
        SELECT key, day, stretch, status, next_ns - from_ns AS ns, 0L AS blind_ns, 0L AS transitions, 0L AS outages
        FROM {pieces}
        UNION ALL SELECT key, day, stretch, status, -ns, ns, 0L, 0L FROM {blind}
        UNION ALL
        SELECT /*+ BROADCAST(d) */ key, day, stretch, status, 0L, 0L, 1L, if(begins_outage, 1L, 0L)
        FROM {segments} AS s JOIN {days} AS d ON is_change AND s.from_ns >= d.first_ns AND s.from_ns < d.next_ns
    ), stretches AS (
        SELECT key, day, stretch, sum(if(status = 0, ns, 0L)) AS up_ns, sum(if(status = 1, ns, 0L)) AS timeout_ns,
            sum(if(status = 2, ns, 0L)) AS retired_ns, sum(blind_ns) AS blind_ns, sum(transitions) AS transitions,
            sum(outages) AS outages
        FROM lengths GROUP BY key, day, stretch)
    SELECT key, day, sum(up_ns) AS up_ns, sum(timeout_ns) AS timeout_ns, sum(retired_ns) AS retired_ns,
        sum(blind_ns) AS blind_ns, sum(transitions) AS transitions, sum(outages) AS outages,
        max(timeout_ns + retired_ns) AS longest_ns
    FROM stretches GROUP BY key, day
    """


def measure_days(session: SparkSession, history: History, days: Sequence[Day]) -> pa.Table:
    """Return a row for each node and day on which it was known, in no order.

    `days` follow each other. Columns: key, day (an index into `days`), up_ns, timeout_ns, retired_ns, blind_ns (their sum: the
    time of the day since the node was first seen, up to the watermark), transitions, outages (stretches not up that began on
    the day) and longest_ns (the longest part of a stretch not up, blind time left out).
    """
    calendar = pa.table(
        {
            "day": pa.array(range(len(days)), pa.int32()),
            "first_ns": pa.array([day.first_ns for day in days], pa.int64()),
            "next_ns": pa.array([day.next_ns for day in days], pa.int64()),
        }
    )

    def frame(rows: pa.Table, columns: str) -> DataFrame:
        # Spark takes a schema from an Arrow table with rows only.
        return session.createDataFrame(rows) if rows.num_rows else session.createDataFrame([], columns)

    inputs = {
        "nodes": frame(history.nodes, "key INT, stream INT, first_ns BIGINT, status TINYINT, until_ns BIGINT"),
        "changes": frame(history.changes, "key INT, ordinal INT, at_ns BIGINT, before TINYINT, after TINYINT"),
        "days": frame(calendar, "day INT, first_ns BIGINT, next_ns BIGINT"),
        "spans": frame(history.spans, "stream INT, first_ns BIGINT, next_ns BIGINT"),
    }
    points = session.sql(_POINTS, first_ns=days[0].first_ns, nodes=inputs["nodes"], changes=inputs["changes"])
    segments = session.sql(_SEGMENTS, points=points, nodes=inputs["nodes"], next_ns=days[-1].next_ns)
    pieces = session.sql(_PIECES, segments=segments, days=inputs["days"])
    blind = session.sql(_BLIND, pieces=pieces, spans=inputs["spans"])
    daily = session.sql(_DAILY, pieces=pieces, segments=segments, days=inputs["days"], blind=blind)
    return daily.toArrow()
