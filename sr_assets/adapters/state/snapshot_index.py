"""The index of a stream's Parquet history in `state.duckdb`: files, and the file of each node's newest message.

Paths are relative to the home (`snapshots/name=…`), so that a home can be moved. A file that compaction merged is
`replaced`: its rows no longer count, and the file stays until no reader has it open.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from sr_assets.adapters.history_paths import relative_name
from sr_assets.adapters.state.stream_tables import StreamTable
from sr_assets.domain.history_layout import HistoryFile

#: SQL expression for a file's path relative to its home, given its whole path.
_RELATIVE: Final = r"regexp_replace({}, '^.*/(snapshots/name=)', '\1')"


class IndexedFile(NamedTuple):
    """A file of the history, relative to the home; an earlier build knew only its level."""

    file: str
    level: int
    rows: int | None
    first_hour: int | None
    last_hour: int | None


class SnapshotIndex(StreamTable):
    """One stream's index of its history. Call the methods that change it inside a transaction."""

    def stage(self, first: int, next_sequence: int, mark: str = "") -> None:
        """Record that a batch left staged files; `mark` identifies their source."""
        query = "INSERT INTO staged (stream, first, next, mark) VALUES (?, ?, ?, ?)"
        self._connection.execute(query, [self._stream, first, next_sequence, mark])

    def staged(self) -> list[tuple[int, int, str]]:
        """Return the committed batches whose staged files are not indexed yet, in commit order."""
        query = "SELECT first, next, mark FROM staged WHERE stream = ? ORDER BY rowid"
        return self._connection.rows(query, [self._stream])

    def add(self, first: int, next_sequence: int, files: Sequence[HistoryFile], mark: str = "") -> None:
        """Index a batch's files, and remove the batch from the staged ones."""
        if files:
            self._read_newest(files)
            self._connection.execute(
                "DELETE FROM snapshots WHERE stream = ? AND node IN (SELECT node FROM fresh)", [self._stream]
            )
            self._connection.execute(
                "INSERT INTO snapshots (stream, node, sequence, file) SELECT ?, node, sequence, file FROM fresh",
                [self._stream],
            )
            self._connection.execute("DROP TABLE fresh")
            self.list_files(files)
        self._connection.execute(
            "DELETE FROM staged WHERE stream = ? AND first = ? AND next = ? AND mark = ?",
            [self._stream, first, next_sequence, mark],
        )

    def add_earlier(self, files: Sequence[HistoryFile]) -> None:
        """Index files of the present source whose messages may be older than the indexed ones."""
        if not files:
            return
        self._read_newest(files)
        self._connection.execute(
            """
            DELETE FROM snapshots USING fresh
            WHERE snapshots.stream = ? AND snapshots.node = fresh.node AND snapshots.sequence < fresh.sequence
            """,
            [self._stream],
        )
        self._connection.execute(
            """
            INSERT INTO snapshots (stream, node, sequence, file) SELECT $1, node, sequence, file FROM fresh
            WHERE node NOT IN (SELECT node FROM snapshots WHERE stream = $1)
            """,
            [self._stream],
        )
        self._connection.execute("DROP TABLE fresh")
        self.list_files(files)

    def missing(self) -> dict[str, int]:
        """Return the nodes without an indexed message, each with the stored time (unix ns) of its newest copied one."""
        rows = self._connection.execute(
            """
            SELECT node, copied_ns FROM nodes WHERE stream = $1 AND copied_ns IS NOT NULL
                AND node NOT IN (SELECT node FROM snapshots WHERE stream = $1)
            """,
            [self._stream],
        ).fetchall()
        return dict(rows)

    def _read_newest(self, files: Sequence[HistoryFile]) -> None:
        """Create the table `fresh` with the newest message of each node in some files."""
        self._connection.execute(
            f"""
            CREATE OR REPLACE TEMP TABLE fresh AS
            SELECT node, max(sequence) AS sequence, {_RELATIVE.format("arg_max(filename, sequence)")} AS file
            FROM read_parquet(?, filename = true, hive_partitioning = false) GROUP BY node
            """,
            [[str(file.path) for file in files]],
        )

    def list_files(self, files: Iterable[HistoryFile]) -> None:
        """Add files of the history, each once; the row of a listed file is replaced."""
        rows = [
            (self._stream, relative_name(file.path), file.level, False, file.rows, file.first_hour, file.last_hour)
            for file in files
        ]
        self._unlist([row[1] for row in rows])
        if rows:
            self._connection.executemany("INSERT INTO history VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    def move(self, parts: Sequence[Path], files: Sequence[HistoryFile]) -> None:
        """Replace files by the files that compaction merged them into, or by none if another listed file has their rows."""
        replaced = [self._stream, list(map(relative_name, parts))]
        self._connection.execute(
            """
            CREATE OR REPLACE TEMP TABLE moved AS SELECT stream, node, sequence FROM snapshots
            WHERE stream = ? AND list_contains(?::VARCHAR[], file)
            """,
            replaced,
        )
        # An UPDATE of this many rows takes ten times as long.
        self._connection.execute(
            "DELETE FROM snapshots WHERE stream = ? AND list_contains(?::VARCHAR[], file)", replaced
        )
        if len(files) == 1:
            self._connection.execute("INSERT INTO snapshots SELECT *, ? FROM moved", [relative_name(files[0].path)])
        elif files:
            self._connection.execute(
                f"""
                INSERT INTO snapshots SELECT moved.*, {_RELATIVE.format("filename")}
                FROM moved JOIN read_parquet(?, filename = true, hive_partitioning = false) USING (node, sequence)
                """,
                [[str(file.path) for file in files]],
            )
        self._connection.execute("DROP TABLE moved")
        self._connection.execute(
            "UPDATE history SET replaced = true WHERE stream = ? AND list_contains(?::VARCHAR[], file)", replaced
        )
        self.list_files(files)

    def count(self) -> int:
        """Return the number of nodes whose newest copied message is indexed."""
        return int(self._value("SELECT count(*) FROM snapshots WHERE stream = ?"))

    def files(self) -> list[IndexedFile]:
        """Return the files of the history, without replaced ones."""
        query = "SELECT file, level, rows, first_hour, last_hour FROM history WHERE stream = ? AND NOT replaced ORDER BY file"
        return [IndexedFile(*row) for row in self._connection.rows(query, [self._stream])]

    def replaced(self) -> list[str]:
        """Return the replaced files, relative to the home."""
        query = "SELECT file FROM history WHERE stream = ? AND replaced"
        return [file for (file,) in self._connection.rows(query, [self._stream])]

    def forget(self, files: Sequence[str]) -> None:
        """Remove deleted files, relative to the home, and the nodes whose newest message was there."""
        self._connection.execute(
            "DELETE FROM snapshots WHERE stream = ? AND list_contains(?::VARCHAR[], file)", [self._stream, list(files)]
        )
        self._unlist(files)

    def _unlist(self, files: Sequence[str]) -> None:
        self._connection.execute(
            "DELETE FROM history WHERE stream = ? AND list_contains(?::VARCHAR[], file)", [self._stream, list(files)]
        )
