"""The copies of a stream in its target, and the comparison with their originals.

The stored times of the copies' messages show whether a source was recreated or rolled back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final

from sr_assets.adapters import wire
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.progress_lines import LongWork
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange, format_rfc3339_ns
from sr_assets.domain.provenance import CopyOf, Original, compare_original, find_copy, is_copy_of
from sr_assets.domain.senders import inspect
from sr_assets.stages.replication.found_copies import Copy, FoundCopies

if TYPE_CHECKING:
    from sr_assets.settings import ClusterSettings, StreamSettings
    from sr_assets.stages.site import Site

_CLIENT: Final = "sr-assets review"
#: A higher restart in a copy's id is forged.
_MOST_RESTARTS: Final = 1_000_000


@dataclass(slots=True)
class Copies:
    """The copies of an entry in its target.

    `here` are copies of the present source, by sequence. `earlier` are copies of an earlier source with the same name,
    `undone` copies of messages that the source held before it was rolled back; both by stored time. `forged` counts the
    messages that claim to be copies, with another content than their originals; they are none. `restart` is the highest
    restart in the ids of `here` and `undone`. `source_is_another` means that the source was recreated or rolled back
    since the last copy was made.
    """

    here: FoundCopies = field(default_factory=FoundCopies)
    earlier: FoundCopies = field(default_factory=FoundCopies)
    undone: FoundCopies = field(default_factory=FoundCopies)
    forged: int = 0
    restart: int = 0
    source_is_another: bool = False

    def __len__(self) -> int:
        """Return the number of all copies."""
        return len(self.here) + len(self.earlier) + len(self.undone)

    @property
    def last(self) -> int | None:
        """The highest copied sequence of the present source, or None without a copy."""
        return self.here[-1].sequence if len(self.here) else None

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
    last_held, undone_restart, follows = 0, -1, True
    with wire.Connection(stream.source, _CLIENT) as connection:
        for messages in _read_lists(stream.target, info):
            claims = [
                (message, claim)
                for message in messages
                if (claim := find_copy(message.headers, stream.identity)) is not None
            ]
            originals = _compare(connection, stream.stream, claims, source.created_ns)
            for message, claim in claims:
                original, copy = originals.get(message.sequence), _copy(stream, message, claim)
                if original is Original.FORGED:
                    copies.forged += 1
                elif claim.created_ns not in (None, source.created_ns):
                    copies.earlier.add(copy)
                else:
                    is_undone = original is Original.ANOTHER or (
                        original is None and claim.sequence > source.last_sequence
                    )
                    (copies.undone if is_undone else copies.here).add(copy)
                    restart = min(claim.restart or 0, _MOST_RESTARTS)
                    copies.restart = max(copies.restart, restart)
                    if is_undone:
                        undone_restart = max(undone_restart, restart)
                    if original is Original.HELD:
                        last_held = max(last_held, claim.sequence)
                    # A run has followed the rollback.
                    follows = original is Original.HELD or (not is_undone and restart > undone_restart)
    copies.here.sort_by_sequence()
    copies.earlier.sort_by_time()
    if len(copies.undone):
        # Those after the last original that the source holds may be copies of what it held before.
        kept = copies.here.before(last_held + 1)
        for copy in copies.here.part(kept, len(copies.here)):
            copies.undone.add(copy)
        copies.undone.sort_by_time()
        copies.here = copies.here.part(0, kept)
    copies.source_is_another = bool(len(copies)) and not (follows and len(copies.here))
    return copies


def _compare(
    connection: wire.Connection, source_stream: str, claims: list[tuple[Message, CopyOf]], created_ns: int
) -> dict[int, Original]:
    """Compare the claimed copies of the present source with its messages, by target sequence."""
    of_original: dict[int, list[tuple[Message, CopyOf]]] = {}
    for message, claim in claims:
        if claim.created_ns in (None, created_ns):
            of_original.setdefault(claim.sequence, []).append((message, claim))
    lists = wire.read_sequences(connection, source_stream, sorted(of_original), direct=False)
    return {
        message.sequence: compare_original(message, claim, original)
        for originals in lists
        for original in originals
        for message, claim in of_original[original.sequence]
    }


def _copy(stream: StreamSettings, message: Message, claim: CopyOf) -> Copy:
    sender = None
    if stream.extractor:
        sender = inspect(stream.extractor, None, message.subject, message.headers, message.payload)[0]
    return Copy(
        message.sequence, claim.sequence, claim.stored_ms * 1_000_000, len(message.payload), sender, claim.created_ns
    )


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


def check_source(
    site: Site, stream: StreamSettings, source: StreamInfo, copies: Copies, unknown: list[str], *, force: bool
) -> int | None:
    """Return the stored time (unix ns) of the message of the last copy, or None if the source lacks it.

    Raise RunError, unless `force`, if the source is another stream than the copied one.
    """
    message = None if copies.last is None else site.clusters.connect(stream.source).message(stream.stream, copies.last)
    if copies.source_is_another:
        problem = _another_source(stream, source, copies)
        if not force:
            raise RunError(
                f"{problem}, so its sequences identify other messages; with --force the stream continues after the last copy"
                " of a message that the source still holds, and the other copies stay unchanged"
            )
        unknown.append(f"the messages that the source lost: {problem}")
    elif message is None:
        unknown.append(f"whether the source is the same stream: its message {copies.last} no longer exists")
    return None if message is None else message.stored_ns


def _another_source(stream: StreamSettings, source: StreamInfo, copies: Copies) -> str:
    """Describe a source that does not hold the copied messages."""
    if not len(copies.undone):
        return f"source stream {stream.stream} was recreated since it was copied"
    copied = copies.undone.latest
    if copied.sequence > source.last_sequence:
        return (
            f"source stream {stream.stream} ends at {source.last_sequence}, before the copied message {copied.sequence}"
        )
    at = format_rfc3339_ns(copied.stored_ns)
    return f"source stream {stream.stream} lacks the copied message {copied.sequence} (stored {at})"


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
