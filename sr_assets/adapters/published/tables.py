"""The published tables: `fleet.duckdb`, written as a whole new file and moved into place, and read by anyone at any
time.

Here: each table's columns and the query that makes its rows from a site's state; publishing; opening for reading. Not
here: the state itself (`state`).

A site replaces its own rows and carries over the other sites'. Readers keep the file they opened; the next open sees
the new one. Payloads are not copied: `node_snapshots` is a view over the Parquet history.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import duckdb

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.state import global_view
from sr_assets.adapters.state.global_view import at
from sr_assets.domain.errors import ConfigurationError, RunError, cannot_write

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from sr_assets.adapters.state.store import SiteState

SCHEMA_VERSION: Final = 2
#: Any DuckDB 1.x reads this format.
_STORAGE_VERSION: Final = "v1.0.0"


#: table → (columns, query over the state's tables; `$name` is the site). Rows of streams, and of feeds, that are no longer
#: configured are left out.
TABLES: Final[dict[str, tuple[str, str]]] = {
    "last_seen_nodes": (
        (
            "name VARCHAR, stream VARCHAR, node VARCHAR, first_seen TIMESTAMPTZ, last_seen TIMESTAMPTZ, last_copied"
            " TIMESTAMPTZ, last_sequence BIGINT, copied_bytes BIGINT, status VARCHAR, status_since TIMESTAMPTZ"
        ),
        (
            f"SELECT $name, stream, node, {at('first_seen_ns')}, {at('seen_ns')}, {at('copied_ns')}, sequence,"
            f" copied_bytes, status, {at('status_since_ns')} FROM nodes WHERE status <> 'retired'"
        ),
    ),
    "retired_nodes": (
        (
            "name VARCHAR, stream VARCHAR, node VARCHAR, first_seen TIMESTAMPTZ, last_seen TIMESTAMPTZ, retired_at"
            " TIMESTAMPTZ, times_retired BIGINT"
        ),
        (
            f"SELECT $name, stream, node, {at('first_seen_ns')}, {at('seen_ns')}, {at('retired_at_ns')},"
            " times_retired FROM nodes WHERE status = 'retired'"
        ),
    ),
    "node_advisories": (
        (
            "event_id VARCHAR, name VARCHAR, stream VARCHAR, node VARCHAR, event VARCHAR, event_time TIMESTAMPTZ,"
            " detected_at TIMESTAMPTZ, seen TIMESTAMPTZ, age_seconds DOUBLE, previous VARCHAR, transition BIGINT, late"
            " BOOLEAN, returned BOOLEAN, outage_seconds DOUBLE, published_at TIMESTAMPTZ, epoch BIGINT"
        ),
        (
            f"SELECT event_id, $name, stream, node, event, {at('event_ns')}, {at('detected_ns')}, {at('seen_ns')},"
            " round(age_ns / 1e9, 3), previous, transition, late, returned, round(outage_ns / 1e9, 3),"
            f" {at('published_ns')}, epoch FROM transitions WHERE true"
        ),
    ),
    "replication": (
        (
            "name VARCHAR, stream VARCHAR, source_stream VARCHAR, source_created TIMESTAMPTZ, target_stream VARCHAR,"
            " next_sequence BIGINT, source_last_sequence BIGINT, lag_messages BIGINT, lag_seconds DOUBLE, seen_messages"
            " BIGINT, copied_messages BIGINT, copied_bytes BIGINT, skipped_messages BIGINT, too_old_messages BIGINT,"
            " no_sender_messages BIGINT, gap_messages BIGINT, parked_messages BIGINT, late_sightings BIGINT, watermark"
            " TIMESTAMPTZ, next_deadline TIMESTAMPTZ, last_error VARCHAR, as_of TIMESTAMPTZ, queued_messages BIGINT, paused"
            " BOOLEAN, blind_seconds DOUBLE"
        ),
        (
            f"SELECT $name, stream, stream, {at('nullif(streams.created_ns, 0)')}, configured.target_stream,"
            " next_sequence, source_last_sequence, lag_messages, round(lag_ns / 1e9, 3), seen_messages -"
            " coalesce(lost_messages, 0), coalesce(copied_messages, 0), coalesce(copied_bytes, 0), skipped_messages,"
            " too_old_messages, no_sender_messages, gap_messages + coalesce(lost_messages, 0), coalesce(parked_messages,"
            f" 0), late_sightings, {at('watermark_ns')},"
            f" {at('(SELECT min(deadline_ns) FROM nodes WHERE nodes.stream = streams.stream)')}, coalesce(last_error,"
            f" error), {at('as_of_ns')}, (SELECT count(*) FROM copy_queue AS queue WHERE queue.stream ="
            " streams.stream), configured.paused, (SELECT coalesce(round(sum(next_ns - first_ns) / 1e9, 3), 0) FROM"
            " blind_spans AS span WHERE span.stream = streams.stream) FROM streams JOIN configured USING (stream) LEFT"
            " JOIN copying USING (stream) WHERE true"
        ),
    ),
    "gaps": (
        (
            "name VARCHAR, stream VARCHAR, first_sequence BIGINT, last_sequence BIGINT, messages BIGINT, reason"
            " VARCHAR, noticed_at TIMESTAMPTZ"
        ),
        (
            f"SELECT $name, stream, first_sequence, last_sequence, messages, reason, {at('noticed_ns')} FROM gaps"
            " WHERE true"
        ),
    ),
    "parked_messages": (
        (
            "name VARCHAR, stream VARCHAR, sequence BIGINT, stored_at TIMESTAMPTZ, subject VARCHAR, payload_bytes"
            " BIGINT, reason VARCHAR, parked_at TIMESTAMPTZ"
        ),
        (
            f"SELECT $name, stream, sequence, {at('stored_ns')}, subject, payload_bytes, reason, {at('parked_ns')}"
            " FROM parked WHERE true"
        ),
    ),
    "site_summary": (
        (
            "name VARCHAR, stream VARCHAR, nodes BIGINT, up BIGINT, timeout BIGINT, retired BIGINT, new_24h BIGINT,"
            " as_of TIMESTAMPTZ"
        ),
        (
            "SELECT $name, stream, counted.up + counted.timeout, counted.up, counted.timeout, counted.retired, (SELECT"
            " count(DISTINCT node) FROM transitions WHERE transitions.stream = streams.stream AND event = 'new' AND"
            f" event_ns > streams.watermark_ns - 86400000000000), {at('as_of_ns')} FROM streams JOIN configured USING"
            " (stream) JOIN (SELECT streams.stream AS stream, count(*) FILTER (status = 'up') AS up, count(*) FILTER"
            " (status = 'timeout') AS timeout, count(*) FILTER (status = 'retired') AS retired FROM streams LEFT JOIN"
            " nodes USING (stream) GROUP BY streams.stream) AS counted USING (stream) WHERE configured.tracked"
        ),
    ),
    "latest_snapshots": (
        "name VARCHAR, stream VARCHAR, node VARCHAR, sequence BIGINT, file VARCHAR",
        "SELECT $name, stream, node, sequence, file FROM snapshots WHERE true",
    ),
    **global_view.PUBLISHED,
}
#: view → query over the published tables: what these say already is not written a second time, a row per node.
VIEWS: Final[dict[str, str]] = {
    "node_availability": (
        "SELECT name, stream, node, status, status_since, first_seen, last_seen FROM last_seen_nodes UNION ALL SELECT"
        " name, stream, node, 'retired', retired_at, first_seen, last_seen FROM retired_nodes"
    ),
    **global_view.VIEWS,
}
_NO_SNAPSHOTS: Final = (
    "SELECT NULL::VARCHAR AS name, NULL::VARCHAR AS stream, NULL::VARCHAR AS node, NULL::BIGINT AS sequence,"
    " NULL::TIMESTAMPTZ AS stored_at, NULL::VARCHAR AS subject, NULL::BIGINT AS payload_bytes, NULL::JSON AS payload,"
    " NULL::BLOB AS payload_raw, NULL::JSON AS metadata WHERE false"
)


@dataclass(frozen=True, slots=True)
class PublishedStream:
    """A configured stream, or feed, as far as the published tables say it."""

    stream: str
    target_stream: str | None
    tracked: bool
    paused: bool = False


def publish_site(
    home: Path,
    name: str,
    state: SiteState,
    streams: Sequence[PublishedStream],
    *,
    sites: Sequence[str],
    run_id: str,
    as_of_ns: int,
) -> str:
    """Put a site's rows in place of its old ones, in a new `fleet.duckdb` moved into place; returns the file's generation.

    Rows of sites not among `sites` are dropped. A new generation means that the file was made from nothing: every other
    site has to publish again. Two sites publish one after the other (`fleet.lock`). Raises RunError when it cannot be
    written: then the old one stays.
    """
    home.mkdir(parents=True, exist_ok=True)
    file, draft = home / "fleet.duckdb", home / ".fleet.duckdb.new"
    connection = state.connection
    with (home / "fleet.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        draft.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            draft.with_name(draft.name + ".wal").unlink()
        try:
            connection.execute(f"ATTACH '{_quoted(draft)}' AS fleet (STORAGE_VERSION '{_STORAGE_VERSION}')")
            generation = _carry_over(connection, file, name, sites)
            _insert_site(connection, name, streams)
            connection.execute(
                "INSERT INTO fleet.snapshot_info VALUES (make_timestamptz(?::BIGINT // 1000), ?, ?, ?)",
                [as_of_ns, run_id, SCHEMA_VERSION, generation],
            )
            _create_snapshot_view(connection)
            for view, query in VIEWS.items():
                connection.execute(f"CREATE VIEW fleet.{view} AS {query}")
            # Detaching would do it too, but does not say why it could not.
            connection.execute("CHECKPOINT fleet")
            connection.execute("DETACH fleet")
        except BaseException as error:
            with contextlib.suppress(duckdb.Error):
                connection.execute("DETACH fleet")
            if not isinstance(error, duckdb.OperationalError):
                raise
            raise RunError(cannot_write(draft, OSError(str(error).splitlines()[0]))) from None
        reach(Point.PUBLISHING_TABLES)
        draft.replace(file)
        reach(Point.PUBLISHED_TABLES)
        marker = home / ".fleet.json.new"
        marker.write_text(json.dumps({"generation": generation}))
        marker.replace(home / "fleet.json")
    return generation


def _quoted(path: Path) -> str:
    return str(path.resolve()).replace("'", "''")


def _carry_over(connection: duckdb.DuckDBPyConnection, file: Path, name: str, sites: Sequence[str]) -> str:
    """Create the tables with the other sites' rows, and return the generation."""
    for table, (columns, _) in TABLES.items():
        connection.execute(f"CREATE TABLE fleet.{table} ({columns})")
    connection.execute(
        "CREATE TABLE fleet.snapshot_info (as_of TIMESTAMPTZ, run_id VARCHAR, schema_version INTEGER, generation VARCHAR)"
    )
    others = [site for site in sites if site != name]
    try:
        connection.execute(f"ATTACH '{_quoted(file)}' AS published (READ_ONLY)")
    except duckdb.Error:
        # Missing, broken, or opened for writing by a stranger: start from nothing, and let the generation say so.
        return uuid.uuid4().hex
    try:
        info = connection.execute("SELECT schema_version, generation FROM published.snapshot_info").fetchone()
        if info is None or info[0] != SCHEMA_VERSION:
            return uuid.uuid4().hex
        for table in TABLES:
            connection.execute(
                f"INSERT INTO fleet.{table} SELECT * FROM published.{table} WHERE list_contains(?::VARCHAR[],"
                f" {_site_of(table)})",
                [others],
            )
        return str(info[1])
    except duckdb.Error:
        for table in TABLES:
            connection.execute(f"DELETE FROM fleet.{table}")
        return uuid.uuid4().hex
    finally:
        connection.execute("DETACH published")


