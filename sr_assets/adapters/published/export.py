"""Copies of the published tables for other programs: Parquet or CSV files in a folder or an object store, or a DuckDB file.

Files are replaced atomically, and only those whose rows have changed. `tables.json` names the files of each table. Days that
expire in the home stay in the copy.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

import duckdb
import pyarrow as pa
from pyarrow import fs

from sr_assets.adapters.published.catalog import COLUMN_TYPES, ROWS
from sr_assets.adapters.published.daily_tables import DAILY_TABLES
from sr_assets.adapters.published.fleet_file import TABLES_FILE, history_files, table_versions
from sr_assets.adapters.published.fleet_reader import first_line, open_fleet, refuse_incomplete_history, unknown_table
from sr_assets.adapters.published.tables import STORAGE_VERSION, literal, parquet
from sr_assets.domain.errors import ConfigurationError, RunError

Form = Literal["parquet", "csv", "duckdb"]
#: Table → the column of the time of a row. The other tables are the present, which is copied whole.
TIMES: Final[Mapping[str, str]] = {
    "node_advisories": "detected_at",
    "node_events": "event_time",
    "site_events": "event_time",
    "gaps": "noticed_at",
    "blind_spans": "until",
    "parked_messages": "parked_at",
    "operator_actions": "occurred_at",
    "global_advisories": "received_at",
    "global_rejects": "received_at",
    **dict.fromkeys(("availability_daily", "inventory_daily", "node_snapshot_history"), "date"),
}
_DAILY: Final = {table.name: table for table in DAILY_TABLES}
#: The history of all messages is copied only if it is named.
_LARGE: Final = "node_snapshot_history"
#: What a killed export leaves, as patterns in its folder.
_DRAFTS: Final = (f".{TABLES_FILE}.new", ".*.csv.new", "*/.rows.parquet.new", "*/date=*/.rows.parquet.new")
#: The version of a file that is being written.
_UNKNOWN: Final = ""


class Exported(NamedTuple):
    """What an export did: the number of its tables, and of written and unchanged files."""

    tables: int
    written: int
    unchanged: int


class _Part(NamedTuple):
    """A file of a table: its name, the query of its rows, and a version that changes with them."""

    name: str
    query: str
    version: str


def export_tables(
    home: Path, target: str, form: Form, tables: Sequence[str] = (), since_ns: int | None = None
) -> Exported:
    """Copy tables, by default all except `node_snapshot_history`, to a folder, a URL such as `s3://bucket/folder`, or a new file.

    Of tables with a time (`TIMES`), only rows since then are copied, if it is given (unix ns); days are whole UTC dates.
    Parquet has a file for each day of a daily table and of the history.

    Raises ConfigurationError for an unknown table, and RunError if the target cannot be written.
    """
    if not target:
        raise ConfigurationError("the target is empty; name a folder, a URL, or a file")
    for table in tables:
        if table not in ROWS:
            raise unknown_table(table, ROWS)
    chosen = list(dict.fromkeys(tables)) or [table for table in ROWS if table != _LARGE]
    since = None if since_ns is None else datetime.fromtimestamp(since_ns / 1e9, UTC)
    # Versions of an earlier publication are harmless: the next export copies such a table again.
    versions = table_versions(home)
    with open_fleet(home) as connection:
        if _LARGE in chosen:
            refuse_incomplete_history(connection, home)
        try:
            if form == "duckdb":
                _write_duckdb(connection, target, chosen, since)
                return Exported(len(chosen), 1, 0)
            parts = {table: list(_parts(connection, home, table, form, since, versions)) for table in chosen}
            store = _Target(target)
            with store.locked():
                return _write_files(connection, store, form, parts)
        except (OSError, duckdb.Error, pa.ArrowException) as error:
            if isinstance(error, duckdb.IOException) and f"{home.resolve()}/" in str(error):
                raise
            raise RunError(f"{target} cannot be written: {first_line(error)}") from None


def _write_duckdb(
    connection: duckdb.DuckDBPyConnection, target: str, tables: Sequence[str], since: datetime | None
) -> None:
    """Write one file with the tables and views as tables; no partial file remains."""
    file = Path(target)
    if "://" in target:
        raise ConfigurationError(f"{target}: a DuckDB file is local; use `--format parquet`, or a path")
    if file.exists():
        raise RunError(f"{file} already exists; choose another file")
    draft = file.with_name(f".{file.name}.{os.getpid()}.new")
    try:
        attach = (
            f"ATTACH {literal(str(draft.absolute()))} AS exported (READ_WRITE, STORAGE_VERSION '{STORAGE_VERSION}')"
        )
        connection.execute(attach)
        for table in tables:
            connection.execute(f"CREATE TABLE exported.{table} AS SELECT * FROM {table}{_condition(table, since)}")
        connection.execute("DETACH exported")
        draft.replace(file)
    finally:
        for partial_file in (draft, draft.with_name(f"{draft.name}.wal")):
            partial_file.unlink(missing_ok=True)


def _write_files(
    connection: duckdb.DuckDBPyConnection, target: _Target, form: Form, parts: Mapping[str, Sequence[_Part]]
) -> Exported:
    known = target.read_versions(form)
    existing = target.existing(part.name for files in parts.values() for part in files)
    options = "FORMAT csv, HEADER" if form == "csv" else "FORMAT parquet, COMPRESSION zstd"
    ((as_of,),) = connection.execute("SELECT as_of FROM snapshot_info").fetchall()

    def write_list() -> None:
        listed = {
            table: {"files": sorted(files), "versions": dict(sorted(files.items()))}
            for table, files in sorted(known.items())
        }
        content = {"version": 1, "format": form, "as_of": as_of.astimezone(UTC).isoformat(), "tables": listed}
        target.put(TABLES_FILE, lambda path: Path(path).write_text(json.dumps(content, indent=1)))

    changed = [
        (table, part)
        for table, files in parts.items()
        for part in files
        if part.name not in existing or known[table].get(part.name) != part.version
    ]
    for table in parts:
        known[table].update({part.name: _UNKNOWN for changed_table, part in changed if changed_table == table})
    # An export that ends early leaves no file under the version of other rows.
    write_list()
    for table, part in changed:
        target.put(part.name, partial(_copy, connection, part.query, options))
        known[table][part.name] = part.version
    write_list()
    return Exported(len(parts), len(changed), sum(map(len, parts.values())) - len(changed))


def _copy(connection: duckdb.DuckDBPyConnection, query: str, options: str, path: str) -> None:
    connection.execute(f"COPY ({query}) TO {literal(path)} ({options})")


class _Target:
    """A folder of this host or of an object store."""

    def __init__(self, target: str) -> None:
        if "@" in target.partition("://")[2].partition("/")[0]:
            raise ConfigurationError(
                "the URL contains a login; set it in the environment, such as AWS_SECRET_ACCESS_KEY"
            )
        if "://" in target:
            self._store, self._folder = fs.FileSystem.from_uri(target)
        else:
            self._store, self._folder = fs.LocalFileSystem(), str(Path(target).absolute())

    def read_versions(self, form: Form) -> defaultdict[str, dict[str, str]]:
        """Return the version of each file of each table, as the last export wrote it in this form."""
        file = f"{self._folder}/{TABLES_FILE}"
        versions = defaultdict[str, dict[str, str]](dict)
        if self._store.get_file_info(file).type is fs.FileType.NotFound:
            return versions
        with self._store.open_input_stream(file) as stream:
            try:
                content = json.loads(stream.read())
                for table, files in content["tables"].items():
                    versions[table] = dict(files["versions"])
                if content["format"] == form:
                    return versions
            except (ValueError, KeyError, TypeError, AttributeError):
                pass
        raise ConfigurationError(f"{file} is not of an export as {form}; choose another folder")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let one export at a time write into a folder of this host."""
        if not isinstance(self._store, fs.LocalFileSystem):
            yield
            return
        self._store.create_dir(self._folder)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            for pattern in _DRAFTS:
                for draft in Path(self._folder).glob(pattern):
                    draft.unlink(missing_ok=True)
            yield
        finally:
            os.close(folder)

    def existing(self, names: Iterable[str]) -> set[str]:
        """Return the names of files that exist."""
        paths = {f"{self._folder}/{name}": name for name in names}
        infos = self._store.get_file_info(list(paths))
        return {paths[info.path] for info in infos if info.type is fs.FileType.File}

    def put(self, name: str, write: Callable[[str], object]) -> None:
        """Replace a file by the one that `write` makes at a path of this host."""
        path = f"{self._folder}/{name}"
        folder, _, last = path.rpartition("/")
        self._store.create_dir(folder)
        if isinstance(self._store, fs.LocalFileSystem):
            draft = Path(folder, f".{last}.new")
            try:
                write(str(draft))
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
            return
        with tempfile.TemporaryDirectory() as local:
            write(f"{local}/{last}")
            # An object appears once it is complete.
            fs.copy_files(f"{local}/{last}", path, fs.LocalFileSystem(), self._store)


