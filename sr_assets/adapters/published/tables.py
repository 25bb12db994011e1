"""The published tables of sites, centres and native streams: columns, and the queries that select their rows from the state.

A site publishes every hop that its copies show; the views combine the hops that several sites publish. In a centre's tables,
column `feed` is `name/stream` of the feed, and `name` is the site that an advisory came from. Add a table here.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from sr_assets.adapters.home import OtherSchemaError
from sr_assets.adapters.state.global_view import blind, same_key
from sr_assets.domain.hops import SLOT_NS, bucket_seconds
from sr_assets.domain.positions import DAY_NS, SECOND_NS
from sr_assets.domain.received import REPORTED, STATUS

if TYPE_CHECKING:
    import duckdb

HOP_VIEWS: Final[dict[str, str]] = {
    "heartbeats": """
        SELECT hop_name AS name, hop_stream AS stream, subject, originator, sent_at, stored_at, arrived_at, seconds,
            p50_seconds, p95_seconds, max_seconds
        FROM {heartbeat_hops}
        QUALIFY row_number() OVER (
            PARTITION BY hop_name, hop_stream, subject, originator ORDER BY arrived_at DESC) = 1
        """,
    "hops": """
        SELECT hop_name AS name, hop_stream AS stream, copies, p50_seconds, p95_seconds, max_seconds, until
        FROM {message_hops}
        QUALIFY row_number() OVER (PARTITION BY hop_name, hop_stream ORDER BY until DESC, copies DESC) = 1
        """,
}
#: By event code.
_STATUS: Final = f"{[status.value for status in STATUS]}[event_code + 1]"
_EVENT: Final = f"{list(REPORTED)}[event_code + 1]"
_FEED: Final = "$name || '/' || feed"
_FEEDS_SITE: Final = "split_part(feed, '/', 1)"
_SITE: Final = ("replicator", "name", "stream")
_BLIND: Final = blind("watermarks.now_ns")
#: View → its query over the published tables, each as `{table}`.
GLOBAL_VIEWS: Final[dict[str, str]] = {
    # At a site that a node left, it is retired.
    "v_nodes_at_several_sites": """
        SELECT node, count(DISTINCT (replicator, coalesce(name, replicator))) AS sites,
            list(DISTINCT coalesce(name, replicator) ORDER BY coalesce(name, replicator)) AS names,
            max(last_seen) AS last_seen
        FROM {global_availability} WHERE status <> 'retired' GROUP BY node HAVING sites > 1
        """,
}
#: Publication name of the topology tables; no site can have it.
TOPOLOGY_SITE: Final = ".topology"
#: Version of the tables; files of another version are refused.
SCHEMA_VERSION: Final = 1
#: File format that any DuckDB 1.x reads; the views need 1.1.
STORAGE_VERSION: Final = "v1.0.0"
#: Columns that describe the file; each file has a new `generation`.
SNAPSHOT_INFO: Final = (
    "as_of TIMESTAMPTZ, run_id VARCHAR, schema_version INTEGER, generation VARCHAR, role VARCHAR, leader VARCHAR"
)
#: View → its query over the published tables, each as `{table}`: by name a DuckDB before 2.0 finds none in an attached file.
VIEWS: Final[dict[str, str]] = {
    "node_availability": """
        SELECT name, stream, node, status, status_since, first_seen, last_seen, class FROM {last_seen_nodes}
        UNION ALL SELECT name, stream, node, 'retired', retired_at, first_seen, last_seen, class FROM {retired_nodes}
        """,
    **HOP_VIEWS,
    **GLOBAL_VIEWS,
}
#: The pattern of the files of the Parquet history in a home.
HISTORY: Final = "snapshots/*/*/*/[0-9]*.parquet"
#: The variable of DuckDB with the path of the home, for a reader of a moved, copied or mounted one.
HOME_VARIABLE: Final = "sr_assets_home"


class Growth(NamedTuple):
    """How a table of the state grows; its base file is not written again.

    `time` is a row's time, an expression that is later in newer rows. A row has changed if the expression `mark` has changed.
    The expression `key`, if any, is equal in a row and the newer row that replaces it. A newer row that fulfils the condition
    `gone` only removes the older one. Rows may arrive with a time that is `late_ns` before that of others.
    """

    time: str
    mark: str
    key: str | None = None
    gone: str = "false"
    late_ns: int = 0


class Table(NamedTuple):
    """A table's columns as DuckDB declares them, and the query that selects its rows from a site's state.

    In the query `$name` is the site, and a condition can be appended. Without a row in `state`, a table of the state, it
    has no rows. `entry` is its column with the configured stream or feed. `site` is the expression, on the published
    table, for the site that published a row.
    """

    columns: str
    query: str
    state: str
    entry: str = "stream"
    site: str = "name"
    growth: Growth | None = None

    @property
    def kinds(self) -> dict[str, str]:
        """Type of each column by name, in column order."""
        return kinds_of(self.columns)

    @property
    def reads_status(self) -> bool:
        """Whether the rows come from `status` too, the rows of `stream_status`, which is no table of the state."""
        return "FROM status" in self.query

    @property
    def replaced(self) -> bool:
        """Whether newer rows replace older ones: the files then have the columns `row_key` and `row_mark` too."""
        return self.growth is not None and self.growth.key is not None

    @property
    def shown(self) -> str:
        """The condition that rows of a file fulfil, unless they only remove others."""
        return "true" if self.growth is None else f"NOT ({self.growth.gone})"


@cache
def kinds_of(columns: str) -> dict[str, str]:
    """Return the type of each column by name, in order, of columns as DuckDB declares them; no caller changes it."""
    return dict(column.split(maxsplit=1) for column in columns.split(","))


def of_streams(column: str, streams: Iterable[str]) -> str:
    """Return the SQL condition that a column names one of some streams."""
    names = ", ".join(map(literal, streams))
    return f"{column} IN ({names})" if names else "false"


def at(column: str) -> str:
    """Return the SQL that converts a column of unix nanoseconds to TIMESTAMPTZ."""
    return f"make_timestamptz({column} // 1000)"


def in_home(home: str) -> str:
    """Return the SQL of the path of a home for a reader: the variable `sr_assets_home`, else the path of the writer."""
    return f"coalesce(getvariable({literal(HOME_VARIABLE)}), {literal(home)})"


def pattern_in_home(home: str, pattern: str) -> str:
    """Return the SQL of a pattern of files in a home, whose path may contain the pattern's special characters."""
    return f"regexp_replace({in_home(home)}, '([*?[])', '[\\1]', 'g') || {literal(f'/{pattern}')}"


