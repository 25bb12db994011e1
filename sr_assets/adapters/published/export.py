"""Copies of the published tables for other programs: Parquet or CSV files in a folder or an object store, or a DuckDB file.

Files are replaced atomically, and only those whose rows have changed. `tables.json` names the files of each table. Days that
expire in the home stay in a copy as Parquet.
"""

from __future__ import annotations

import glob
import json
import os
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

import duckdb
import pyarrow as pa
from pyarrow import fs

from sr_assets.adapters import times
from sr_assets.adapters.locking import locked_folder
from sr_assets.adapters.progress_lines import tracked
from sr_assets.adapters.published import actions
from sr_assets.adapters.published.catalog import COLUMN_TYPES, ROWS
from sr_assets.adapters.published.daily_tables import DAILY_TABLES
from sr_assets.adapters.published.fleet_file import TABLES_FILE, listed_history
from sr_assets.adapters.published.fleet_reader import first_line, open_fleet, refuse_incomplete_history, unknown_table
from sr_assets.adapters.published.tables import STORAGE_VERSION, literal, parquet
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.positions import DAY_NS

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
#: Where a row's folders say more than the file has; a name is percent-encoded.
_FOLDERS: Final = {
    "name": "url_decode(substring(split_part(filename, '/', -4), 6))",
    "stream": "url_decode(substring(split_part(filename, '/', -3), 8))",
    "date": "substring(split_part(filename, '/', -2), 6)::DATE",
}
#: What a killed export leaves, as patterns in its folder.
_DRAFTS: Final = (f".{TABLES_FILE}.new", ".*.csv.new", "*/.rows.parquet.new", "*/date=*/.rows.parquet.new")


class Exported(NamedTuple):
    """What an export did: the number of its tables, and of written and unchanged files."""

    tables: int
    written: int
    unchanged: int


class _Part(NamedTuple):
    """A file of a table: its name, the query of its rows, and a version that changes with them.

    The home lacks rows of an `expiring` one, which a copy may have.
    """

    table: str
    name: str
    query: str
    version: str
    expiring: bool = False


def export_tables(
    home: Path, target: str, form: Form, tables: Sequence[str] = (), since_ns: int | None = None
) -> Exported:
    """Copy tables, by default all except `node_snapshot_history`, to a folder, a URL such as `s3://bucket/folder`, or a new file.

    Of tables with a time (`TIMES`), only rows since then are copied, if it is given (unix ns); days are whole UTC dates.
    Parquet has a file for each day of a daily table and of the history.

    Raises ConfigurationError for an unknown table or a wrong target, and RunError if the target cannot be written.
    """
    if not target:
        raise ConfigurationError("the target is empty; name a folder, a URL, or a file")
    for table in tables:
        if table not in ROWS:
            raise unknown_table(table, ROWS)
    chosen = list(dict.fromkeys(tables)) or [table for table in ROWS if table != _LARGE]
    since = None if since_ns is None else datetime.fromtimestamp(since_ns / 1e9, UTC)
    shown = target.partition("?")[0]
    try:
        store = None if form == "duckdb" else _Target(target)
        # An export that waits for another begins with the tables as they are then.
        with nullcontext() if store is None else store.locked(), open_fleet(home) as connection:
            if _LARGE in chosen:
                refuse_incomplete_history(connection, home)
            try:
                if store is None:
                    _write_duckdb(connection, target, chosen, since)
                    return Exported(len(chosen), 1, 0)
                compared = tracked("comparing tables", chosen)
                parts = [part for table in compared for part in _parts(connection, home, table, form, since)]
                return _write_files(connection, store, form, chosen, parts)
            except duckdb.Error as error:
                if isinstance(error, duckdb.IOException) and f"{home.resolve()}/" in str(error):
                    raise
                raise RunError(f"{shown} cannot be written: {first_line(error)}") from None
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"{shown} cannot be written: {first_line(error)}") from None


