"""The global view in a site's state: the nodes of all sites as the site's feeds report them.

A batch is an Arrow table with the columns of `range_rows.Advisories`, folded by one statement per table. Apply
all its changes in the transaction that moves the feed's position. A name or stream that an advisory omits is "" here
and NULL in the published tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from sr_assets.domain.received import BLIND_AFTER, RANK, Observation, Reject, SiteNotice

if TYPE_CHECKING:
    import pyarrow as pa

    from sr_assets.adapters.state.cached_connection import StateConnection


#: Limit of stored rejected messages, for all feeds of a configuration together; more are only counted.
MAX_REJECTS: Final = 10_000

_KEY: Final = ("replicator", "name", "stream", "node")
#: Deadline of the next heartbeat of a site that sent one.
_DUE: Final = " + ".join(BLIND_AFTER)
_ADD_REJECTS: Final = """
INSERT INTO global_rejects BY NAME
SELECT $feed AS feed, sequence, stored_ns AS received_ns, subject, payload_bytes, reason, field, excerpt
FROM advisories WHERE reason IS NOT NULL ORDER BY sequence DESC LIMIT $most
"""
_LIMIT_REJECTS: Final = """
DELETE FROM global_rejects WHERE feed = $feed AND sequence < (
    SELECT sequence FROM global_rejects WHERE feed = $feed ORDER BY sequence DESC LIMIT 1 OFFSET $last)
"""
_LIMITED: Final = f"""
SELECT advisories.* REPLACE (
    if(cause IS NULL, kind, 'nothing') AS kind, if(cause IS NULL, event_code, NULL) AS event_code,
    coalesce(cause, reason) AS reason, coalesce(wrong, field) AS field,
    if(cause IS NULL, excerpt, concat_ws('/', {", ".join(_KEY)})) AS excerpt)
FROM advisories LEFT JOIN beyond USING (sequence) ORDER BY sequence
"""
_NEXT_SILENCE: Final = f"SELECT min({_DUE}) FROM global_sites WHERE feed = ? AND {_DUE} >= ?"
#: Display name of a site; a Stream Replicator's site has no name.
_SITE_NAME: Final = "coalesce(nullif(name, ''), replicator)"
_OF_A_SITE: Final = f"""
    {_SITE_NAME} = $site AND ($stream IS NULL OR stream = $stream) AND ($replicator IS NULL OR replicator = $replicator)
"""


def blind(now: str) -> str:
    """Return the condition on `global_sites` for a site that is blind at the time of the expression `now`.

    Its heartbeat is overdue. A site that never sent one, or announced no next one, is never blind.
    """
    return f"coalesce({_DUE} < {now}, false)"


def same_key(left: str, right: str, columns: Iterable[str] = _KEY) -> str:
    """Return the condition that rows of two tables have the same key, by default the same node."""
    return " AND ".join(f"{left}.{column} = {right}.{column}" for column in columns)


def _rank(table: str) -> list[str]:
    """Return the expressions that rank a table's rows, each higher for the winning row."""
    special = {"seen_ns": f"coalesce({table}.seen_ns, -1)", "received_ns": f"-{table}.received_ns"}
    return [special.get(column, f"{table}.{column}") for column in RANK]