def parquet(home: str, files: Iterable[str], *options: str) -> str:
    """Return the SQL that reads Parquet files of a home."""
    listed = ", ".join(map(literal, files))
    paths = f"list_transform([{listed}], lambda file: {in_home(home)} || '/' || file)"
    return f"read_parquet({', '.join([paths, 'hive_partitioning = false', *options])})"


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


#: The query of the latency of each stream's hops, over a site's state.
LATENCY: Final = f"""
    SELECT stream, hop_name, hop_stream, any_value(total)::BIGINT AS copies,
        {bucket_seconds("min(bucket) FILTER (upto >= 0.5 * total)")} AS p50_seconds,
        {bucket_seconds("min(bucket) FILTER (upto >= 0.95 * total)")} AS p95_seconds,
        {bucket_seconds("max(bucket)")} AS max_seconds, {at(f"((max(slot) + 1) * {SLOT_NS})")} AS until
    FROM (
        SELECT *, sum(copies) OVER (hop ORDER BY bucket) AS upto, sum(copies) OVER hop AS total
        FROM latencies WINDOW hop AS (PARTITION BY stream, hop_name, hop_stream)
    )
    GROUP BY stream, hop_name, hop_stream
    """

HOP_TABLES: Final[dict[str, Table]] = {
    "heartbeat_hops": Table(
        """
        name VARCHAR, stream VARCHAR, hop_name VARCHAR, hop_stream VARCHAR, subject VARCHAR, originator VARCHAR,
        sent_at TIMESTAMPTZ, stored_at TIMESTAMPTZ, arrived_at TIMESTAMPTZ, seconds DOUBLE, p50_seconds DOUBLE,
        p95_seconds DOUBLE, max_seconds DOUBLE
        """,
        f"""
        SELECT $name, stream, hop_name, hop_stream, subject, originator, {at("sent_ns")}, {at("stored_ns")},
            {at("arrived_ns")}, round(took_ns / 1e9, 3), round(p50_ns / 1e9, 3), round(p95_ns / 1e9, 3), round(max_ns / 1e9, 3)
        FROM (
            SELECT *, quantile_cont(took_ns, 0.5) OVER hop AS p50_ns, quantile_cont(took_ns, 0.95) OVER hop AS p95_ns,
                max(took_ns) OVER hop AS max_ns, arrived_ns = max(arrived_ns) OVER hop AS newest
            FROM (SELECT *, arrived_ns - stored_ns AS took_ns FROM heartbeats)
            WINDOW hop AS (PARTITION BY stream, hop_name, hop_stream, subject, originator)
        )
        WHERE newest
        """,
        "heartbeats",
    ),
    "message_hops": Table(
        """
        name VARCHAR, stream VARCHAR, hop_name VARCHAR, hop_stream VARCHAR, copies BIGINT, p50_seconds DOUBLE,
        p95_seconds DOUBLE, max_seconds DOUBLE, until TIMESTAMPTZ
        """,
        f"""
        SELECT $name, stream, hop_name, hop_stream, copies, p50_seconds, p95_seconds, max_seconds, until
        FROM ({LATENCY}) WHERE true
        """,
        "latencies",
    ),
}

