"""The comparison of the copy log with the copies found in a target: both may be longer than memory.

It has its own database in memory, with a limit, above which DuckDB moves tables to a temporary folder of the site.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import duckdb
import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from sr_assets.adapters.state.cached_connection import StateConnection

    Numbers = np.ndarray[Any, np.dtype[np.int64]]

#: Number of copies compared at a time.
PORTION: Final = 50_000
_MEMORY: Final = "80MB"
_LOGGED: Final = """
    SELECT unnest(target_sequences) AS place, unnest(sequences) AS sequence, unnest(lengths) AS length
    FROM copies WHERE stream = ?
    """


class CopyComparison:
    """One stream's copy log beside the copies that its target holds; a context manager.

    `state` is a connection to the site's state, `folder` the site's folder.
    """

    def __init__(self, state: StateConnection, stream: str, folder: Path) -> None:
        self._state, self._stream, self._folder = state, stream, folder

    def __enter__(self) -> Self:
        """Read the copy log."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=self._folder))
            limits: dict[str, Any] = {
                "memory_limit": _MEMORY,
                "temp_directory": folder,
                "threads": 1,
                "preserve_insertion_order": False,
            }
            self._connection = stack.enter_context(duckdb.connect(config=limits))
            self._connection.execute("CREATE TABLE runs (place BIGINT, sequence BIGINT, length BIGINT)")
            self._connection.execute("CREATE TABLE held (place BIGINT, sequence BIGINT)")
            with contextlib.closing(self._state.second()) as reading:
                logged = reading.execute(_LOGGED, [self._stream])
                while rows := logged.fetchmany(PORTION):
                    at, sequences, lengths = zip(*rows, strict=True)
                    self._insert("runs", pa.table({"place": at, "sequence": sequences, "length": lengths}))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Drop the comparison."""
        self._stack.close()

    def add_held(self, copies: Sequence[tuple[int, int]]) -> None:
        """Add copies that the target holds: target sequence and source sequence."""
        at, sequences = zip(*copies, strict=True)
        self._insert("held", pa.table({"place": at, "sequence": sequences}))

    def last_kept(self) -> tuple[int, int] | None:
        """Return the last copy of the log that the target still holds: target sequence and source sequence."""
        return self._first(
            """
            SELECT max(h.place), arg_max(h.sequence, h.place) FROM held h ASOF JOIN runs r ON h.place >= r.place
            WHERE h.place < r.place + r.length AND h.sequence - h.place = r.sequence - r.place
            """
        )

    def last_held(self) -> tuple[int, int] | None:
        """Return the last copy of any age that the target holds."""
        return self._first("SELECT max(place), arg_max(sequence, place) FROM held")

    def first_after(self, target_sequence: int) -> tuple[int, int] | None:
        """Return the log's first copy after a target sequence."""
        return self._first(
            """
            SELECT min(greatest(place, $1)), arg_min(sequence + greatest(0, $1 - place), greatest(place, $1)) FROM runs
            WHERE place + length > $1
            """,
            target_sequence + 1,
        )

    def holds_any(self, first: int, after: int) -> bool:
        """Return whether the target holds a copy of a range of source sequences."""
        rows = self._connection.execute(
            "SELECT 1 FROM held WHERE sequence >= ? AND sequence < ? LIMIT 1", [first, after]
        )
        return bool(rows.fetchall())

    def lost(self, target_sequence: int) -> Iterator[Numbers]:
        """Yield the source sequences of the log's copies from a target sequence on that the target lacks, in portions."""
        self._connection.execute("CREATE TABLE sorted AS SELECT sequence FROM held ORDER BY sequence")
        self._connection.execute("SET preserve_insertion_order = true")
        with contextlib.closing(self._connection.cursor()) as reading:
            runs = reading.execute("FROM runs WHERE place + length > ? ORDER BY sequence", [target_sequence])
            for sequences in _portions(runs, target_sequence):
                held = self._connection.execute(
                    "SELECT sequence FROM sorted WHERE sequence BETWEEN ? AND ?",
                    [int(sequences[0]), int(sequences[-1])],
                ).fetchnumpy()["sequence"]
                lost = sequences[~np.isin(sequences, held)]
                if len(lost):
                    yield lost

    def _insert(self, table: str, rows: pa.Table) -> None:
        self._connection.register("rows", rows)
        self._connection.execute(f"INSERT INTO {table} FROM rows")
        self._connection.unregister("rows")

    def _first(self, query: str, *values: object) -> tuple[int, int] | None:
        ((at, sequence),) = self._connection.execute(query, list(values)).fetchall()
        return None if at is None else (at, sequence)


def _portions(runs: duckdb.DuckDBPyConnection, target_sequence: int) -> Iterator[Numbers]:
    """Yield the source sequences of runs from a target sequence on, ascending, at most `PORTION` at a time."""
    parts: list[Numbers] = []
    size = 0
    while rows := runs.fetchmany(10_000):
        for at, sequence, length in rows:
            first, after = sequence + max(0, target_sequence - at), sequence + length
            while first < after:
                part = np.arange(first, min(after, first + PORTION - size), dtype=np.int64)
                parts.append(part)
                first, size = first + len(part), size + len(part)
                if size >= PORTION:
                    yield np.unique(np.concatenate(parts))
                    parts, size = [], 0
    if parts:
        yield np.unique(np.concatenate(parts))
