"""The published tables of a site: columns, and the queries that select their rows from the site's state.

Add a table here, or in `global_schema` for a centre.
"""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.home import OtherSchemaError
from sr_assets.adapters.published.global_schema import GLOBAL_TABLES, GLOBAL_VIEWS
from sr_assets.adapters.published.hop_schema import HOP_TABLES, HOP_VIEWS
from sr_assets.adapters.published.table import Growth, Table, at, literal

if TYPE_CHECKING:
    import duckdb

#: Version of the tables; files of another version are refused.
SCHEMA_VERSION: Final = 1
#: File format that any DuckDB 1.x reads.
STORAGE_VERSION: Final = "v1.0.0"

TABLES: Final[dict[str, Table]] = {
    "last_seen_nodes": Table(
        """
        name VARCHAR, stream VARCHAR, node VARCHAR, first_seen TIMESTAMPTZ, last_seen TIMESTAMPTZ,
        last_copied TIMESTAMPTZ, last_sequence BIGINT, copied_bytes BIGINT, status VARCHAR, status_since TIMESTAMPTZ,
        class VARCHAR
        """,
        f"""
        SELECT $name, stream, node, {at("first_seen_ns")}, {at("seen_ns")}, {at("copied_ns")}, sequence, copied_bytes,
            status, {at("status_since_ns")}, class
        FROM nodes WHERE status <> 'retired'
        """,
        "nodes",
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
        latency_p50_seconds DOUBLE, latency_p95_seconds DOUBLE
        """,
        f"""
        SELECT $name, stream, stream, {at("nullif(created_ns, 0)")}, target_stream, next_sequence,
            source_last_sequence, lag_messages, round(lag_ns / 1e9, 3), seen_messages, copied_messages, copied_bytes,
            skipped_messages, too_old_messages, no_sender_messages, gap_messages, parked_messages, late_sightings,
            {at("watermark_ns")}, {at("deadline_ns")}, error, {at("as_of_ns")}, queued, paused, round(blind_ns / 1e9, 3),
            p50_seconds, p95_seconds
        FROM progress WHERE true
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
        FROM progress WHERE tracked
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
#: The pattern of the files of the Parquet history in a home.
HISTORY: Final = "snapshots/*/*/*/[0-9]*.parquet"
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


def snapshots_query(files: str, home: str, latest: str) -> str:
    """Return the query of `node_snapshots`.

    `files` are the elements of an SQL list of Parquet files, `home` is a literal, and `latest` the query of
    `latest_snapshots`.
    """
    return f"""
        SELECT latest.name, latest.stream, latest.node, stored.sequence, stored.stored_at, stored.subject,
            stored.payload_bytes, stored.payload::JSON AS payload, stored.payload_raw, stored.metadata::JSON AS metadata
        FROM ({latest}) AS latest
        JOIN read_parquet([{files}], filename = true, hive_partitioning = false) AS stored
            ON stored.filename = {home} || latest.file AND stored.sequence = latest.sequence AND stored.node = latest.node
        """


def history_query(home: str, files: str) -> str:
    """Return the query of `node_snapshot_history` over a home's Parquet files that the query `files` lists.

    A pattern finds the files: each publication would have to write a list of a year's files of a thousand sites. DuckDB
    does not open files of other dates than a query needs.
    """
    pattern = literal(f"{glob.escape(home)}/{HISTORY}")
    return f"""
        SELECT name, stream, node, sequence, stored_at, subject, payload_bytes, payload::JSON AS payload, payload_raw,
            metadata::JSON AS metadata, date::DATE AS date
        FROM read_parquet({pattern}, filename = true, hive_partitioning = true, hive_types_autocast = false) AS stored
        WHERE stored.filename IN (SELECT {literal(f"{home}/")} || file FROM ({files}))
        """