_FOLD_NODES: Final = f"""
MERGE INTO global_nodes AS stored USING (
    SELECT {", ".join((*_KEY, *RANK))}
    FROM (SELECT *, stored_ns AS received_ns FROM advisories WHERE kind = 'advisory') AS candidate
    QUALIFY 1 = row_number() OVER (
        PARTITION BY {", ".join(_KEY)} ORDER BY {", ".join(f"{value} DESC" for value in _rank("candidate"))})
) AS fresh ON {same_key("stored", "fresh")}
WHEN MATCHED AND ({", ".join(_rank("fresh"))}) > ({", ".join(_rank("stored"))}) THEN UPDATE SET
    feed = $feed, {", ".join(f"{column} = fresh.{column}" for column in RANK)}
WHEN NOT MATCHED THEN INSERT (feed, {", ".join((*_KEY, *RANK))})
    VALUES ($feed, {", ".join(f"fresh.{column}" for column in (*_KEY, *RANK))})
"""
# Only rows of the same time can repeat an advisory, so this reads little of a long history.
_ADD_HISTORY: Final = f"""
INSERT INTO global_history BY NAME
SELECT $feed AS feed, event_id, {", ".join(_KEY)}, event_code, event_ns, stored_ns AS received_ns, seen_ns, age_seconds,
    previous, epoch_ns, transition, late, returned, outage_seconds, origin
FROM advisories WHERE kind = 'advisory' AND NOT EXISTS (
    SELECT 1 FROM global_history AS stored
    WHERE stored.event_ns BETWEEN $first_ns AND $last_ns
        AND {same_key("stored", "advisories", ("event_ns", "event_id", *_KEY))})
QUALIFY 1 = row_number() OVER (PARTITION BY event_ns, event_id, {", ".join(_KEY)} ORDER BY stored_ns, sequence)
"""
_NOTE_SITES: Final = f"""
MERGE INTO global_sites AS stored USING (
    SELECT replicator, name, stream, max(stored_ns) AS advised_ns FROM advisories WHERE kind = 'advisory' GROUP BY ALL
) AS fresh ON {same_key("stored", "fresh", _KEY[:3])}
WHEN MATCHED THEN UPDATE SET feed = $feed, advised_ns = greatest(stored.advised_ns, fresh.advised_ns)
WHEN NOT MATCHED THEN INSERT (feed, replicator, name, stream, advised_ns)
    VALUES ($feed, fresh.replicator, fresh.name, fresh.stream, fresh.advised_ns)
"""
_NOTE_OBSERVATION: Final = f"""
MERGE INTO global_sites AS stored USING (
    SELECT unnest([$replicator]) AS replicator, $name AS name, $stream AS stream, $received_ns::BIGINT AS observed_ns
) AS fresh ON {same_key("stored", "fresh", _KEY[:3])}
WHEN MATCHED AND fresh.observed_ns >= coalesce(stored.observed_ns, 0) THEN UPDATE SET
    feed = $feed, observed_ns = fresh.observed_ns, next_within_ns = $next_within_ns, watermark_ns = $watermark_ns,
    position = $position, lag_messages = $lag_messages, nodes = $nodes
WHEN NOT MATCHED THEN INSERT
    (feed, replicator, name, stream, observed_ns, next_within_ns, watermark_ns, position, lag_messages, nodes)
    VALUES ($feed, fresh.replicator, fresh.name, fresh.stream, fresh.observed_ns, $next_within_ns, $watermark_ns,
        $position, $lag_messages, $nodes)
"""
_NOTE_OUTAGE: Final = f"""
MERGE INTO global_sites AS stored USING (
    SELECT $replicator AS replicator, $name AS name, $stream AS stream, $event AS outage, $event_ns::BIGINT AS outage_ns
) AS fresh ON {same_key("stored", "fresh", _KEY[:3])}
WHEN MATCHED AND fresh.outage_ns >= coalesce(stored.outage_ns, 0) THEN UPDATE SET
    feed = $feed, outage = fresh.outage, outage_ns = fresh.outage_ns
WHEN NOT MATCHED THEN INSERT (feed, replicator, name, stream, outage, outage_ns)
    VALUES ($feed, fresh.replicator, fresh.name, fresh.stream, fresh.outage, fresh.outage_ns)
"""


