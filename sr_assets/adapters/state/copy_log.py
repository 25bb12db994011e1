"""A stream's copy log in `state.duckdb`: the target sequence of each recent copy, and the copies to be sent again.

Here: the two tables and every statement on them. Not here: comparing the log with the target
(`stages.replication.target_history`), the transaction of a batch (`stages.replication.batch`).

Rows are kept for an hour: a server acknowledges before it has written to disk (within two minutes by default), so the copies
that a power failure can undo are younger. One row per batch holds runs: `length` copies of the source sequences from
`sequence` on have the target sequences from `target_sequence` on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sr_assets.domain.positions import SequenceRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import duckdb

KEPT_NS: Final = 3_600 * 1_000_000_000
SCHEMA: Final = """
CREATE TABLE copies (
    stream VARCHAR, committed_ns BIGINT, target_sequences BIGINT[], sequences BIGINT[], lengths BIGINT[]);
CREATE TABLE resends (stream VARCHAR, first BIGINT, next BIGINT, stood BOOLEAN);
"""
#: `target_sequence`, `sequence`, `length`.
Run = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Resend:
    """Source sequences to be copied again. `stood`: each had a copy in the target, so one missing in the source is lost."""

    covered: SequenceRange
    stood: bool


class CopyLog:
    """One stream's part of the copy log. Methods that change it are called inside a transaction."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, stream: str) -> None:
        """Take the connection and the stream's name."""
        self._connection = connection
        self._stream = stream

    def add(self, runs: Sequence[Run], now_ns: int) -> None:
        """Record the target sequences of a batch's copies, and drop rows older than an hour."""
        self._connection.execute(
            "DELETE FROM copies WHERE stream = ? AND committed_ns < ?", [self._stream, now_ns - KEPT_NS]
        )
        if runs:
            columns = [list(column) for column in zip(*runs, strict=True)]
            self._connection.execute("INSERT INTO copies VALUES (?, ?, ?, ?, ?)", [self._stream, now_ns, *columns])

    def copies(self) -> list[tuple[int, int]]:
        """Return (target sequence, source sequence) of every copy of the last hour, in the target's order."""
        rows = self._connection.execute(
            "SELECT target_sequences, sequences, lengths FROM copies WHERE stream = ?", [self._stream]
        ).fetchall()
        runs = [run for columns in rows for run in zip(*columns, strict=True)]
        return sorted((at + step, sequence + step) for at, sequence, length in runs for step in range(length))

    def keep_until(self, target_sequence: int) -> None:
        """Forget the copies after a target sequence: the target no longer holds them."""
        rows = self._connection.execute(
            "SELECT committed_ns, target_sequences, sequences, lengths FROM copies WHERE stream = ?", [self._stream]
        ).fetchall()
        self._connection.execute("DELETE FROM copies WHERE stream = ?", [self._stream])
        for committed_ns, *columns in rows:
            runs = [
                (at, sequence, min(length, target_sequence - at + 1))
                for at, sequence, length in zip(*columns, strict=True)
                if at <= target_sequence
            ]
            if runs:
                kept = [list(column) for column in zip(*runs, strict=True)]
                self._connection.execute(
                    "INSERT INTO copies VALUES (?, ?, ?, ?, ?)", [self._stream, committed_ns, *kept]
                )

    def add_resends(self, ranges: Iterable[SequenceRange], *, stood: bool) -> None:
        """Request that source sequences are copied again."""
        rows = [[self._stream, sequences.first, sequences.next, stood] for sequences in ranges if len(sequences)]
        if rows:
            self._connection.executemany("INSERT INTO resends VALUES (?, ?, ?, ?)", rows)

    def resends(self, limit: int | None = None, until: int | None = None) -> list[Resend]:
        """Return the sequences to be sent again, in order: at most `limit`, none from `until` on."""
        rows = self._connection.execute(
            "SELECT first, next, stood FROM resends WHERE stream = ? ORDER BY first", [self._stream]
        ).fetchall()
        resends: list[Resend] = []
        left = limit
        for first, after, stood in rows:
            end = after if until is None else min(after, until)
            end = end if left is None else min(end, first + left)
            if end <= first:
                break
            resends.append(Resend(SequenceRange(first, end), stood))
            left = None if left is None else left - (end - first)
        return resends

    def settle_resends(self, until: int) -> None:
        """Remove the requests before a source sequence: those were sent again, or are known to be lost."""
        self._connection.execute("DELETE FROM resends WHERE stream = ? AND next <= ?", [self._stream, until])
        self._connection.execute(
            "UPDATE resends SET first = ? WHERE stream = ? AND first < ?", [until, self._stream, until]
        )

    def clear(self) -> None:
        """Forget everything, for another source or another target."""
        self._connection.execute("DELETE FROM copies WHERE stream = ?", [self._stream])
        self._connection.execute("DELETE FROM resends WHERE stream = ?", [self._stream])
