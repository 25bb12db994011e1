"""Reading the published tables at any time: rows, counts, a self-contained copy, and a user's own SQL within limits.

Readers and publishers never wait for each other.
"""

import contextlib
import itertools
import json
import logging
import re
import resource
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import duckdb

from sr_assets.adapters import times
from sr_assets.adapters.published import actions
from sr_assets.adapters.published.catalog import ROWS
from sr_assets.adapters.published.daily_tables import DAILY_TABLES
from sr_assets.adapters.published.fleet_file import listed_history, renew_views
from sr_assets.adapters.published.manifest import read_manifest
from sr_assets.adapters.published.publication import FOLDER
from sr_assets.adapters.published.tables import (
    HOME_VARIABLE,
    literal,
    refuse_other_schema,
)
from sr_assets.domain.errors import ConfigurationError, RunError, did_you_mean

logger = logging.getLogger(__name__)

#: Memory limit of a confined connection, which cannot spill to disk.
MEMORY: Final = "1GiB"
T = TypeVar("T")
#: Memory limit of the process: DuckDB limits its buffers, but not its strings and lists.
_PROCESS_BYTES: Final = 4 << 30
_FETCH_ROWS: Final = 2048
_AGAIN_SECONDS: Final = 0.05


class OutOfMemoryError(RunError):
    """A confined query needs more memory than its limit."""

    def __init__(self) -> None:
        super().__init__(f"the query needs more than {MEMORY} of memory; narrow it, aggregate, or take fewer columns")


def _refusal(file: Path, error: duckdb.Error) -> RunError:
    if holder := re.search(r"Conflicting lock is held in (.+? \(PID [0-9]+\))", str(error)):
        remedy = "end it, use `duckdb -readonly` instead, or wait for the next run, which writes a new file"
        return RunError(f"{file} cannot be opened: {holder[1]} has it open for writing; {remedy}")
    again = _remedy(file.parent) if is_copy(file.parent) else "; delete it and the next run writes it again"
    return RunError(f"{file} cannot be opened: {first_line(error)}{again}")


