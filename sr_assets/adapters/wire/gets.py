"""Messages read by sequence with get requests: one by one from the leader or by direct get, or in batches by direct get.

Any replica, and any mirror, may answer a direct get (batches: 2.11+, `allow_direct`); `reading` confirms missing messages.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sr_assets.adapters.jetstream import MESSAGE_NOT_FOUND, NO_RESPONDERS, ApiError, encode_json, parse_message
from sr_assets.adapters.wire import frames as f
from sr_assets.adapters.wire.connection import Connection, SilenceError
from sr_assets.adapters.wire.frames import Frame
from sr_assets.adapters.wire.link import WireError
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange

_NOT_FOUND: Final = 404
_FIRST_WINDOW: Final = 32
_LAST_WINDOW: Final = 256


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
