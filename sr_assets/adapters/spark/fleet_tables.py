"""The published tables as DataFrames of any Spark session that sees the files of the home."""

from __future__ import annotations

import re
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import duckdb

from sr_assets.adapters import times
from sr_assets.adapters.published.catalog import COLUMN_TYPES
from sr_assets.adapters.published.daily_tables import DAILY_TABLES
from sr_assets.adapters.published.fleet_file import history_files, view_files
from sr_assets.adapters.published.fleet_reader import (
    attach_fleet,
    refuse_incomplete_history,
    refuse_unknown_table,
    unreadable,
)
from sr_assets.adapters.published.tables import TABLES, TOPOLOGY_TABLES, VIEWS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TYPES: Final = {
    "BIGINT": "long",
    "BLOB": "binary",
    "BOOLEAN": "boolean",
    "DATE": "date",
    "DOUBLE": "double",
    "INTEGER": "int",
    "JSON": "string",
    "TIMESTAMPTZ": "timestamp_ltz",
    "VARCHAR": "string",
    "VARCHAR[]": "array<string>",
}
_ROW_KEY: Final = "row_key decimal(20, 0)"
# Spark decodes a folder's percent-encoded bytes as Latin-1.
_FOLDER_NAME: Final = "decode(encode({0}, 'ISO-8859-1'), 'UTF-8') AS {0}"
_ENCODED: Final = ("name", "stream")
_DAILY: Final = {table.name: table for table in DAILY_TABLES}
#: The files of a table stay for so long after its DataFrame is gone, for DataFrames that were derived from it.
_HELD_SECONDS: Final = 600.0
#: The connections of gone DataFrames, and since when, in monotonic seconds.
_held: Final = deque[tuple[float, duckdb.DuckDBPyConnection]]()
#: Reentrant: the end of a DataFrame can come at any moment, also while it is held.
_guard: Final = threading.RLock()


def read_table(session: SparkSession, table: str, home: Path) -> DataFrame:
    """Return a published table as of now.

    Its files stay as long as the DataFrame exists, and at least ten minutes longer. Raises the errors of `attach_fleet`,
    ConfigurationError for an unknown table, and RunError for missing files.
    """
    _release_old()
    home = home.resolve()
    connection = attach_fleet(home)
    try:
        refuse_unknown_table(table, connection)
        if table == "node_snapshot_history":
            refuse_incomplete_history(connection, home)
        frame = frame_of(session, connection, home, table)
    except duckdb.Error as error:
        connection.close()
        raise unreadable(f"table {table}", error, home) from None
    except BaseException:
        connection.close()
        raise
    # It only keeps the file open from now on.
    connection.execute("SET threads = 1")
    weakref.finalize(frame, _hold, connection)
    return frame


def _hold(connection: duckdb.DuckDBPyConnection) -> None:
    with _guard:
        _held.append((times.monotonic(), connection))


def _release_old() -> None:
    with _guard:
        while _held and _held[0][0] < times.monotonic() - _HELD_SECONDS:
            _held.popleft()[1].close()


def frame_of(session: SparkSession, connection: duckdb.DuckDBPyConnection, home: Path, table: str) -> DataFrame:
    """Return a table as its view in the opened `fleet.duckdb` shows it."""
    schema = schema_of(COLUMN_TYPES[table])
    if table in TABLES or table in TOPOLOGY_TABLES:
        return _published(session, connection, home, table)
    if table == "node_availability":
        seen, retired = (_published(session, connection, home, part) for part in ("last_seen_nodes", "retired_nodes"))
        return session.sql(VIEWS[table], last_seen_nodes=seen, retired_nodes=retired)
    if table in _DAILY:
        daily = _DAILY[table]
        _refuse_missing(home, daily.folder)
        files = [f"{daily.folder}/{when}.parquet" for when in daily.computed_dates(home)]
        return read_files(session, home, files, schema)
    if table == "node_snapshot_history":
        return read_history(session, home, history_files(connection, home), COLUMN_TYPES[table])
    if table == "node_snapshots":
        return _node_snapshots(session, connection, home)
    rows = connection.table(table).to_arrow_table()
    return session.createDataFrame(rows.to_pylist(), schema)


def _published(session: SparkSession, connection: duckdb.DuckDBPyConnection, home: Path, name: str) -> DataFrame:
    table = (TABLES | TOPOLOGY_TABLES)[name]
    files, replacing = view_files(connection, name)
    schema = schema_of(table.kinds)
    if not replacing:
        return read_files(session, home, files, schema)
    later = read_files(session, home, replacing, f"{schema}, {_ROW_KEY}")
    earlier = read_files(session, home, files, f"{schema}, {_ROW_KEY}").join(later, "row_key", "left_anti")
    return earlier.unionByName(later.where(table.shown)).drop("row_key")


def _node_snapshots(session: SparkSession, connection: duckdb.DuckDBPyConnection, home: Path) -> DataFrame:
    listed, files = view_files(connection, "node_snapshots")
    kinds = COLUMN_TYPES["node_snapshots"]
    latest = read_files(session, home, listed, schema_of(TABLES["latest_snapshots"].kinds)).selectExpr(
        *("name", "stream", "node", "sequence"),
        # After a recreation of the source, another file may have the same sequence.
        "CAST(regexp_extract(file, 'date=([0-9-]+)/', 1) AS DATE) AS date",
        "substring_index(file, '/', -1) AS file_name",
    )
    messages = read_history(session, home, files, {**kinds, "date": "DATE"}, "_metadata.file_name AS file_name")
    return messages.join(latest, latest.columns, "left_semi").select(*kinds)


def read_history(
    session: SparkSession, home: Path, files: Sequence[str], kinds: Mapping[str, str], *more: str
) -> DataFrame:
    """Return columns of the messages in files of the Parquet history, and the expressions `more`."""
    whole = schema_of(kinds)
    if not files:
        return read_files(session, home, (), whole).selectExpr("*", *(f"NULL AS {each.split()[-1]}" for each in more))
    messages = read_files(session, home, files, whole, basePath=f"file:{home}/snapshots")
    columns = (_FOLDER_NAME.format(name) if name in _ENCODED else f"`{name}`" for name in kinds)
    return messages.selectExpr(*columns, *more)


def read_files(session: SparkSession, home: Path, files: Sequence[str], schema: str, **options: str) -> DataFrame:
    """Return the rows of Parquet files, given relative to the home; columns that a file lacks are NULL.

    Raises RunError for a missing file, which a Connect session would notice later.
    """
    if not files:
        return session.createDataFrame([], schema)
    _refuse_missing(home, *files)
    return session.read.schema(schema).options(**options).parquet(*(escaped(f"{home}/{file}") for file in files))


def _refuse_missing(home: Path, *names: str) -> None:
    for name in names:
        if not (home / name).exists():
            raise unreadable(str(home / name), FileNotFoundError("it is missing"), home)


def escaped(file: str) -> str:
    """Return a file's name for Spark, which takes patterns."""
    return "file:" + re.sub(r"([\\*?\[\]{}])", r"\\\1", file)


def schema_of(kinds: Mapping[str, str]) -> str:
    """Return a Spark schema of columns as DuckDB declares them."""
    return ", ".join(f"`{name}` {_TYPES[kind.strip()]}" for name, kind in kinds.items())
