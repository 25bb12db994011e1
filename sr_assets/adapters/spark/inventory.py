"""The inventory of nodes by day, counted by Spark: which values were there, on how many nodes, on which new, on which no more.

Here: the counting. Not here: where its input comes from and its rows go (`published.inventory`), which days are counted
(`stages.inventory`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sr_assets.adapters.published.inventory import ANY_VALUE
from sr_assets.adapters.spark.segments import calendar, frame, segments

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from sr_assets.adapters.published.node_histories import History
    from sr_assets.domain.days import Day

# A node is counted on a day on which it was not retired all the time, with its newest message of that day or, while it holds,
# of a day before.
_HELD: Final = """
    WITH members AS (
        SELECT /*+ BROADCAST(d) */ DISTINCT key, stream, day FROM {segments} AS s JOIN {days} AS d
            ON s.from_ns < d.next_ns AND s.next_ns > d.first_ns WHERE status <> 2 AND s.from_ns < s.next_ns
    ), reported AS (
        SELECT key, day, stream, struct(o.until_ns, o.held) AS newest FROM members AS m FULL JOIN (
            SELECT * FROM {observed}) AS o USING (key, day)
    ), known AS (
        SELECT key, day, stream, last_value(if(newest.held IS NULL, NULL, newest)) IGNORE NULLS OVER (
            PARTITION BY key ORDER BY day ROWS UNBOUNDED PRECEDING) AS newest FROM reported)
    SELECT /*+ BROADCAST(d) */ key, known.day, stream, explode(array_append(
        if(newest.until_ns >= d.first_ns, newest.held, {unknown}), {any_value})) AS value_number
    FROM known JOIN {days} AS d ON d.day = known.day WHERE stream IS NOT NULL
    """
_COUNTED: Final = """
    WITH beside AS (
        SELECT key, stream, day, value_number, 1 AS now, 0 AS before FROM {held}
        UNION ALL SELECT key, stream, day + 1, value_number, 0, 1 FROM {held}
    ), of_nodes AS (
        SELECT stream, day, value_number, max(now) AS now, max(before) AS before FROM beside
        WHERE day BETWEEN 1 AND {last} GROUP BY key, stream, day, value_number)
    SELECT stream, CAST(day - 1 AS INT) AS day, value_number, sum(now) AS nodes, sum(int(before = 0)) AS came,
        sum(int(now = 0)) AS went
    FROM of_nodes GROUP BY stream, day, value_number
    """


def count_values(
    session: SparkSession, history: History, observed: pa.Table, days: Sequence[Day], unknown: Sequence[int]
) -> pa.Table:
    """Return, in no order, on how many nodes each value was found on each day but the first, which they are compared with.

    `observed` is what `published.inventory` observed of the history's nodes on these days, `unknown` the values of a node of
    which nothing is known. Columns: stream, day (0: the second of `days`), value_number, nodes, came, went.
    """
    held = session.sql(
        _HELD.replace("{unknown}", f"array({', '.join(map(str, unknown))})").replace("{any_value}", str(ANY_VALUE)),
        segments=segments(session, history, days),
        days=calendar(session, days),
        observed=frame(session, observed, "key INT, day INT, at_ns BIGINT, until_ns BIGINT, held ARRAY<INT>"),
    )
    return session.sql(_COUNTED, held=held, last=len(days) - 1).toArrow()
