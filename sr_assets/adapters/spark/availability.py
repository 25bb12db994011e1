"""The availability of nodes by day, computed by Spark: how long each was up, silent, retired, unwatched.

Here: the computation, exact to the nanosecond. Not here: where its input comes from and its rows go
(`published.availability`), which days are computed (`stages.availability`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sr_assets.adapters.spark.segments import calendar, frame, segments

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from sr_assets.adapters.published.node_histories import History
    from sr_assets.domain.days import Day

# A change counts on the day on which it happened, also when another one follows at the same instant.
_DAILY: Final = """
    WITH pieces AS (
        SELECT /*+ BROADCAST(d), BROADCAST(b) */ key, coalesce(b.spans, array()) AS spans, day, stretch, status,
            greatest(from_ns, d.first_ns) AS from_ns, least(s.next_ns, d.next_ns) AS next_ns,
            if(from_ns >= d.first_ns, changes, 0) AS changes, if(from_ns >= d.first_ns, outages, 0) AS outages
        FROM {segments} AS s JOIN {days} AS d ON s.from_ns < d.next_ns
            AND (s.next_ns > d.first_ns OR (s.next_ns = s.from_ns AND s.from_ns = d.first_ns))
        LEFT JOIN (SELECT stream, collect_list(struct(first_ns, next_ns)) AS spans FROM {spans} GROUP BY stream) AS b
            ON b.stream = s.stream
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
    spans = frame(session, history.spans, "stream INT, first_ns BIGINT, next_ns BIGINT")
    daily = session.sql(_DAILY, segments=segments(session, history, days), days=calendar(session, days), spans=spans)
    return daily.toArrow()
