"""Reading of a stream in sequence order, as complete as the leader's copy: by get requests, or by temporary pull consumers.

Any replica, and any mirror, may answer a direct get (batches: 2.11+, `allow_direct`). A lagging replica or a partial mirror may
therefore lack a message, so a missing one counts as absent only if the leader confirms it.
"""

import contextlib
import itertools
import secrets
from bisect import bisect_left
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sr_assets.adapters import times
from sr_assets.adapters.jetstream import (
    CONSUMER_WITHOUT_ACKS,
    MESSAGE_NOT_FOUND,
    NO_RESPONDERS,
    ApiError,
    consumer_creation,
    encode_json,
    is_leaderless,
    is_unavailable,
    parse_message,
    temporary_consumer,
)
from sr_assets.adapters.wire import frames as f
from sr_assets.adapters.wire.connection import Connection, RefusedError, SilenceError, WireError
from sr_assets.adapters.wire.frames import Frame
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange, merge_ranges

_FIRST_WINDOW: Final = 32
_LAST_WINDOW: Final = 256
CONSUMER_INACTIVE_NS: Final = 300 * 1_000_000_000
#: Less than `connection.SILENCE_SECONDS`: a pull without messages ends with a status before the stream counts as silent.
EXPIRES_NS: Final = 2 * 1_000_000_000
#: So many placements follow each other without a pause.
_HASTY_PLACEMENTS: Final = 32
_PLACEMENT_SECONDS: Final = 0.02
_DELETE_SECONDS: Final = 2.0
_UNREACHABLE_SECONDS: Final = 0.02
_NOT_FOUND: Final = 404
_TIMED_OUT: Final = 408
_TOO_LARGE: Final = 409
BATCH_MESSAGES: Final = 5_000
BATCH_BYTES: Final = 8 << 20
#: With more holes than this in one batch, a consumer on the leader costs less than a request for each hole.
_MAX_CONFIRMED_HOLES: Final = 64
#: Messages of this average size are cheaper by consumer (docs/decisions/0004).
_PULLED_BYTES: Final = 4_000
#: The shortest run of consecutive sequences that is read as a range.
_RUN: Final = 32


@dataclass(frozen=True, slots=True)
class StreamRead:
    """A stream to read, and the limits of one request; `filter_subject` None reads all subjects."""

    connection: Connection
    stream: str
    filter_subject: str | None
    batch_messages: int
    max_bytes: int


def refused(connection: Connection, stream: str, frame: Frame) -> WireError:
    """Return the error for a frame that is not the expected message."""
    if frame.status == NO_RESPONDERS:
        return WireError(f"{connection.address}: stream {stream} does not exist or has no direct get (allow_direct)")
    answer = frame.status_text if frame.status is not None else repr(frame.payload[:80])
    return WireError(f"{connection.address}: stream {stream} answered {answer}")


def stored_message(connection: Connection, stream: str, sequence: int) -> Message | None:
    """Return a message from the leader (`STREAM.MSG.GET`), or None if the stream does not hold it."""
    return _stored(connection, stream, connection.request(_leader_subject(connection, stream), {"seq": sequence}))


def next_message(
    connection: Connection, stream: str, sequence: int, filter_subject: str | None = None
) -> Message | None:
    """Return the leader's first message at or after a sequence, or None."""
    request = {"seq": sequence, "next_by_subj": filter_subject or ">"}
    return _stored(connection, stream, connection.request(_leader_subject(connection, stream), request))


def next_sequences(connection: Connection, stream: str, sequences: Sequence[int]) -> list[int | None]:
    """Return the leader's first sequence at or after each of the given ones, with overlapping requests."""
    bodies = {connection.new_inbox(): b'{"seq":%d,"next_by_subj":">"}' % sequence for sequence in sequences}
    subject = _leader_subject(connection, stream)
    connection.send(b"".join(f.encode_pub(subject, inbox, b"", body) for inbox, body in bodies.items()))
    following: dict[bytes, int | None] = {}
    for frame in connection.answers(f"the next messages of {stream}"):
        if frame.subject in bodies:
            message = _stored(connection, stream, connection.response(frame, f"stream {stream}"))
            following[frame.subject] = message and message.sequence
            if len(following) == len(bodies):
                break
    return [following[inbox] for inbox in bodies]


