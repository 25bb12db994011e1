"""Copies found in a target, as columns: 48 bytes each and every sender's name once, for a target may hold millions.

Not here: finding them (`copies`), what follows from them (`rebuilding`, `recover`, `unsettled`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_NONE: Final = -1


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of ours found in the target.

    Its place there, the sequence of its original and the time it was stored, its size, its sender if it says so, and the
    created time of its source if its id says so.
    """

    target_sequence: int
    sequence: int
    stored_ns: int
    payload_bytes: int
    sender: str | None
    created_ns: int | None = None


class CopyColumns:
    """Copies in the order in which they were added, or last sorted."""

    def __init__(self) -> None:
        """Begin with none."""
        self._columns = tuple(array("q") for _ in range(6))
        self._names: list[str | None] = [None]
        self._indexes: dict[str | None, int] = {None: 0}

    def add(self, copy: Copy) -> None:
        """Add one at the end."""
        index = self._indexes.setdefault(copy.sender, len(self._names))
        if index == len(self._names):
            self._names.append(copy.sender)
        created_ns = _NONE if copy.created_ns is None else copy.created_ns
        values = (copy.target_sequence, copy.sequence, copy.stored_ns, copy.payload_bytes, index, created_ns)
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)

    def __len__(self) -> int:
        """Count them."""
        return len(self._columns[0])

    def __getitem__(self, at: int) -> Copy:
        """Return one by its place."""
        target_sequence, sequence, stored_ns, payload_bytes, index, created_ns = (
            column[at] for column in self._columns
        )
        known_ns = None if created_ns == _NONE else created_ns
        return Copy(target_sequence, sequence, stored_ns, payload_bytes, self._names[index], known_ns)

    def __iter__(self) -> Iterator[Copy]:
        """Yield each."""
        return map(self.__getitem__, range(len(self)))

    @property
    def sequences(self) -> array[int]:
        """The sequences of the originals."""
        return self._columns[1]

    @property
    def stored_ns(self) -> array[int]:
        """When the originals were stored."""
        return self._columns[2]

    @property
    def total_bytes(self) -> int:
        """The size of all together."""
        return sum(self._columns[3])

    @property
    def latest(self) -> Copy:
        """The one with the highest place in the target."""
        return self[int(np.argmax(self._columns[0]))]

    def __contains__(self, sequence: int) -> bool:
        """Return whether there is a copy of a source sequence among these, which are sorted by it."""
        at = bisect_left(self.sequences, sequence)
        return at < len(self) and self.sequences[at] == sequence

    def of_sequences(self, sequences: Collection[int]) -> Iterator[Copy]:
        """Yield the copies of some source sequences."""
        wanted = np.fromiter(sequences, np.int64, len(sequences))
        return map(self.__getitem__, np.flatnonzero(np.isin(np.asarray(self.sequences), wanted)).tolist())

    def sort_by_sequence(self) -> None:
        """Order them by their source sequence; of several of one message the last that was added stays."""
        order = np.argsort(self.sequences, kind="stable")
        sequences = np.asarray(self.sequences)[order]
        self._take(order[np.append(sequences[1:] != sequences[:-1], True)[: len(order)]])

    def sort_by_time(self) -> None:
        """Order them by when their originals were stored."""
        self._take(np.argsort(self.stored_ns, kind="stable"))

    def part(self, first: int, after: int) -> CopyColumns:
        """Return those from one place to before another."""
        part = CopyColumns()
        part._columns = tuple(column[first:after] for column in self._columns)
        part._names, part._indexes = self._names, self._indexes
        return part

    def _take(self, order: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        self._columns = tuple(array("q", np.asarray(column)[order].tobytes()) for column in self._columns)
