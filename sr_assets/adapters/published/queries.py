"""Queries on the published tables: one function for each, which returns `Rows`, or reads the nodes in pages.

Add a function for a new query of a command. Every query is confined to the published tables, and every function raises
RunError before the first publication.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import date, datetime
from pathlib import Path
from typing import Any, Final

import duckdb

from sr_assets.adapters.published.daily_tables import DailyTable
from sr_assets.adapters.published.fleet_reader import Rows, open_fleet, read_rows, start_query
from sr_assets.adapters.published.tables import literal
from sr_assets.domain.days import Day

#: The number of nodes of each class at the sites of this installation, as text; sites without classes have no row.
CLASS_COUNTS: Final = """
    SELECT name, stream, string_agg(class || ' ' || nodes, ', ' ORDER BY class) AS classes FROM (
        SELECT name, stream, class, count(*) AS nodes FROM node_availability
        WHERE class IS NOT NULL AND status <> 'retired' GROUP BY ALL)
    GROUP BY ALL
    """
#: The last event of each node that has flapped.
FLAPS: Final = """
    SELECT name, stream, node, arg_max(event, event_time) = 'flapping' AS flapping FROM node_events
    WHERE event <> 'unretired' GROUP BY ALL
    """
#: The outage or window that holds back the announcement of a node's present silence.
WITHHELD: Final = """
    SELECT name, stream, node, if(event = 'timeout', event, 'retired') AS status, event_time AS since,
        coalesce(held_by, suppressed_by) AS withheld_by, held_by IS NOT NULL AS held
    FROM node_advisories WHERE announced_at IS NULL AND coalesce(held_by, suppressed_by) IS NOT NULL
        AND event IN ('timeout', 'expire') AND undone_at IS NULL
    """
#: The number of flapping nodes and of unannounced silent nodes at the sites of this installation.
RULE_COUNTS: Final = f"""
    SELECT a.name, a.stream, count(*) FILTER (f.flapping) AS flapping, count(*) FILTER (w.held) AS held,
        count(*) FILTER (NOT w.held) AS suppressed
    FROM node_availability AS a LEFT JOIN ({FLAPS}) AS f USING (name, stream, node)
    LEFT JOIN ({WITHHELD}) AS w ON (w.name, w.stream, w.node, w.since, w.status)
            = (a.name, a.stream, a.node, a.status_since, a.status)
    WHERE f.flapping OR w.held IS NOT NULL GROUP BY ALL
    """


#: Number of rows of a page: 200 MiB to sort and join them.
PAGE_ROWS: Final = 500_000
_FETCH_ROWS: Final = 2_048
#: Rows of the sample that gives the limits of a page.
_SAMPLED: Final = 100

#: The columns of a query, and its rows as they are fetched.
Fetched = tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]
#: The watermark of the feed that a row of a global table comes from.
_FEED_CLOCK: Final = "(SELECT name || '/' || stream AS feed, watermark FROM replication) AS r"
#: The displayed columns of `global_advisories`, in order.
GLOBAL_ADVISORY_COLUMNS: Final = (
    "event_time",
    "replicator",
    "name",
    "stream",
    "node",
    "event",
    "age_seconds",
    "previous",
    "outage_seconds",
    "late",
    "returned",
    "seen",
    "received_at",
    "transition",
    "source",
    "event_id",
)


@contextmanager
def read_pages(
    home: Path,
    sql: str,
    table: str,
    keys: Sequence[str],
    parameters: Mapping[str, object],
    most: int | None = None,
) -> Iterator[Fetched]:
    """Run a query for one page of a table's nodes after the other, on one publication; yield its columns and rows.

    `sql` has `{page}`, a condition on the columns `keys` and `node` that replaces it, and is ordered by these columns.
    `most` rows need no pages, because DuckDB then keeps only these. Raises the errors of `read_rows`.
    """
    with open_fleet(home, confined=True) as connection:
        pages = _pages(connection, table, keys) if most is None else ["true"]
        limited = sql if most is None else f"{sql} LIMIT {most}"
        answers = (start_query(connection, limited.format(page=page), parameters) for page in pages)
        first = next(answers)
        batches = (
            batch
            for answer in itertools.chain([first], answers)
            for batch in iter(lambda answer=answer: answer.fetch(_FETCH_ROWS), [])  # type: ignore[misc]  # no Callable
        )
        try:
            yield first.columns, itertools.chain.from_iterable(batches)
        finally:
            # DuckDB computes beyond the fetched rows, and closing would wait for it.
            connection.interrupt()


def _pages(connection: duckdb.DuckDBPyConnection, table: str, keys: Sequence[str]) -> list[str]:
    """Return conditions, at least one, that each select about `PAGE_ROWS` rows, in order of keys and node."""
    ((rows,),) = connection.execute(f"SELECT count(*) FROM {table}").fetchall()
    if rows <= PAGE_ROWS:
        return ["true"]
    columns = ", ".join(keys)
    groups = connection.execute(f"SELECT {columns}, count(*) FROM {table} GROUP BY ALL ORDER BY {columns}").fetchall()
    pages, together, size = list[str](), list[str](), 0
    for *values, count in groups:
        key = f"row({', '.join('NULL' if value is None else literal(value) for value in values)})"
        if together and size + count > PAGE_ROWS:
            pages.append(f"row({columns}) IN ({', '.join(together)})")
            together, size = [], 0
        if count > PAGE_ROWS:
            pages += _ranges(connection, table, f"row({columns}) IN ({key})", count)
        else:
            together, size = [*together, key], size + count
    return [*pages, f"row({columns}) IN ({', '.join(together)})"] if together else pages


def _ranges(connection: duckdb.DuckDBPyConnection, table: str, condition: str, count: int) -> Iterator[str]:
    """Yield conditions for ranges of the nodes of one key; a sample gives their limits."""
    number = -(-count // PAGE_ROWS)
    sample = connection.execute(
        f"SELECT node FROM (SELECT node FROM {table} WHERE {condition}) USING SAMPLE {_SAMPLED * number} ROWS"
    ).fetchall()
    nodes = sorted(node for (node,) in sample)
    limits = [literal(node) for node in dict.fromkeys(nodes[len(nodes) * part // number] for part in range(1, number))]
    for first, after in itertools.pairwise(["", *limits, ""]):
        from_first, to_after = first and f" AND node >= {first}", after and f" AND node < {after}"
        yield f"{condition}{from_first}{to_after}"


def ask(home: Path, sql: str, parameters: Mapping[str, object] | None = None) -> Rows:
    """Run one SELECT on the published tables of a home, without access to other data.

    Raises ConfigurationError if it is not one SELECT or is invalid.
    """
    with open_fleet(home, confined=True) as connection:
        return read_rows(connection, sql, parameters or ())


# ------------------------------------------------------------------------------------------ nodes of this installation


def nodes(
    home: Path, *, labels: Sequence[str] | None, status: str | None, silent_for: float | None, like: str | None
) -> AbstractContextManager[Fetched]:
    """Read the nodes of some streams (`name/stream`; None: all) in order; `silent_for` is in seconds."""
    sql = f"""
        SELECT a.name, a.stream, a.node, a.status, age_seconds, a.last_seen, a.status_since, a.first_seen,
            l.last_copied, l.copied_bytes, l.last_sequence, a.class, coalesce(f.flapping, false) AS flapping,
            w.withheld_by
        FROM (SELECT * FROM node_availability WHERE {{page}}) AS a
        JOIN (SELECT name, stream, watermark FROM replication) AS r USING (name, stream)
        LEFT JOIN (SELECT * FROM last_seen_nodes WHERE {{page}}) AS l USING (name, stream, node)
        LEFT JOIN ({FLAPS}) AS f USING (name, stream, node)
        LEFT JOIN ({WITHHELD}) AS w ON (w.name, w.stream, w.node, w.since, w.status)
            = (a.name, a.stream, a.node, a.status_since, a.status),
        LATERAL (SELECT greatest(0, (epoch_us(r.watermark) - epoch_us(a.last_seen)) / 1e6) AS age_seconds)
        WHERE ($labels IS NULL OR list_contains($labels, a.name || '/' || a.stream))
            AND ($status IS NULL OR a.status = $status)
            AND ($silent_for IS NULL OR age_seconds >= $silent_for)
            AND ($like IS NULL OR a.node GLOB $like)
        ORDER BY a.name, a.stream, a.node
    """
    wanted = {"labels": labels, "status": status, "silent_for": silent_for, "like": like}
    return read_pages(home, sql, "node_availability", ("name", "stream"), wanted)


def node_states(home: Path, node: str) -> Rows:
    """Return a node's state at every stream that tracks it; the first two columns are name and stream."""
    sql = f"""
        SELECT a.name, a.stream, a.node, a.status,
            greatest(0, (epoch_us(r.watermark) - epoch_us(a.last_seen)) / 1e6) AS age_seconds,
            a.last_seen, a.status_since, a.first_seen, l.last_copied, l.copied_bytes, l.last_sequence,
            retired.retired_at, retired.times_retired, a.class, coalesce(f.flapping, false) AS flapping,
            w.withheld_by
        FROM node_availability AS a
        JOIN (SELECT name, stream, watermark FROM replication) AS r USING (name, stream)
        LEFT JOIN last_seen_nodes AS l USING (name, stream, node)
        LEFT JOIN retired_nodes AS retired USING (name, stream, node)
        LEFT JOIN ({FLAPS}) AS f USING (name, stream, node)
        LEFT JOIN ({WITHHELD}) AS w ON (w.name, w.stream, w.node, w.since, w.status)
            = (a.name, a.stream, a.node, a.status_since, a.status)
        WHERE a.node = $node ORDER BY a.name, a.stream
    """
    return ask(home, sql, {"node": node})