def _site_of(table: str) -> str:
    """Return how a row of a published table tells which site published it; of a global one `name` is another's."""
    return "split_part(feed, '/', 1)" if table in global_view.PUBLISHED else "name"


def _insert_site(connection: duckdb.DuckDBPyConnection, name: str, streams: Sequence[PublishedStream]) -> None:
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE configured (stream VARCHAR, target_stream VARCHAR, tracked BOOLEAN, paused BOOLEAN)"
    )
    connection.executemany(
        "INSERT INTO configured VALUES (?, ?, ?, ?)",
        [(one.stream, one.target_stream, one.tracked, one.paused) for one in streams],
    )
    for table, (_, query) in TABLES.items():
        ours = "feed" if table in global_view.PUBLISHED else "stream"
        connection.execute(
            f"INSERT INTO fleet.{table} {query} AND {ours} IN (SELECT stream FROM configured)",
            {"name": name} if "$name" in query else None,
        )


def _create_snapshot_view(connection: duckdb.DuckDBPyConnection) -> None:
    named = connection.execute("SELECT DISTINCT file FROM fleet.latest_snapshots ORDER BY file").fetchall()
    # A file that somebody took away costs its rows, not all tables.
    files = [file for (file,) in named if os.path.exists(file)]  # noqa: PTH110  a text from a table
    if not files:
        connection.execute(f"CREATE VIEW fleet.node_snapshots AS {_NO_SNAPSHOTS}")
        return
    listed = ", ".join("'" + file.replace("'", "''") + "'" for file in files)
    connection.execute(
        "CREATE VIEW fleet.node_snapshots AS SELECT latest.name, latest.stream, latest.node, stored.sequence,"
        " stored.stored_at, stored.subject, stored.payload_bytes, stored.payload::JSON AS payload, stored.payload_raw,"
        f" stored.metadata::JSON AS metadata FROM latest_snapshots AS latest JOIN read_parquet([{listed}], filename ="
        " true, hive_partitioning = false) AS stored ON stored.filename = latest.file AND stored.sequence ="
        " latest.sequence AND stored.node = latest.node"
    )


