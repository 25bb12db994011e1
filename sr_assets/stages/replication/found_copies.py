"""Copies found in a target, in an unnamed temporary file, because a target may hold more copies than memory."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sr_assets.domain.positions import SequenceRange

if TYPE_CHECKING:
    Rows = np.ndarray[tuple[int], np.dtype[np.void]]
    Numbers = np.ndarray[Any, np.dtype[np.int64]]

_NONE: Final = -1
_COLUMNS: Final = ("target_sequence", "sequence", "stored_ns", "payload_bytes", "sender", "created_ns")
_ROW: Final = np.dtype([(column, np.int64) for column in _COLUMNS])
#: Number of copies written, read and cached at a time.
_CHUNK: Final = 8_192
_CHUNKS_HELD: Final = 4


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


class _RowFile:
    """Rows in an unnamed file, which the system deletes after its last use."""

    def __init__(self, folder: Path | None) -> None:
        self.descriptor, name = tempfile.mkstemp(dir=folder)
        Path(name).unlink()
        weakref.finalize(self, os.close, self.descriptor)

    def append(self, rows: Rows) -> None:
        """Append rows."""
        left = memoryview(rows.tobytes())
        while left:
            left = left[os.write(self.descriptor, left) :]

    def chunk(self, number: int) -> Rows:
        """Return the rows of one chunk."""
        size = _CHUNK * _ROW.itemsize
        return np.frombuffer(os.pread(self.descriptor, size, number * size), _ROW)

    def everything(self) -> Rows:
        """Return all rows, read lazily."""
        return np.frombuffer(mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ), _ROW)


class FoundCopies:
    """Copies in the order of their addition or last sort. Memory holds a few thousand of them, and each sender's name."""

    def __init__(self, folder: Path | None = None) -> None:
        """Start empty; the file is in `folder`, or in the system's temporary directory."""
        self._folder = folder
        self._file = _RowFile(folder)
        self._added: list[tuple[int, ...]] = []
        self._names: list[str | None] = [None]
        self._indexes: dict[str | None, int] = {None: 0}
        self._first = self._after = 0
        self._held: OrderedDict[int, Rows] = OrderedDict()
        self._firsts: Numbers | None = None

    def add(self, copy: Copy) -> None:
        """Append a copy."""
        index = self._indexes.setdefault(copy.sender, len(self._names))
        if index == len(self._names):
            self._names.append(copy.sender)
        created_ns = _NONE if copy.created_ns is None else copy.created_ns
        values = (copy.target_sequence, copy.sequence, copy.stored_ns, copy.payload_bytes, index, created_ns)
        self._added.append(values)
        self._after += 1
        if len(self._added) >= _CHUNK:
            self._write()

    def __len__(self) -> int:
        """Return the number of copies."""
        return self._after - self._first

    def __getitem__(self, index: int) -> Copy:
        """Return the copy at an index; -1 is the last."""
        row = self._first + (index if index >= 0 else len(self) + index)
        return self._copy(self._chunk(row // _CHUNK)[row % _CHUNK].item())

    def __iter__(self) -> Iterator[Copy]:
        """Yield each copy."""
        for rows in self._chunks():
            yield from map(self._copy, rows.tolist())

    @property
    def total_bytes(self) -> int:
        """Total bytes of all copies."""
        return sum(int(rows["payload_bytes"].sum()) for rows in self._chunks())

    @property
    def latest_ns(self) -> int:
        """Latest stored time of an original; there must be at least one copy."""
        return max(int(rows["stored_ns"].max()) for rows in self._chunks())

    @property
    def latest(self) -> Copy:
        """The copy with the highest target sequence; there must be at least one."""
        best = [rows[int(rows["target_sequence"].argmax())].item() for rows in self._chunks()]
        return self._copy(max(best))

    def before(self, sequence: int) -> int:
        """Return the number of copies with lower source sequences; the copies must be sorted by sequence."""
        chunk = max(0, int(np.searchsorted(self._firsts_of_chunks(), sequence)) - 1)
        row = chunk * _CHUNK + int(np.searchsorted(self._chunk(chunk)["sequence"], sequence)) if self._after else 0
        return min(max(row, self._first), self._after) - self._first

    def __contains__(self, sequence: int) -> bool:
        """Return whether a source sequence has a copy; the copies must be sorted by sequence."""
        at = self.before(sequence)
        return at < len(self) and self[at].sequence == sequence

    def of_sequences(self, sequences: Collection[int]) -> Iterator[Copy]:
        """Yield the copies of some source sequences."""
        wanted = np.fromiter(sequences, np.int64, len(sequences))
        for rows in self._chunks():
            yield from map(self._copy, rows[np.isin(rows["sequence"], wanted)].tolist())

    def of_range(self, sequences: SequenceRange) -> FoundCopies:
        """Return the copies of a range of source sequences; the copies must be sorted by sequence."""
        return self.part(self.before(sequences.first), self.before(sequences.next))

    @property
    def location(self) -> SequenceRange:
        """The range of target sequences of all copies; empty, at 0, without a copy."""
        columns = [rows["target_sequence"] for rows in self._chunks()]
        if not columns:
            return SequenceRange(0, 0)
        return SequenceRange(min(int(at.min()) for at in columns), max(int(at.max()) for at in columns) + 1)

    def sort_by_sequence(self) -> None:
        """Sort by source sequence; of several copies of one message, only the last added stays."""
        if self._ascends("sequence", 1):
            return
        keys = self._column("sequence")
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        self._take(order[np.append(keys[1:] != keys[:-1], True)])

    def sort_by_time(self) -> None:
        """Sort by the stored times of the originals."""
        if not self._ascends("stored_ns", 0):
            self._take(np.argsort(self._column("stored_ns"), kind="stable"))

    def part(self, first: int, after: int) -> FoundCopies:
        """Return the copies of a range of indexes, in the same file; the caller must not append afterwards."""
        self._write()
        part = FoundCopies(self._folder)
        part._file, part._names, part._indexes = self._file, self._names, self._indexes
        part._first, part._after = (min(self._first + index, self._after) for index in (first, max(first, after)))
        return part

    def _copy(self, values: Any) -> Copy:
        target_sequence, sequence, stored_ns, payload_bytes, index, created_ns = values
        known_ns = None if created_ns == _NONE else created_ns
        return Copy(target_sequence, sequence, stored_ns, payload_bytes, self._names[index], known_ns)

    def _write(self) -> None:
        if self._added:
            self._file.append(np.array(self._added, _ROW))
            self._added.clear()
            self._held.clear()
            self._firsts = None

    def _chunk(self, number: int) -> Rows:
        """Return the rows of a chunk of the file; the last few chunks are cached."""
        self._write()
        rows = self._held.get(number)
        if rows is None:
            rows = self._held[number] = self._file.chunk(number)
            if len(self._held) > _CHUNKS_HELD:
                self._held.popitem(last=False)
        return rows

    def _chunks(self) -> Iterator[Rows]:
        for number in range(self._first // _CHUNK, -(-self._after // _CHUNK) if len(self) else 0):
            begin = number * _CHUNK
            yield self._chunk(number)[max(0, self._first - begin) : self._after - begin]

    def _firsts_of_chunks(self) -> Numbers:
        """Return the first source sequence of each chunk of the file."""
        self._write()
        if self._firsts is None:
            chunks = -(-self._after // _CHUNK)
            self._firsts = np.array([self._chunk(number)["sequence"][0] for number in range(chunks)], np.int64)
        return self._firsts

    def _ascends(self, column: str, least: int) -> bool:
        """Return whether each value exceeds the previous one by at least `least`."""
        before: int | None = None
        for rows in self._chunks():
            values = rows[column]
            if before is not None and values[0] - before < least:
                return False
            if len(values) > 1 and int(np.diff(values).min()) < least:
                return False
            before = int(values[-1])
        return True

    def _column(self, column: str) -> Numbers:
        values = np.empty(len(self), np.int64)
        at = 0
        for rows in self._chunks():
            values[at : at + len(rows)] = rows[column]
            at += len(rows)
        return values

    def _take(self, order: Numbers) -> None:
        """Keep only the rows with these indexes, in this order, in a new file."""
        self._write()
        rows, ordered = self._file.everything(), _RowFile(self._folder)
        for begin in range(0, len(order), _CHUNK):
            ordered.append(rows[self._first + order[begin : begin + _CHUNK]])
        self._file, self._first, self._after = ordered, 0, len(order)
        self._held, self._firsts = OrderedDict(), None
