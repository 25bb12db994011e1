"""The input of daily tables: the published nodes, transitions and blind spans, and the events of each node on some days."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from sr_assets.domain.days import Day

if TYPE_CHECKING:
    import duckdb


#: The columns of the published tables that a history needs, by table.
INPUTS: Final = {
    "node_availability": ("name", "stream", "node", "status", "first_seen", "class"),
    "node_advisories": ("name", "stream", "node", "event", "event_ns", "previous", "epoch", "transition", "undone_at"),
    "global_availability": ("replicator", "name", "stream", "node", "status", "event_time"),
    "global_advisories": (
        *("replicator", "name", "stream", "node"),
        *("event", "event_ns", "previous", "epoch", "transition"),
    ),
}
#: Status codes, before and after a transition.
UP, TIMEOUT, RETIRED = 0, 1, 2
#: SQL: the code of the status in the column `{}`, and of the status after `event`.
STATUS_CODE: Final = "list_position(['up', 'timeout', 'retired'], {}) - 1"
AFTER: Final = f"CASE event WHEN 'timeout' THEN {TIMEOUT} WHEN 'expire' THEN {RETIRED} ELSE {UP} END"
# Advisories of the Stream Replicator have no previous status.
_BEFORE: Final = f"""
    coalesce({STATUS_CODE.format("previous")},
        CASE event WHEN 'timeout' THEN {UP} WHEN 'recover' THEN {TIMEOUT} WHEN 'expire' THEN {TIMEOUT} END)
    """
# Sites of this installation come from their own tables, others from their advisories. A forgotten node appears in
# transitions only; it was retired.
# A heartbeat's watermark is another site's word: it ends that stream's history, and never sets the clock, which is the
# feed's own.
_STREAMS: Final = """
    WITH own AS (
        SELECT $replicator::VARCHAR AS replicator, name, stream, epoch_ns(watermark) AS until_ns,
            until_ns AS clock_ns, true AS own
        FROM replication JOIN site_summary USING (name, stream) WHERE watermark IS NOT NULL
    ), reported AS (
        SELECT g.replicator, g.name, g.stream, max(epoch_ns(least(g.watermark, r.watermark))), max(epoch_ns(r.watermark)),
            false
        FROM global_summary AS g LEFT JOIN replication AS r ON r.name || '/' || r.stream = g.feed
        WHERE NOT EXISTS (
            FROM own WHERE own.replicator = g.replicator AND own.name = g.name AND own.stream = g.stream)
        GROUP BY ALL
    )
    SELECT row_number() OVER (ORDER BY own DESC, replicator, name, stream)::INTEGER - 1 AS number, *
    FROM (FROM own UNION ALL FROM reported) WHERE until_ns IS NOT NULL AND (own OR NOT $own_only)
    """
# `unretire` makes no transition: the next one, or the current status, shows the status after it.
_UNDONE: Final = """
    SELECT * FROM (
        SELECT *, lead(previous) OVER (PARTITION BY name, stream, node ORDER BY epoch, transition) AS following
        FROM node_advisories SEMI JOIN (SELECT name, stream, node FROM node_advisories WHERE undone_at IS NOT NULL)
            USING (name, stream, node)
    ) LEFT JOIN (SELECT name, stream, node, status FROM node_availability) USING (name, stream, node)
    WHERE undone_at IS NOT NULL
    """
_TRANSITIONS: Final = f"""
    CREATE TEMP TABLE changes AS
    SELECT number, node, event_ns, {_BEFORE} AS before, {AFTER} AS after, epoch, transition FROM node_advisories AS a
    JOIN streams AS s ON s.own AND s.name = a.name AND s.stream = a.stream
    UNION ALL
    SELECT number, node, event_ns, {_BEFORE}, {AFTER}, epoch, transition FROM global_advisories AS a
    JOIN streams AS s ON NOT s.own AND s.replicator = a.replicator AND s.name IS NOT DISTINCT FROM a.name
        AND s.stream IS NOT DISTINCT FROM a.stream
    UNION ALL
    SELECT number, node, epoch_ns(undone_at), {RETIRED}, {STATUS_CODE.format("coalesce(following, status)")}, epoch, transition
    FROM ({_UNDONE}) AS a JOIN streams AS s ON s.own AND s.name = a.name AND s.stream = a.stream
    """
_NODES: Final = f"""
    CREATE TEMP TABLE node_keys AS
    WITH found AS (
        SELECT number, node, epoch_ns(first_seen) AS first_ns, {STATUS_CODE.format("status")} AS status
        FROM node_availability AS a JOIN streams AS s ON s.own AND s.name = a.name AND s.stream = a.stream
        UNION ALL
        SELECT number, node, min(epoch_ns(event_time)), arg_max({STATUS_CODE.format("status")}, event_time)
        FROM global_availability AS a
        JOIN streams AS s ON NOT s.own AND s.replicator = a.replicator AND s.name IS NOT DISTINCT FROM a.name
            AND s.stream IS NOT DISTINCT FROM a.stream
        GROUP BY ALL
    ), changed AS (SELECT number, node, min(event_ns) AS first_ns FROM changes GROUP BY ALL)
    SELECT row_number() OVER (ORDER BY number, node)::INTEGER AS key, number, node,
        least(found.first_ns, changed.first_ns) AS first_ns, coalesce(status, {RETIRED})::TINYINT AS status
    FROM found FULL JOIN changed USING (number, node)
    """


_SINCE: Final = """
    CREATE OR REPLACE TEMP TABLE since AS
    SELECT key, row_number() OVER ()::INTEGER AS ordinal, event_ns AS at_ns, before::TINYINT AS before, after::TINYINT AS after
    FROM (
        SELECT key, event_ns, before, after FROM changes JOIN node_keys USING (number, node) WHERE event_ns >= $first_ns
        ORDER BY event_ns, coalesce(epoch, 0), coalesce(transition, 0))
    """
# The status before a node's first change in the period, or its current status without a change.
_PORTION: Final = """
    SELECT key, number AS stream, first_ns, until_ns,
        (CASE WHEN changed.key IS NULL THEN status ELSE changed.before END)::TINYINT AS status,
        coalesce(changed.at_ns, []) AS at_ns, coalesce(changed.after, []) AS after
    FROM node_keys JOIN streams USING (number) LEFT JOIN (
        SELECT key, arg_min_null(before, ordinal) AS before,
            list(at_ns ORDER BY ordinal) FILTER (at_ns < $next_ns) AS at_ns,
            list(after ORDER BY ordinal) FILTER (at_ns < $next_ns) AS after
        FROM since WHERE key >= $first AND key < $next GROUP BY key) AS changed USING (key)
    WHERE key >= $first AND key < $next
    """


_SPANS: Final = """
    SELECT number AS stream, min(since_ns) AS first_ns, max(until_ns) AS next_ns
    FROM (
        SELECT *, sum(begins) OVER (PARTITION BY number ORDER BY since_ns, until_ns) AS joined
        FROM (
            SELECT number, b.since_ns, b.until_ns, coalesce(b.since_ns > max(b.until_ns) OVER (
                    PARTITION BY number ORDER BY b.since_ns, b.until_ns
                    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), true)::INTEGER AS begins
            FROM blind_spans AS b JOIN streams AS s ON s.own AND s.name = b.name AND s.stream = b.stream
            WHERE b.until_ns > $since_ns))
    GROUP BY number, joined ORDER BY ALL
    """


def read_streams(connection: duckdb.DuckDBPyConnection, replicator: str, *, own: bool) -> pa.Table:
    """Return the tracked streams of the published tables, with their progress; `replicator` is that of our own sites.

    Columns: number, replicator, name, stream, until_ns (the end of its history), clock_ns (the time of its own watermark, or of
    the feed's), own. `own` leaves out the streams that other sites report.
    """
    values = {"replicator": replicator, "own_only": own}
    return connection.sql(_STREAMS, params=values).to_arrow_table()


@contextlib.contextmanager
def with_tables(connection: duckdb.DuckDBPyConnection, **tables: pa.Table) -> Iterator[None]:
    """Register Arrow tables by name until the end of the block."""
    for name, table in tables.items():
        connection.register(name, table)
    try:
        yield
    finally:
        for name in tables:
            connection.unregister(name)


def read_spans(connection: duckdb.DuckDBPyConnection, streams: pa.Table, since_ns: int) -> pa.Table:
    """Return the blind spans of streams that end after a time, ascending and disjoint: stream (a number), first_ns, next_ns."""
    # A span that grew was saved several times.
    with with_tables(connection, streams=streams):
        return connection.sql(_SPANS, params={"since_ns": since_ns}).to_arrow_table()


class Histories:
    """The events of some nodes of `streams`, whose rows a connection has in the tables of `INPUTS`: whole nodes, all or some.

    The temporary tables are `streams`, and `node_keys` with a number (`key`) per node.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, streams: pa.Table) -> None:
        self.connection = connection
        with with_tables(connection, given=streams):
            connection.execute("CREATE TEMP TABLE streams AS FROM given")
        connection.execute(_TRANSITIONS)
        connection.execute(_NODES)

    def node_count(self) -> int:
        """Return the number of nodes ever seen."""
        return int(self.connection.execute("SELECT count(*) FROM node_keys").fetchall()[0][0])

    def nodes_of(self, number: int) -> list[tuple[int, str, str | None]]:
        """Return the key, the node and the class of each node of a stream of this installation."""
        query = """
            SELECT key, node, class FROM node_keys JOIN streams USING (number)
            LEFT JOIN (SELECT name, stream, node, class FROM node_availability) USING (name, stream, node)
            WHERE number = ?
            """
        return self.connection.execute(query, [number]).fetchall()

    def portions(self, days: Sequence[Day], most_rows: int) -> Iterator[pa.Table]:
        """Yield the events of consecutive days in portions of nodes, at least one.

        A portion's changes, with a row for each node and day, are about `most_rows`. Columns: key, stream (a number), first_ns,
        until_ns (its stream's), status (a code, at the start of the days; NULL: unknown), and the lists at_ns and after of its
        changes in order; times in unix ns.
        """
        connection = self.connection
        connection.execute(_SINCE, {"first_ns": days[0].first_ns})
        ((changes, nodes),) = connection.execute(
            "SELECT (SELECT count(*) FROM since), (SELECT count(*) FROM node_keys)"
        ).fetchall()
        step = max(1, nodes * most_rows // max(1, changes + nodes * len(days)))
        for first in range(1, max(1, nodes) + 1, step):
            keys = {"first": first, "next": first + step, "next_ns": days[-1].next_ns}
            yield connection.sql(_PORTION, params=keys).to_arrow_table()