def _beyond(key: tuple[str, ...], table: str, most: str) -> str:
    """Return the query of a batch's new keys beyond the limit of their site; the first ones of the batch have the room."""
    columns = ", ".join(key)
    return f"""
        SELECT {columns} FROM (SELECT {columns}, min(sequence) AS first FROM spoken GROUP BY ALL)
        ANTI JOIN {table} USING ({columns})
        LEFT JOIN (SELECT replicator, name, count(*) AS known FROM {table} GROUP BY ALL) USING (replicator, name)
        QUALIFY row_number() OVER (PARTITION BY replicator, name ORDER BY first) + coalesce(known, 0) > {most}
        """


# A site names its streams and nodes, and each is a row for ever.
_BEYOND_LIMITS: Final = f"""
WITH spoken AS (FROM advisories WHERE replicator IS NOT NULL),
    streams_beyond AS MATERIALIZED ({_beyond(_KEY[:3], "global_sites", "$most_streams")}),
    nodes_beyond AS MATERIALIZED ({{nodes}})
SELECT sequence, '{Reject.TOO_MANY_STREAMS}' AS cause, 'stream' AS wrong
FROM spoken SEMI JOIN streams_beyond USING ({", ".join(_KEY[:3])})
UNION ALL
SELECT sequence, '{Reject.TOO_MANY_NODES}', 'value'
FROM spoken SEMI JOIN nodes_beyond USING ({", ".join(_KEY)})
"""
_NODES_BEYOND: Final = f"""
    WITH spoken AS (FROM advisories ANTI JOIN streams_beyond USING ({", ".join(_KEY[:3])}) WHERE kind = 'advisory')
    {_beyond(_KEY, "global_nodes", "$most_nodes")}
"""
_BLIND_SITES: Final = f"""
SELECT coalesce(nullif(name, ''), replicator) || coalesce('/' || nullif(stream, ''), ''), observed_ns
FROM global_sites WHERE feed = $feed AND {blind("$now_ns")} ORDER BY ALL
"""


class ReportedSite(NamedTuple):
    """A site that a feed reports: its replicator, name and one of its streams ("" if the advisories omit it)."""

    replicator: str
    name: str
    stream: str