def read_generation(home: Path) -> str | None:
    """Return the generation of the published file; None when there is none."""
    if not (home / "fleet.duckdb").exists():
        return None
    try:
        return str(json.loads((home / "fleet.json").read_text())["generation"])
    except (OSError, ValueError, KeyError):
        return None


@contextlib.contextmanager
def open_fleet(home: Path, *, confined: bool = False) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the published tables for reading, in UTC; nobody waits for it and it waits for nobody.

    `confined` is for SQL of a stranger: no file but our Parquet history, no network, no change of settings. Raises
    RunError when nothing was published yet, or when the file is none of ours.
    """
    file = home / "fleet.duckdb"
    if not file.exists():
        raise RunError(
            f"nothing is published yet: {file} is made by the first run (`sr-assets run --once`, or `sr-assets up`)"
        )
    try:
        connection = duckdb.connect(str(file), read_only=True)
    except duckdb.Error as error:
        raise RunError(
            f"{file} cannot be opened: {str(error).strip().partition(chr(10))[0]}; delete it and the next run makes it"
            " anew"
        ) from None
    try:
        connection.execute("SET TimeZone = 'UTC'")
        if confined:
            connection.execute("SET python_enable_replacements = false")
            connection.execute(f"SET allowed_directories = ['{_quoted(home / 'snapshots')}/']")
            connection.execute("SET enable_external_access = false")
            connection.execute("SET lock_configuration = true")
        yield connection
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class Rows:
    """What a query answered: the columns, no two with one name, and the values, those of JSON columns decoded."""

    columns: tuple[str, ...]
    values: list[tuple[Any, ...]]


def read_rows(
    connection: duckdb.DuckDBPyConnection, query: str, parameters: Sequence[Any] | Mapping[str, Any] = ()
) -> Rows:
    """Run one SELECT (also SHOW, DESCRIBE, SUMMARIZE) and return its rows.

    Anything else is refused, because a confined connection may write where it may read: COPY, also inside EXPLAIN
    ANALYZE or around a PIVOT, would put files among the Parquet history. Raises ConfigurationError, one line with
    DuckDB's words.
    """
    try:
        statements = duckdb.extract_statements(query)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise ConfigurationError(
                "one SELECT is allowed (or SHOW TABLES, DESCRIBE, SUMMARIZE; a PIVOT with its values listed)"
            )
        cursor = connection.execute(statements[0], parameters or None)
        described = cursor.description or []
        values = cursor.fetchall()
    except duckdb.Error as error:
        raise ConfigurationError(str(error).strip().partition("\n")[0]) from None
    json_columns = [place for place, (_, kind, *_) in enumerate(described) if str(kind) == "JSON"]
    if json_columns:
        values = [
            tuple(_decoded(value) if place in json_columns else value for place, value in enumerate(row))
            for row in values
        ]
    return Rows(_distinct([str(column[0]) for column in described]), values)


def _decoded(value: str | None) -> Any:
    return None if value is None else json.loads(value)


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Number the repeated names, so that no column hides another: `name`, `name_1`."""
    found: list[str] = []
    for name in names:
        number, unique = 0, name
        while unique in found:
            number += 1
            unique = f"{name}_{number}"
        found.append(unique)
    return tuple(found)


