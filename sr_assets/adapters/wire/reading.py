"""Reading a stream: ranges and single messages, in sequence order, whichever way the stream allows.

Not here: how it is done (`direct`, `consumer`, `single`), what a hole means and what is read again (the callers).
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

from sr_assets.adapters.wire.connection import Connection
from sr_assets.adapters.wire.consumer import read_consumer
from sr_assets.adapters.wire.direct import read_direct
from sr_assets.adapters.wire.single import next_message, read_singles
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange, merge_ranges

BATCH_MESSAGES: Final = 5_000
BATCH_BYTES: Final = 8 << 20


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
    """Read what the stream holds of a range, in sequence order.

    Lists have at most `batch_messages` messages and about `max_bytes`, and are never empty. `direct` asks by batched
    direct get (2.11+, `allow_direct`), which any replica may answer; otherwise a pull consumer is made, and deleted
    at the end. An answer that ends early is not an error: the caller compares. While a list is with the caller
    nothing is on its way, so a slow caller is no slow consumer.
    """
    read = read_direct if direct else read_consumer
    yield from _inside(wanted, read(connection, stream, wanted, filter_subject, batch_messages, max_bytes))


def _inside(wanted: SequenceRange, lists: Iterator[list[Message]]) -> Iterator[list[Message]]:
    for messages in lists:
        inside = messages if messages[-1].sequence < wanted.next else [m for m in messages if m.sequence in wanted]
        if inside:
            yield inside


def read_confirmed(
    connection: Connection,
    stream: str,
    wanted: SequenceRange,
    *,
    filter_subject: str | None = None,
    max_bytes: int = BATCH_BYTES,
    direct: bool,
) -> Iterator[list[Message]]:
    """Read a range like `read_range` until the leader confirms that nothing more of it is there.

    Any replica may answer a direct get, and one that lags ends early: then the leader is asked for the next message,
    and the rest is read again from behind it.
    """
    read = partial(read_range, connection, stream, filter_subject=filter_subject, max_bytes=max_bytes, direct=direct)
    yield from _until_confirmed(wanted, read, partial(next_message, connection, stream, filter_subject=filter_subject))


def read_headers(connection: Connection, stream: str, wanted: SequenceRange) -> Iterator[list[Message]]:
    """Read a range without payloads like `read_confirmed`: for looking through a target. Uses a pull consumer."""

    def read(rest: SequenceRange) -> Iterator[list[Message]]:
        every = read_consumer(connection, stream, rest, None, BATCH_MESSAGES, BATCH_BYTES, headers_only=True)
        return _inside(rest, every)

    def following(sequence: int) -> Message | None:
        found = next_message(connection, stream, sequence)
        return found and found._replace(payload=b"")

    yield from _until_confirmed(wanted, read, following)


def _until_confirmed(
    wanted: SequenceRange,
    read: Callable[[SequenceRange], Iterator[list[Message]]],
    following: Callable[[int], Message | None],
) -> Iterator[list[Message]]:
    """Read a range again from where it ended early, until the leader knows of nothing that follows inside it.

    A consumer may live on a replica that lags, like the one that answers a direct get.
    """
    first = wanted.first
    while first < wanted.next:
        for messages in read(SequenceRange(first, wanted.next)):
            yield messages
            first = messages[-1].sequence + 1
        if first >= wanted.next:
            return
        found = following(first)
        if found is None or found.sequence >= wanted.next:
            return
        yield [found]
        first = found.sequence + 1


def read_sequences(
    connection: Connection,
    stream: str,
    sequences: Iterable[int],
    *,
    direct: bool,
    batch_messages: int = BATCH_MESSAGES,
    max_bytes: int = BATCH_BYTES,
) -> Iterator[list[Message]]:
    """Read single messages in sequence order; those that are not there are left out.

    Runs of at least 32 neighbours go through `read_range`, the others through single gets that overlap (`direct`: any
    replica; otherwise the leader's word).
    """
    scattered: list[int] = []
    for run in merge_ranges(SequenceRange(sequence, sequence + 1) for sequence in sequences):
        if len(run) < 32:
            scattered.extend(range(run.first, run.next))
            continue
        yield from read_singles(connection, stream, scattered, direct, batch_messages, max_bytes)
        scattered = []
        yield from read_range(
            connection, stream, run, batch_messages=batch_messages, max_bytes=max_bytes, direct=direct
        )
    yield from read_singles(connection, stream, scattered, direct, batch_messages, max_bytes)
