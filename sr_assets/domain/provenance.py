"""The only place that decides whether a message in a target is one of our copies."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from sr_assets.domain.messages import (
    MESSAGE_ID_HEADER,
    SOURCE_HEADER,
    Message,
    header_values,
    kept_headers,
    last_origin,
    parse_message_id,
)


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of an entry's copies: source stream, replicator and entry's name, as in `Choria-SR-Source`."""

    stream: str
    replicator: str
    name: str


class CopyOf(NamedTuple):
    """The original of a copy: its source sequence and its stored time in ms.

    `created_ns` and `restart` are the source's created time and restart in the copy's message id, or None, as in the
    Stream Replicator's copies.
    """

    sequence: int
    stored_ms: int
    created_ns: int | None
    restart: int | None = None

    def is_before(self, restart: int) -> bool:
        """Return whether an earlier restart of the source made this copy; `restart` makes its own."""
        return self.restart is not None and self.restart < restart


def find_copy(headers: bytes, identity: Identity, created_ns: int | None = None) -> CopyOf | None:
    """Return the original of a target's message if it is a copy of this identity, else None.

    With `created_ns`, the created time of the source (unix ns), a copy of an earlier source of the same name is not
    ours; a copy whose message id has no created time is ours.
    """
    origin = last_origin(headers)
    if origin is None or (origin.stream, origin.replicator, origin.name) != (
        identity.stream,
        identity.replicator,
        identity.name,
    ):
        return None
    ids = header_values(headers, MESSAGE_ID_HEADER)
    parsed = parse_message_id(ids[-1]) if ids else None
    known_ns, restart = (parsed[0], parsed[2]) if parsed else (None, None)
    if created_ns is not None and known_ns is not None and known_ns != created_ns:
        return None
    return CopyOf(origin.sequence, origin.stored_ms, known_ns, restart)


def is_copy_of(copy: Message, original: Message) -> bool:
    """Return whether a message with the headers of a copy also has the payload and the kept headers of its original.

    Whoever publishes to the target may write these headers. Of a payload that is not read,
    only the size is compared: such a message may still be no copy.
    """
    lines = _kept_lines(copy.headers)
    own = [at for at, line in enumerate(lines) if line.startswith(SOURCE_HEADER + b":")]
    if not own or copy.payload_bytes != original.payload_bytes:
        return False
    if not copy.unread_bytes and copy.payload != original.payload:
        return False
    del lines[own[-1]]
    return lines == _kept_lines(original.headers)


class Original(Enum):
    """What the source holds at the sequence of a claimed copy."""

    #: The copied message.
    HELD = auto()
    #: A message with another stored time: the source was rolled back or recreated.
    ANOTHER = auto()
    #: The message with this stored time, but with another content: the claimed copy is forged.
    FORGED = auto()


def compare_original(copy: Message, claim: CopyOf, original: Message) -> Original:
    """Compare a claimed copy with the source's message at its sequence."""
    if claim.stored_ms != original.stored_ns // 1_000_000:
        return Original.ANOTHER
    return Original.HELD if is_copy_of(copy, original) else Original.FORGED


def _kept_lines(headers: bytes) -> list[bytes]:
    return [line for line in kept_headers(headers).split(b"\r\n")[1:] if line]


def foreign_copy(headers: bytes, identity: Identity, created_ns: int) -> Identity | None:
    """Return the identity of another entry's copy of the same source, or None.

    The source's created time in the message id distinguishes sources of the same name.
    """
    origin, ids = last_origin(headers), header_values(headers, MESSAGE_ID_HEADER)
    parsed = parse_message_id(ids[-1]) if ids else None
    if origin is None or parsed is None or parsed[0] != created_ns or origin.stream != identity.stream:
        return None
    other = Identity(origin.stream, origin.replicator, origin.name)
    return None if other == identity else other


def doubled_text(target_stream: str, identity: Identity, other: Identity) -> str:
    """Return the warning about another entry's copies of the same source in a target."""
    return (
        f"target stream {target_stream} holds copies of the same source by {other.replicator}/{other.name}, so it gets every"
        f" message twice; if this entry was renamed, restore the name {other.name} (replicator {other.replicator}), and run"
        f" `sr-assets recover --stream {other.name}/{identity.stream}` if its state is lost; else give each entry its own"
        " target_stream"
    )


def forged_text(target_stream: str, count: int) -> str:
    """Return the error about messages that claim to be copies, but have another content than their originals."""
    return f"target stream {target_stream} holds {count} messages that claim to be copies of other messages; they are ignored"


def other_writer_text(target_stream: str, identity: Identity, sequence: int) -> str:
    """Return the error about a copy of ours that no intent of this state explains."""
    stream, replicator, name = identity.stream, identity.replicator, identity.name
    return (
        f"target stream {target_stream} holds a copy of {stream} {sequence} that no batch of this run made: another"
        f" replicator named {replicator}/{name} writes there at the same time; stop one of the two"
    )
