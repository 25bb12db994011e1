"""A stream's copy_log in `state.duckdb`: which copy stands where in the target, and which are to be sent again.

Here: the two tables and every statement on them. Not here: what became of the target (`stages.replication.target_history`), who
commits (`stages.replication.batch`).

Kept for an hour: a server acknowledges before it has written to disk (within two minutes by default), so what a power
failure can take back is younger than that. One row per batch holds runs: `length` copies from `sequence` on stand in
the target from `target_sequence` on.
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
CREATE TABLE IF NOT EXISTS copies (
    stream VARCHAR, committed_ns BIGINT, target_sequences BIGINT[], sequences BIGINT[], lengths BIGINT[]);
CREATE TABLE IF NOT EXISTS resends (stream VARCHAR, first BIGINT, next BIGINT, stood BOOLEAN);
"""
#: `target_sequence`, `sequence`, `length`.
Run = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Resend:
    """Source sequences to be copied once more. `stood`: each of them did stand in the target, so one that is gone is lost."""

    covered: SequenceRange
    stood: bool


class CopyLog:
    """One stream's part of the copy_log. What changes it is called inside a transaction."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, stream: str) -> None:
        """Name the stream; the tables are there."""
        self._connection = connection
        self._stream = stream

    def add(self, runs: Sequence[Run], now_ns: int) -> None:
        """Note where a batch's copies stand, and forget what is older than an hour."""
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
        """Forget the copies behind a place in the target: they stand there no more."""
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
        """Ask for source sequences to be copied once more."""
        rows = [[self._stream, one.first, one.next, stood] for one in ranges if len(one)]
        if rows:
            self._connection.executemany("INSERT INTO resends VALUES (?, ?, ?, ?)", rows)

    def resends(self, limit: int | None = None, until: int | None = None) -> list[Resend]:
        """Return what is to be sent again, in order: at most `limit` sequences, none from `until` on."""
        rows = self._connection.execute(
            "SELECT first, next, stood FROM resends WHERE stream = ? ORDER BY first", [self._stream]
        ).fetchall()
        found: list[Resend] = []
        left = limit
        for first, after, stood in rows:
            end = after if until is None else min(after, until)
            end = end if left is None else min(end, first + left)
            if end <= first:
                break
            found.append(Resend(SequenceRange(first, end), stood))
            left = None if left is None else left - (end - first)
        return found

    def settle_resends(self, until: int) -> None:
        """Strike out what was to be sent again before a source sequence: it was, or it is known to be lost."""
        self._connection.execute("DELETE FROM resends WHERE stream = ? AND next <= ?", [self._stream, until])
        self._connection.execute(
            "UPDATE resends SET first = ? WHERE stream = ? AND first < ?", [until, self._stream, until]
        )

    def clear(self) -> None:
        """Forget everything: another source or another target is another story."""
        self._connection.execute("DELETE FROM copies WHERE stream = ?", [self._stream])
        self._connection.execute("DELETE FROM resends WHERE stream = ?", [self._stream])