def _parts(
    connection: duckdb.DuckDBPyConnection,
    home: Path,
    table: str,
    form: Form,
    since: datetime | None,
    versions: Mapping[str, str],
) -> Iterator[_Part]:
    """Yield the files of a table: one, or in Parquet one for each day of a table by day."""
    days = dict(_days(connection, home, table, since))
    if form == "parquet" and TIMES.get(table) == "date":
        for day, (version, rows) in days.items():
            yield _Part(f"{table}/date={day}/rows.parquet", _select(table, rows), version)
        return
    name = f"{table}.csv" if form == "csv" else f"{table}/rows.parquet"
    version = f"{zlib.crc32(repr(days).encode()):08x}" if days else versions.get(table, "")
    yield _Part(name, _select(table, table, _condition(table, since)), f"{version} {since and since.isoformat()}")


def _days(
    connection: duckdb.DuckDBPyConnection, home: Path, table: str, since: datetime | None
) -> Iterator[tuple[date, tuple[str, str]]]:
    """Yield each day of a table by day since a time, with the version of its rows and the SQL that reads them."""
    first = date.min if since is None else since.date()
    files = defaultdict[date, list[str]](list)
    if table in _DAILY:
        for day in _DAILY[table].computed_dates(home):
            files[day].append(f"{_DAILY[table].folder}/{day}.parquet")
    elif table == _LARGE:
        for file in history_files(connection, home):
            files[date.fromisoformat(file.split("/date=")[1].split("/")[0])].append(file)
    for day in sorted(day for day in files if day >= first):
        seen = []
        for file in sorted(files[day]):
            with suppress(FileNotFoundError):  # a day that expires now
                status = (home / file).stat()
                seen.append((file, status.st_size, status.st_mtime_ns))
        rows = f"{table} WHERE date = DATE '{day}'"
        if table in _DAILY:
            # A pattern would open the files of all days; an earlier version's lack columns.
            empty = ", ".join(f"NULL::{kind} AS {name}" for name, kind in COLUMN_TYPES[table].items())
            read = parquet(str(home.resolve()), files[day])
            rows = f"(SELECT {empty} WHERE false UNION ALL BY NAME SELECT * FROM {read})"
        if seen:
            yield day, (f"{zlib.crc32(repr(seen).encode()):08x}", rows)


def _select(table: str, rows: str, condition: str = "") -> str:
    """Return the query of the columns of a table; JSON becomes text, which every reader knows."""
    columns = (
        f'"{name}"::VARCHAR AS "{name}"' if kind == "JSON" else f'"{name}"'
        for name, kind in COLUMN_TYPES[table].items()
    )
    return f"SELECT {', '.join(columns)} FROM {rows}{condition}"


def _condition(table: str, since: datetime | None) -> str:
    if since is None or table not in TIMES:
        return ""
    kind = "DATE" if TIMES[table] == "date" else "TIMESTAMPTZ"
    return f" WHERE {TIMES[table]} >= TIMESTAMPTZ {literal(since.isoformat())}::{kind}"