@contextlib.contextmanager
def open_fleet(home: Path, *, confined: bool = False) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the published tables for reading, in UTC.

    `confined` is for a user's SQL: no file except published ones, no network, no change of settings, and at most
    `MEMORY`. Raises RunError before the first publication or if the file cannot be opened, OtherSchemaError if another
    version wrote it. An error of DuckDB inside the block, such as a missing file of a table, is a RunError too.
    """
    file = home / "fleet.duckdb"
    if not file.exists():
        raise RunError(
            f"nothing is published yet: {file} is written by the first run (`sr-assets run --once`, or `sr-assets up`)"
        )
    with contextlib.suppress(RunError, OSError, duckdb.Error):
        renew_views(home)
    try:
        connection = duckdb.connect(str(file), read_only=True)
    except duckdb.Error as error:
        raise _refusal(file, error) from None
    with contextlib.closing(connection):
        try:
            refuse_other_schema(connection, "fleet", file)
        except duckdb.Error as error:
            raise _refusal(file, error) from None
        _set_up(connection, home)
        if confined:
            _confine(connection, home.resolve())
        try:
            yield connection
        except duckdb.Error as error:
            raise unreadable(str(file), error, home) from error


def unreadable(table: str, error: Exception, home: Path) -> RunError:
    """Return the error, in one line, of a file or table in a home that DuckDB or Spark cannot read."""
    remedy = "" if isinstance(error, duckdb.Error) and not isinstance(error, duckdb.IOException) else _remedy(home)
    return RunError(f"{table} cannot be read: {first_line(error)}{remedy}")


def _remedy(home: Path) -> str:
    if is_copy(home):
        return "; copy the home again, or use `sr-assets export`"
    return "; the site's next run writes it again"


def is_copy(home: Path) -> bool:
    """Return whether the home is at another path than the last run published it at."""
    published_at = read_manifest(home).home
    return bool(published_at) and published_at != str(home.resolve())


def refuse_incomplete_history(connection: duckdb.DuckDBPyConnection, home: Path) -> None:
    """Raise an error if the view of `node_snapshot_history` would show other rows than the home has had.

    It shows the files that exist, so a copied home may lack some: RunError. Retention deletes the oldest days of a stream.
    DuckDB reads the names of all folders: ConfigurationError for one above the home that looks like a column's.
    """
    if column := next((part for part in home.resolve().parts if re.match(r"(name|stream|date)=", part)), None):
        raise ConfigurationError(
            f"{home} is inside a folder {column}, which is read as a column; move or mount it elsewhere"
        )
    if not is_copy(home):
        return
    oldest, missing = dict[str, str](), list[str]()
    for file in listed_history(connection, home):
        stream, day, _ = file.rsplit("/", 2)
        if (home / file).exists():
            oldest[stream] = min(oldest.get(stream, day), day)
        else:
            missing.append(file)
    lost = [file for file in missing if file.rsplit("/", 2)[1] >= oldest.get(file.rsplit("/", 2)[0], "")]
    if lost:
        files = f"{lost[0]} and {len(lost) - 1} more files" if len(lost) > 1 else lost[0]
        raise RunError(f"table node_snapshot_history lacks {files}{_remedy(home)}")


def attach_fleet(home: Path) -> duckdb.DuckDBPyConnection:
    """Return a connection to the published tables as they are now; they stay so until it and all its relations are gone.

    Later publications are visible to other connections of the process, unlike with a file that `duckdb.connect` keeps
    open. Raises the errors of `open_fleet`.
    """
    with open_fleet(home):
        pass
    file, connection = home / "fleet.duckdb", duckdb.connect()
    try:
        connection.execute(f"ATTACH {literal(str(file.resolve()))} AS fleet (READ_ONLY)")
        connection.execute("USE fleet")
        _set_up(connection, home)
    except duckdb.Error as error:
        connection.close()
        raise _refusal(file, error) from None
    return connection


def unknown_table(table: str, names: Collection[str]) -> ConfigurationError:
    """Return the error of a table that is not one of the published ones."""
    hint = did_you_mean(table, names)
    return ConfigurationError(f"no table {table!r} is published; {hint}the tables are: {', '.join(names)}")


def refuse_unknown_table(table: str, connection: duckdb.DuckDBPyConnection) -> None:
    """Raise ConfigurationError, with the nearest name, for a table that is not published."""
    rows = connection.execute(
        "SELECT table_name FROM information_schema.tables WHERE table_schema = 'main' ORDER BY table_name"
    ).fetchall()
    names = [name for (name,) in rows]
    if table not in names:
        raise unknown_table(table, names)


def _set_up(connection: duckdb.DuckDBPyConnection, home: Path) -> None:
    connection.execute(f"SET VARIABLE {HOME_VARIABLE} = {literal(str(home.resolve()))}")
    connection.execute("SET TimeZone = 'UTC'")
    # A notebook without ipywidgets refuses every change of the bar.
    with contextlib.suppress(duckdb.InvalidInputException):
        connection.execute("SET enable_progress_bar = false")  # DuckDB draws the bar on stdout, among the rows


def _confine(connection: duckdb.DuckDBPyConnection, home: Path) -> None:
    """Restrict a connection, irrevocably, to the published files of a home and to `MEMORY`."""
    folders = (FOLDER, "snapshots", actions.FOLDER, *(table.folder for table in DAILY_TABLES))
    allowed = ", ".join(literal(f"{home}/{folder}/") for folder in folders)
    for setting in (
        "python_enable_replacements = false",
        f"memory_limit = '{MEMORY}'",
        "temp_directory = ''",
        f"allowed_directories = [{allowed}]",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        connection.execute(f"SET {setting}")


@dataclass(frozen=True, slots=True)
class Rows:
    """The result of a query: distinct column names, and the values, with JSON columns decoded."""

    columns: tuple[str, ...]
    values: list[tuple[Any, ...]]


class Answer:
    """A started query: its columns, and its rows as they are fetched."""

    def __init__(self, cursor: duckdb.DuckDBPyConnection) -> None:
        described = cursor.description or []
        self.columns = _distinct([str(column[0]) for column in described])
        self._cursor = cursor
        self._json = frozenset(index for index, (_, kind, *_) in enumerate(described) if str(kind) == "JSON")

    def fetch(self, most: int | None = None) -> list[tuple[Any, ...]]:
        """Return the next rows, by default all of them; empty at the end. Raises the errors of `read_rows`."""
        with _one_line_errors():
            rows = self._cursor.fetchall() if most is None else self._cursor.fetchmany(most)
        return [self._decoded(row) for row in rows] if self._json else rows

    def _decoded(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            json.loads(value) if index in self._json and value is not None else value for index, value in enumerate(row)
        )


def start_query(
    connection: duckdb.DuckDBPyConnection, query: str, parameters: Sequence[object] | Mapping[str, object] = ()
) -> Answer:
    """Start one SELECT (or SHOW, DESCRIBE, SUMMARIZE).

    Other statements are refused, because a confined connection may write where it may read: COPY, even inside EXPLAIN
    ANALYZE or around a PIVOT, would write files into the Parquet history. Raises ConfigurationError, one line with
    DuckDB's message, or RunError if the query needs too much memory.
    """
    with _one_line_errors():
        statements = duckdb.extract_statements(query)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise ConfigurationError(
                "one SELECT is allowed (or SHOW TABLES, DESCRIBE, SUMMARIZE; a PIVOT with its values listed)"
            )
        return Answer(connection.execute(statements[0], parameters or None))


def read_rows(
    connection: duckdb.DuckDBPyConnection, query: str, parameters: Sequence[object] | Mapping[str, object] = ()
) -> Rows:
    """Run one SELECT (or SHOW, DESCRIBE, SUMMARIZE) and return its rows; raises the errors of `start_query`."""
    answer = start_query(connection, query, parameters)
    return Rows(answer.columns, answer.fetch())


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Translate DuckDB's exceptions into one-line errors of this package."""
    try:
        yield
    except duckdb.OutOfMemoryException:
        raise OutOfMemoryError from None
    except duckdb.Error as error:
        raise ConfigurationError(first_line(error)) from None


