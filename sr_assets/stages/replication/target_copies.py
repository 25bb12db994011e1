"""The copies of a stream in its target, which may be more than memory holds, and the comparison with their originals.

The stored times of the copies' messages show whether a source was recreated or rolled back.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sr_assets.adapters import wire
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange, format_rfc3339_ns
from sr_assets.domain.provenance import CopyOf, find_copy, is_copy_of, is_forged
from sr_assets.domain.senders import inspect
from sr_assets.stages.progress_lines import LongWork

if TYPE_CHECKING:
    Rows = np.ndarray[tuple[int], np.dtype[np.void]]
    Numbers = np.ndarray[Any, np.dtype[np.int64]]
    from sr_assets.settings import ClusterSettings, StreamSettings
    from sr_assets.stages.site import Site

_NONE: Final = -1
_COLUMNS: Final = ("target_sequence", "sequence", "stored_ns", "payload_bytes", "sender", "created_ns")
_ROW: Final = np.dtype([(column, np.int64) for column in _COLUMNS])
#: Number of copies written, read and cached at a time.
_CHUNK: Final = 8_192
_CHUNKS_HELD: Final = 4
_CLIENT: Final = "sr-assets review"


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
        left = memoryview(rows.tobytes())
        while left:
            left = left[os.write(self.descriptor, left) :]

    def chunk(self, number: int) -> Rows:
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


@dataclass(slots=True)
class Copies:
    """The copies of an entry in its target.

    `here` are copies of the present source, by sequence. `earlier` are copies of an earlier source with the same name,
    `undone` copies of messages that the source held before it was rolled back; both by stored time. `forged` counts the
    messages that claim to be copies, with another content than their originals; they are none.
    """

    here: FoundCopies = field(default_factory=FoundCopies)
    earlier: FoundCopies = field(default_factory=FoundCopies)
    undone: FoundCopies = field(default_factory=FoundCopies)
    forged: int = 0

    def __len__(self) -> int:
        """Return the number of all copies."""
        return len(self.here) + len(self.earlier) + len(self.undone)

    @property
    def last(self) -> int | None:
        """The highest copied sequence of the present source, or None without a copy."""
        return self.here[-1].sequence if len(self.here) else None

    def is_covered(self, sequence: int) -> bool:
        """Return whether a source sequence still identifies the same message and is not read again."""
        return self.last is not None and sequence <= self.last

    def made(self, sequences: Collection[int], created_ns: int) -> set[tuple[int, int]]:
        """Return the copied ones of some source sequences, each with its source's created time.

        `created_ns` applies to copies without a source's created time.
        """
        return {
            (copy.created_ns or created_ns, copy.sequence)
            for kind in (self.here, self.earlier, self.undone)
            for copy in kind.of_sequences(sequences)
        }

    @property
    def latest_ns(self) -> int:
        """Stored time of the youngest copied message."""
        return max(kind.latest_ns for kind in (self.here, self.earlier, self.undone) if len(kind))

    @property
    def source_is_another(self) -> bool:
        """Whether the source was recreated or rolled back since the youngest copy was made."""
        return bool(len(self.undone)) or (bool(len(self.earlier)) and not len(self.here))

    def undo_after(self, sequence: int | None) -> None:
        """Treat the copies after a source sequence, or all, as copies of messages that the source no longer holds."""
        kept = 0 if sequence is None else self.here.before(sequence + 1)
        for copy in self.here.part(kept, len(self.here)):
            self.undone.add(copy)
        self.undone.sort_by_time()
        self.here = self.here.part(0, kept)


def claimed_copies(
    connection: wire.Connection,
    stream: StreamSettings,
    held: SequenceRange,
    subjects: str | None = None,
    created_ns: int | None = None,
) -> Iterator[tuple[Message, CopyOf]]:
    """Yield the messages with the headers of this entry's copies in a range of its target, without payloads.

    Another publisher may have written these headers. `subjects` is a pattern of the copies' subjects; with
    `created_ns`, copies of an earlier source are left out.
    """
    for message in chain.from_iterable(wire.read_headers(connection, stream.target_stream, held, subjects)):
        if copy := find_copy(message.headers, stream.identity, created_ns):
            yield message, copy


def find_copies(site: Site, stream: StreamSettings, source: StreamInfo) -> Copies:
    """Return every copy of this entry in the target; of several copies of one message, only the last."""
    target = site.clusters.connect(stream.target)
    copies = Copies(FoundCopies(site.folder), FoundCopies(site.folder), FoundCopies(site.folder))
    if not target.stream_exists(stream.target_stream):
        return copies
    info = target.stream_info(stream.target_stream)
    with wire.Connection(stream.source, _CLIENT) as connection:
        for messages in _read_lists(stream.target, info):
            claims = [
                (message, claim)
                for message in messages
                if (claim := find_copy(message.headers, stream.identity)) is not None
            ]
            forged = _forged(connection, stream.stream, claims, source.created_ns)
            copies.forged += len(forged)
            for message, claim in claims:
                if claim.created_ns not in (None, source.created_ns):
                    copies.earlier.add(_copy(stream, message, claim))
                elif message.sequence not in forged:
                    copies.here.add(_copy(stream, message, claim))
    copies.here.sort_by_sequence()
    copies.earlier.sort_by_time()
    return copies


def _forged(
    connection: wire.Connection, source_stream: str, claims: list[tuple[Message, CopyOf]], created_ns: int
) -> set[int]:
    """Return the target sequences of the claimed copies of the present source that have another content."""
    of_original: dict[int, list[tuple[Message, CopyOf]]] = {}
    for message, claim in claims:
        if claim.created_ns in (None, created_ns):
            of_original.setdefault(claim.sequence, []).append((message, claim))
    lists = wire.read_sequences(connection, source_stream, sorted(of_original), direct=False)
    return {
        message.sequence
        for originals in lists
        for original in originals
        for message, claim in of_original[original.sequence]
        if is_forged(message, claim, original)
    }


def _copy(stream: StreamSettings, message: Message, claim: CopyOf) -> Copy:
    sender = None
    if stream.extractor:
        sender = inspect(stream.extractor, None, message.subject, message.headers, message.payload)[0]
    stored_ns = claim.stored_ms * 1_000_000
    return Copy(message.sequence, claim.sequence, stored_ns, len(message.payload), sender, claim.created_ns)


def first_genuine(
    stream: StreamSettings, claims: Iterable[tuple[Message, CopyOf]], *, lost_until: int = 0
) -> tuple[int, int] | None:
    """Return the first claimed copy with the content of its original: its target sequence and source sequence.

    The messages of the claims may lack their payloads.
    Whoever publishes to the target may write the headers of a copy. A copy whose original the source lost counts up to
    the source sequence `lost_until`.
    """
    with wire.Connection(stream.source, _CLIENT) as source, wire.Connection(stream.target, _CLIENT) as target:
        for message, claim in claims:
            at, sequence = message.sequence, claim.sequence
            original = wire.stored_message(source, stream.stream, sequence)
            if original is None:
                if sequence <= lost_until:
                    return at, sequence
                continue
            # What no connection of ours could publish is not read: a link may not carry it.
            size = len(message.headers) + message.payload_bytes
            if size > target.max_payload_bytes or not is_copy_of(message, original):
                continue
            copy = wire.stored_large(target, stream.target_stream, at)
            if copy and is_copy_of(copy, original):
                return at, sequence
    return None


def compare_with_original(
    site: Site, stream: StreamSettings, source: StreamInfo, copies: Copies, unknown: list[str], *, force: bool
) -> int | None:
    """Compare the last copied message with its original; return its stored time (unix ns), or None if it no longer
    exists.

    Another stored time means another stream: raise RunError, or with `force` count only the copies that the source
    still holds.
    """
    cluster = site.clusters.connect(stream.source)

    def stored_ns(sequence: int) -> int | None:
        message = cluster.message(stream.stream, sequence)
        return None if message is None else message.stored_ns

    last = copies.last
    last_ns = None if last is None else stored_ns(last)
    problem = _another_source(stream, source, copies, last_ns)
    if problem is None:
        if last_ns is None:
            unknown.append(f"whether the source is the same stream: its message {last} no longer exists")
        return last_ns
    if not force:
        raise RunError(
            f"{problem}, so its sequences identify other messages; with --force the stream continues after the last copy of a"
            " message that the source still holds, and the other copies stay unchanged"
        )
    unknown.append(f"the messages that the source lost: {problem}")
    held = range(source.first_sequence, source.last_sequence + 1)
    matching = last_matching(copies.here, held, stored_ns)
    copies.undo_after(matching)
    return None if matching is None else stored_ns(matching)


def _another_source(stream: StreamSettings, source: StreamInfo, copies: Copies, last_ns: int | None) -> str | None:
    """Describe a source that does not hold the copied messages, or return None; `last_ns` is the stored time of the
    last one.
    """
    last = copies.last
    if last is None:
        return f"source stream {stream.stream} was recreated since it was copied"
    if last_ns is None:
        if last <= source.last_sequence:
            return None
        return f"source stream {stream.stream} ends at {source.last_sequence}, before the copied message {last}"
    copied = copies.here[-1]
    if _same_time(last_ns, copied.stored_ns):
        return None
    return (
        f"source stream {stream.stream} has a message {last} (stored {format_rfc3339_ns(last_ns)}) that differs from the"
        f" copied one (stored {format_rfc3339_ns(copied.stored_ns)})"
    )


def last_matching(copies: FoundCopies, held: range, stored_ns: Callable[[int], int | None]) -> int | None:
    """Return the last copied sequence whose message a rolled-back source still holds, or None.

    `copies` are sorted by sequence, `held` are the source's sequences, and `stored_ns` returns a message's stored time
    or None. A rolled-back source differs from some sequence on, so a binary search finds it.
    """
    matching = None
    low, high = copies.before(held.start), copies.before(held.stop)
    while low < high:
        at = middle = (low + high) // 2
        while at >= low and (found_ns := stored_ns(copies[at].sequence)) is None:
            at -= 1
        if at < low:
            # None of these messages exists; the later ones decide.
            low = middle + 1
        elif _same_time(found_ns, copies[at].stored_ns):
            matching, low = copies[at].sequence, middle + 1
        else:
            high = at
    return matching


def _same_time(stored_ns: int | None, copied_ns: int) -> bool:
    """Return whether the two stored times are equal in milliseconds, the precision of a copy."""
    return stored_ns is not None and stored_ns // 1_000_000 == copied_ns // 1_000_000


def read_stream(
    cluster: ClusterSettings,
    info: StreamInfo,
    filter_subject: str | None = None,
    *,
    since: int = 1,
    until: int | None = None,
) -> Iterator[Message]:
    """Read a stream through the leader's consumer, from its first message or from `since`."""
    return chain.from_iterable(_read_lists(cluster, info, filter_subject, since=since, until=until))


def _read_lists(
    cluster: ClusterSettings,
    info: StreamInfo,
    filter_subject: str | None = None,
    *,
    since: int = 1,
    until: int | None = None,
) -> Iterator[list[Message]]:
    first = max(since, info.first_sequence)
    wanted = SequenceRange(first, max(first, (info.last_sequence if until is None else until) + 1))
    with (
        LongWork(f"reading stream {info.stream}", len(wanted)) as progress,
        wire.Connection(cluster, "sr-assets recover") as connection,
    ):
        for messages in wire.read_confirmed(
            connection, info.stream, wanted, filter_subject=filter_subject, direct=False
        ):
            yield messages
            progress.reached(messages[-1].sequence + 1 - first)
