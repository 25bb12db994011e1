"""What the daily computations share: nodes as segments of time in which their status is the same.

Not here: what is computed of them (`availability`, `inventory`), where they come from (`published.node_histories`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession

    from sr_assets.adapters.published.node_histories import History
    from sr_assets.domain.days import Day

# A node's points are what it was when the days begin, or when it was first seen, and its changes since; from each point to the
# next it is the same. `stretch` counts how often it was up so far, so that what follows until it is up again, and nothing
# else, shares its number.
_SEGMENTS: Final = """
    WITH points AS (
        SELECT key, greatest(first_ns, {first_ns}) AS at_ns, 0 AS ordinal, false AS is_change, status
        FROM {nodes} WHERE status IS NOT NULL
        UNION ALL SELECT key, at_ns, ordinal, true, after FROM {changes})
    SELECT key, stream, at_ns AS from_ns, least(until_ns, coalesce(lead(at_ns) OVER in_order, until_ns)) AS next_ns, status,
        int(is_change) AS changes, int(is_change AND status <> 0 AND coalesce(lag(status) OVER in_order, 0) = 0) AS outages,
        sum(int(status = 0)) OVER in_order AS stretch
    FROM points JOIN (SELECT key, stream, least(until_ns, {next_ns}) AS until_ns FROM {nodes}) USING (key)
    WHERE at_ns < until_ns
    WINDOW in_order AS (PARTITION BY key ORDER BY at_ns, ordinal)
    """


def frame(session: SparkSession, rows: pa.Table, columns: str) -> DataFrame:
    """Return an Arrow table as Spark has it; `columns` are its schema, which Spark takes from a table with rows only."""
    return session.createDataFrame(rows) if rows.num_rows else session.createDataFrame([], columns)


def calendar(session: SparkSession, days: Sequence[Day]) -> DataFrame:
    """Return the days with their numbers: day, first_ns, next_ns."""
    rows = pa.table(
        {
            "day": pa.array(range(len(days)), pa.int32()),
            "first_ns": pa.array([day.first_ns for day in days], pa.int64()),
            "next_ns": pa.array([day.next_ns for day in days], pa.int64()),
        }
    )
    return frame(session, rows, "day INT, first_ns BIGINT, next_ns BIGINT")


def segments(session: SparkSession, history: History, days: Sequence[Day]) -> DataFrame:
    """Return the segments of nodes on consecutive days: key, stream, from_ns, next_ns, status, changes, outages, stretch."""
    nodes = frame(session, history.nodes, "key INT, stream INT, first_ns BIGINT, status TINYINT, until_ns BIGINT")
    changes = frame(session, history.changes, "key INT, ordinal INT, at_ns BIGINT, after TINYINT")
    return session.sql(_SEGMENTS, nodes=nodes, changes=changes, first_ns=days[0].first_ns, next_ns=days[-1].next_ns)
