"""Reading of ranges and single messages of a stream, in sequence order and as complete as the leader's copy.

A lagging replica or a partial mirror may serve a direct get, so a missing message counts as absent only if the leader
confirms it.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Final

from sr_assets.adapters.wire.connection import Connection, SilenceError
from sr_assets.adapters.wire.consumer import NoConsumerError, read_consumer
from sr_assets.adapters.wire.gets import StreamRead, next_message, next_sequences, read_direct, read_singles
from sr_assets.adapters.wire.link import WireError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange, merge_ranges

BATCH_MESSAGES: Final = 5_000
BATCH_BYTES: Final = 8 << 20
#: With more holes than this in one batch, a consumer on the leader costs less than a request for each hole.
_MAX_CONFIRMED_HOLES: Final = 64
#: The shortest run of consecutive sequences that is read as a range.
_RUN: Final = 32


def read_range(
    connection: Connection,
    stream: str,
    wanted: SequenceRange,
    *,
    filter_subject: str | None = None,
    batch_messages: int = BATCH_MESSAGES,
    max_bytes: int = BATCH_BYTES,
    direct: bool,
) -> Iterator[list[Message]]:
    """Read a range in sequence order, without confirmation of missing messages (see `read_confirmed`).

    Lists have at most `batch_messages` messages and about `max_bytes`, and are never empty. `direct` uses batched direct
    gets (2.11+, `allow_direct`), which any replica may serve; otherwise a temporary pull consumer. An early end is not an
    error. No request is pending while the caller processes a list, so a slow caller is not a slow consumer.
    """
    read = StreamRead(connection, stream, filter_subject, batch_messages, max_bytes)
    yield from _inside(wanted, read_direct(read, wanted) if direct else read_consumer(read, wanted))


def read_confirmed(
    connection: Connection,
    stream: str,
    wanted: SequenceRange,
    *,
    filter_subject: str | None = None,
    batch_messages: int = BATCH_MESSAGES,
    max_bytes: int = BATCH_BYTES,
    direct: bool,
    held: bool = False,
    headers_only: bool = False,
) -> Iterator[list[Message]]:
    """Read all messages of a range that the leader has, in lists as in `read_range`; missing ones are confirmed as absent.

    With `direct` the leader confirms each hole. If a batch proves incomplete, is from another stream or has many holes, a
    consumer reads the remainder; with a filter, where holes prove nothing, it reads the whole range. `held`: the stream has
    held the whole range; raises WireError if its leader now ends earlier, because then absence proves nothing.
    `headers_only`: a consumer omits the payloads (`Message.unread_bytes`); if the server creates none but `direct` can read
    the range, messages are whole.
    """
    read = StreamRead(connection, stream, filter_subject, batch_messages, max_bytes)
    first = wanted.first
    if headers_only:
        try:
            for messages in _read_from_leader(read, wanted, held=held, headers_only=True):
                yield messages
                first = messages[-1].sequence + 1
            return
        except NoConsumerError:
            if not direct or filter_subject:
                raise
    rest = SequenceRange(first, wanted.next)
    if direct and not filter_subject:
        yield from _read_direct_first(read, rest, held=held)
    else:
        yield from _read_from_leader(read, rest, held=held)


def read_headers(
    connection: Connection, stream: str, wanted: SequenceRange, filter_subject: str | None = None
) -> Iterator[list[Message]]:
    """Scan a range without payloads through a pull consumer, like `read_confirmed` with `held`."""
    read = StreamRead(connection, stream, filter_subject, BATCH_MESSAGES, BATCH_BYTES)
    yield from _read_from_leader(read, wanted, held=True, headers_only=True)


def stored_headers(connection: Connection, stream: str, sequence: int) -> Message | None:
    """Return a message from the leader without its payload, or None if the stream does not hold it.

    The response with a large message, base64 in JSON, would close a leaf node's link; this one is small.
    """
    return _delivered(connection, stream, sequence, headers_only=True)


def stored_large(connection: Connection, stream: str, sequence: int) -> Message | None:
    """Return a message from the leader as a consumer delivers it: no larger than it was published, unlike base64 in JSON."""
    return _delivered(connection, stream, sequence, headers_only=False)


def _delivered(connection: Connection, stream: str, sequence: int, *, headers_only: bool) -> Message | None:
    read = StreamRead(connection, stream, None, 1, 0)
    lists = read_consumer(read, SequenceRange(sequence, sequence + 1), headers_only=headers_only)
    with contextlib.closing(lists):
        messages = next(lists, None)
    return messages[0] if messages and messages[0].sequence == sequence else None


def read_sequences(
    connection: Connection,
    stream: str,
    sequences: Iterable[int],
    *,
    direct: bool,
    batch_messages: int = BATCH_MESSAGES,
    max_bytes: int = BATCH_BYTES,
) -> Iterator[list[Message]]:
    """Read single messages in sequence order; omit messages that the leader lacks.

    Runs of at least 32 consecutive sequences are read as ranges, others with overlapping single gets.
    """
    read = StreamRead(connection, stream, None, batch_messages, max_bytes)
    scattered: list[int] = []
    for run in merge_ranges(SequenceRange(sequence, sequence + 1) for sequence in sequences):
        if len(run) < _RUN:
            scattered.extend(range(run.first, run.next))
            continue
        yield from read_singles(read, scattered, direct=direct)
        scattered = []
        yield from _read_direct_first(read, run, held=False) if direct else _read_from_leader(read, run, held=False)
    yield from read_singles(read, scattered, direct=direct)


def _inside(wanted: SequenceRange, lists: Iterator[list[Message]]) -> Iterator[list[Message]]:
    for messages in lists:
        inside = messages if messages[-1].sequence < wanted.next else [m for m in messages if m.sequence in wanted]
        if inside:
            yield inside


def _read_from_leader(
    read: StreamRead, wanted: SequenceRange, *, held: bool, headers_only: bool = False
) -> Iterator[list[Message]]:
    """Read a range by consumer; resume after an early end until the leader has no further message in it."""
    first = wanted.first
    while first < wanted.next:
        rest = SequenceRange(first, wanted.next)
        for messages in _inside(rest, read_consumer(read, rest, headers_only=headers_only)):
            yield messages
            first = messages[-1].sequence + 1
        if first >= wanted.next:
            return
        if held:
            _check_end(read, wanted.next)
        following = next_message(read.connection, read.stream, first, read.filter_subject)
        if following is None or following.sequence >= wanted.next:
            return
        yield [following.without_payload() if headers_only else following]
        first = following.sequence + 1


def _read_direct_first(read: StreamRead, wanted: SequenceRange, *, held: bool) -> Iterator[list[Message]]:
    """Read a range by direct gets as far as the leader confirms them, and the remainder by consumer."""
    first = wanted.first
    for messages in _read_direct_confirmed(read, wanted):
        yield messages
        first = messages[-1].sequence + 1
    if first < wanted.next and held:
        _check_end(read, wanted.next)
    following = next_message(read.connection, read.stream, first) if first < wanted.next else None
    if following is None:
        return
    rest = SequenceRange(min(following.sequence, wanted.next), wanted.next)
    yield from _read_from_leader(read, rest, held=held)


def _check_end(read: StreamRead, after: int) -> None:
    """Raise WireError if the leader ends before `after`, although the stream held those sequences."""
    connection, stream = read.connection, read.stream
    last = int(connection.request_api(f"STREAM.INFO.{stream}")["state"]["last_seq"])
    if last < after - 1:
        raise WireError(f"{connection.address}: stream {stream} ends at {last}, before {after - 1}, which it held")


def _read_direct_confirmed(read: StreamRead, wanted: SequenceRange) -> Iterator[list[Message]]:
    """Read by direct gets up to their end, or the first hole that the leader does not confirm."""
    first = max(wanted.first, 1)
    lists = read_direct(read, wanted, read.connection.silence_seconds)
    for messages in _inside(wanted, _until_silence(lists)):
        count = _confirmed(read, first, messages)
        if count:
            yield messages if count == len(messages) else messages[:count]
        if count < len(messages):
            return
        first = messages[-1].sequence + 1


def _until_silence(lists: Iterator[list[Message]]) -> Iterator[list[Message]]:
    # The responder, for example a distant mirror, may have failed: the leader can still respond.
    with contextlib.suppress(SilenceError):
        yield from lists


def _confirmed(read: StreamRead, first: int, messages: list[Message]) -> int:
    """Count the leading messages, from `first`, whose preceding holes the leader confirms."""
    if messages[-1].sequence - first + 1 == len(messages):
        return len(messages)
    holes: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message.sequence > first:
            holes.append((index, first))
        first = message.sequence + 1
    if len(holes) > _MAX_CONFIRMED_HOLES:
        return holes[0][0]
    following = next_sequences(read.connection, read.stream, [hole for _, hole in holes])
    for (index, _), sequence in zip(holes, following, strict=True):
        if sequence is not None and sequence < messages[index].sequence:
            return index
    return len(messages)
