"""Copies that a target holds, which may exceed the memory: their order, their parts, and the logged ones that are missing.

They are in a database of their own, in memory up to a limit, above which DuckDB moves them to a temporary folder.
"""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import duckdb
import numpy as np
import pyarrow as pa

from sr_assets.domain.positions import SequenceRange
from sr_assets.stages.site import SPILLED

if TYPE_CHECKING:
    from sr_assets.adapters.state.cached_connection import StateConnection

    Numbers = np.ndarray[Any, np.dtype[np.int64]]

_MEMORY: Final = "80MB"
#: Number of copies inserted, read and compared at a time.
PORTION: Final = 10_000
_ROW: Final = pa.schema(
    {
        "place": pa.int64(),
        "target_sequence": pa.int64(),
        "sequence": pa.int64(),
        "stored_ns": pa.int64(),
        "payload_bytes": pa.int64(),
        "sender": pa.string(),
        "created_ns": pa.int64(),
    }
)
_COLUMNS: Final = ", ".join(_ROW.names[1:])
_LOGGED: Final = """
    SELECT unnest(target_sequences) AS start, unnest(sequences) AS sequence, unnest(lengths) AS length
    FROM copies WHERE stream = ?
    """


@dataclass(frozen=True, slots=True)
class Copy:
    """One of our copies in the target: its target sequence, its original's sequence and stored time, and its size.

    `sender` and `created_ns` (of its source) are None if the copy does not contain them.
    """

    target_sequence: int
    sequence: int
    stored_ns: int
    payload_bytes: int
    sender: str | None
    created_ns: int | None = None


