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

_WITH_SPANS: Final = """
    SELECT /*+ BROADCAST(s) */ n.*, coalesce(s.spans, array()) AS spans FROM {nodes} AS n
    LEFT JOIN (SELECT stream, collect_list(struct(first_ns, next_ns)) AS spans FROM {spans} GROUP BY stream) AS s
        ON s.stream = n.stream
    """
# A node's points are what it was when the days begin, or when it was first seen, and its changes since; from each point to the
# next it is the same. `stretch` counts how often it was up so far, so that what follows until it is up again, and nothing
# else, shares its number.
_SEGMENTS: Final = """
    WITH points AS (
        SELECT key, greatest(first_ns, {first_ns}) AS at_ns, 0 AS ordinal, false AS is_change, status
        FROM {nodes} WHERE status IS NOT NULL
        UNION ALL SELECT key, at_ns, ordinal, true, after FROM {changes})
    SELECT key, spans, at_ns AS from_ns, least(until_ns, coalesce(lead(at_ns) OVER in_order, until_ns)) AS next_ns, status,
        int(is_change) AS changes, int(is_change AND status <> 0 AND coalesce(lag(status) OVER in_order, 0) = 0) AS outages,
        sum(int(status = 0)) OVER in_order AS stretch
    FROM points JOIN (SELECT key, spans, least(until_ns, {next_ns}) AS until_ns FROM {nodes}) USING (key)
    WHERE at_ns < until_ns
    WINDOW in_order AS (PARTITION BY key ORDER BY at_ns, ordinal)
    """
# A change counts on the day on which it happened, also when another one follows at the same instant.
_DAILY: Final = """
    WITH pieces AS (
        SELECT /*+ BROADCAST(d) */ key, spans, day, stretch, status, greatest(from_ns, d.first_ns) AS from_ns,
            least(s.next_ns, d.next_ns) AS next_ns, if(from_ns >= d.first_ns, changes, 0) AS changes,
            if(from_ns >= d.first_ns, outages, 0) AS outages
        FROM {segments} AS s JOIN {days} AS d ON s.from_ns < d.next_ns
            AND (s.next_ns > d.first_ns OR (s.next_ns = s.from_ns AND s.from_ns = d.first_ns))
    ), lengths AS (
        SELECT *, next_ns - from_ns - blind_ns AS ns FROM (
            SELECT *, aggregate(spans, 0L, (sum, span) ->
                sum + greatest(0L, least(next_ns, span.next_ns) - greatest(from_ns, span.first_ns))) AS blind_ns
            FROM pieces)
    ), stretches AS (
        SELECT key, day, stretch, sum(if(status = 0, ns, 0L)) AS up_ns, sum(if(status = 1, ns, 0L)) AS timeout_ns,
            sum(if(status = 2, ns, 0L)) AS retired_ns, sum(blind_ns) AS blind_ns, sum(changes) AS transitions,
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

    nodes = frame(history.nodes, "key INT, stream INT, first_ns BIGINT, status TINYINT, until_ns BIGINT")
    changes = frame(history.changes, "key INT, ordinal INT, at_ns BIGINT, after TINYINT")
    spans = frame(history.spans, "stream INT, first_ns BIGINT, next_ns BIGINT")
    nodes = session.sql(_WITH_SPANS, nodes=nodes, spans=spans)
    segments = session.sql(_SEGMENTS, nodes=nodes, changes=changes, first_ns=days[0].first_ns, next_ns=days[-1].next_ns)
    daily = session.sql(_DAILY, segments=segments, days=frame(calendar, "day INT, first_ns BIGINT, next_ns BIGINT"))
    return daily.toArrow()
