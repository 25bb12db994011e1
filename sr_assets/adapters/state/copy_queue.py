"""A stream's copy queue in `state.duckdb`: the copies that are decided and not made yet.

The fold appends the due copies in the transaction that commits its decisions; copying takes them from the front, in the
order of the source, and removes them in the transaction that commits a receipt. The queue may hold a day's copies, so no
reader takes more than one batch. Not here: filling it (`stages.tracking`), draining it (`stages.replication`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from sr_assets.domain.positions import SequenceRange

if TYPE_CHECKING:
    import duckdb

SCHEMA: Final = """
CREATE TABLE copy_queue (
    stream VARCHAR, starts BIGINT, created_ns BIGINT, sequence BIGINT, node VARCHAR, payload_bytes BIGINT);
"""


@dataclass(frozen=True, slots=True)
class QueuedCopies:
    """Copies at the front of the queue: of one source (`created_ns`) and one beginning of it (`starts`).

    `rows` has the columns sequence and node (null when the sender is not tracked), in the order of the source.
    """

    created_ns: int
    starts: int
    rows: pa.Table

    @property
    def covered(self) -> SequenceRange:
        """The range from the first to the last of them; never empty."""
        sequences = self.rows["sequence"]
        return SequenceRange(sequences[0].as_py(), sequences[-1].as_py() + 1)


class CopyQueue:
    """One stream's part of the queue. Methods that change it are called inside a transaction."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, stream: str) -> None:
        """Take the connection and the stream's name."""
        self._connection = connection
        self._stream = stream

    def append(self, due: pa.Table, created_ns: int, starts: int) -> None:
        """Add copies that are due: columns sequence, node (null: not tracked), payload_bytes."""
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
        """Return the next copies, at most so many messages and, but for the first, bytes; None when there is none."""
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

    def inside(self, covered: SequenceRange, starts: int) -> pa.Table:
        """Return the copies of a range of source sequences, columns sequence and node, in the order of the source."""
        return self._connection.sql(
            """
            SELECT sequence, node FROM copy_queue
            WHERE stream = ? AND starts = ? AND sequence >= ? AND sequence < ? ORDER BY sequence
            """,
            params=[self._stream, starts, covered.first, covered.next],
        ).to_arrow_table()

    def everything(self) -> list[tuple[int, int, str | None]]:
        """Return all that is due, of every source there was: the source's created time, sequence, node."""
        return self._connection.execute(
            "SELECT created_ns, sequence, node FROM copy_queue WHERE stream = ? ORDER BY starts, sequence",
            [self._stream],
        ).fetchall()

    def strike(self, covered: SequenceRange, starts: int) -> None:
        """Remove the copies of a range: they are made, parked or known to be lost."""
        self._connection.execute(
            "DELETE FROM copy_queue WHERE stream = ? AND starts = ? AND sequence >= ? AND sequence < ?",
            [self._stream, starts, covered.first, covered.next],
        )

    def size(self) -> int:
        """Return how many copies are due."""
        row = self._connection.execute("SELECT count(*) FROM copy_queue WHERE stream = ?", [self._stream]).fetchall()
        return int(row[0][0])

    @staticmethod
    def _queued(table: pa.Table) -> QueuedCopies:
        created_ns, starts = table["created_ns"][0].as_py(), table["starts"][0].as_py()
        return QueuedCopies(created_ns, starts, table.select(["sequence", "node"]))