class TableSummary(NamedTuple):
    """The number of rows of a table, and its first rows by column."""

    row_count: int
    first_rows: list[dict[str, Any]]


#: The tables whose rows are counted: the others can be large, or have the rows of one of these.
_COUNTED: Final = tuple(table for table in ROWS if table not in ("node_snapshot_history", "v_nodes_at_several_sites"))


def summarize_tables(home: Path, first_rows: int = 0, tables: Iterable[str] = _COUNTED) -> dict[str, TableSummary]:
    """Return the number of rows of public tables, and a few of them; without a table that has an unreadable file."""
    summaries = {}
    with open_fleet(home) as connection:
        for table in tables:
            try:
                summaries[table] = _summarize(connection, table, first_rows)
            except duckdb.Error as error:
                logger.warning("the table %s cannot be read: %s", table, first_line(error))
    return summaries


def _summarize(connection: duckdb.DuckDBPyConnection, table: str, first_rows: int) -> TableSummary:
    ((row_count,),) = connection.execute(f"SELECT count(*) FROM {table}").fetchall()
    if not row_count or not first_rows:
        return TableSummary(row_count, [])
    cursor = connection.execute(f"SELECT * FROM {table} LIMIT {first_rows}")
    columns = [str(column[0]) for column in cursor.description or ()]
    return TableSummary(row_count, [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()])


def count_rows(home: Path) -> dict[str, int]:
    """Return the number of rows of every public table."""
    return {table: summary.row_count for table, summary in summarize_tables(home).items()}


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names with repeated ones numbered (`name`, `name_1`), so that no column hides another."""
    distinct: list[str] = []
    for name in names:
        number, unique = 0, name
        while unique in distinct:
            number += 1
            unique = f"{name}_{number}"
        distinct.append(unique)
    return tuple(distinct)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, which DuckDB sometimes gives as JSON."""
    text = str(error).strip()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["exception_message"]
    return text.partition("\n")[0]


@contextlib.contextmanager
def user_query(home: Path, sql: str, *, seconds: float) -> Iterator[tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]]:
    """Run one SELECT; yield its columns and an iterator that fetches its rows in portions.

    Raises ConfigurationError as `read_rows` does, and RunError if it takes longer than `seconds` or more memory than
    `MEMORY`. An interrupt (Ctrl-C) ends the query too.
    """
    with open_fleet(home, confined=True) as connection, ThreadPoolExecutor(1) as pool, _limited_memory():
        within = _Deadline(connection, pool, seconds)
        answer = within.call(lambda: start_query(connection, sql))
        batches = iter(lambda: within.call(lambda: answer.fetch(_FETCH_ROWS)), [])
        try:
            yield answer.columns, itertools.chain.from_iterable(batches)
        finally:
            # DuckDB computes beyond the fetched rows, and closing would wait for it.
            connection.interrupt()


class _Deadline:
    """Runs the steps of one query in a thread, so that this thread can end it: DuckDB ignores signals."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, pool: ThreadPoolExecutor, seconds: float) -> None:
        self._connection = connection
        self._pool = pool
        self._seconds = seconds
        self._end = times.monotonic() + seconds

    def call(self, work: Callable[[], T]) -> T:
        future = self._pool.submit(work)
        try:
            return future.result(max(0.0, self._end - times.monotonic()))
        except TimeoutError:
            raise RunError(
                f"the query took longer than {self._seconds:g} s; narrow it, or allow more with --timeout"
            ) from None
        except MemoryError:
            raise OutOfMemoryError from None
        finally:
            # DuckDB ignores an interrupt before the query starts, so repeat it.
            while not future.done():
                self._connection.interrupt()
                wait([future], _AGAIN_SECONDS)


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """Limit the data of the process to `_PROCESS_BYTES` inside the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    lowest = min((limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY), default=_PROCESS_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (min(lowest, _PROCESS_BYTES), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