def node_history(home: Path, node: str) -> Rows:
    """Return a node's transitions in order; the first two columns are name and stream."""
    sql = """
        SELECT name, stream, transition, event, event_time, previous, age_seconds, outage_seconds, late, returned,
            published_at, suppressed_by, held_by, announced_at
        FROM node_advisories WHERE node = $node ORDER BY name, stream, transition
    """
    return ask(home, sql, {"node": node})


def newest_nodes(home: Path, name: str, stream: str, limit: int) -> list[tuple[str, str | None]]:
    """Return the nodes of a stream that reported last, retired or not, each with its class."""
    sql = """
        SELECT node, class FROM node_availability WHERE name = $name AND stream = $stream
        ORDER BY last_seen DESC, node LIMIT $limit
    """
    return [(row[0], row[1]) for row in ask(home, sql, {"name": name, "stream": stream, "limit": limit}).values]


def node_snapshots(home: Path, node: str) -> Rows:
    """Return a node's newest copied message of each stream.

    Raises ConfigurationError if their Parquet files no longer exist.
    """
    sql = """
        SELECT name, stream, stored_at, subject, payload_bytes, payload, metadata
        FROM node_snapshots WHERE node = $node ORDER BY name, stream
    """
    return ask(home, sql, {"node": node})


def similar_nodes(home: Path, name: str) -> list[str]:
    """Return at most three nodes with similar names, the most similar first."""
    sql = """
        SELECT DISTINCT node, jaro_winkler_similarity(lower(node), lower($node)) AS likeness
        FROM (SELECT node FROM node_availability UNION SELECT node FROM global_availability)
        WHERE likeness > 0.8 OR contains(lower(node), lower($node)) ORDER BY likeness DESC, node LIMIT 3
    """
    return [row[0] for row in ask(home, sql, {"node": name}).values]


