"""Publishing into a stream: acknowledgements, a bounded window, or one acknowledgement for many messages (nats-server 2.14+).

In a batch with one acknowledgement, a message's number in its batch and the operation are in its reply subject,
`<inbox>.<id>.<flow>.fail.<number>.<op>.$FI`. In the mode `fail` the server stores the messages in order and ends the batch at
the first one that it refuses.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from sr_assets.adapters.jetstream import NO_RESPONDERS, decode_response
from sr_assets.adapters.wire import frames as f
from sr_assets.adapters.wire.connection import Connection, WireError
from sr_assets.adapters.wire.frames import FirstParser, Frame
from sr_assets.domain.foreign_text import visible
from sr_assets.domain.refusals import INVALID_SUBJECT, MESSAGE_TOO_LARGE

_LONGEST_ERROR: Final = 500
# A text in a server's JSON.
_TEXT: Final = rb'[^"\r\n]*'
# A stream's acknowledgement of a stored message, with placeholders for the names of stream and domain.
_STORED: Final = rb'\{"stream":"%b",(?:"domain":"%b",)?"seq":(\d{1,18})\}'
_STORED_BY_ANY: Final = re.compile(_STORED % (_TEXT, _TEXT))
SEND_BYTES: Final = 256 << 10
MAX_CONTROL_LINE_BYTES: Final = 4096
_UNKNOWN: Final = (0, 0)
_START, _APPEND, _COMMIT_WITHOUT_STORING = 0, 1, 3
#: The server acknowledges at least every so many messages; it may choose fewer.
_FLOW: Final = 500
#: Errors of the batch, not of a message: disabled, invalid pattern or id, unknown (after 10 s without a message), and more
#: batches than the server's limit.
_BATCH_ERRORS: Final = frozenset({10205, 10206, 10207, 10208, 10211})


class Ack(NamedTuple):
    """The outcome of a publish: stored at `target_sequence` (earlier if `duplicate`), or not stored with an error."""

    sequence: int
    target_sequence: int | None = None
    duplicate: bool = False
    error_code: int | None = None
    error: str | None = None


class StoredParser(FirstParser[tuple[bytes, int]]):
    """Takes acknowledgements of stored messages: their subject and the sequence; of one stream and one domain, if given."""

    def __init__(self, stream: str = "", domain: str = "") -> None:
        super().__init__()
        stored = _STORED % (_literal(stream), _literal(domain))
        # The subject, the size, the payload and its sequence.
        self._frame = re.compile(rb"MSG ([^ \r\n]+) [^ \r\n]+ (\d+)\r\n(%b)\r\n" % stored)
        # Not possessive, although backtracking is unnecessary: before Python 3.11.5 such a repetition ends in the wrong
        # position.
        self._frames = re.compile(rb"(?:MSG [^ \r\n]+ [^ \r\n]+ \d+\r\n%b\r\n)*" % stored)

    def parse(self, buffer: bytes) -> int:
        """Take the acknowledgements and return their end."""
        run = self._frames.match(buffer)
        if not run or not run.end():
            return 0
        subjects, sizes, payloads, sequences = zip(*self._frame.findall(buffer, 0, run.end()), strict=True)
        if list(map(int, sizes)) != list(map(len, payloads)):
            return 0
        self.taken += zip(subjects, map(int, sequences), strict=True)
        return run.end()


def _literal(name: str) -> bytes:
    """Return the pattern of a name as the server writes it into JSON; without a name, of any."""
    text = json.dumps(name, ensure_ascii=False)[1:-1]
    for special in "&<>":
        text = text.replace(special, f"\\u{ord(special):04x}")
    return re.escape(text.encode()) or _TEXT


class Answers:
    """Tells the responses of a stream, in the connection's configured domain, from those of others; all count without a name."""

    def __init__(self, connection: Connection, stream: str) -> None:
        self._connection, self._stream = connection, stream
        self._domain = connection.cluster.domain or "" if stream else ""
        self._other = ""

    def parser(self) -> StoredParser:
        """Return a parser of the stream's acknowledgements."""
        return StoredParser(self._stream, self._domain)

    def of_stream(self, frames: Iterable[Frame]) -> Iterator[Frame]:
        """Yield the frames that are no response of another stream."""
        for frame in frames:
            if not self._stream or not self._is_other(frame.payload):
                yield frame

    def silence(self, seconds: float) -> WireError:
        """Return the error of missing acknowledgements."""
        other = f", only of {self._other}, which also accepts the subject" if self._other else ""
        return WireError(f"{self._connection.address}: no acknowledgement within {seconds:g} s{other}")

    def _is_other(self, payload: bytes) -> bool:
        try:
            answer = decode_response(payload)
        except ValueError:
            return False
        stream, domain = answer.get("stream") or self._stream, answer.get("domain") or self._domain
        if stream == self._stream and (not self._domain or domain == self._domain):
            return False
        self._other = f"stream {stream}" + (f" of domain {domain}" if domain else "")
        return True