def _write_duckdb(
    connection: duckdb.DuckDBPyConnection, target: str, tables: Sequence[str], since: datetime | None
) -> None:
    """Write one file with the tables and views as tables; no partial file remains, and after a kill for a day at most."""
    file = Path(target)
    if "://" in target:
        raise ConfigurationError(f"{target}: a DuckDB file is local; use `--format parquet`, or a path")
    if file.exists():
        raise RunError(f"{file} already exists; choose another file")
    for left in file.parent.glob(f".{glob.escape(file.name)}.*.new*"):
        if left.stat().st_mtime_ns < times.time_ns() - DAY_NS:
            left.unlink(missing_ok=True)
    draft = file.with_name(f".{file.name}.{os.getpid()}.new")
    try:
        attach = (
            f"ATTACH {literal(str(draft.absolute()))} AS exported (READ_WRITE, STORAGE_VERSION '{STORAGE_VERSION}')"
        )
        connection.execute(attach)
        for table in tracked("exporting tables", tables):
            connection.execute(f"CREATE TABLE exported.{table} AS SELECT * FROM {table}{_condition(table, since)}")
        connection.execute("DETACH exported")
        draft.replace(file)
    finally:
        for left in (draft, draft.with_name(f"{draft.name}.wal")):
            left.unlink(missing_ok=True)


def _write_files(
    connection: duckdb.DuckDBPyConnection, target: _Target, form: Form, tables: Sequence[str], parts: Sequence[_Part]
) -> Exported:
    known: dict[str, dict[str, str | None]] = target.read_versions(form)
    for table in tables:
        known.setdefault(table, {})
    existing = target.existing(part.name for part in parts)
    options = "FORMAT csv, HEADER" if form == "csv" else "FORMAT parquet, COMPRESSION zstd"
    ((as_of,),) = connection.execute("SELECT as_of FROM snapshot_info").fetchall()

    def write_list() -> None:
        listed = {table: {"files": sorted(files), "versions": files} for table, files in sorted(known.items())}
        content = {"version": 1, "format": form, "as_of": as_of.astimezone(UTC).isoformat(), "tables": listed}
        target.put(TABLES_FILE, lambda path: Path(path).write_text(json.dumps(content, indent=1)))

    changed = [
        part
        for part in parts
        if part.name not in existing or not (part.expiring or known[part.table].get(part.name) == part.version)
    ]
    # An export that ends early leaves no file under the version of other rows.
    for part in changed:
        known[part.table].pop(part.name, None)
        if part.name in existing:
            known[part.table][part.name] = None
    write_list()
    for part in tracked("exporting files", changed, lambda part: part.name):
        target.put(part.name, partial(_copy, connection, part.query, options))
        known[part.table][part.name] = part.version
    write_list()
    return Exported(len(tables), len(changed), len(parts) - len(changed))


def _copy(connection: duckdb.DuckDBPyConnection, query: str, options: str, path: str) -> None:
    connection.execute(f"COPY ({query}) TO {literal(path)} ({options})")