#: The columns of each view, with their types.
HOP_COLUMNS: Final = {
    view: {name: kind for name, kind in HOP_TABLES[table].kinds.items() if name not in ("hop_name", "hop_stream")}
    for view, table in {"heartbeats": "heartbeat_hops", "hops": "message_hops"}.items()
}


_NODES_GROWTH: Final = Growth(
    "received_ns",
    "hash(received_ns, event_ns, epoch_ns, transition, event_code, seen_ns)",
    "hash($name, feed, replicator, name, stream, node)",
)
#: A node that retires leaves its table. A sweep may notice a timeout, and another stream may be read, seconds later.
_SEEN_GROWTH: Final = Growth(
    "greatest(seen_ns, status_since_ns)",
    "hash(first_seen_ns, seen_ns, copied_ns, sequence, copied_bytes, status, status_since_ns, class)",
    "hash($name, stream, node)",
    "status = 'retired'",
    10 * SECOND_NS,
)
_HISTORY_GROWTH: Final = Growth("received_ns", "hash(received_ns, event_ns, epoch_ns, transition, event_code)")


def _site(table: str) -> str:
    return f"{table}.replicator, nullif({table}.name, ''), nullif({table}.stream, '')"


GLOBAL_TABLES: Final[dict[str, Table]] = {
    "global_availability": Table(
        """
        replicator VARCHAR, name VARCHAR, stream VARCHAR, node VARCHAR, status VARCHAR, status_since TIMESTAMPTZ,
        last_seen TIMESTAMPTZ, event_time TIMESTAMPTZ, received_at TIMESTAMPTZ, source VARCHAR, feed VARCHAR
        """,
        f"""
        SELECT {_site("latest")}, node, {_STATUS}, {at("event_ns")},
            {at("CASE WHEN event_code IN (0, 2) THEN event_ns ELSE seen_ns END")}, {at("event_ns")}, {at("received_ns")},
            origin, {_FEED}, {_NODES_GROWTH.key}, {_NODES_GROWTH.mark}
        FROM global_nodes AS latest WHERE true
        """,
        "global_nodes",
        "feed",
        _FEEDS_SITE,
        _NODES_GROWTH,
    ),
    "global_advisories": Table(
        """
        event_id VARCHAR, replicator VARCHAR, name VARCHAR, stream VARCHAR, node VARCHAR, event VARCHAR,
        event_time TIMESTAMPTZ, received_at TIMESTAMPTZ, seen TIMESTAMPTZ, age_seconds DOUBLE, previous VARCHAR,
        transition BIGINT, late BOOLEAN, returned BOOLEAN, outage_seconds DOUBLE, source VARCHAR, feed VARCHAR,
        epoch BIGINT, event_ns BIGINT
        """,
        f"""
        SELECT event_id, {_site("advisory")}, node, {_EVENT}, {at("event_ns")}, {at("received_ns")}, {at("seen_ns")},
            age_seconds, previous, nullif(transition, 0), late, returned, outage_seconds, origin, {_FEED},
            nullif(epoch_ns, 0), event_ns
        FROM global_history AS advisory WHERE true
        """,
        "global_history",
        "feed",
        _FEEDS_SITE,
        _HISTORY_GROWTH,
    ),
    "global_summary": Table(
        """
        replicator VARCHAR, name VARCHAR, stream VARCHAR, nodes BIGINT, up BIGINT, timeout BIGINT, retired BIGINT,
        new_24h BIGINT, last_advisory_at TIMESTAMPTZ, blind BOOLEAN, observer VARCHAR, observer_alive_at TIMESTAMPTZ,
        watermark TIMESTAMPTZ, position BIGINT, lag_messages BIGINT, tracked_nodes BIGINT, as_of TIMESTAMPTZ,
        feed VARCHAR, outage VARCHAR, outage_since TIMESTAMPTZ
        """,
        f"""
        SELECT {_site("site")}, coalesce(up, 0) + coalesce(timeout, 0), coalesce(up, 0), coalesce(timeout, 0),
            coalesce(retired, 0), coalesce(new_24h, 0), {at("advised_ns")}, {_BLIND},
            CASE WHEN {_BLIND} THEN 'blind' WHEN observed_ns IS NULL THEN 'unwatched' ELSE 'ok' END,
            {at("observed_ns")}, {at("site.watermark_ns")}, position, lag_messages, site.nodes,
            {at("watermarks.now_ns")}, {_FEED}, nullif(outage, 'restored'),
            {at("if(outage = 'restored', NULL, outage_ns)")}
        FROM global_sites AS site
        JOIN (SELECT stream AS feed, watermark_ns AS now_ns FROM streams) AS watermarks USING (feed)
        LEFT JOIN (
            SELECT replicator, name, stream, count(*) FILTER (event_code IN (0, 2, 4)) AS up,
                count(*) FILTER (event_code = 1) AS timeout, count(*) FILTER (event_code = 3) AS retired
            FROM global_nodes GROUP BY ALL
        ) AS counted ON {same_key("counted", "site", _SITE)}
        LEFT JOIN (
            SELECT replicator, name, advisory.stream, count(DISTINCT node) AS new_24h
            FROM global_history AS advisory JOIN streams ON streams.stream = advisory.feed
            WHERE event_code = 0 AND event_ns > streams.watermark_ns - {DAY_NS} GROUP BY ALL
        ) AS recent ON {same_key("recent", "site", _SITE)}
        WHERE true
        """,
        "global_sites",
        "feed",
        _FEEDS_SITE,
    ),
    "global_rejects": Table(
        """
        feed VARCHAR, sequence BIGINT, received_at TIMESTAMPTZ, subject VARCHAR, payload_bytes BIGINT, reason VARCHAR,
        field VARCHAR, excerpt VARCHAR
        """,
        f"""
        SELECT {_FEED}, sequence, {at("received_ns")}, subject, payload_bytes, reason, field, excerpt
        FROM global_rejects WHERE true
        """,
        "global_rejects",
        "feed",
        _FEEDS_SITE,
    ),
}