class GlobalTables:
    """The tables of the global view. Call the methods that change them inside a transaction of the site's state."""

    def __init__(self, connection: StateConnection) -> None:
        self._connection = connection

    def fold(self, feed: str, advisories: pa.Table) -> None:
        """Fold a batch into the nodes, the history, each site's last advisory, and the rejected messages."""
        self._connection.register("advisories", advisories)
        try:
            ((first_ns, last_ns),) = self._connection.execute(
                "SELECT min(event_ns), max(event_ns) FROM advisories WHERE kind = 'advisory'"
            ).fetchall()
            if first_ns is not None:
                self._connection.execute(_FOLD_NODES, {"feed": feed})
                self._connection.execute(_ADD_HISTORY, {"feed": feed, "first_ns": first_ns, "last_ns": last_ns})
                self._connection.execute(_NOTE_SITES, {"feed": feed})
            self._connection.execute(_ADD_REJECTS, {"feed": feed, "most": MAX_REJECTS})
        finally:
            self._connection.unregister("advisories")

    def limited(self, advisories: pa.Table, most_streams: int, most_nodes: int) -> pa.Table:
        """Return a batch in which the messages about more streams and nodes of a site than these are rejected."""
        self._connection.register("advisories", advisories)
        try:
            # Counting the nodes of each site reads all of them, which only a table near the limit needs.
            ((nodes,),) = self._connection.execute("SELECT count(*) FROM global_nodes").fetchall()
            near = nodes + advisories.num_rows > most_nodes
            query = _BEYOND_LIMITS.format(
                nodes=_NODES_BEYOND if near else f"SELECT {', '.join(_KEY)} FROM spoken LIMIT 0"
            )
            limits = {"most_streams": most_streams} | ({"most_nodes": most_nodes} if near else {})
            beyond = self._connection.sql(query, params=limits).to_arrow_table()
            if not beyond.num_rows:
                return advisories
            self._connection.register("beyond", beyond)
            return self._connection.sql(_LIMITED).to_arrow_table()
        finally:
            self._connection.unregister("advisories")
            self._connection.unregister("beyond")

    def observe(self, feed: str, observation: Observation, received_ns: int) -> None:
        """Record a site's heartbeat; the one received last counts."""
        self._connection.execute(_NOTE_OBSERVATION, {"feed": feed, "received_ns": received_ns, **observation._asdict()})

    def note_outage(self, feed: str, notice: SiteNotice) -> None:
        """Record a site event; the latest one counts."""
        self._connection.execute(_NOTE_OUTAGE, {"feed": feed, **notice._asdict()})

    def limit_rejects(self, feed: str, most: int) -> None:
        """Keep only a feed's newest rejected messages."""
        self._connection.execute(_LIMIT_REJECTS, {"feed": feed, "last": most - 1})

    def forget_before(self, feed: str, time_ns: int) -> None:
        """Delete a feed's history and rejected messages received before a time."""
        for table in ("global_history", "global_rejects"):
            self._connection.execute(f"DELETE FROM {table} WHERE feed = ? AND received_ns < ?", [feed, time_ns])

    def forget_retired(self, feed: str, before_ns: int) -> None:
        """Delete a feed's nodes that retired before a time."""
        self._connection.execute(
            "DELETE FROM global_nodes WHERE feed = ? AND event_code = 3 AND event_ns < ?", [feed, before_ns]
        )

    def reported_sites(self) -> list[ReportedSite]:
        """Return the sites, with each of their streams, that any feed reports."""
        rows = self._connection.execute(
            f"SELECT DISTINCT replicator, {_SITE_NAME}, stream FROM global_sites ORDER BY ALL"
        ).fetchall()
        return [ReportedSite(*row) for row in rows]

    def forget_site(self, site: str, stream: str | None, replicator: str | None) -> dict[str, int]:
        """Delete every feed's rows of a site, or of one of its streams; return the number of rows by kind."""
        values = {"site": site, "stream": stream, "replicator": replicator}
        tables = {"nodes": "global_nodes", "advisories": "global_history", "summaries": "global_sites"}
        return {noun: self._count(f"DELETE FROM {table} WHERE {_OF_A_SITE}", values) for noun, table in tables.items()}

    def forget_feed(self, feed: str) -> int:
        """Delete all rows of a feed; return their number."""
        tables = ("global_nodes", "global_history", "global_sites", "global_rejects")
        return sum(self._count(f"DELETE FROM {table} WHERE feed = $feed", {"feed": feed}) for table in tables)

    def _count(self, statement: str, values: dict[str, str | None] | dict[str, str]) -> int:
        """Execute a DELETE and return the number of deleted rows."""
        return int(self._connection.execute(statement, values).fetchall()[0][0])

    def count_nodes(self, feed: str) -> int:
        """Return the number of nodes of a feed; a node of several sites counts once for each."""
        rows = self._connection.execute("SELECT count(*) FROM global_nodes WHERE feed = ?", [feed]).fetchall()
        return int(rows[0][0])

    def rejects_since(self, feed: str, time_ns: int) -> int:
        """Return the number of a feed's stored messages that were rejected since a time."""
        ((count,),) = self._connection.execute(
            "SELECT count(*) FROM global_rejects WHERE feed = ? AND received_ns > ?", [feed, time_ns]
        ).fetchall()
        return int(count)

    def next_silence(self, feed: str, after_ns: int | None) -> int | None:
        """Return the time when the next heartbeat becomes overdue, among sites whose heartbeat is not overdue."""
        rows = self._connection.execute(_NEXT_SILENCE, [feed, after_ns or 0]).fetchall()
        return rows[0][0] if rows else None

    def blind_sites(self, feed: str, now_ns: int | None) -> list[tuple[str, int]]:
        """Return the blind sites, by name and stream, and the time of each one's last heartbeat."""
        return self._connection.execute(_BLIND_SITES, {"feed": feed, "now_ns": now_ns}).fetchall()