def read_singles(read: StreamRead, sequences: list[int], *, direct: bool) -> Iterator[list[Message]]:
    """Read single messages, ascending, with overlapping gets; omit messages that the leader lacks.

    With `direct` any replica may respond first, and the leader supplies messages that it lacks.
    """
    gets = _Gets(read, direct)
    position = 0
    while position < len(sequences):
        end = min(position + read.batch_messages, len(sequences))
        messages, unanswered, position = gets.run(sequences, position, end)
        messages.sort(key=_sequence)
        some = bool(messages)
        for more in read_singles(read, sorted(unanswered), direct=False):
            count = bisect_left(messages, more[-1].sequence, key=_sequence)
            yield sorted([*messages[:count], *more], key=_sequence)
            messages, some = messages[count:], True
        if messages:
            yield messages
        if not some and position < len(sequences):
            # A batch without messages may be part of a large hole: skip to its end.
            following = next_message(read.connection, read.stream, sequences[position])
            if following is None:
                return
            position = bisect_left(sequences, following.sequence, position)


def _sequence(message: Message) -> int:
    return message.sequence


@dataclass
class _Gets:
    """Overlapping gets; their number depends on the largest message so far, to stay at about `max_bytes` in flight."""

    read: StreamRead
    direct: bool
    window: int = _FIRST_WINDOW
    largest_bytes: int = 1
    in_flight: dict[bytes, int] = field(default_factory=dict)

    def run(self, sequences: list[int], position: int, end: int) -> tuple[list[Message], list[int], int]:
        """Get sequences from `position` up to `end` or about `max_bytes`.

        Return the messages in any order, the sequences that a direct get did not find, and the next position.
        """
        messages: list[Message] = []
        unanswered: list[int] = []
        left_bytes, connection = self.read.max_bytes, self.read.connection
        seconds = connection.silence_seconds if self.direct else None
        answers = connection.answers(f"a message of {self.read.stream}", seconds)
        while self.in_flight or (position < end and left_bytes > 0):
            if position < end and left_bytes > 0 and len(self.in_flight) <= self.window // 2:
                requested = sequences[position : min(position + self.window - len(self.in_flight), end)]
                self._request(requested)
                position += len(requested)
            try:
                frame = next(answers)
            except SilenceError:
                if not self.direct:
                    raise
                # The replica or mirror may have failed: the leader supplies these messages.
                unanswered += self.in_flight.values()
                self.in_flight.clear()
                break
            sequence = self.in_flight.pop(frame.subject, None)
            if sequence is None:
                continue
            message = self._message(frame)
            if message is not None:
                messages.append(message)
                left_bytes -= self._widen(len(frame.headers) + len(frame.payload))
            elif self.direct:
                unanswered.append(sequence)
        return messages, unanswered, position

    def _request(self, sequences: list[int]) -> None:
        connection, stream = self.read.connection, self.read.stream
        direct = connection.cluster.api(f"DIRECT.GET.{stream}")
        subject = direct if self.direct else _leader_subject(connection, stream)
        requested = {connection.new_inbox(): sequence for sequence in sequences}
        self.in_flight |= requested
        requests = (
            f.encode_pub(subject, inbox, b"", b'{"seq":%d}' % sequence) for inbox, sequence in requested.items()
        )
        connection.send(b"".join(requests))

    def _widen(self, size_bytes: int) -> int:
        """Widen the window by one after a message, within the limit of the largest message; return `size_bytes`."""
        self.largest_bytes = max(self.largest_bytes, size_bytes)
        self.window = max(1, min(_LAST_WINDOW, self.window + 1, self.read.max_bytes // self.largest_bytes))
        return size_bytes

    def _message(self, frame: Frame) -> Message | None:
        """Return the message in a response, or None if there is none or it is from another stream."""
        connection, stream = self.read.connection, self.read.stream
        if self.direct:
            if frame.status == _NOT_FOUND:
                return None
            answer = f.direct_get_message(frame)
            if answer is None:
                raise refused(connection, stream, frame)
            message, _, responder = answer
            # Only the leader returns the whole of a header block without a terminator.
            return message if responder == stream.encode() and f.has_whole_headers(message) else None
        return _stored(connection, stream, connection.response(frame, f"stream {stream}"))


def _leader_subject(connection: Connection, stream: str) -> str:
    return connection.cluster.api(f"STREAM.MSG.GET.{stream}")


def _stored(connection: Connection, stream: str, answer: dict[str, Any]) -> Message | None:
    try:
        response = connection.check(f"STREAM.MSG.GET.{stream}", answer)
    except ApiError as error:
        if error.code == MESSAGE_NOT_FOUND:
            return None
        raise
    try:
        return parse_message(response)
    except RunError:
        raise WireError(f"{connection.address}: stream {stream} sent a response that is not a message") from None


def read_direct(
    read: StreamRead, wanted: SequenceRange, timeout_seconds: float | None = None
) -> Iterator[list[Message]]:
    """Request batches until the range has been read or no messages follow; later messages may be included.

    Ends early if another stream, a mirror, responds; its messages are discarded. Raises SilenceError if no response
    arrives within the timeout (default `request_seconds`).
    """
    cursor = max(wanted.first, 1)
    while cursor < wanted.next:
        count = min(read.batch_messages, wanted.next - cursor)
        request: dict[str, Any] = {"seq": cursor, "batch": count, "max_bytes": read.max_bytes}
        if read.filter_subject:
            request["next_by_subj"] = read.filter_subject
        messages, pending = _direct_batch(read.connection, read.stream, request, timeout_seconds)
        if messages:
            yield messages
        if not pending:
            return
        cursor = messages[-1].sequence + 1


def _direct_batch(
    connection: Connection, stream: str, request: dict[str, Any], timeout_seconds: float | None
) -> tuple[list[Message], int]:
    """Return the messages of one batched direct get, and how many follow (404: none, without an end marker)."""
    inbox, asked = connection.new_inbox(), stream.encode()
    connection.send(f.encode_pub(connection.cluster.api(f"DIRECT.GET.{stream}"), inbox, b"", encode_json(request)))
    damaged: list[int] = []
    parser = f.DirectParser(inbox, asked)
    messages = parser.messages
    for frame in connection.answers(f"a direct get from {stream}", timeout_seconds, parser):
        if frame.subject != inbox:
            continue
        answer = f.direct_get_message(frame)
        if answer is None:
            if frame.status not in (204, 404):
                raise refused(connection, stream, frame)
            break
        message, pending, answering = answer
        if answering != asked:
            return [], 0
        if not f.has_whole_headers(message):
            damaged.append(len(messages))
        messages.append(message)
        # A server before 2.11 has no batches: it returns one message without an end marker.
        parser.pending = 1 if pending is None else pending
        if pending is None:
            break
    for at in damaged:
        messages[at] = stored_message(connection, stream, messages[at].sequence) or messages[at]
    return messages, parser.pending


class NoConsumerError(WireError):
    """The server did not create a consumer: no permission, too many consumers, or no such stream. `code` is the server's."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


def read_consumer(
    read: StreamRead, wanted: SequenceRange, *, headers_only: bool = False, singly: bool = True
) -> Generator[list[Message]]:
    """Pull the range, possibly with messages after it, until no messages follow.

    A work queue takes no such consumer: its messages are read one by one, unless `singly` is false.

    If a pull gets no response for some seconds, a new consumer with smaller pulls reads the remainder, because the old one
    never redelivers. Raises WireError if no message arrives for `request_seconds`, or a delivery was lost.
    """
    connection, stream = read.connection, read.stream
    batch_messages, max_bytes = read.batch_messages, read.max_bytes
    cursor = max(wanted.first, 1)
    deadline = times.monotonic() + connection.request_seconds
    while cursor < wanted.next:
        config = temporary_consumer("", cursor, read.filter_subject, CONSUMER_INACTIVE_NS)
        if headers_only:
            config["headers_only"] = True
        try:
            consumer = _create_on_leader(connection, stream, config, deadline)
        except NoConsumerError as error:
            if error.code != CONSUMER_WITHOUT_ACKS or not singly:
                raise
            yield from _read_work_queue(read, SequenceRange(cursor, wanted.next), headers_only=headers_only)
            return
        try:
            for messages in consumer.pull(SequenceRange(cursor, wanted.next), batch_messages, max_bytes):
                cursor = messages[-1].sequence + 1
                yield _with_whole_headers(connection, stream, messages) if headers_only else messages
                deadline = times.monotonic() + connection.request_seconds
            return
        except SilenceError:
            if times.monotonic() >= deadline:
                raise
            # Reduce the limits: they may be why the server ended the pull without a status.
            max_bytes, batch_messages = max(1, max_bytes * 2 // 3), max(1, batch_messages * 2 // 3)
        finally:
            consumer.delete()


def _read_work_queue(read: StreamRead, wanted: SequenceRange, *, headers_only: bool) -> Iterator[list[Message]]:
    """Read messages one by one: a work queue permits only consumers that delete its messages."""
    cursor = wanted.first
    while cursor < wanted.next:
        message = next_message(read.connection, read.stream, cursor, read.filter_subject)
        if message is None:
            return
        yield [message.without_payload() if headers_only else message]
        cursor = message.sequence + 1


def _with_whole_headers(connection: Connection, stream: str, messages: list[Message]) -> list[Message]:
    for at, message in enumerate(messages):
        if not f.has_whole_headers(message) and (whole := stored_message(connection, stream, message.sequence)):
            messages[at] = whole.without_payload()
    return messages


def _create_on_leader(connection: Connection, stream: str, config: dict[str, Any], deadline: float) -> "_Consumer":
    """Create a consumer on the server of the stream's leader: another replica may lag and deliver less.

    The server places a consumer of one replica at random. With three servers, an average of 3 placements finds the leader.
    Raises WireError if none did until the deadline (monotonic seconds).
    """
    for misses in itertools.count(1):
        consumer = _create(connection, stream, config, deadline)
        # Ask again after each miss: the stream may have elected another leader.
        if not consumer.clustered or consumer.server in (leader := _leaders(connection, stream)):
            return consumer
        consumer.delete()
        if times.monotonic() >= deadline:
            break
        if not leader or misses % _HASTY_PLACEMENTS == 0:
            times.sleep(_PLACEMENT_SECONDS)
    raise WireError(f"{connection.address}: stream {stream}: no consumer was placed on the stream's leader in time")


def _leaders(connection: Connection, stream: str) -> set[str]:
    """Return the name of the server that leads a stream; empty if there is none now."""
    operation = f"STREAM.INFO.{stream}"
    answer = connection.request(connection.cluster.api(operation), {})
    leader = _server(answer if is_leaderless(answer) else connection.check(operation, answer))
    return {leader} if leader else set()


def _create(connection: Connection, stream: str, config: dict[str, Any], deadline: float) -> "_Consumer":
    config = {**config, "name": f"sr_{secrets.token_hex(8)}"}
    # The deadline may pass after the reader's last check of it.
    left_seconds = max(deadline - times.monotonic(), connection.silence_seconds)
    try:
        operation, body = consumer_creation(stream, config)
        answer = connection.request(connection.cluster.api(operation), body, left_seconds)
        while is_unavailable(answer) and times.monotonic() < deadline:
            times.sleep(_PLACEMENT_SECONDS)
            answer = connection.request(connection.cluster.api(operation), body, left_seconds)
        connection.check(operation, answer)
    except SilenceError:
        raise
    except WireError as error:
        raise NoConsumerError(str(error), error.code if isinstance(error, RefusedError) else 0) from None
    # A server outside a cluster answers without one.
    clustered = isinstance(answer.get("cluster"), dict)
    return _Consumer(connection, stream, config, answer.get("num_pending"), _server(answer), clustered=clustered)


def _server(answer: dict[str, Any]) -> str | None:
    """Return the name of the leader in a response, or None outside a cluster and without a leader."""
    cluster = answer.get("cluster")
    leader = cluster.get("leader") if isinstance(cluster, dict) else None
    return leader if isinstance(leader, str) else None


class _Consumer:
    """A new consumer on `server`, None without a leader; `pending` counts the messages that it has not delivered yet."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        config: dict[str, Any],
        pending: int | None,
        server: str | None,
        *,
        clustered: bool,
    ) -> None:
        self.server, self.clustered = server, clustered
        self._connection = connection
        self._stream = stream
        self._name: str = config["name"]
        self._headers_only = "headers_only" in config
        self._parser = f.DeliveryParser(
            stream.encode(), self._name.encode(), -1 if pending is None else pending, headers_only=self._headers_only
        )
        self._silence: SilenceError | None = None

    def pull(self, wanted: SequenceRange, batch_messages: int, max_bytes: int) -> Iterator[list[Message]]:
        """Pull batches until the range has been read or no messages follow; raises SilenceError if none arrive."""
        cursor, limit_bytes = wanted.first, max_bytes
        reachable_until = times.monotonic() + self._connection.silence_seconds
        while cursor < wanted.next and self._parser.pending:
            batch = min(batch_messages, wanted.next - cursor) if limit_bytes else 1
            messages, status = self._pull_batch(batch, limit_bytes)
            if messages:
                cursor = messages[-1].sequence + 1
                yield messages
                reachable_until = times.monotonic() + self._connection.silence_seconds
            if self._silence:
                raise self._silence
            if not messages and status == NO_RESPONDERS:
                if times.monotonic() > reachable_until:
                    address = self._connection.address
                    raise SilenceError(f"{address}: stream {self._stream}: its consumer no longer exists")
                # A server learns of a new consumer on another server only a moment later.
                times.sleep(_UNREACHABLE_SECONDS)
                continue
            if not messages and status != _TOO_LARGE:
                return
            # A message over the limit needs a pull of one message without a limit.
            limit_bytes = max_bytes if messages else 0

    def delete(self) -> None:
        """Delete the consumer; if this fails, the server deletes it once it is inactive."""
        with contextlib.suppress(WireError):
            seconds = min(_DELETE_SECONDS, self._connection.request_seconds)
            self._connection.request_api(f"CONSUMER.DELETE.{self._stream}.{self._name}", None, seconds)

    def _pull_batch(self, batch_messages: int, max_bytes: int) -> tuple[list[Message], int | None]:
        """Return the messages of one pull, and the status that ended it.

        The server sends no status for a pull whose messages reach its limits.
        """
        inbox = self._connection.new_inbox()
        request: dict[str, Any] = {"batch": batch_messages, "no_wait": True, "expires": EXPIRES_NS}
        if max_bytes:
            request["max_bytes"] = max_bytes
        question = self._connection.cluster.api(f"CONSUMER.MSG.NEXT.{self._stream}.{self._name}")
        self._connection.send(f.encode_pub(question, inbox, b"", encode_json(request)))
        mark, parser = b".%b." % self._name.encode(), self._parser
        messages = parser.messages = list[Message]()
        end_bytes = parser.delivered_bytes + max_bytes
        late = times.monotonic() + self._connection.silence_seconds
        complete = False
        try:
            while not complete:
                frames = self._receive()
                for frame in frames:
                    if mark in frame.reply:
                        self._add(frame)
                complete = len(messages) == batch_messages or (bool(messages) and parser.delivered_bytes == end_bytes)
                for frame in frames if not complete else ():
                    if frame.subject == inbox:
                        return messages, self._status(frame)
                if not messages and times.monotonic() > late:
                    raise SilenceError(f"{self._connection.address}: stream {self._stream} does not answer a pull")
        except SilenceError as silence:
            self._silence = silence
        return messages, None

    def _receive(self) -> list[Frame]:
        """Return the next frames that the parser does not take; raises SilenceError if none arrive."""
        connection, parser = self._connection, self._parser
        frames = connection.receive(connection.silence_seconds, parser)
        if parser.taken:
            parser.collect()
        elif not frames:
            seconds = connection.silence_seconds
            raise SilenceError(f"{connection.address}: no answer to a pull from {self._stream} within {seconds:g} s")
        return frames

    def _add(self, frame: Frame) -> None:
        """Add the message of a delivery; raises WireError if it is invalid, or an earlier one was lost."""
        parser = self._parser
        try:
            message, number, parser.pending = f.delivered_message(frame, headers_only=self._headers_only)
        except ValueError as error:
            raise WireError(f"{self._connection.address}: {error}") from None
        parser.delivered += 1
        if number != parser.delivered:
            stream = f"{self._connection.address}: stream {self._stream}"
            raise WireError(f"{stream}: delivery {parser.delivered} was lost")
        parser.delivered_bytes += sum(map(len, frame[1:]))
        parser.messages.append(message)

    def _status(self, frame: Frame) -> int | None:
        """Return the status that ended a pull; raises WireError if the consumer can no longer deliver."""
        too_large = frame.status == _TOO_LARGE and "MaxBytes" in frame.status_text
        if frame.status in (_NOT_FOUND, _TIMED_OUT, NO_RESPONDERS) or too_large:
            return frame.status
        raise refused(self._connection, self._stream, frame)


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
    read: StreamRead, wanted: SequenceRange, *, held: bool, headers_only: bool = False, singly: bool = True
) -> Iterator[list[Message]]:
    """Read a range by consumer; resume after an early end until the leader has no further message in it."""
    first = wanted.first
    while first < wanted.next:
        rest = SequenceRange(first, wanted.next)
        for messages in _inside(rest, read_consumer(read, rest, headers_only=headers_only, singly=singly)):
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


