"""The global view in a site's state: what its feeds told of all sites' nodes, and what is published of it.

Here: the tables, the fold of a batch as one statement a table, retention, the queries that make the published rows. Not
here: the rules, whose reference in Python is `domain.availability`; positions and gaps, which a feed has like every
stream (`state`); the file that is published (`fleet`).

A batch is an Arrow table with the columns of `spark.source.ADVISORY_SCHEMA`. All its changes belong into the transaction
that moves the feed's position. Names and streams that an advisory does not tell are "" here and NULL in what is published.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sr_assets.domain.availability import LIFE_CYCLE, STATUS

if TYPE_CHECKING:
    from collections.abc import Iterable

    import duckdb
    import pyarrow as pa

    from sr_assets.domain.availability import Observation

#: What is kept of messages that are no advisories, by all feeds of a configuration together; the rest is counted.
MAX_REJECTS: Final = 10_000
_DAY_NS: Final = 86_400_000_000_000

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS global_nodes (
    feed VARCHAR, replicator VARCHAR, name VARCHAR, stream VARCHAR, node VARCHAR, transition BIGINT, event_ns BIGINT,
    cycle TINYINT, seen_ns BIGINT, origin VARCHAR, received_ns BIGINT);
CREATE TABLE IF NOT EXISTS global_history (
    feed VARCHAR, event_id VARCHAR, replicator VARCHAR, name VARCHAR, stream VARCHAR, node VARCHAR, cycle TINYINT,
    event_ns BIGINT, received_ns BIGINT, seen_ns BIGINT, age_seconds DOUBLE, previous VARCHAR, transition BIGINT,
    late BOOLEAN, returned BOOLEAN, outage_seconds DOUBLE, origin VARCHAR);
CREATE TABLE IF NOT EXISTS global_sites (
    feed VARCHAR, replicator VARCHAR, name VARCHAR, stream VARCHAR, advised_ns BIGINT, observed_ns BIGINT,
    next_within_ns BIGINT, watermark_ns BIGINT, position BIGINT, lag_messages BIGINT, nodes BIGINT);
CREATE TABLE IF NOT EXISTS global_rejects (
    feed VARCHAR, sequence BIGINT, received_ns BIGINT, subject VARCHAR, payload_bytes BIGINT, reason VARCHAR,
    field VARCHAR, excerpt VARCHAR);
"""
_KEY: Final = ("replicator", "name", "stream", "node")
_TOLD: Final = ("transition", "event_ns", "cycle", "seen_ns", "origin", "received_ns")


def _same(left: str, right: str, columns: Iterable[str]) -> str:
    return " AND ".join(f"{left}.{column} = {right}.{column}" for column in columns)


def _rank(table: str) -> str:
    """The order that decides, as in `domain.availability`; of equals the one received first."""
    return (
        f"({table}.transition, {table}.event_ns, {table}.cycle, coalesce({table}.seen_ns, -1), {table}.origin,"
        f" -{table}.received_ns)"
    )


