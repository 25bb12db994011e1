"""The copies of a stream in its target, and whether its source still holds what they were made of.

Here: finding them, and telling a source that was made again or went back by its messages' stored times. Not here: what
is rebuilt of them (`rebuilding`), the commit (`recover`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sr_assets.adapters import wire
from sr_assets.domain.errors import RunError
from sr_assets.domain.positions import SequenceRange, format_rfc3339_ns
from sr_assets.domain.provenance import Identity, find_copy
from sr_assets.domain.senders import inspect
from sr_assets.stages.progress import LongWork
from sr_assets.stages.replication.found_copies import Copy, FoundCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from sr_assets.adapters.nats.stream_info import StreamInfo
    from sr_assets.domain.messages import Message
    from sr_assets.settings import ClusterSettings, StreamSettings
    from sr_assets.stages.site import Site


@dataclass(slots=True)
class Copies:
    """The copies of an entry in its target.

    `here` are those of the source as it is, in the order of its sequences; `earlier` those of a source of the same name
    before it; `undone` those of messages that the source held before it went back. The last two in the order of their stored
    times.
    """

    here: FoundCopies = field(default_factory=FoundCopies)
    earlier: FoundCopies = field(default_factory=FoundCopies)
    undone: FoundCopies = field(default_factory=FoundCopies)

    def __len__(self) -> int:
        """Return the number of all copies."""
        return len(self.here) + len(self.earlier) + len(self.undone)

    @property
    def last(self) -> int | None:
        """The highest source sequence that was copied of the source as it is; None when nothing was."""
        return self.here[-1].sequence if len(self.here) else None

    def is_covered(self, sequence: int) -> bool:
        """Return whether a source sequence still means the message that it did, and is not read again."""
        return self.last is not None and sequence <= self.last

    def made(self, sequences: Collection[int], created_ns: int) -> set[tuple[int, int]]:
        """Return those of some source sequences that were copied, each with its source's created time.

        `created_ns` is that of the source of a copy that does not say.
        """
        return {
            (copy.created_ns or created_ns, copy.sequence)
            for kind in (self.here, self.earlier, self.undone)
            for copy in kind.of_sequences(sequences)
        }

    @property
    def latest_ns(self) -> int:
        """When the youngest message that was copied had been stored."""
        return max(kind.latest_ns for kind in (self.here, self.earlier, self.undone) if len(kind))

    @property
    def source_is_another(self) -> bool:
        """Whether the source was made again, or went back, since the youngest copy was made."""
        return bool(len(self.undone)) or not len(self.here)

    def undo_after(self, sequence: int | None) -> None:
        """Treat the copies after a source sequence, or all, as copies of messages that the source no longer holds."""
        kept = 0 if sequence is None else self.here.before(sequence + 1)
        for copy in self.here.part(kept, len(self.here)):
            self.undone.add(copy)
        self.undone.sort_by_time()
        self.here = self.here.part(0, kept)


def find_copies(site: Site, stream: StreamSettings, source: StreamInfo) -> Copies:
    """Return every copy of this entry in the target; of several of one message the last."""
    target = site.clusters.connect(stream.target)
    copies = Copies(*(FoundCopies(site.folder) for _ in range(3)))
    if not target.stream_exists(stream.target_stream):
        return copies
    info = target.stream_info(stream.target_stream)
    for message in read_stream(stream.target, info):
        origin = find_copy(message.headers, Identity(stream.stream, stream.replicator, stream.name))
        if origin is None:
            continue
        sender = (
            inspect(stream.extractor, None, message.subject, message.headers, message.payload)[0]
            if stream.extractor
            else None
        )
        stored_ns = origin.stored_ms * 1_000_000
        size_bytes = len(message.payload)
        copy = Copy(message.sequence, origin.sequence, stored_ns, size_bytes, sender, origin.created_ns)
        if origin.created_ns in (None, source.created_ns):
            copies.here.add(copy)
        else:
            copies.earlier.add(copy)
    copies.here.sort_by_sequence()
    copies.earlier.sort_by_time()
    return copies


def compare_with_original(
    site: Site, stream: StreamSettings, source: StreamInfo, copies: Copies, unknown: list[str], *, force: bool
) -> int | None:
    """Compare the last copied message with its original; returns when that was stored (unix ns), None when it is gone.

    Another time means another stream: RunError, or with `force` only the copies of what the source holds now count.
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
            unknown.append(f"whether the source is the same stream: its message {last} is gone")
        return last_ns
    if not force:
        raise RunError(
            f"{problem}: its sequences mean other messages now; with --force the stream goes on behind the last copy of"
            " what the source holds now, and the other copies stay as they are"
        )
    unknown.append(f"what the source lost: {problem}")
    held = range(source.first_sequence, source.last_sequence + 1)
    standing = last_matching(copies.here, held, stored_ns)
    copies.undo_after(standing)
    return None if standing is None else stored_ns(standing)


def _another_source(stream: StreamSettings, source: StreamInfo, copies: Copies, last_ns: int | None) -> str | None:
    """Return what became of a source that does not hold what was copied; `last_ns` is the stored time of the last one."""
    last = copies.last
    if last is None:
        return f"source stream {stream.stream} was deleted and made again since it was copied"
    if last_ns is None:
        if last <= source.last_sequence:
            return None
        return f"source stream {stream.stream} ends at {source.last_sequence}, before {last}, which was copied"
    copied = copies.here[-1]
    if _same_time(last_ns, copied.stored_ns):
        return None
    return (
        f"source stream {stream.stream} holds another message {last} (stored {format_rfc3339_ns(last_ns)}) than the one"
        f" that was copied (stored {format_rfc3339_ns(copied.stored_ns)})"
    )


def last_matching(copies: FoundCopies, held: range, stored_ns: Callable[[int], int | None]) -> int | None:
    """Return the last copied sequence whose message the source still holds, where it went back; None when there is none.

    `copies` are sorted by sequence, `held` are the source's sequences, `stored_ns` returns when the message it holds was
    stored, None for one that is gone. A source that went back differs from some sequence on, so halving finds it.
    """
    standing = None
    low, high = copies.before(held.start), copies.before(held.stop)
    while low < high:
        at = middle = (low + high) // 2
        while at >= low and (found_ns := stored_ns(copies[at].sequence)) is None:
            at -= 1
        if at < low:
            # None of these is left: what follows shows whether they stand.
            low = middle + 1
        elif _same_time(found_ns, copies[at].stored_ns):
            standing, low = copies[at].sequence, middle + 1
        else:
            high = at
    return standing


def _same_time(stored_ns: int | None, copied_ns: int) -> bool:
    """Tell whether a source's message was stored when the original of a copy was: copies know the millisecond."""
    return stored_ns is not None and stored_ns // 1_000_000 == copied_ns // 1_000_000


def read_stream(
    cluster: ClusterSettings,
    info: StreamInfo,
    filter_subject: str | None = None,
    *,
    since: int = 1,
    until: int | None = None,
) -> Iterator[Message]:
    """Read a stream, from its first message unless `since` is later, through the leader's own consumer."""
    first = max(since, info.first_sequence)
    wanted = SequenceRange(first, max(first, (info.last_sequence if until is None else until) + 1))
    with (
        LongWork(f"reading stream {info.stream}", len(wanted)) as progress,
        wire.Connection(cluster, "sr-assets recover") as connection,
    ):
        for messages in wire.read_confirmed(
            connection, info.stream, wanted, filter_subject=filter_subject, direct=False
        ):
            yield from messages
            progress.reached(messages[-1].sequence + 1 - first)