def parse_ack(sequence: int, frame: Frame) -> Ack:
    """Parse the response to a publish; a response that is not from a stream counts as an error."""
    stored = _STORED_BY_ANY.fullmatch(frame.payload)
    if stored:
        return Ack(sequence, int(stored[1]))
    if frame.status == NO_RESPONDERS:
        return Ack(sequence, error_code=NO_RESPONDERS, error="no stream takes this subject")
    try:
        answer = json.loads(frame.payload)
        error = answer.get("error")
        if error:
            code = error.get("err_code") or error.get("code")
            # A core subscriber may answer, too: without a text it would count as stored.
            text = visible(str(error.get("description") or "an error without a description")[:_LONGEST_ERROR])
            return Ack(sequence, error_code=code if type(code) is int else None, error=text)
        stored_at = answer["seq"]
        if type(stored_at) is int and 0 <= stored_at < 1 << 63:
            return Ack(sequence, stored_at, duplicate=answer.get("duplicate") is True)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return Ack(sequence, error=f"not the answer of a stream: {frame.payload[:80]!r}")


class Outgoing(NamedTuple):
    """A message to publish; `sequence` is the caller's identifier, which the Ack repeats."""

    sequence: int
    subject: str
    headers: bytes
    payload: bytes


class Publisher:
    """Publishes into a stream with a bounded window of unacknowledged messages and bytes.

    Only responses of the named `stream`, in the connection's configured domain, count: at a leaf node or its hub, another
    stream may accept the same subjects. `guard` is called before each send: it raises an error if that is forbidden.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        stream: str = "",
        max_messages: int = 4000,
        max_bytes: int = 32 << 20,
        ack_timeout_seconds: float = 30.0,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection = connection
        self._answers = Answers(connection, stream)
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._ack_timeout_seconds, self._guard = ack_timeout_seconds, guard

    def publish_all(self, items: Iterable[Outgoing]) -> Iterator[Ack]:
        """Publish in order and yield the acks as they arrive; sending starts with the first iteration.

        Sending stops at the first refusal; messages in flight are awaited, and unsent messages are not reported. A message
        that the server cannot accept is not sent but reported last, as a refusal: over `max_payload` as 10054, an invalid
        subject as 400. Raises WireError if the connection fails or no ack arrives in time: then read the target.
        """
        window = _Window(iter(items), self._connection, self._max_messages, self._max_bytes)
        parser = self._answers.parser()
        while True:
            chunk = window.fill()
            if chunk:
                self._guard()
                self._connection.send(chunk)
            elif not window.in_flight:
                break
            frames = self._connection.receive(0 if chunk else self._ack_timeout_seconds, parser)
            stored = parser.take()
            if not (chunk or stored or frames):
                raise self._answers.silence(self._ack_timeout_seconds)
            settle = window.in_flight.pop
            for inbox, target_sequence in stored:
                sequence, size_bytes = settle(inbox, _UNKNOWN)
                if size_bytes:
                    window.waiting_bytes -= size_bytes
                    yield Ack(sequence, target_sequence)
            for frame in self._answers.of_stream(frames):
                sequence, size_bytes = settle(frame.subject, _UNKNOWN)
                if size_bytes:
                    window.waiting_bytes -= size_bytes
                    ack = parse_ack(sequence, frame)
                    window.sending = window.sending and ack.error is None
                    yield ack
        if window.refusal is not None:
            yield window.refusal


@dataclass(slots=True)
class _Window:
    """The unacknowledged messages, and the source of the messages still to be sent."""

    source: Iterator[Outgoing]
    connection: Connection
    max_messages: int
    max_bytes: int
    sending: bool = True
    #: The refusal of a message that the server cannot accept.
    refusal: Ack | None = None
    #: Sequence and size, by the inbox of the acknowledgement.
    in_flight: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    waiting_bytes: int = 0

    def fill(self) -> bytes:
        """Return the frames to send next: none if the window is full or all messages have been sent."""
        chunk: list[bytes] = []
        chunk_bytes, free_bytes = 0, min(SEND_BYTES, self.max_bytes - self.waiting_bytes)
        in_flight, connection = self.in_flight, self.connection
        while self.sending and chunk_bytes < free_bytes and len(in_flight) < self.max_messages:
            item = next(self.source, None)
            if item is None:
                self.sending = False
                break
            inbox = connection.new_inbox()
            parts = encode_item(item, inbox, connection.max_payload_bytes)
            if isinstance(parts, Ack):
                self.sending, self.refusal = False, parts
                break
            size_bytes = len(parts[0]) + len(parts[1]) + len(item.payload)
            in_flight[inbox] = (item.sequence, size_bytes)
            chunk += parts
            chunk_bytes += size_bytes
        self.waiting_bytes += chunk_bytes
        return b"".join(chunk)


def encode_item(item: Outgoing, inbox: bytes, limit_bytes: int) -> tuple[bytes, ...] | Ack:
    """Return the parts of a frame, its control line first, or a refusal if the server would close the connection on it."""
    sequence, subject, headers, payload = item
    headers_bytes = len(headers)
    size_bytes = headers_bytes + len(payload)
    if size_bytes > limit_bytes:
        text = f"{size_bytes} bytes are more than the server takes (max_payload {limit_bytes})"
        return Ack(sequence, error_code=MESSAGE_TOO_LARGE, error=text)
    try:
        line = f.pub_line(f.encode_subject(subject), inbox, headers_bytes, size_bytes)
    except ValueError as error:
        return Ack(sequence, error_code=INVALID_SUBJECT, error=str(error))
    if len(line) > MAX_CONTROL_LINE_BYTES:
        text = f"the subject's {len(subject)} characters are more than the server takes"
        return Ack(sequence, error_code=INVALID_SUBJECT, error=text)
    return line, headers, payload, f.CRLF


@dataclass(slots=True)
class BatchEnd:
    """The outcome of a batch.

    - `sent`: the caller's identifiers of the sent messages, in order
    - `stored`: the server reports so many of them, from the first, as stored or as duplicates, which it does not name
    - `last`: the target sequence of the last stored one, or None if the server did not report the batch's end
    - `refusal`: the refusal of the first message that was not stored, if the server named one
    - `exhausted`: whether no further items exist
    """

    sent: list[int] = field(default_factory=list)
    stored: int = 0
    last: int | None = None
    refusal: Ack | None = None
    exhausted: bool = False


class BatchPublisher:
    """Publishes batches of bounded size, each with a bounded window of unacknowledged messages.

    The defaults keep the window below the 10,000 messages that a server queues for a stream. Only responses of the
    named `stream` count, as with `Publisher`. `guard` is called before each send: it raises an error if that is forbidden.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        stream: str = "",
        max_messages: int = 64_000,
        max_bytes: int = 64 << 20,
        window: int = 8000,
        ack_timeout_seconds: float = 30.0,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection, self._guard = connection, guard
        self._answers = Answers(connection, stream)
        self._max_messages, self._max_bytes, self._window = max_messages, max_bytes, window
        self._ack_timeout_seconds = ack_timeout_seconds

    def publish(self, items: Iterator[Outgoing]) -> BatchEnd:
        """Publish the next items as one batch, and wait for its end.

        Raises WireError if the connection fails or no acknowledgement arrives in time: then read the target.
        """
        batch = _Batch(self._connection, items, self._max_messages, self._max_bytes)
        while not batch.ended:
            # The first message opens the batch: the server wants others only after its response.
            chunk = batch.fill(self._window if batch.opened else 1)
            if chunk:
                self._guard()
                self._connection.send(chunk)
            elif not batch.number:
                break
            received = self._connection.receive(0 if chunk and batch.sending else self._ack_timeout_seconds)
            if not (chunk or received):
                raise self._answers.silence(self._ack_timeout_seconds)
            for frame in self._answers.of_stream(received):
                batch.read(frame)
        return batch.end


