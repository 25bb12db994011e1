"""The true lag of a native link: its origin's last sequence minus the last copied one.

The server's own `lag` does not change while a link is dead. Unknown values are None, never 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message, header_values
from sr_assets.domain.topology.found import FoundLink, FoundStream
from sr_assets.domain.topology.links import NATIVE_SOURCE_HEADER, brought_by, read_mark

if TYPE_CHECKING:
    from sr_assets.adapters.nats.cluster import Cluster

#: Number of messages at a stream's end that are searched for a source's last message.
_MOST_STEPS: Final = 200


class LinkLag(NamedTuple):
    """Number of messages that are not copied yet, and the waiting time of the first one; None if unknown."""

    messages: int | None = None
    seconds: float | None = None


def measure_link(stream: FoundStream, link: FoundLink, at: Cluster, origin: FoundStream, origin_at: Cluster) -> LinkLag:
    """Return the lag of one link of a stream; `at` and `origin_at` are the clusters of copy and origin."""
    try:
        position = _position(stream, link, at, origin)
        if position is None:
            return LinkLag()
        if position >= origin.last_sequence:
            # A copy ahead of its origin means a recreated origin, unless the origin was queried earlier.
            ahead = position > origin.last_sequence and link.active_ns is None
            return LinkLag() if ahead else LinkLag(0, 0.0)
        messages = _count(link, position, origin, origin_at)
        return LinkLag(messages, _seconds(link, position, origin, origin_at) if messages else 0.0)
    except RunError:
        return LinkLag()


def _position(stream: FoundStream, link: FoundLink, at: Cluster, origin: FoundStream) -> int | None:
    """Return the last origin sequence that was copied or skipped, or None if unknown."""
    if link.kind == "mirror":
        copied: int | None = stream.last_sequence
    elif link.sequence is not None:
        copied = link.sequence
    else:
        copied = _last_brought(stream, link, at, origin)
    if copied:
        return copied
    if link.start_sequence:
        return link.start_sequence - 1
    # With a start time, the first sequence is unknown.
    return None if copied is None or (link.start_time and origin.last_sequence) else 0


def _last_brought(stream: FoundStream, link: FoundLink, at: Cluster, origin: FoundStream) -> int | None:
    """Return a source's last sequence according to the messages' headers, or 0 if none has one."""
    if not stream.last_sequence:
        return 0
    patterns = _outputs(link) or origin.config.get("subjects") or [">"]
    newest = [message for message in (at.last_message(stream.name, pattern) for pattern in patterns) if message]
    brought = [mark for message in newest if (mark := _brought(message, stream, link)) is not None]
    if brought:
        return max(brought)
    message = max(newest, default=None, key=lambda candidate: candidate.sequence)
    steps = 0
    while message is not None and message.sequence > 1 and steps < _MOST_STEPS:
        steps += 1
        sequence = message.sequence - 1
        message = at.message(stream.name, sequence)
        if message is None:
            break
        mark = _brought(message, stream, link)
        if mark is not None:
            return mark
    whole = int(stream.state.get("messages", 0)) == stream.last_sequence
    return 0 if whole and (message is None or message.sequence == 1) else None


def _brought(message: Message, stream: FoundStream, link: FoundLink) -> int | None:
    values = header_values(message.headers, NATIVE_SOURCE_HEADER)
    mark = read_mark(values[-1].decode(errors="replace")) if values else None
    return mark.sequence if mark and brought_by(mark, link, stream.links) else None


def _outputs(link: FoundLink) -> list[str]:
    """Return the subjects of its copies; empty if unknown."""
    if link.transforms:
        named = [transform.dest or transform.src for transform in link.transforms]
        return [] if any("{" in subject or "$" in subject for subject in named) else named
    return [link.filter_subject] if link.filter_subject else []


def _count(link: FoundLink, position: int, origin: FoundStream, origin_at: Cluster) -> int:
    """Return the number of origin messages to copy after a sequence."""
    if not link.filters:
        return origin.last_sequence - position
    return sum(origin_at.count_from(origin.name, position + 1, pattern) for pattern in link.filters)


def _seconds(link: FoundLink, position: int, origin: FoundStream, origin_at: Cluster) -> float | None:
    """Return the waiting time of the first uncopied message, by the origin's clock."""
    waiting = [origin_at.next_message(origin.name, position + 1, pattern) for pattern in link.filters or (">",)]
    stored = [message.stored_ns for message in waiting if message is not None]
    if not stored or origin.ts_ns is None:
        return None
    return max(0.0, round((origin.ts_ns - min(stored)) / 1e9, 3))