_FOLD_NODES: Final = f"""
MERGE INTO global_nodes AS known USING (
    SELECT {", ".join(_KEY)}, transition, event_ns, event_code AS cycle, seen_ns, origin, stored_ns AS received_ns
    FROM told WHERE kind = 'advisory' QUALIFY 1 = row_number() OVER (PARTITION BY {", ".join(_KEY)} ORDER BY
        transition DESC, event_ns DESC, event_code DESC, coalesce(seen_ns, -1) DESC, origin DESC, stored_ns)
) AS fresh ON {_same("known", "fresh", _KEY)}
WHEN MATCHED AND {_rank("fresh")} > {_rank("known")} THEN UPDATE SET
    feed = $feed, {", ".join(f"{column} = fresh.{column}" for column in _TOLD)}
WHEN NOT MATCHED THEN INSERT (feed, {", ".join((*_KEY, *_TOLD))})
    VALUES ($feed, {", ".join(f"fresh.{column}" for column in (*_KEY, *_TOLD))})
"""
# Repetitions are looked for among the history's rows of the same time, so that of a long one little is read.
_ADD_HISTORY: Final = f"""
INSERT INTO global_history BY NAME
SELECT $feed AS feed, event_id, {", ".join(_KEY)}, event_code AS cycle, event_ns, stored_ns AS received_ns, seen_ns, age_seconds,
    previous, transition, late, returned, outage_seconds, origin
FROM told WHERE kind = 'advisory' AND NOT EXISTS (
    SELECT 1 FROM global_history AS known
    WHERE known.event_ns BETWEEN $first_ns AND $last_ns AND {_same("known", "told", ("event_ns", "event_id", *_KEY))})
QUALIFY 1 = row_number() OVER (PARTITION BY event_ns, event_id, {", ".join(_KEY)} ORDER BY stored_ns, sequence)
"""
_NOTE_SITES: Final = """
MERGE INTO global_sites AS known USING (
    SELECT replicator, name, stream, max(stored_ns) AS advised_ns FROM told WHERE kind = 'advisory' GROUP BY ALL
) AS fresh ON known.replicator = fresh.replicator AND known.name = fresh.name AND known.stream = fresh.stream
WHEN MATCHED THEN UPDATE SET feed = $feed, advised_ns = greatest(known.advised_ns, fresh.advised_ns)
WHEN NOT MATCHED THEN INSERT (feed, replicator, name, stream, advised_ns)
    VALUES ($feed, fresh.replicator, fresh.name, fresh.stream, fresh.advised_ns)
"""
_NOTE_OBSERVATION: Final = """
MERGE INTO global_sites AS known USING (
    SELECT unnest([$replicator]) AS replicator, $name AS name, $stream AS stream, $received_ns::BIGINT AS observed_ns
) AS fresh ON known.replicator = fresh.replicator AND known.name = fresh.name AND known.stream = fresh.stream
WHEN MATCHED AND fresh.observed_ns >= coalesce(known.observed_ns, 0) THEN UPDATE SET
    feed = $feed, observed_ns = fresh.observed_ns, next_within_ns = $next_within_ns, watermark_ns = $watermark_ns,
    position = $position, lag_messages = $lag_messages, nodes = $nodes
WHEN NOT MATCHED THEN INSERT
    (feed, replicator, name, stream, observed_ns, next_within_ns, watermark_ns, position, lag_messages, nodes)
    VALUES ($feed, fresh.replicator, fresh.name, fresh.stream, fresh.observed_ns, $next_within_ns, $watermark_ns,
        $position, $lag_messages, $nodes)
"""


