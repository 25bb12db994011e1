"""Copies in `state.duckdb`: a stream's queue of decided ones, and its log of those in the target.

The fold appends due copies in the transaction that commits its decisions. Copying takes them from the front, in source
order, and removes them in the transaction that commits a receipt. The queue may hold a day's copies, so no reader takes
more than one batch.

Rows of the log live for an hour. A server acknowledges before it writes to disk (within two minutes by default), so a power
failure can only undo younger copies. Each batch is one row of runs: `length` copies of the source sequences from
`sequence` on have the target sequences from `target_sequence` on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from sr_assets.adapters.state.stream_tables import StreamTable
from sr_assets.domain.positions import SequenceRange

RETENTION_NS: Final = 3_600 * 1_000_000_000
#: `target_sequence`, `sequence`, `length`.
Run = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class QueuedCopies:
    """Copies at the front of the queue, all from one source (`created_ns`) and one restart of it (`starts`).

    `rows` has the columns sequence and node (null if the sender is not tracked), in source order.
    """

    created_ns: int
    starts: int
    rows: pa.Table

    @property
    def covered(self) -> SequenceRange:
        """Range from the first to the last copy; never empty."""
        sequences = self.rows["sequence"]
        return SequenceRange(sequences[0].as_py(), sequences[-1].as_py() + 1)


class FirstQueued(NamedTuple):
    """The copy at the front of the queue: its source sequence, its source and the source's restart."""

    sequence: int
    created_ns: int
    starts: int


class CopyQueue(StreamTable):
    """One stream's part of the queue. Call the methods that change it inside a transaction."""

    def append(self, due: pa.Table, created_ns: int, starts: int) -> None:
        """Add due copies: columns sequence, node (null: not tracked), payload_bytes."""
        self._connection.register("due", due)
        try:
            self._connection.execute(
                """
                INSERT INTO copy_queue (stream, starts, created_ns, sequence, node, payload_bytes)
                SELECT ?, ?, ?, sequence, node, payload_bytes FROM due
                """,
                [self._stream, starts, created_ns],
            )
        finally:
            self._connection.unregister("due")

    def front(self, most: int, most_bytes: int) -> QueuedCopies | None:
        """Return the next copies, or None if the queue is empty.

        There are at most `most` messages of at most `most_bytes`, but always at least one message.
        """
        queued = self._connection.sql(
            """
            SELECT starts, created_ns, sequence, node, payload_bytes FROM copy_queue
            WHERE stream = ? ORDER BY starts, sequence LIMIT ?
            """,
            params=[self._stream, most],
        ).to_arrow_table()
        if not queued.num_rows:
            return None
        starts, sizes = queued["starts"].to_numpy(), queued["payload_bytes"].to_numpy()
        # DuckDB would take three times as long.
        count = np.count_nonzero((starts == starts[0]) & (np.cumsum(sizes) - sizes < most_bytes))
        created_ns = queued["created_ns"][0].as_py()
        return QueuedCopies(created_ns, int(starts[0]), queued.select(["sequence", "node"]).slice(0, count))

    def first(self) -> FirstQueued | None:
        """Return the first of the next copies, or None if the queue is empty."""
        query = "SELECT sequence, created_ns, starts FROM copy_queue WHERE stream = ? ORDER BY starts, sequence LIMIT 1"
        rows = self._connection.rows(query, [self._stream])
        return FirstQueued(*rows[0]) if rows else None

    def in_range(self, covered: SequenceRange, starts: int) -> pa.Table:
        """Return the copies of a range of source sequences in source order, columns sequence and node."""
        return self._connection.sql(
            """
            SELECT sequence, node FROM copy_queue
            WHERE stream = ? AND starts = ? AND sequence >= ? AND sequence < ? ORDER BY sequence
            """,
            params=[self._stream, starts, covered.first, covered.next],
        ).to_arrow_table()

    def all_copies(self) -> list[tuple[int, int, str | None]]:
        """Return all due copies of every source: the source's created time, sequence, node."""
        return self._connection.execute(
            "SELECT created_ns, sequence, node FROM copy_queue WHERE stream = ? ORDER BY starts, sequence",
            [self._stream],
        ).fetchall()

    def remove(self, covered: SequenceRange, starts: int) -> None:
        """Remove the copies of a range: they are made, parked or lost."""
        self._connection.execute(
            "DELETE FROM copy_queue WHERE stream = ? AND starts = ? AND sequence >= ? AND sequence < ?",
            [self._stream, starts, covered.first, covered.next],
        )

    def size(self) -> int:
        """Return the number of due copies."""
        return int(self._value("SELECT count(*) FROM copy_queue WHERE stream = ?"))


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
        """Record the target sequences of a batch's copies, and drop rows older than an hour but the last one.

        If the target still holds that one, it has lost no older copies.
        """
        self._connection.execute(
            """
            DELETE FROM copies WHERE stream = $1 AND committed_ns < (
                SELECT max(committed_ns) FROM copies WHERE stream = $1 AND committed_ns < $2)
            """,
            [self._stream, now_ns - RETENTION_NS],
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