class _Database:
    """The table `found`, created with its first row: most runs find no copy, and the database costs 35 ms."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._connection: duckdb.DuckDBPyConnection | None = None

    @property
    def connection(self) -> duckdb.DuckDBPyConnection:
        if self._connection is None:
            self._folder.mkdir(exist_ok=True)
            # Of this database alone; DuckDB deletes it.
            spilled = str(self._folder / uuid.uuid4().hex)
            limits: dict[str, Any] = {"memory_limit": _MEMORY, "temp_directory": spilled, "threads": 1}
            self._connection = duckdb.connect(config=limits)
            self.insert("found", _ROW.empty_table())
        return self._connection

    def insert(self, table: str, rows: pa.Table) -> None:
        """Add rows to a table, which is created if need be."""
        self.connection.register("rows", rows)
        self.connection.execute(f"CREATE TABLE IF NOT EXISTS {table} AS FROM rows LIMIT 0")
        self.connection.execute(f"INSERT INTO {table} FROM rows")
        self.connection.unregister("rows")


class FoundCopies:
    """Copies in the order of their addition or last sort; indexes count in that order."""

    def __init__(self, folder: Path | None = None) -> None:
        """Start empty; of many copies, most are in the folder `SPILLED` of `folder`, a site's, or of the temporary directory."""
        self._database = _Database((folder or Path(tempfile.gettempdir())) / SPILLED)
        self._added: list[tuple[Any, ...]] = []
        self._first = self._after = 0

    def add(self, copy: Copy) -> None:
        """Add a copy as the last one."""
        # `astuple` would copy each value.
        values = copy.target_sequence, copy.sequence, copy.stored_ns, copy.payload_bytes, copy.sender, copy.created_ns
        self._added.append((self._after, *values))
        self._after += 1
        if len(self._added) >= PORTION:
            self._write()

    def __len__(self) -> int:
        """Return the number of copies."""
        return self._after - self._first

    def __getitem__(self, index: int) -> Copy:
        """Return the copy at an index; -1 is the last."""
        place = self._first + (index if index >= 0 else len(self) + index)
        ((*values,),) = self._select(_COLUMNS, "place = ?", place)
        return Copy(*values)

    def __iter__(self) -> Iterator[Copy]:
        """Yield each copy."""
        return self._ordered("true")

    @property
    def total_bytes(self) -> int:
        return int(self._value("coalesce(sum(payload_bytes), 0)")) if len(self) else 0

    @property
    def latest_ns(self) -> int:
        """Latest stored time of an original; there must be at least one copy."""
        return int(self._value("max(stored_ns)"))

    @property
    def latest(self) -> Copy:
        """The copy with the highest target sequence; there must be at least one."""
        return self[int(self._value("arg_max(place, target_sequence)")) - self._first]

    @property
    def location(self) -> SequenceRange:
        """The range of target sequences of all copies; empty, at 0, without a copy."""
        if not len(self):
            return SequenceRange(0, 0)
        ((first, last),) = self._select("min(target_sequence), max(target_sequence)")
        return SequenceRange(first, last + 1)

    def before(self, sequence: int) -> int:
        """Return the number of copies with lower source sequences."""
        return int(self._value("count(*)", "sequence < ?", sequence)) if len(self) else 0

    def of_sequences(self, sequences: Collection[int]) -> Iterator[Copy]:
        """Yield the copies of some source sequences."""
        return self._ordered("list_contains(?::BIGINT[], sequence)", list(sequences))

    def of_range(self, sequences: SequenceRange) -> FoundCopies:
        """Return the copies of a range of source sequences; the copies must be sorted by sequence."""
        return self.part(self.before(sequences.first), self.before(sequences.next))

    def part(self, first: int, after: int) -> FoundCopies:
        """Return the copies of a range of indexes, in the same database; neither may be added to or sorted afterwards."""
        self._write()
        part = FoundCopies()
        part._database = self._database
        part._first, part._after = (min(self._first + index, self._after) for index in (first, max(first, after)))
        return part

    def sort_by_sequence(self) -> None:
        """Sort by source sequence; of several copies of one message, only the last added stays."""
        self._sort("sequence", "place IN (SELECT max(place) FROM found GROUP BY sequence)")

    def sort_by_time(self) -> None:
        """Sort by the stored times of the originals."""
        self._sort("stored_ns, place", "true")

    def _sort(self, order: str, condition: str) -> None:
        if not len(self):
            return
        self._write()
        connection = self._database.connection
        connection.execute(
            f"""
            CREATE TABLE sorted AS SELECT row_number() OVER () - 1 AS place, {_COLUMNS}
            FROM (FROM found WHERE {condition} ORDER BY {order})
            """
        )
        connection.execute("DROP TABLE found")
        connection.execute("ALTER TABLE sorted RENAME TO found")
        ((self._after,),) = connection.execute("SELECT count(*) FROM found").fetchall()

    def _write(self) -> None:
        if self._added:
            columns = zip(*self._added, strict=True)
            rows = [pa.array(column, kind) for column, kind in zip(columns, _ROW.types, strict=True)]
            self._database.insert("found", pa.table(rows, _ROW))
            self._added = []

    def _value(self, value: str, condition: str = "true", *values: object) -> Any:  # noqa: ANN401  a number
        ((selected,),) = self._select(value, condition, *values)
        return selected

    def _select(self, columns: str, condition: str = "true", *values: object) -> list[tuple[Any, ...]]:
        self._write()
        query = f"SELECT {columns} FROM found WHERE place BETWEEN ? AND ? AND {condition}"
        return self._database.connection.execute(query, [self._first, self._after - 1, *values]).fetchall()

    def _ordered(self, condition: str, *values: object) -> Iterator[Copy]:
        if not len(self):
            return
        self._write()
        query = f"SELECT {_COLUMNS} FROM found WHERE place BETWEEN ? AND ? AND {condition} ORDER BY place"
        with contextlib.closing(self._database.connection.cursor()) as reading:
            reading.execute(query, [self._first, self._after - 1, *values])
            while rows := reading.fetchmany(PORTION):
                yield from (Copy(*row) for row in rows)

    # --------------------------------------------------------------------------------------- compared with the copy log

    def read_log(self, state: StateConnection, stream: str) -> None:
        """Read the copy log of a stream from the site's state; the methods below compare it with these copies."""
        self._write()
        with contextlib.closing(state.second()) as reading:
            logged = reading.execute(_LOGGED, [stream])
            self._database.insert(
                "runs", pa.table({name: pa.array([], pa.int64()) for name in ("start", "sequence", "length")})
            )
            while rows := logged.fetchmany(PORTION):
                starts, sequences, lengths = zip(*rows, strict=True)
                self._database.insert("runs", pa.table({"start": starts, "sequence": sequences, "length": lengths}))

    def last_logged(self) -> Copy | None:
        """Return the last copy that the log has at the same target sequence."""
        ((place,),) = self._database.connection.execute(
            """
            SELECT arg_max(place, target_sequence) FROM found ASOF JOIN runs ON target_sequence >= start
            WHERE target_sequence < start + length AND found.sequence - target_sequence = runs.sequence - start
            """
        ).fetchall()
        return None if place is None else self[place]

    def first_logged_after(self, target_sequence: int) -> tuple[int, int] | None:
        """Return the log's first copy after a target sequence: target sequence and source sequence."""
        ((at, sequence),) = self._database.connection.execute(
            """
            SELECT min(greatest(start, $1)), arg_min(sequence + greatest(0, $1 - start), greatest(start, $1)) FROM runs
            WHERE start + length > $1
            """,
            [target_sequence + 1],
        ).fetchall()
        return None if at is None else (at, sequence)

    def lost(self, target_sequence: int) -> Iterator[Numbers]:
        """Yield the source sequences of the log's copies from a target sequence on that are missing here, in portions."""
        connection = self._database.connection
        connection.execute("CREATE TABLE by_sequence AS SELECT sequence FROM found ORDER BY sequence")
        with contextlib.closing(connection.cursor()) as reading:
            runs = reading.execute("FROM runs WHERE start + length > ? ORDER BY sequence", [target_sequence])
            for sequences in _portions(runs, target_sequence):
                held = connection.execute(
                    "SELECT sequence FROM by_sequence WHERE sequence BETWEEN ? AND ?",
                    [int(sequences[0]), int(sequences[-1])],
                ).fetchnumpy()["sequence"]
                lost = sequences[~np.isin(sequences, held)]
                if len(lost):
                    yield lost


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