class GlobalTables:
    """The tables of the global view; what changes them is to be called inside a transaction of the site's state."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Work on an open state."""
        self._connection = connection

    def fold(self, feed: str, told: pa.Table) -> None:
        """Take a batch in: nodes, history, when each site told something; and what is kept apart."""
        self._connection.register("told", told)
        try:
            span = self._connection.execute(
                "SELECT min(event_ns), max(event_ns) FROM told WHERE kind = 'advisory'"
            ).fetchone()
            if span is not None and span[0] is not None:
                self._connection.execute(_FOLD_NODES, {"feed": feed})
                self._connection.execute(_ADD_HISTORY, {"feed": feed, "first_ns": span[0], "last_ns": span[1]})
                self._connection.execute(_NOTE_SITES, {"feed": feed})
            self._connection.execute(
                "INSERT INTO global_rejects BY NAME SELECT $feed AS feed, sequence, stored_ns AS received_ns, subject,"
                " payload_bytes, reason, field, excerpt FROM told WHERE reason IS NOT NULL ORDER BY sequence DESC"
                " LIMIT $most",
                {"feed": feed, "most": MAX_REJECTS},
            )
        finally:
            self._connection.unregister("told")

    def observe(self, feed: str, observation: Observation, received_ns: int) -> None:
        """Take in what a site says of itself; the word received last counts."""
        self._connection.execute(_NOTE_OBSERVATION, {"feed": feed, "received_ns": received_ns, **observation._asdict()})

    def limit_rejects(self, feed: str, most: int) -> None:
        """Keep the newest of what a feed keeps apart."""
        self._connection.execute(
            "DELETE FROM global_rejects WHERE feed = $feed AND sequence < (SELECT sequence FROM global_rejects WHERE feed"
            " = $feed ORDER BY sequence DESC LIMIT 1 OFFSET $last)",
            {"feed": feed, "last": most - 1},
        )

    def forget_before(self, feed: str, time_ns: int) -> None:
        """Drop a feed's history, and what it keeps apart, received before a time."""
        for table in ("global_history", "global_rejects"):
            self._connection.execute(f"DELETE FROM {table} WHERE feed = ? AND received_ns < ?", [feed, time_ns])

    def rejects_since(self, feed: str, time_ns: int) -> int:
        """Return how many of a feed's messages, of those kept, were kept apart since a time."""
        row = self._connection.execute(
            "SELECT count(*) FROM global_rejects WHERE feed = ? AND received_ns > ?", [feed, time_ns]
        ).fetchone()
        return int(row[0]) if row else 0

    def next_silence(self, feed: str, after_ns: int | None) -> int | None:
        """Return when the next site will have been silent for longer than it promised, of those that are not yet."""
        row = self._connection.execute(
            "SELECT min(observed_ns + next_within_ns) FROM global_sites WHERE feed = ? AND observed_ns + next_within_ns"
            " >= ?",
            [feed, after_ns or 0],
        ).fetchone()
        return None if row is None else row[0]

    def blind_sites(self, feed: str, now_ns: int | None) -> list[tuple[str, int]]:
        """Return which sites, by name and stream, have been silent for longer than they promised, and when each last spoke."""
        return self._connection.execute(
            "SELECT coalesce(nullif(name, ''), replicator) || coalesce('/' || nullif(stream, ''), ''), observed_ns"
            " FROM global_sites WHERE feed = ? AND observed_ns + next_within_ns < ? ORDER BY ALL",
            [feed, now_ns],
        ).fetchall()


def at(column: str) -> str:
    """Return how a column of unix nanoseconds is published."""
    return f"make_timestamptz({column} // 1000)"


_STATUS: Final = f"{[status.value for status in STATUS]}[{{}}.cycle + 1]"
_EVENT: Final = f"{[event.value for event in LIFE_CYCLE]}[{{}}.cycle + 1]"
_FEED: Final = "$name || '/' || feed"
_BLIND: Final = "coalesce(observed_ns + next_within_ns < watermarks.now_ns, false)"


def _site(table: str) -> str:
    return f"{table}.replicator, nullif({table}.name, ''), nullif({table}.stream, '')"


