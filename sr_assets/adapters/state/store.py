"""A site's private state, `state.duckdb`: transactions, and the rows of streams, their copying and their intents.

The other tables have modules of their own. Only the process that holds the site's lock opens the file. Reading and
copying run concurrently in that process, each with its own connection (`second_connection`), and never write the same rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any, Self

import duckdb
import pyarrow as pa

from sr_assets.adapters.state.cached_connection import StateConnection
from sr_assets.adapters.state.copy_tables import CopyLog, CopyQueue
from sr_assets.adapters.state.database import first_line, open_database
from sr_assets.adapters.state.global_view import GlobalTables
from sr_assets.adapters.state.guard import GuardRows
from sr_assets.adapters.state.node_table import Nodes
from sr_assets.adapters.state.operator_requests import AnsweredRequests
from sr_assets.adapters.state.records import CopyState, Intent, StreamState
from sr_assets.adapters.state.schema import CURRENT_TABLES, HISTORY_TABLES
from sr_assets.adapters.state.snapshot_index import SnapshotIndex
from sr_assets.adapters.state.stream_tables import Counters, Gaps, Heartbeats, Latencies, Partitions
from sr_assets.adapters.state.transitions import Transitions, Undecided
from sr_assets.domain.errors import RunError, cannot_write


class SiteState:
    """The open `state.duckdb` of one site, as a context manager. Use it inside the site's lock.

    `on_commit` is called after each transaction, with the tables that it may have changed; `guard` before it and before
    its commit: it raises an error unless this process may change the state. `time_ns` returns the servers' time (unix ns),
    from which the numbers of commits are made, or 0 while it is unknown.
    """

    def __init__(
        self,
        folder: Path,
        on_commit: Callable[[set[str]], None] = lambda _: None,
        guard: Callable[[], None] = lambda: None,
        time_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        self._folder = folder
        self._on_commit, self._guard, self._time_ns = on_commit, guard, time_ns
        #: The maintenance windows by which each stream's suppressed transitions were last judged in this process.
        self.followed_windows: dict[str, object] = {}

    def __enter__(self) -> Self:
        """Open or create the file; raises the errors of `open_database`."""
        self._connection = StateConnection(open_database(self._folder / "state.duckdb"))
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._connection.close()

    @contextlib.contextmanager
    def second_connection(self) -> Iterator[SiteState]:
        """Yield the same state with another connection, for another thread of this process."""
        other = SiteState(self._folder, self._on_commit, self._guard, self._time_ns)
        other._connection = self._connection.second()
        try:
            yield other
        finally:
            other._connection.close()

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def connection(self) -> StateConnection:
        return self._connection

    @contextlib.contextmanager
    def transaction(self, *, after: int = 0) -> Iterator[None]:
        """Run the block in one transaction; raises RunError if the commit cannot be written.

        The number of the commit is higher than `after`.
        """
        self._guard()
        self._connection.begin()
        try:
            yield
            self._guard()
        except BaseException:
            self._connection.rollback()
            raise
        try:
            touched = self._connection.commit(max(self._time_ns(), after + 1))
        except duckdb.OperationalError as error:
            file = self._folder / "state.duckdb"
            raise RunError(cannot_write(f"the state {file}", OSError(first_line(error)))) from None
        self._on_commit(touched)

    @contextlib.contextmanager
    def read_snapshot(self) -> Iterator[None]:
        """Run the block in one read transaction: a consistent snapshot."""
        self._connection.begin_snapshot()
        with contextlib.ExitStack() as stack:
            stack.callback(self._connection.rollback)
            yield

    def note_change(self, *, after: int = 0) -> None:
        """Commit a number higher than `after`, and nothing else: what belongs to the state has changed outside of it."""
        with self.transaction(after=after):
            self._connection.mark_changed()

    def last_commit(self) -> int:
        """Return the number of the last commit, or 0 without one."""
        return self._connection.last_commit()

    # ---------------------------------------------------------------------------------- tables with their own module

    @property
    def global_tables(self) -> GlobalTables:
        """The tables of the global view, which the site's feeds fold into."""
        return GlobalTables(self._connection)

    def copy_log(self, stream: str) -> CopyLog:
        """Return a stream's copy log: the target sequence of each recent copy."""
        return CopyLog(self._connection, stream)

    def copy_queue(self, stream: str) -> CopyQueue:
        """Return a stream's copy queue: the due copies."""
        return CopyQueue(self._connection, stream)

    def counters(self, stream: str) -> Counters:
        """Return a stream's counters that only metrics use."""
        return Counters(self._connection, stream)

    def heartbeats(self, stream: str) -> Heartbeats:
        """Return the heartbeats among a stream's copies."""
        return Heartbeats(self._connection, stream)

    def latencies(self, stream: str) -> Latencies:
        """Return the latency of a stream's copies."""
        return Latencies(self._connection, stream)

    def gaps(self, stream: str) -> Gaps:
        """Return a stream's gaps: the holes in its source."""
        return Gaps(self._connection, stream)

    def nodes(self, stream: str) -> Nodes:
        return Nodes(self._connection, stream)

    def outbox(self, stream: str) -> Transitions:
        """Return a stream's transitions."""
        return Transitions(self._connection, stream)

    def answered_requests(self, stream: str) -> AnsweredRequests:
        """Return a stream's applied requests of operators."""
        return AnsweredRequests(self._connection, stream)

    def partitions(self, stream: str) -> Partitions:
        return Partitions(self._connection, stream)

    def guard(self, stream: str) -> GuardRows:
        """Return a stream's rows of the outage guard."""
        return GuardRows(self._connection, stream)

    def undecided(self, stream: str) -> Undecided:
        """Return a stream's transitions on which the rules of operators have not decided."""
        return Undecided(self._connection, stream)

    def count_unpublished(self, stream: str) -> int:
        """Return the number of a stream's advisories and events that wait to be published."""
        events = (self.guard(stream), self.undecided(stream))
        return self.outbox(stream).size() + sum(rows.count_unpublished() for rows in events)

    def snapshot_index(self, stream: str) -> SnapshotIndex:
        """Return the index of a stream's history."""
        return SnapshotIndex(self._connection, stream)

    # ---------------------------------------------------------------------------------- streams, copying, intents

    def load_stream(self, stream: str) -> StreamState | None:
        """Return the reading progress of a stream, or None before its first run."""
        row = self._row("streams", StreamState, "stream = ?", [stream])
        return StreamState(*row) if row else None

    def save_stream(self, state: StreamState) -> None:
        """Write the reading progress of a stream; call it inside a transaction."""
        self._replace("streams", state, "stream = ?", [state.stream])

    def load_copying(self, stream: str) -> CopyState:
        """Return the copying progress of a stream; before the first copy, an empty record."""
        row = self._row("copying", CopyState, "stream = ?", [stream])
        return CopyState(*row) if row else CopyState(stream)

    def save_copying(self, copying: CopyState) -> None:
        """Write the copying progress of a stream; call it inside a transaction."""
        self._replace("copying", copying, "stream = ?", [copying.stream])

    def open_intent(self, stream: str, *, resend: bool = False) -> Intent | None:
        """Return the uncommitted intent of a batch, or of a resend, or None."""
        row = self._row("intents", Intent, "stream = ? AND resend = ?", [stream, resend])
        return Intent(*row) if row else None

    def save_intent(self, intent: Intent) -> None:
        """Replace the stream's intent of the same kind; call it inside a transaction."""
        self._replace("intents", intent, "stream = ? AND resend = ?", [intent.stream, intent.resend])

    def clear_intent(self, stream: str, *, resend: bool = False) -> None:
        """Delete an intent of a stream; call it in the transaction that commits its batch."""
        self._connection.execute("DELETE FROM intents WHERE stream = ? AND resend = ?", [stream, resend])

    def note_attempt_ended(self, stream: str) -> None:
        """Record that the attempt at the open intent ends in order, if it does not commit.

        It only adds a row, because another thread may be committing the attempt.
        """
        with self.transaction():
            self._connection.execute("INSERT INTO ended_attempts VALUES (?)", [stream])

    def take_attempt_ended(self, stream: str) -> bool:
        """Delete the records of `note_attempt_ended`; return whether there were any. Call it inside a transaction."""
        query = "DELETE FROM ended_attempts WHERE stream = ?"
        ((count,),) = self._connection.execute(query, [stream]).fetchall()
        return bool(count)

    def forget_stream(self, stream: str) -> None:
        """Delete a stream's rows except its history (transitions, gaps, parked messages); call it inside a transaction."""
        for table in CURRENT_TABLES:
            self._connection.execute(f"DELETE FROM {table} WHERE stream = ?", [stream])

    def forget_history(self, stream: str, *, gaps_ns: int, transitions_ns: int) -> None:
        """Delete gaps and parked messages before `gaps_ns`, transitions and blind spans before `transitions_ns`.

        An unpublished transition stays, and so does the last transition of each stored node: it dates the node's
        status. Call it inside a transaction.
        """
        self._connection.execute("DELETE FROM gaps WHERE stream = ? AND noticed_ns < ?", [stream, gaps_ns])
        self._connection.execute("DELETE FROM parked WHERE stream = ? AND parked_ns < ?", [stream, gaps_ns])
        self._connection.execute("DELETE FROM blind_history WHERE stream = ? AND next_ns < ?", [stream, transitions_ns])
        self.outbox(stream).forget_before(transitions_ns)
        self.guard(stream).forget_before(transitions_ns)
        self.undecided(stream).forget_before(transitions_ns)

    def known_streams(self) -> list[str]:
        """Return every stream and feed that has rows in any table."""
        # One query: each costs as much as reading a small table.
        every = " UNION ALL ".join(f"SELECT stream FROM {table}" for table in (*CURRENT_TABLES, *HISTORY_TABLES))
        return sorted(stream for (stream,) in self._connection.rows(f"SELECT DISTINCT stream FROM ({every})"))

    def erase_stream(self, stream: str) -> dict[str, int]:
        """Delete all rows of a stream or feed, including its history; return the number of rows by kind.

        Call it inside a transaction.
        """
        counts = {
            noun: self._connection.execute(f"SELECT count(*) FROM {table} WHERE stream = ?", [stream]).fetchall()[0][0]
            for noun, table in {"nodes": "nodes", "transitions": "transitions", "queued copies": "copy_queue"}.items()
        }
        self.forget_stream(stream)
        for table in HISTORY_TABLES:
            self._connection.execute(f"DELETE FROM {table} WHERE stream = ?", [stream])
        return {**counts, "rows of the global view": self.global_tables.forget_feed(stream)}

    def parked(self, stream: str) -> dict[int, tuple[int, int]]:
        """Return the parked messages: sequence → stored time in unix ns and payload bytes, the latest of a sequence."""
        query = "SELECT sequence, stored_ns, payload_bytes FROM parked WHERE stream = ? ORDER BY parked_ns"
        return {
            sequence: (stored_ns, size)
            for sequence, stored_ns, size in self._connection.execute(query, [stream]).fetchall()
        }

    def parked_reason(self, stream: str) -> tuple[int, str]:
        """Return the number of parked messages and the latest reason, empty without any."""
        query = "SELECT count(*), coalesce(arg_max(reason, parked_ns), '') FROM parked WHERE stream = ?"
        ((count, reason),) = self._connection.rows(query, [stream])
        return count, reason

    def remove_parked(self, stream: str, sequences: list[int]) -> None:
        """Delete parked messages; call it in the transaction that requests their copies."""
        query = "DELETE FROM parked WHERE stream = ? AND list_contains(?::BIGINT[], sequence)"
        self._connection.execute(query, [stream, sequences])

    def add_rows(self, table: str, rows: pa.Table) -> None:
        """Append rows to `transitions` or `parked` by column name; call it inside a transaction."""
        self._connection.register("added", rows)
        try:
            self._connection.execute(f"INSERT INTO {table} BY NAME SELECT * FROM added")
        finally:
            self._connection.unregister("added")

    def _row(
        self, table: str, record: type[StreamState | CopyState | Intent], condition: str, values: list[object]
    ) -> tuple[Any, ...] | None:
        rows = self._connection.rows(_selection(table, record, condition), values)
        return rows[0] if rows else None

    def _replace(
        self, table: str, record: StreamState | CopyState | Intent, condition: str, values: list[object]
    ) -> None:
        row, query = asdict(record), _selection(table, type(record), condition)
        if before := self._connection.current(query, values):
            # DuckDB takes a third of the time of a whole row for the few columns that a batch changes.
            row = {name: value for (name, value), old in zip(row.items(), before[0], strict=True) if value != old}
            if row:
                changes = ", ".join(f"{name} = ?" for name in row)
                self._connection.execute(f"UPDATE {table} SET {changes} WHERE {condition}", [*row.values(), *values])
        else:
            marks = ", ".join("?" * len(row))
            self._connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", list(row.values()))
        self._connection.expect(query, values, [astuple(record)])


def _selection(table: str, record: type[StreamState | CopyState | Intent], condition: str) -> str:
    names = ", ".join(column.name for column in fields(record))
    return f"SELECT {names} FROM {table} WHERE {condition}"
