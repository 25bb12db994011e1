"""Whether a message in a target is a copy of ours: the only place that decides it.

Here: the identity of an entry's copies, the decision by a message's headers, and the error about a copy that no batch
explains. Not here: how headers are written and read (`messages`), what follows from the decision (the callers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sr_assets.domain.messages import MESSAGE_ID_HEADER, header_values, last_origin, parse_message_id


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of an entry's copies: source stream, replicator and the entry's name, as in `Choria-SR-Source`."""

    stream: str
    replicator: str
    name: str


class CopyOf(NamedTuple):
    """The original of a copy: its source sequence and its stored time in ms.

    `created_ns` is the created time of the source in the copy's message id; None when the id does not hold one, as in
    the Stream Replicator's copies.
    """

    sequence: int
    stored_ms: int
    created_ns: int | None


def find_copy(headers: bytes, identity: Identity, created_ns: int | None = None) -> CopyOf | None:
    """Return the original of a message in a target when it is a copy of this identity, else None.

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
    known_ns = parsed[0] if parsed else None
    if created_ns is not None and known_ns is not None and known_ns != created_ns:
        return None
    return CopyOf(origin.sequence, origin.stored_ms, known_ns)


def foreign_copy(headers: bytes, identity: Identity, created_ns: int) -> Identity | None:
    """Return whose copy of the same source a message in a target is; None when it is ours, or of another source.

    The source's created time in the message id tells the same source from another one of that name.
    """
    origin, ids = last_origin(headers), header_values(headers, MESSAGE_ID_HEADER)
    parsed = parse_message_id(ids[-1]) if ids else None
    if origin is None or parsed is None or parsed[0] != created_ns or origin.stream != identity.stream:
        return None
    other = Identity(origin.stream, origin.replicator, origin.name)
    return None if other == identity else other


def doubled_text(target_stream: str, identity: Identity, other: Identity) -> str:
    """Return the warning that a target holds somebody else's copies of the same source."""
    return (
        f"target stream {target_stream} holds copies of the same source by {other.replicator}/{other.name}, so every"
        f" message gets there twice: if this entry was renamed, name it {other.name} (replicator {other.replicator}) again,"
        f" and run `sr-assets recover --stream {other.name}/{identity.stream}` if its state is lost; else give each a"
        " target_stream of its own"
    )


def other_writer_text(target_stream: str, identity: Identity, sequence: int) -> str:
    """Return the message about a copy of ours in the target that no intent of this state explains."""
    stream, replicator, name = identity.stream, identity.replicator, identity.name
    return (
        f"target stream {target_stream} holds a copy of {stream} {sequence} that no batch of this site made: another"
        f" replicator called {replicator}/{name} writes there, or this state is an old one; stop it, or run `sr-assets"
        f" recover --stream {name}/{stream}`"
    )