def advisories(home: Path, *, since: float | None, node: str | None, event: str | None) -> Rows:
    """Return the transitions in order of time; `since` is in seconds before the watermark. The last column is the id."""
    sql = """
        SELECT a.event_time, a.name, a.stream, a.node, a.event, a.age_seconds, a.previous, a.outage_seconds, a.late,
            a.returned, a.seen, a.detected_at, a.transition, a.published_at,
            a.suppressed_by, a.held_by, a.event_id
        FROM node_advisories AS a JOIN (SELECT name, stream, watermark FROM replication) AS r USING (name, stream)
        WHERE ($since IS NULL OR epoch_us(r.watermark) - epoch_us(a.event_time) <= $since * 1e6)
            AND ($node IS NULL OR a.node = $node)
            AND ($event IS NULL OR a.event = $event)
        ORDER BY a.event_time, a.name, a.stream, a.node, a.transition
    """
    return ask(home, sql, {"since": since, "node": node, "event": event})


def published_streams(home: Path) -> list[tuple[str, str]]:
    """Return name and stream of every entry with published rows, configured or not."""
    return [(name, stream) for name, stream in ask(home, "SELECT name, stream FROM replication ORDER BY ALL").values]


def freshness(home: Path) -> list[tuple[str, datetime, datetime | None]]:
    """Return for every entry with rows (`name/stream`) the time of its last publication or run end, and its watermark."""
    sql = "SELECT name || '/' || stream, as_of, watermark FROM replication WHERE as_of IS NOT NULL ORDER BY ALL"
    return [(label, as_of, watermark) for label, as_of, watermark in ask(home, sql).values]