class _Target:
    """A folder of this host or of an object store."""

    def __init__(self, target: str) -> None:
        # A key may contain a slash.
        if "@" in target.partition("://")[2]:
            raise ConfigurationError(
                "the URL contains '@', as with a login; set a login in the environment, such as AWS_SECRET_ACCESS_KEY"
            )
        if "://" in target:
            self._store, self._folder = fs.FileSystem.from_uri(target)
        else:
            self._store, self._folder = fs.LocalFileSystem(), str(Path(target).absolute())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let one export at a time write into a folder of this host, without what a killed one has left."""
        if not isinstance(self._store, fs.LocalFileSystem):
            yield
            return
        self._store.create_dir(self._folder)
        with locked_folder(Path(self._folder)):
            for pattern in _DRAFTS:
                for draft in Path(self._folder).glob(pattern):
                    draft.unlink(missing_ok=True)
            yield

    def read_versions(self, form: Form) -> dict[str, dict[str, str | None]]:
        """Return the version of each file of each table, as the last export wrote it in this form."""
        file = f"{self._folder}/{TABLES_FILE}"
        if self._store.get_file_info(file).type is fs.FileType.NotFound:
            return {}
        with self._store.open_input_stream(file) as stream, suppress(ValueError, KeyError, TypeError, AttributeError):
            content = json.loads(stream.read())
            if content["format"] == form:
                return {table: dict(files["versions"]) for table, files in content["tables"].items()}
        raise ConfigurationError(f"{file} is not of an export as {form}; choose another folder")

    def existing(self, names: Iterable[str]) -> set[str]:
        """Return the names of files that exist."""
        paths = {f"{self._folder}/{name}": name for name in names}
        infos = self._store.get_file_info(list(paths))
        return {paths[info.path] for info in infos if info.type is fs.FileType.File}

    def put(self, name: str, write: Callable[[str], object]) -> None:
        """Replace a file; `write` makes the new one at a path of this host."""
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
    connection: duckdb.DuckDBPyConnection, home: Path, table: str, form: Form, since: datetime | None
) -> Iterator[_Part]:
    """Yield the files of a table: one, or in Parquet one for each day of a table by day."""
    if TIMES.get(table) != "date":
        name = f"{table}.csv" if form == "csv" else f"{table}/rows.parquet"
        # The rows of other tables do not depend on `since`.
        version = f"{_version(connection, home, table)} {since.isoformat() if since and table in TIMES else ''}"
        yield _Part(table, name, _select(table, table, _condition(table, since)), version)
        return
    days = {day: files for day, files in _days(connection, home, table).items() if since is None or day >= since.date()}
    if form == "csv":
        version = _checksum([_looks(home, files) for files in days.values()])
        yield _Part(table, f"{table}.csv", _select(table, table, _condition(table, since)), version)
        return
    for day, files in sorted(days.items()):
        if looks := _looks(home, files):
            source = parquet(
                str(home.resolve()), [file for file, *_ in looks], "filename = true", "union_by_name = true"
            )
            name, query = f"{table}/date={day}/rows.parquet", _select(table, _whole(table, source))
            yield _Part(table, name, query, _checksum(looks), expiring=len(looks) < len(files))


def _version(connection: duckdb.DuckDBPyConnection, home: Path, table: str) -> str:
    """Return a text that changes with the rows of a table: of a view its query, which names files that never change."""
    if table == actions.NAME:
        return actions.version(home)
    query = "SELECT sql FROM duckdb_views() WHERE view_name = $table AND NOT internal"
    return _checksum(connection.execute(query, {"table": table}).fetchall() or connection.table(table).fetchall())


def _checksum(value: object) -> str:
    return f"{zlib.crc32(repr(value).encode()):08x}"


def _days(connection: duckdb.DuckDBPyConnection, home: Path, table: str) -> Mapping[date, list[str]]:
    """Return the files of each day of a table by day, relative to the home, including expired ones."""
    if table in _DAILY:
        daily = _DAILY[table]
        return {day: [f"{daily.folder}/{day}.parquet"] for day in daily.computed_dates(home)}
    days = defaultdict[date, list[str]](list)
    for file in listed_history(connection, home):
        days[date.fromisoformat(file.split("/")[-2].removeprefix("date="))].append(file)
    return days


def _looks(home: Path, files: Iterable[str]) -> list[tuple[str, int, int]]:
    """Return the name, the size and the modification time of the files that exist."""
    looks = []
    for file in sorted(files):
        with suppress(FileNotFoundError):
            status = (home / file).stat()
            looks.append((file, status.st_size, status.st_mtime_ns))
    return looks


def _whole(table: str, source: str) -> str:
    """Return the query of all columns of a table by day; columns that an earlier version's file lacks are NULL."""
    kinds = COLUMN_TYPES[table]
    empty = ", ".join(f"NULL::{kind} AS {name}" for name, kind in kinds.items())
    folders = {} if table in _DAILY else _FOLDERS
    stored = ", ".join(f"{folders[name]} AS {name}" for name in kinds if name in folders)
    rows = f"SELECT *{f', {stored}' if stored else ''} FROM {source}"
    return f"(SELECT {empty} WHERE false UNION ALL BY NAME {rows})"


def _select(table: str, source: str, condition: str = "") -> str:
    """Return the query of the columns of a table; JSON becomes text, which every reader knows."""
    columns = (
        f'"{name}"::VARCHAR AS "{name}"' if kind == "JSON" else f'"{name}"'
        for name, kind in COLUMN_TYPES[table].items()
    )
    return f"SELECT {', '.join(columns)} FROM {source}{condition}"


def _condition(table: str, since: datetime | None) -> str:
    if since is None or table not in TIMES:
        return ""
    kind = "DATE" if TIMES[table] == "date" else "TIMESTAMPTZ"
    return f" WHERE {TIMES[table]} >= TIMESTAMPTZ {literal(since.isoformat())}::{kind}"
