"""Which file of the history holds each node's newest copied message, in `state.duckdb`.

Not here: the files (`adapters.published.history`), when they are indexed (`stages.tracking.node_snapshots`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import duckdb


class SnapshotIndex:
    """One stream's index of its history. Methods that change it are called inside a transaction."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, stream: str) -> None:
        """Take the connection and the stream's name."""
        self._connection = connection
        self._stream = stream

    def stage(self, first: int, next_sequence: int, mark: str = "") -> None:
        """Note that a batch left staged files; `mark` tells its source from those before."""
        self._connection.execute(
            "INSERT INTO staged (stream, first, next, mark) VALUES (?, ?, ?, ?)",
            [self._stream, first, next_sequence, mark],
        )

    def staged(self) -> list[tuple[int, int, str]]:
        """Return the committed batches whose staged files are not indexed yet, in the order in which they were made."""
        return self._connection.execute(
            "SELECT first, next, mark FROM staged WHERE stream = ? ORDER BY rowid", [self._stream]
        ).fetchall()

    def add(self, first: int, next_sequence: int, files: Sequence[Path], mark: str = "") -> None:
        """Take a batch's files into the index, and note that they are no longer staged."""
        if files:
            self._connection.execute(
                """
                CREATE OR REPLACE TEMP TABLE fresh AS
                SELECT node, max(sequence) AS sequence, arg_max(filename, sequence) AS file
                FROM read_parquet(?, filename = true, hive_partitioning = false) GROUP BY node
                """,
                [[str(file) for file in files]],
            )
            self._connection.execute(
                "DELETE FROM snapshots WHERE stream = ? AND node IN (SELECT node FROM fresh)", [self._stream]
            )
            self._connection.execute(
                "INSERT INTO snapshots (stream, node, sequence, file) SELECT ?, node, sequence, file FROM fresh",
                [self._stream],
            )
            self._connection.execute("DROP TABLE fresh")
        self._connection.execute(
            "DELETE FROM staged WHERE stream = ? AND first = ? AND next = ? AND mark = ?",
            [self._stream, first, next_sequence, mark],
        )

    def move(self, files: Sequence[Path], file: Path) -> None:
        """Point the index from files to the one file they became."""
        self._connection.execute(
            "UPDATE snapshots SET file = ? WHERE stream = ? AND file IN (SELECT unnest(?::VARCHAR[]))",
            [str(file), self._stream, list(map(str, files))],
        )

    def files(self) -> set[str]:
        """Return the files that hold a node's newest message."""
        rows = self._connection.execute(
            "SELECT DISTINCT file FROM snapshots WHERE stream = ?", [self._stream]
        ).fetchall()
        return {row[0] for row in rows}

    def forget(self, files: Sequence[str]) -> None:
        """Drop the nodes whose newest message was in files that no longer exist."""
        self._connection.execute(
            "DELETE FROM snapshots WHERE stream = ? AND file IN (SELECT unnest(?::VARCHAR[]))",
            [self._stream, list(files)],
        )
