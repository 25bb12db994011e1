"""Which file of the history holds each node's newest copied message, in `state.duckdb`.

Files are recorded relative to the home (`snapshots/name=…`), so that a home can be moved. Not here: the
files (`adapters.published.history`), when they are indexed (`stages.tracking.node_snapshots`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import duckdb

#: A file's path relative to the home it is in, as an expression of SQL over its whole path.
_RELATIVE: Final = r"regexp_replace({}, '^.*/(snapshots/name=)', '\1')"
#: The statement that makes the files of a state from before they were relative so.
MIGRATION: Final = f"UPDATE snapshots SET file = {_RELATIVE.format('file')};"


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
                f"""
                CREATE OR REPLACE TEMP TABLE fresh AS
                SELECT node, max(sequence) AS sequence, {_RELATIVE.format("arg_max(filename, sequence)")} AS file
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
            f"""
            UPDATE snapshots SET file = {_RELATIVE.format("?")}
            WHERE stream = ? AND file IN (SELECT {_RELATIVE.format("unnest(?::VARCHAR[])")})
            """,
            [str(file), self._stream, list(map(str, files))],
        )

    def files(self) -> set[str]:
        """Return the files that hold a node's newest message, relative to the home."""
        rows = self._connection.execute(
            "SELECT DISTINCT file FROM snapshots WHERE stream = ?", [self._stream]
        ).fetchall()
        return {row[0] for row in rows}

    def forget(self, files: Sequence[str]) -> None:
        """Drop the nodes whose newest message was in files, as `files` names them, that no longer exist."""
        self._connection.execute(
            "DELETE FROM snapshots WHERE stream = ? AND file IN (SELECT unnest(?::VARCHAR[]))",
            [self._stream, list(files)],
        )
