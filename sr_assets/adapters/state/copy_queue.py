"""A stream's copy queue in `state.duckdb`: copies that are decided and not made yet.

The fold appends due copies in the transaction that commits its decisions. Copying takes them from the front, in source
order, and removes them in the transaction that commits a receipt. The queue may hold a day's copies, so no reader takes
more than one batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from sr_assets.adapters.state.stream_table import StreamTable
from sr_assets.domain.positions import SequenceRange

if TYPE_CHECKING:
    pass

SCHEMA: Final = """
CREATE TABLE copy_queue (
    stream VARCHAR, starts BIGINT, created_ns BIGINT, sequence BIGINT, node VARCHAR, payload_bytes BIGINT);
"""


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
        queued: pa.Table = self._connection.sql(
            """
            WITH front AS (
                SELECT starts, created_ns, sequence, node, payload_bytes FROM copy_queue
                WHERE stream = $stream ORDER BY starts, sequence LIMIT $most)
            SELECT starts, created_ns, sequence, node FROM front
            WHERE starts = (SELECT min(starts) FROM front)
            QUALIFY sum(payload_bytes) OVER (ORDER BY sequence) - payload_bytes < $most_bytes
            ORDER BY sequence
            """,
            params={"stream": self._stream, "most": most, "most_bytes": most_bytes},
        ).to_arrow_table()
        return self._queued(queued) if queued.num_rows else None

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

    @staticmethod
    def _queued(table: pa.Table) -> QueuedCopies:
        created_ns, starts = table["created_ns"][0].as_py(), table["starts"][0].as_py()
        return QueuedCopies(created_ns, starts, table.select(["sequence", "node"]))