def recovery_ages(home: Path) -> dict[str, float]:
    """Return by stream (`name/stream`) the median silence in seconds before a recovery.

    Only streams where most nodes recovered within a day are included.
    """
    sql = """
        SELECT a.name || '/' || a.stream, median(a.age_seconds)
        FROM node_advisories AS a JOIN (SELECT name, stream, watermark FROM replication) AS r USING (name, stream)
        WHERE a.event = 'recover' AND a.detected_at > r.watermark - INTERVAL 1 DAY GROUP BY a.name, a.stream
        HAVING count(DISTINCT a.node) * 2 > (SELECT count(*) FROM node_availability AS all_nodes
            WHERE (all_nodes.name, all_nodes.stream) = (a.name, a.stream))
    """
    return dict(ask(home, sql).values)


# --------------------------------------------------------------------------------- nodes of all sites, from the feeds


def global_nodes(
    home: Path,
    *,
    site: str | None,
    stream: str | None,
    status: str | None,
    silent_for: float | None,
    like: str | None,
    limit: int | None = None,
) -> AbstractContextManager[Fetched]:
    """Read the nodes of all sites in order, ages against the feed's watermark; `site` is a name or a replicator."""
    sql = f"""
        SELECT a.replicator, a.name, a.stream, a.node, a.status, age_seconds, a.last_seen, a.status_since, a.event_time,
            a.received_at, a.source, blind
        FROM (SELECT * FROM global_availability WHERE {{page}}) AS a
        JOIN {_FEED_CLOCK} USING (feed)
        LEFT JOIN (SELECT replicator, name, stream, blind FROM global_summary) AS s ON s.replicator = a.replicator
            AND s.name IS NOT DISTINCT FROM a.name AND s.stream IS NOT DISTINCT FROM a.stream,
        LATERAL (SELECT {_age("r.watermark", "a.last_seen")} AS age_seconds)
        WHERE ($site IS NULL OR $site IN (a.name, a.replicator))
            AND ($stream IS NULL OR a.stream = $stream)
            AND ($status IS NULL OR a.status = $status)
            AND ($silent_for IS NULL OR age_seconds >= $silent_for)
            AND ($like IS NULL OR a.node GLOB $like)
        ORDER BY a.replicator, a.name, a.stream, a.node
    """
    wanted = {"site": site, "stream": stream, "status": status, "silent_for": silent_for, "like": like}
    return read_pages(home, sql, "global_availability", ("replicator", "name", "stream"), wanted, limit)


def global_node_states(home: Path, node: str) -> Rows:
    """Return a node's state at every site that reports it; the first three columns are replicator, name and stream."""
    sql = f"""
        SELECT a.replicator, a.name, a.stream, a.status, {_age("r.watermark", "a.last_seen")} AS age_seconds,
            a.last_seen, a.status_since, a.event_time, a.received_at, a.source, a.feed
        FROM global_availability AS a
        JOIN {_FEED_CLOCK} USING (feed)
        WHERE a.node = $node ORDER BY a.replicator, a.name, a.stream
    """
    return ask(home, sql, {"node": node})