class _Batch:
    """The state of one batch."""

    def __init__(self, connection: Connection, items: Iterator[Outgoing], max_messages: int, max_bytes: int) -> None:
        self.end = BatchEnd()
        self.opened = self.ended = False
        self.sending = True
        #: Of the last sent message, from 1.
        self.number = 0
        self._items, self._limit_bytes = items, connection.max_payload_bytes
        self._max_messages, self._left_bytes = max_messages, max_bytes
        self._reply = b"%b.%b.%d.fail." % (connection.new_inbox(), secrets.token_hex(8).encode(), _FLOW)
        self._subject = ""
        self._commit_number = 0
        #: The number of the first message that is known to be refused.
        self._refused = max_messages + 1

    def fill(self, window: int) -> bytes:
        """Return the frames to send next; the last one ends the batch."""
        chunk: list[bytes] = []
        chunk_bytes, acked, sent, reply = 0, self.end.stored, self.end.sent, self._reply
        items, limit_bytes = self._items, self._limit_bytes
        free_bytes, most = min(SEND_BYTES, self._left_bytes), min(self._max_messages, acked + window)
        number = len(sent)
        while self.sending and chunk_bytes < free_bytes and number < most:
            item = next(items, None)
            if item is None:
                self.end.exhausted, self.sending = True, False
                break
            to = b"%b%d.%d.$FI" % (reply, number + 1, _APPEND if number else _START)
            parts = encode_item(item, to, limit_bytes)
            if isinstance(parts, Ack):
                # The server may still refuse an earlier message.
                self.end.refusal, self._refused, self.sending = parts, number + 1, False
                break
            if not number:
                self._subject = item[1]
            sent.append(item[0])
            chunk += parts
            number += 1
            chunk_bytes += len(parts[0]) + len(parts[1]) + len(parts[2])
        self._left_bytes -= chunk_bytes
        self.number = number
        if number >= self._max_messages or self._left_bytes <= 0:
            self.sending = False
        if not self.sending and not self._commit_number and sent and (self.opened or chunk):
            self._commit_number = len(sent) + 1
            chunk.append(
                f.encode_pub(
                    self._subject, b"%b%d.%d.$FI" % (reply, self._commit_number, _COMMIT_WITHOUT_STORING), b"", b""
                )
            )
        return b"".join(chunk)

    def read(self, frame: Frame) -> None:
        """Take over a response to one of the batch's messages."""
        if not frame.subject.startswith(self._reply) or self.ended:
            return
        self.opened = True
        number = int(frame.subject.split(b".")[-3])
        if frame.status == NO_RESPONDERS:
            self._refuse(number, NO_RESPONDERS, "no stream takes this subject")
            return
        try:
            answer = decode_response(frame.payload)
        except ValueError as error:
            self._refuse(number, None, str(error))
            return
        if answer.get("type") == "ack":
            self.end.stored = max(self.end.stored, int(answer["seq"]))
        elif "count" in answer:
            self._finish(answer)
        elif refused := answer.get("error"):
            # The response of the stream, or `err` in the batch's flow.
            self._refuse(number, refused.get("err_code") or refused.get("code"), refused.get("description"))
        # Else a gap, which the end of the batch follows.

    def _finish(self, answer: dict[str, Any]) -> None:
        self.ended, self.sending = True, False
        if not answer.get("duplicate"):
            self.end.stored, self.end.last = int(answer["count"]), int(answer["seq"])

    def _refuse(self, number: int, code: int | None, text: str | None) -> None:
        """End the batch before a refused message; the server then reports the end, unless it knows no batch."""
        self.sending = False
        if code in _BATCH_ERRORS or number in {1, self._commit_number}:
            self.ended = True
        if code not in _BATCH_ERRORS and number != self._commit_number and number < self._refused:
            self._refused = number
            self.end.refusal = Ack(self.end.sent[number - 1], error_code=code, error=text)