#: Published table → (columns, query over the state's tables; `$name` is the site whose feeds these are). Column `feed` is
#: `name/stream` of the feed.
PUBLISHED: Final[dict[str, tuple[str, str]]] = {
    "global_availability": (
        (
            "replicator VARCHAR, name VARCHAR, stream VARCHAR, node VARCHAR, status VARCHAR, status_since TIMESTAMPTZ,"
            " last_seen TIMESTAMPTZ, event_time TIMESTAMPTZ, received_at TIMESTAMPTZ, source VARCHAR, feed VARCHAR"
        ),
        (
            f"SELECT {_site('told')}, node, {_STATUS.format('told')}, {at('event_ns')},"
            f" {at('CASE WHEN cycle IN (0, 2) THEN event_ns ELSE seen_ns END')}, {at('event_ns')},"
            f" {at('received_ns')}, origin, {_FEED} FROM global_nodes AS told WHERE true"
        ),
    ),
    "global_advisories": (
        (
            "event_id VARCHAR, replicator VARCHAR, name VARCHAR, stream VARCHAR, node VARCHAR, event VARCHAR, event_time"
            " TIMESTAMPTZ, received_at TIMESTAMPTZ, seen TIMESTAMPTZ, age_seconds DOUBLE, previous VARCHAR, transition"
            " BIGINT, late BOOLEAN, returned BOOLEAN, outage_seconds DOUBLE, source VARCHAR, feed VARCHAR"
        ),
        (
            f"SELECT event_id, {_site('told')}, node, {_EVENT.format('told')}, {at('event_ns')},"
            f" {at('received_ns')}, {at('seen_ns')}, age_seconds, previous, nullif(transition, 0), late, returned,"
            f" outage_seconds, origin, {_FEED} FROM global_history AS told WHERE true"
        ),
    ),
    "global_summary": (
        (
            "replicator VARCHAR, name VARCHAR, stream VARCHAR, nodes BIGINT, up BIGINT, timeout BIGINT, retired BIGINT,"
            " new_24h BIGINT, last_advisory_at TIMESTAMPTZ, blind BOOLEAN, observer VARCHAR, observer_alive_at TIMESTAMPTZ,"
            " watermark TIMESTAMPTZ, position BIGINT, lag_messages BIGINT, tracked_nodes BIGINT, as_of TIMESTAMPTZ, feed VARCHAR"
        ),
        (
            f"SELECT {_site('site')}, coalesce(up, 0) + coalesce(timeout, 0), coalesce(up, 0), coalesce(timeout, 0),"
            " coalesce(retired, 0), coalesce(new_24h, 0),"
            f" {at('advised_ns')}, {_BLIND},"
            f" CASE WHEN {_BLIND} THEN 'blind' WHEN observed_ns IS NULL THEN 'unwatched' ELSE 'ok' END,"
            f" {at('observed_ns')}, {at('site.watermark_ns')}, position, lag_messages, site.nodes,"
            f" {at('watermarks.now_ns')}, {_FEED} FROM global_sites AS site"
            " JOIN (SELECT stream AS feed, watermark_ns AS now_ns FROM streams) AS watermarks USING (feed) LEFT JOIN"
            " (SELECT replicator, name, stream, count(*) FILTER (cycle IN (0, 2)) AS up, count(*) FILTER (cycle = 1) AS"
            " timeout, count(*) FILTER (cycle = 3) AS retired FROM global_nodes GROUP BY ALL) AS counted ON"
            f" {_same('counted', 'site', _KEY[:3])} LEFT JOIN (SELECT replicator, name, told.stream, count(DISTINCT node)"
            " AS new_24h FROM global_history AS told JOIN streams ON streams.stream = told.feed WHERE cycle = 0 AND"
            f" event_ns > streams.watermark_ns - {_DAY_NS} GROUP BY ALL) AS recent ON"
            f" {_same('recent', 'site', _KEY[:3])} WHERE true"
        ),
    ),
    "global_rejects": (
        (
            "feed VARCHAR, sequence BIGINT, received_at TIMESTAMPTZ, subject VARCHAR, payload_bytes BIGINT, reason"
            " VARCHAR, field VARCHAR, excerpt VARCHAR"
        ),
        (
            f"SELECT {_FEED}, sequence, {at('received_ns')}, subject, payload_bytes, reason, field, excerpt FROM"
            " global_rejects AS told WHERE true"
        ),
    ),
}
#: View → its query over the published tables. A node that left a site, retired there, does not report there any more.
VIEWS: Final[dict[str, str]] = {
    "v_nodes_at_several_sites": (
        "SELECT node, count(DISTINCT (replicator, coalesce(name, replicator))) AS sites, list(DISTINCT coalesce(name,"
        " replicator) ORDER BY coalesce(name, replicator)) AS names, max(last_seen) AS last_seen FROM"
        " global_availability WHERE status <> 'retired' GROUP BY node HAVING sites > 1"
    ),
}
