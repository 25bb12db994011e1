"""A stream's copy log in `state.duckdb`: the target sequence of each recent copy, and the copies to send again.

Rows live for an hour. A server acknowledges before it writes to disk (within two minutes by default), so a power
failure can only undo younger copies. Each batch is one row of runs: `length` copies of the source sequences from
`sequence` on have the target sequences from `target_sequence` on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from sr_assets.adapters.state.stream_table import StreamTable
from sr_assets.domain.positions import SequenceRange

RETENTION_NS: Final = 3_600 * 1_000_000_000
SCHEMA: Final = """
CREATE TABLE copies (
    stream VARCHAR, committed_ns BIGINT, target_sequences BIGINT[], sequences BIGINT[], lengths BIGINT[]);
CREATE TABLE resends (stream VARCHAR, first BIGINT, next BIGINT, stood BOOLEAN);
"""
#: `target_sequence`, `sequence`, `length`.
Run = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Resend:
    """Source sequences to copy again.

    With `was_copied` each of them had a copy in the target, so a message that the source no longer holds is lost.
    """

    covered: SequenceRange
    was_copied: bool


class CopyLog(StreamTable):
    """One stream's part of the copy log. Call the methods that change it inside a transaction."""

    def add(self, runs: Sequence[Run], now_ns: int) -> None:
        """Record the target sequences of a batch's copies, and drop rows older than an hour."""
        self._connection.execute(
            "DELETE FROM copies WHERE stream = ? AND committed_ns < ?", [self._stream, now_ns - RETENTION_NS]
        )
        if runs:
            columns = [list(column) for column in zip(*runs, strict=True)]
            self._connection.execute("INSERT INTO copies VALUES (?, ?, ?, ?, ?)", [self._stream, now_ns, *columns])

    def keep_until(self, target_sequence: int) -> None:
        """Drop the copies after a target sequence: the target no longer holds them."""
        self._connection.execute(
            """
            CREATE OR REPLACE TEMP TABLE kept AS
            SELECT stream, committed_ns, list(place), list(sequence), list(least(length, $2 - place + 1)) FROM (
                SELECT rowid AS batch, stream, committed_ns, unnest(target_sequences) AS place,
                    unnest(sequences) AS sequence, unnest(lengths) AS length
                FROM copies WHERE stream = $1 AND list_max(target_sequences) + list_max(lengths) > $2)
            WHERE place <= $2 GROUP BY batch, stream, committed_ns
            """,
            [self._stream, target_sequence],
        )
        self._connection.execute(
            "DELETE FROM copies WHERE stream = ? AND list_max(target_sequences) + list_max(lengths) > ?",
            [self._stream, target_sequence],
        )
        self._connection.execute("INSERT INTO copies FROM kept")
        self._connection.execute("DROP TABLE kept")

    def add_resends(self, ranges: Iterable[SequenceRange], *, was_copied: bool) -> None:
        """Request that source sequences are copied again."""
        rows = [(sequences.first, sequences.next) for sequences in ranges if len(sequences)]
        if rows:
            columns = [list(column) for column in zip(*rows, strict=True)]
            self._connection.execute(
                "INSERT INTO resends SELECT ?, unnest(?::BIGINT[]), unnest(?::BIGINT[]), ?",
                [self._stream, *columns, was_copied],
            )

    def resends(self, limit: int | None = None, until: int | None = None) -> list[Resend]:
        """Return the sequences to send again, in order: at most `limit`, and only those before `until`."""
        # Each row has at least one sequence.
        rows = self._connection.rows(
            "SELECT first, next, stood FROM resends WHERE stream = $1 AND first < coalesce($2, first + 1)"
            " ORDER BY first LIMIT $3",
            [self._stream, until, limit],
        )
        resends: list[Resend] = []
        left = limit
        for first, after, was_copied in rows:
            end = after if until is None else min(after, until)
            end = end if left is None else min(end, first + left)
            if end <= first:
                break
            resends.append(Resend(SequenceRange(first, end), was_copied))
            left = None if left is None else left - (end - first)
        return resends

    def settle_resends(self, until: int) -> None:
        """Remove the requests before a source sequence: they were sent again or are lost."""
        self._connection.execute("DELETE FROM resends WHERE stream = ? AND next <= ?", [self._stream, until])
        self._connection.execute(
            "UPDATE resends SET first = ? WHERE stream = ? AND first < ?", [until, self._stream, until]
        )

    def clear(self) -> None:
        """Delete all rows, for another source or another target."""
        self._connection.execute("DELETE FROM copies WHERE stream = ?", [self._stream])
        self._connection.execute("DELETE FROM resends WHERE stream = ?", [self._stream])