TOPOLOGY_TABLES: Final[dict[str, Table]] = {
    "topology_streams": Table(
        """
        cluster VARCHAR, domain VARCHAR, stream VARCHAR, storage VARCHAR, replicas BIGINT, placement VARCHAR,
        consumers BIGINT, messages BIGINT, bytes BIGINT, lost BIGINT, deleted BIGINT, leader VARCHAR, as_of TIMESTAMPTZ,
        peers VARCHAR, api_level BIGINT, error VARCHAR
        """,
        "",
        "",
    ),
    "topology_links": Table(
        """
        cluster VARCHAR, stream VARCHAR, kind VARCHAR, origin_cluster VARCHAR, origin_stream VARCHAR, filter VARCHAR,
        transforms VARCHAR, active_seconds DOUBLE, lag_messages BIGINT, lag_seconds DOUBLE, error VARCHAR,
        as_of TIMESTAMPTZ, sampling VARCHAR, api_prefix VARCHAR, domain VARCHAR, origin_domain VARCHAR, dead BOOLEAN
        """,
        "",
        "",
    ),
    "topology_drift": Table(
        "cluster VARCHAR, stream VARCHAR, key VARCHAR, wanted VARCHAR, found VARCHAR, remedy VARCHAR", "", ""
    ),
}