def global_node_history(home: Path, node: str) -> Rows:
    """Return a node's transitions as all sites report them; the first three columns are replicator, name and stream."""
    sql = """
        SELECT replicator, name, stream, transition, event, event_time, previous, age_seconds, outage_seconds, late,
            returned, received_at
        FROM global_advisories WHERE node = $node ORDER BY replicator, name, stream, transition, event_time, event
    """
    return ask(home, sql, {"node": node})


def global_advisories(home: Path, *, since: float | None, node: str | None, event: str | None) -> Rows:
    """Return the transitions of all sites in order of time: columns `GLOBAL_ADVISORY_COLUMNS`."""
    sql = f"""
        SELECT {", ".join(GLOBAL_ADVISORY_COLUMNS)} FROM global_advisories AS a
        JOIN {_FEED_CLOCK} USING (feed)
        WHERE ($since IS NULL OR epoch_us(r.watermark) - epoch_us(a.event_time) <= $since * 1e6)
            AND ($node IS NULL OR a.node = $node)
            AND ($event IS NULL OR a.event = $event)
        ORDER BY a.event_time, a.replicator, a.name, a.stream, a.node, a.transition
    """
    return ask(home, sql, {"since": since, "node": node, "event": event})


def summary(home: Path) -> Rows:
    """Return one row per reported site and stream, with its counts, rates and the age of its heartbeat."""
    sql = f"""
        SELECT s.replicator, s.name, s.stream, s.observer, s.outage, s.up, s.timeout, s.retired, s.new_24h,
            coalesce(h.last_hour, 0) AS advisories_1h, coalesce(h.last_day, 0) AS advisories_24h,
            {_age("s.as_of", "s.last_advisory_at")} AS last_advisory_age_seconds,
            {_age("s.as_of", "s.observer_alive_at")} AS observer_age_seconds,
            s.lag_messages, s.tracked_nodes, s.last_advisory_at, s.observer_alive_at, s.watermark, s.as_of, s.feed,
            k.classes, s.outage_since, n.flapping, n.held, n.suppressed
        FROM global_summary AS s LEFT JOIN (
            SELECT a.replicator, a.name, a.stream,
                count(*) FILTER (a.received_at > r.watermark - INTERVAL 1 HOUR) AS last_hour, count(*) AS last_day
            FROM global_advisories AS a
            JOIN {_FEED_CLOCK} USING (feed)
            WHERE a.received_at > r.watermark - INTERVAL 24 HOUR GROUP BY ALL
        ) AS h ON h.replicator = s.replicator AND h.name IS NOT DISTINCT FROM s.name
            AND h.stream IS NOT DISTINCT FROM s.stream
        LEFT JOIN ({CLASS_COUNTS}) AS k ON k.name = s.name AND k.stream = s.stream
        LEFT JOIN ({RULE_COUNTS}) AS n ON n.name = s.name AND n.stream = s.stream
        ORDER BY s.replicator, s.name, s.stream
    """
    return ask(home, sql)


# ------------------------------------------------------------------------------------------------- the daily tables


def unfinished_dates(home: Path, table: DailyTable) -> list[tuple[date, int]]:
    """Return the dates with rows that are not final, and the time (unix ns) until which their streams are known."""
    sql = f"""
        WITH rest AS (SELECT DISTINCT date, name, stream FROM {table.name} WHERE NOT final), clocks AS ({table.clocks})
        SELECT date, max(epoch_ns(known_until)) FROM rest JOIN clocks
            ON clocks.name IS NOT DISTINCT FROM rest.name AND clocks.stream IS NOT DISTINCT FROM rest.stream
        GROUP BY date HAVING max(known_until) IS NOT NULL ORDER BY date
        """
    return [(when, until_ns) for when, until_ns in ask(home, sql).values]


def day_parameters(day: Day) -> dict[str, object]:
    """Return a day's query parameters: date, first_us, next_us."""
    return {"date": day.date, "first_us": day.first_ns // 1000, "next_us": day.next_ns // 1000}


def _age(now: str, time: str) -> str:
    """Return SQL for the age of a time in seconds, 0 for a time after `now`; NULL if one of them is NULL."""
    return f"CASE WHEN {now} >= {time} THEN (epoch_us({now}) - epoch_us({time})) / 1e6 WHEN {now} < {time} THEN 0.0 END"