def _read_direct_first(
    read: StreamRead, wanted: SequenceRange, *, held: bool, may_pull: bool = True
) -> Iterator[list[Message]]:
    """Read a range by direct gets as far as the leader confirms them, and the remainder by consumer.

    With `may_pull`, many large messages are read by consumer after the first batch, if the server creates one.
    """
    first = wanted.first
    for messages in _read_direct_confirmed(read, wanted):
        yield messages
        first = messages[-1].sequence + 1
        if may_pull and _is_cheaper_by_consumer(messages, wanted.next - first):
            with contextlib.suppress(NoConsumerError):
                for pulled in _read_from_leader(read, SequenceRange(first, wanted.next), held=held, singly=False):
                    yield pulled
                    first = pulled[-1].sequence + 1
                return
            yield from _read_direct_first(read, SequenceRange(first, wanted.next), held=held, may_pull=False)
            return
    if first < wanted.next and held:
        _check_end(read, wanted.next)
    following = next_message(read.connection, read.stream, first) if first < wanted.next else None
    if following is None:
        return
    rest = SequenceRange(min(following.sequence, wanted.next), wanted.next)
    yield from _read_from_leader(read, rest, held=held)


def _is_cheaper_by_consumer(messages: list[Message], left: int) -> bool:
    """Return whether a consumer costs less for `left` more messages like these.

    The server copies a message for each direct get, but not for a delivery; a consumer costs about five requests.
    """
    payload_bytes = sum([len(message.payload) for message in messages])
    return left >= 2 * len(messages) and payload_bytes >= _PULLED_BYTES * len(messages)


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