def export_fleet(home: Path, file: Path) -> None:
    """Write a self-contained copy: every table, the views as tables too.

    Raises RunError when `file` exists or cannot be written; nothing is left of it then.
    """
    if file.exists():
        raise RunError(f"{file} exists; name a file that does not")
    draft = file.with_name(f".{file.name}.new")
    draft.unlink(missing_ok=True)
    try:
        with open_fleet(home) as connection:
            connection.execute(
                f"ATTACH '{_quoted(draft)}' AS exported (READ_WRITE, STORAGE_VERSION '{_STORAGE_VERSION}')"
            )
            for table in (*TABLES, "snapshot_info", "node_snapshots", *VIEWS):
                if table != "latest_snapshots":
                    connection.execute(f"CREATE TABLE exported.{table} AS SELECT * FROM {table}")
            connection.execute("DETACH exported")
        draft.replace(file)
    except (duckdb.Error, OSError) as error:
        raise RunError(f"{file} cannot be written: {str(error).strip().partition(chr(10))[0]}") from None
    finally:
        draft.unlink(missing_ok=True)


def count_rows(home: Path) -> dict[str, int]:
    """Return the number of rows of every public table."""
    with open_fleet(home) as connection:
        tables: list[str] = [
            *(table for table in TABLES if table != "latest_snapshots"),
            "node_availability",
            "node_snapshots",
            "snapshot_info",
        ]
        return {table: int(_one(connection, f"SELECT count(*) FROM {table}")) for table in tables}


def _one(connection: duckdb.DuckDBPyConnection, query: str) -> Any:
    row = connection.execute(query).fetchone()
    return row[0] if row else None