TABLES: Final[dict[str, Table]] = {
    "last_seen_nodes": Table(
        """
        name VARCHAR, stream VARCHAR, node VARCHAR, first_seen TIMESTAMPTZ, last_seen TIMESTAMPTZ,
        last_copied TIMESTAMPTZ, last_sequence BIGINT, copied_bytes BIGINT, status VARCHAR, status_since TIMESTAMPTZ,
        class VARCHAR
        """,
        f"""
        SELECT $name, stream, node, {at("first_seen_ns")}, {at("seen_ns")}, {at("copied_ns")}, sequence, copied_bytes,
            status, {at("status_since_ns")}, class, {_SEEN_GROWTH.key}, {_SEEN_GROWTH.mark}
        FROM nodes WHERE true
        """,
        "nodes",
        growth=_SEEN_GROWTH,
    ),
    "retired_nodes": Table(
        """
        name VARCHAR, stream VARCHAR, node VARCHAR, first_seen TIMESTAMPTZ, last_seen TIMESTAMPTZ,
        retired_at TIMESTAMPTZ, times_retired BIGINT, class VARCHAR
        """,
        f"""
        SELECT $name, stream, node, {at("first_seen_ns")}, {at("seen_ns")}, {at("retired_at_ns")}, times_retired, class
        FROM nodes WHERE status = 'retired'
        """,
        "nodes WHERE status = 'retired'",
    ),
    "node_advisories": Table(
        """
        event_id VARCHAR, name VARCHAR, stream VARCHAR, node VARCHAR, event VARCHAR, event_time TIMESTAMPTZ,
        detected_at TIMESTAMPTZ, seen TIMESTAMPTZ, age_seconds DOUBLE, previous VARCHAR, transition BIGINT,
        late BOOLEAN, returned BOOLEAN, outage_seconds DOUBLE, published_at TIMESTAMPTZ, epoch BIGINT, event_ns BIGINT,
        undone_at TIMESTAMPTZ, class VARCHAR, suppressed_by VARCHAR, announced_at TIMESTAMPTZ, held_by VARCHAR
        """,
        f"""
        SELECT event_id, $name, stream, node, event, {at("event_ns")}, {at("detected_ns")}, {at("seen_ns")},
            round(age_ns / 1e9, 3), previous, transition, late, returned, round(outage_ns / 1e9, 3), {at("published_ns")},
            epoch, event_ns, {at("undone_ns")}, class, suppressed_by,
            {at("if(withheld, NULL, coalesce(announced_ns, detected_ns))")}, held_by
        FROM transitions WHERE true
        """,
        "transitions",
        growth=Growth(
            "detected_ns",
            "hash(event_ns, transition, published_ns, undone_ns, announced_ns, suppressed_by, held_by)",
        ),
    ),
    "site_events": Table(
        """
        name VARCHAR, stream VARCHAR, event VARCHAR, event_time TIMESTAMPTZ, nodes BIGINT, silent BIGINT,
        since TIMESTAMPTZ, published_at TIMESTAMPTZ, outage VARCHAR, event_id VARCHAR, detected_at TIMESTAMPTZ
        """,
        f"""
        SELECT $name, stream, event, {at("event_ns")}, nodes, silent, {at("since_ns")}, {at("published_ns")}, outage, event_id,
            {at("detected_ns")}
        FROM site_events WHERE true
        """,
        "site_events",
    ),
    "node_events": Table(
        """
        name VARCHAR, stream VARCHAR, node VARCHAR, event VARCHAR, event_time TIMESTAMPTZ, transitions BIGINT,
        published_at TIMESTAMPTZ, event_id VARCHAR, detected_at TIMESTAMPTZ
        """,
        f"""
        SELECT $name, stream, node, event, {at("event_ns")}, transitions, {at("published_ns")}, event_id, {at("detected_ns")}
        FROM node_events WHERE true
        """,
        "node_events",
    ),
    "replication": Table(
        """
        name VARCHAR, stream VARCHAR, source_stream VARCHAR, source_created TIMESTAMPTZ, target_stream VARCHAR,
        next_sequence BIGINT, source_last_sequence BIGINT, lag_messages BIGINT, lag_seconds DOUBLE,
        seen_messages BIGINT, copied_messages BIGINT, copied_bytes BIGINT, skipped_messages BIGINT,
        too_old_messages BIGINT, no_sender_messages BIGINT, gap_messages BIGINT, parked_messages BIGINT,
        late_sightings BIGINT, watermark TIMESTAMPTZ, next_deadline TIMESTAMPTZ, last_error VARCHAR,
        as_of TIMESTAMPTZ, queued_messages BIGINT, paused BOOLEAN, blind_seconds DOUBLE,
        latency_p50_seconds DOUBLE, latency_p95_seconds DOUBLE, spark_messages BIGINT, local_messages BIGINT
        """,
        f"""
        SELECT $name, stream, stream, {at("nullif(created_ns, 0)")}, target_stream, next_sequence,
            source_last_sequence, lag_messages, round(lag_ns / 1e9, 3), seen_messages - lost_messages, copied_messages,
            copied_bytes, skipped_messages, too_old_messages, no_sender_messages, gap_messages + lost_messages,
            parked_messages, late_sightings,
            {at("watermark_ns")}, {at("deadline_ns")}, last_error, {at("as_of_ns")}, queued, paused, round(blind_ns / 1e9, 3),
            p50_seconds, p95_seconds, spark_messages, local_messages
        FROM status WHERE true
        """,
        "streams",
    ),
    "replication_partitions": Table(
        """
        name VARCHAR, stream VARCHAR, partition BIGINT, next_sequence BIGINT, lag_messages BIGINT, watermark TIMESTAMPTZ,
        subject VARCHAR, begins BIGINT
        """,
        f"""
        SELECT $name, stream, "partition", next_sequence, if(streams.lag_messages = 0, 0, partitions.lag_messages),
            {at("watermark_ns")}, subject, begins
        FROM partitions JOIN streams USING (stream) WHERE true
        """,
        "partitions",
    ),
    "gaps": Table(
        """
        name VARCHAR, stream VARCHAR, first_sequence BIGINT, last_sequence BIGINT, messages BIGINT, reason VARCHAR,
        noticed_at TIMESTAMPTZ
        """,
        f"""
        SELECT $name, stream, first_sequence, last_sequence, messages, reason, {at("noticed_ns")} FROM gaps WHERE true
        """,
        "gaps",
    ),
    "blind_spans": Table(
        "name VARCHAR, stream VARCHAR, since TIMESTAMPTZ, until TIMESTAMPTZ, since_ns BIGINT, until_ns BIGINT",
        f"""
        SELECT $name, stream, {at("first_ns")}, {at("next_ns")}, first_ns, next_ns FROM blind_history WHERE true
        """,
        "blind_history",
    ),
    "parked_messages": Table(
        """
        name VARCHAR, stream VARCHAR, sequence BIGINT, stored_at TIMESTAMPTZ, subject VARCHAR, payload_bytes BIGINT,
        reason VARCHAR, parked_at TIMESTAMPTZ
        """,
        f"""
        SELECT $name, stream, sequence, {at("stored_ns")}, subject, payload_bytes, reason, {at("parked_ns")}
        FROM parked WHERE true
        """,
        "parked",
    ),
    "site_summary": Table(
        """
        name VARCHAR, stream VARCHAR, nodes BIGINT, up BIGINT, timeout BIGINT, retired BIGINT, new_24h BIGINT,
        as_of TIMESTAMPTZ, outage VARCHAR, outage_since TIMESTAMPTZ
        """,
        f"""
        SELECT $name, stream, up + timeout, up, timeout, retired, new_24h, {at("as_of_ns")}, outage, {at("outage_ns")}
        FROM status WHERE tracked
        """,
        "streams",
    ),
    "latest_snapshots": Table(
        "name VARCHAR, stream VARCHAR, node VARCHAR, sequence BIGINT, file VARCHAR",
        "SELECT $name, stream, node, sequence, file FROM snapshots WHERE true",
        "snapshots",
    ),
    "history_files": Table(
        "name VARCHAR, stream VARCHAR, file VARCHAR",
        "SELECT $name, stream, file FROM history WHERE NOT replaced",
        "history",
    ),
    **HOP_TABLES,
    **GLOBAL_TABLES,
}
#: Tables that only views use.
INTERNAL: Final = frozenset({"latest_snapshots", "history_files", *HOP_TABLES})
#: The columns of the views `node_availability` and `node_snapshots`.
NODE_COLUMNS: Final = {
    name: TABLES["last_seen_nodes"].kinds[name]
    for name in ("name", "stream", "node", "status", "status_since", "first_seen", "last_seen", "class")
}
SNAPSHOT_COLUMNS: Final = Table(
    """
    name VARCHAR, stream VARCHAR, node VARCHAR, sequence BIGINT, stored_at TIMESTAMPTZ, subject VARCHAR,
    payload_bytes BIGINT, payload JSON, payload_raw BLOB, metadata JSON
    """,
    "",
    "snapshots",
).kinds
HISTORY_COLUMNS: Final = {**SNAPSHOT_COLUMNS, "date": "DATE"}
SEVERAL_SITES_COLUMNS: Final = {"node": "VARCHAR", "sites": "BIGINT", "names": "VARCHAR[]", "last_seen": "TIMESTAMPTZ"}
#: `node_snapshots` without any file.
NO_SNAPSHOTS: Final = (
    f"SELECT {', '.join(f'NULL::{kind} AS {name}' for name, kind in SNAPSHOT_COLUMNS.items())} WHERE false"
)
#: `node_snapshot_history` without any file.
NO_HISTORY: Final = f"SELECT *, NULL::DATE AS date FROM ({NO_SNAPSHOTS})"


