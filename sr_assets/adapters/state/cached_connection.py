"""An open `state.duckdb`, and its connections, which remember the rows of a query until a commit changes one of its tables.

Making an instance of DuckDB takes 35 ms of CPU time, attaching a file to it 3 ms. An instance has one file at a time, because an
error that invalidates it must not affect another site.

DuckDB plans a statement for up to some milliseconds, which would be most of the cost of a poll without news. Only the
process that holds the site's lock changes the file, and all its connections share one memory, so nothing changes unseen.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Self, cast

import duckdb

from sr_assets.adapters.state.schema import TABLES

#: How many instances wait for another file.
_KEPT: Final = 2
_idle: list[duckdb.DuckDBPyConnection] = []
_lock = threading.Lock()
_numbers = itertools.count(1)
Rows = list[tuple[Any, ...]]
#: Limit of the remembered queries: some have a time among their parameters, and never come again.
_MOST: Final = 500
_READING: Final = frozenset({"SELECT", "FROM", "WITH", "COPY", "DESCRIBE"})


class AttachedFile:
    """An open database file, created if it is missing, with the connection `main`; a context manager."""

    def __init__(self, file: Path) -> None:
        self._name = f"state_{next(_numbers)}"
        self._instance = _take(f"{file}.tmp")
        self._others: list[duckdb.DuckDBPyConnection] = []
        try:
            quoted = str(file).replace("'", "''")
            self._instance.execute(f"ATTACH '{quoted}' AS {self._name}")
            self.main = self._connect()
        except BaseException:
            self._instance.close()
            raise

    def __enter__(self) -> Self:
        """Return self; the file is open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def _connect(self) -> duckdb.DuckDBPyConnection:
        connection = self._instance.cursor()
        # DuckDB draws the bar on stdout.
        connection.execute(f"USE {self._name}; SET enable_progress_bar = false")
        return connection

    def connect(self) -> duckdb.DuckDBPyConnection:
        """Return another connection, for another thread, which `disconnect` closes."""
        connection = self._connect()
        self._others.append(connection)
        return connection

    def disconnect(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Close a connection."""
        connection.close()
        if connection in self._others:
            self._others.remove(connection)

    def close(self) -> None:
        self.main.close()
        with contextlib.suppress(duckdb.Error):
            # The next file must never meet a connection to this one.
            if not self._others:
                self._instance.execute(f"DETACH {self._name}")
                # DuckDB deletes a folder in use only with the instance, and refuses to leave it.
                self._instance.execute("SET temp_directory = ''")
                if _put_back(self._instance):
                    return
        self._instance.close()


def _take(temporary: str) -> duckdb.DuckDBPyConnection:
    """Return an idle or a new instance that spills to the folder `temporary`."""
    with _lock:
        instance = _idle.pop() if _idle else None
    if instance is None:
        instance = duckdb.connect(config={"threads": 2, "memory_limit": "1GB"})
        instance.execute("SET GLOBAL TimeZone = 'UTC'")
    instance.execute("SET temp_directory = ?", [temporary])
    return instance


def _put_back(instance: duckdb.DuckDBPyConnection) -> bool:
    """Let an instance wait for another file; return False if enough others wait."""
    with _lock:
        if len(_idle) >= _KEPT:
            return False
        _idle.append(instance)
    return True


def _end_idle() -> None:
    """End the idle instances before the process forks: their threads would not exist in the child."""
    with _lock:
        while _idle:
            _idle.pop().close()


os.register_at_fork(before=_end_idle)


@lru_cache(maxsize=_MOST)
def tables_in(query: str) -> frozenset[str]:
    """Return the tables of the state that a query names; a column with the name of a table counts too."""
    return frozenset(TABLES.keys() & set(re.findall(r"\w+", query)))


@lru_cache(maxsize=_MOST)
def _changed_by(query: str) -> frozenset[str]:
    first = re.search(r"\w+", query)
    return frozenset() if first and first[0] in _READING else tables_in(query)


#: Parsed queries, which every connection can execute: a tenth to a third of the time of a small one is its parsing.
_statements: dict[str, duckdb.Statement] = {}


def _parsed(connection: duckdb.DuckDBPyConnection, query: str) -> duckdb.Statement | str:
    """Return a query's only statement, or a query of several as it is."""
    statement = _statements.get(query)
    if statement is None:
        statements = connection.extract_statements(query)
        if len(statements) != 1:
            return query
        if len(_statements) >= _MOST:
            _statements.clear()
        (statement,) = statements
        _statements[query] = statement
    return statement


class _Memory:
    """The rows that the connections of a file share, and the number of the last commit that changed each table.

    A holder of `lock` sees the file and these numbers at the same commit.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.commits = 0
        #: The number of the last commit in the file, or None before the first one of this process.
        self.number: int | None = None
        self.known: dict[tuple[object, ...], tuple[int, object]] = {}
        self._changed: dict[str, int] = {}

    def changed(self, tables: frozenset[str]) -> int:
        """Return the number of the last commit that changed one of some tables, or 0."""
        return max((self._changed.get(table, 0) for table in tables), default=0)

    def note_change(self, tables: set[str] | frozenset[str]) -> None:
        """Count a commit that changed some tables; call it inside the lock."""
        self.commits += 1
        self._changed |= dict.fromkeys(tables, self.commits)

    def keep(self, key: tuple[object, ...], changed: int, value: object) -> None:
        """Remember the rows of a query, or another value that follows from some tables."""
        if len(self.known) >= _MOST:
            self.known.clear()
        self.known[key] = changed, value


class StateConnection:
    """One connection to the state, for one thread. Every change of the state goes through `execute` or `executemany`.

    The first one is the file's main connection.
    """

    def __init__(self, file: AttachedFile, memory: _Memory | None = None) -> None:
        self._file = file
        #: DuckDB's connection, for statements that change no table of the state.
        self.raw = file.main if memory is None else file.connect()
        self._memory = memory or _Memory()
        self._writing = False
        self._touched: set[str] = set()
        # Queries of the transaction's own rows → their tables and rows.
        self._expected: dict[tuple[object, ...], tuple[frozenset[str], Rows]] = {}
        # The last commit that the current snapshot contains.
        self._snapshot: int | None = None

    def second(self) -> StateConnection:
        """Return another connection to the same file, for another thread."""
        return StateConnection(self._file, self._memory)

    def close(self) -> None:
        """Close the connection, with the first one the file."""
        if self.raw is self._file.main:
            self._file.close()
        else:
            self._file.disconnect(self.raw)

    # -------------------------------------------------------------------------------------------------- transactions

    def begin(self) -> None:
        """Begin a transaction that may change the state."""
        self.raw.execute("BEGIN TRANSACTION")
        self._writing = True

    def begin_snapshot(self) -> None:
        """Begin a transaction that reads the state as it is now."""
        with self._memory.lock:
            self.raw.execute("BEGIN TRANSACTION")
            self.raw.execute("FROM about LIMIT 0").fetchall()  # DuckDB begins it with the first use of the file
            self._snapshot = self._memory.commits

    def commit(self, time_ns: int = 0) -> set[str]:
        """Commit the transaction; return the tables that its statements may have changed.

        A commit that changes a table has a number: after that of the one before, and not before `time_ns`. So of the states
        of two members, the one with the higher number is the later one.
        """
        expected, touched = self._expected, self._end()
        with self._memory.lock:
            number = self._note_number(time_ns) if touched else self._memory.number
            self.raw.execute("COMMIT")
            self._memory.number = number
            self._memory.note_change(touched)
            for key, (tables, rows) in expected.items():
                self._memory.keep(key, self._memory.changed(tables), rows)
        return touched

    def _note_number(self, time_ns: int) -> int:
        """Add the number of the transaction to the file, within the transaction. Call it inside the memory's lock."""
        try:
            last = self._memory.number
            if last is None:
                last = self.last_commit()
                # Only the first commit of a process deletes, because two transactions must not delete the same row.
                self.raw.execute("DELETE FROM commits")
            number = max(last + 1, time_ns)
            self.raw.execute("INSERT INTO commits VALUES (?)", [number])
        except duckdb.Error:
            self.raw.execute("ROLLBACK")
            raise
        return number

    def mark_changed(self) -> None:
        """Let the commit of the transaction have a number although no statement changes a table."""
        self._touched.add("commits")

    def last_commit(self) -> int:
        """Return the number of the last commit, or 0 without one."""
        ((number,),) = self.raw.execute("SELECT coalesce(max(number), 0) FROM commits").fetchall()
        return int(number)

    def rollback(self) -> None:
        """Undo the transaction, or end the snapshot."""
        self._end()
        self.raw.execute("ROLLBACK")

    def _end(self) -> set[str]:
        touched, self._touched, self._expected = self._touched, set(), {}
        self._writing, self._snapshot = False, None
        return touched

    # ---------------------------------------------------------------------------------------------------- statements

    def execute(self, query: str, values: object = None) -> duckdb.DuckDBPyConnection:
        """Execute a statement; outside a transaction it commits itself."""
        return self._run(self.raw.execute, query, values)

    def executemany(self, query: str, values: Sequence[object]) -> duckdb.DuckDBPyConnection:
        """Execute a statement once for each list of values."""
        return self._run(self.raw.executemany, query, values)

    def _run(
        self, run: Callable[[Any, Any], duckdb.DuckDBPyConnection], query: str, values: object
    ) -> duckdb.DuckDBPyConnection:
        changed, statement = _changed_by(query), _parsed(self.raw, query)
        if self._writing or not changed:
            self._touched |= changed
            self._expected = {key: known for key, known in self._expected.items() if not known[0] & changed}
            return run(statement, values)
        with self._memory.lock:
            result = run(statement, values)
            self._memory.note_change(changed)
        return result

    def sql(self, query: str, *, params: object = None) -> duckdb.DuckDBPyRelation:
        return self.raw.sql(query, params=params)

    def register(self, name: str, table: object) -> None:
        """Let queries read an Arrow table under a name."""
        self.raw.register(name, table)

    def unregister(self, name: str) -> None:
        self.raw.unregister(name)

    def rows(self, query: str, values: Sequence[object] = ()) -> Rows:
        """Return the rows of a query on tables of the state alone, remembered ones if no table has changed since.

        A transaction that may change the state reads the file.
        """
        if self._writing:
            return self._read(query, values)
        key, tables = (query, *values), tables_in(query)
        if (known := self._known(key, tables)) is not None:
            return cast("Rows", known)
        if self._snapshot is not None:
            rows, changed = self._read(query, values), self._memory.changed(tables)
            if changed <= self._snapshot:
                self._memory.keep(key, changed, rows)
            return rows
        with self._memory.lock:
            rows = self._read(query, values)
            self._memory.keep(key, self._memory.changed(tables), rows)
        return rows

    def _read(self, query: str, values: Sequence[object]) -> Rows:
        return self.raw.execute(_parsed(self.raw, query), values).fetchall()

    def current(self, query: str, values: Sequence[object]) -> Rows:
        """Return the rows of a query that only this thread's transactions change, remembered ones if they have not changed."""
        key, tables = (query, *values), tables_in(query)
        if (expected := self._expected.get(key)) is not None:
            return expected[1]
        known = None if self._touched & tables else self._known(key, tables)
        return self._read(query, values) if known is None else cast("Rows", known)

    def expect(self, query: str, values: Sequence[object], rows: Rows) -> None:
        """Remember rows that the transaction has just written for its end, unless a later statement changes their tables."""
        if self._writing:
            self._expected[query, *values] = tables_in(query), rows

    def remembered(self, key: tuple[object, ...], query: str) -> object:
        """Return the value that `remember` was given, or None if a table in the query has changed since; in a snapshot."""
        return self._known(key, tables_in(query))

    def remember(self, key: tuple[object, ...], query: str, value: object) -> None:
        """Remember a value that depends on the query's rows alone; call it inside the snapshot that it comes from."""
        changed = self._memory.changed(tables_in(query))
        if self._snapshot is not None and changed <= self._snapshot:
            self._memory.keep(key, changed, value)

    def _known(self, key: tuple[object, ...], tables: frozenset[str]) -> object:
        changed, known = self._memory.changed(tables), self._memory.known.get(key)
        if known is None or known[0] != changed or (self._snapshot is not None and changed > self._snapshot):
            return None
        return known[1]