def refuse_other_schema(connection: duckdb.DuckDBPyConnection, catalog: str, file: Path) -> None:
    """Raise OtherSchemaError if another version wrote `file`, which is attached as `catalog`."""
    versions = connection.execute(f"SELECT schema_version FROM {catalog}.snapshot_info").fetchall()
    columns = {row[0] for row in connection.execute(f"DESCRIBE {catalog}.snapshot_info").fetchall()}
    # The first unreleased schema was called 1 too; it had no column `generation`.
    if versions != [(SCHEMA_VERSION,)] or "generation" not in columns:
        raise OtherSchemaError(file, versions[0][0] if versions else None)


def snapshots_query(home: str, files: Iterable[str], latest: str) -> str:
    """Return the query of `node_snapshots` over Parquet files of a home; `latest` is the query of `latest_snapshots`."""
    return f"""
        SELECT latest.name, latest.stream, latest.node, stored.sequence, stored.stored_at, stored.subject,
            stored.payload_bytes, stored.payload::JSON AS payload, stored.payload_raw, stored.metadata::JSON AS metadata
        FROM ({latest}) AS latest
        JOIN {parquet(home, files, "filename = true")} AS stored
            ON stored.filename = {in_home(home)} || '/' || latest.file AND stored.sequence = latest.sequence
                AND stored.node = latest.node
        """


def history_query(home: str, files: str) -> str:
    """Return the query of `node_snapshot_history` over a home's Parquet files that the query `files` lists.

    A pattern finds the files: each publication would have to write a list of a year's files of a thousand sites. DuckDB
    does not open files of other dates than a query needs.
    """
    return f"""
        SELECT name, stream, node, sequence, stored_at, subject, payload_bytes, payload::JSON AS payload, payload_raw,
            metadata::JSON AS metadata, date::DATE AS date
        FROM read_parquet(
            {pattern_in_home(home, HISTORY)}, filename = true, hive_partitioning = true, hive_types_autocast = false
        ) AS stored
        WHERE stored.filename IN (SELECT {in_home(home)} || '/' || file FROM ({files}))
        """
