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
from itertools import chain, count, islice, repeat
from operator import add
from typing import Any, Final, NamedTuple, Protocol

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
# The rest of a control line: verb, blanks, the number and the two sizes, each with up to 20 digits, and the line's end.
_LINE_BYTES: Final = len("HPUB    \r\n") + 3 * 20
_UNKNOWN: Final = (-1, 0)
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


class Run(NamedTuple):
    """Acknowledgements of consecutive messages that are stored at consecutive sequences, from these on."""

    number: int
    target_sequence: int
    length: int

    @property
    def end(self) -> tuple[int, int]:
        """The number and the sequence after the last ones."""
        return self.number + self.length, self.target_sequence + self.length


class StoredParser(FirstParser[Run]):
    """Takes acknowledgements of stored messages, whose number is at the end of their subject.

    With names, only acknowledgements of one stream and one domain.
    """

    def __init__(self, stream: str = "", domain: str = "") -> None:
        super().__init__()
        stored = _STORED % (_literal(stream), _literal(domain))
        # The number, the size, the payload and its sequence.
        self._frame = re.compile(rb"MSG [^ \r\n]+\.(\d{1,18}) 1 (\d+)\r\n(%b)\r\n" % stored)

    def parse(self, buffer: bytes) -> int:
        """Take the acknowledgements and return their end."""
        end, taken = 0, self.taken
        while ack := self._frame.match(buffer, end):
            number, size, payload, sequence = ack.groups()
            if int(size) != len(payload):
                break
            run = Run(int(number), int(sequence), 1)
            if not end:
                # Usually the whole buffer is one run. To compare it takes a quarter of the time of parsing it.
                whole = run._replace(length=buffer.count(b"\n") // 2)
                if buffer.startswith(expected := _frames(ack, whole)):
                    taken.append(whole)
                    return len(expected)
            if taken and taken[-1].end == run[:2]:
                run = taken[-1]._replace(length=taken.pop().length + 1)
            taken.append(run)
            end = ack.end()
        return end


def _frames(ack: re.Match[bytes], run: Run) -> bytes:
    """Return the frames of a run whose first acknowledgement was matched."""
    texts = ack.string[: ack.start(1)], ack.string[ack.end(1) : ack.start(4)], ack.string[ack.end(4) : ack.end()]
    frame = b"%b%%d%b%%d%b" % tuple(text.replace(b"%", b"%%") for text in texts)
    return b"".join([frame % numbers for numbers in zip(range(run.number, run.end[0]), count(run.target_sequence))])


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


class Stored(NamedTuple):
    """Messages that the target has stored at consecutive sequences, from `first` on; `sequences` are the caller's."""

    sequences: list[int]
    first: int


class Outgoing(NamedTuple):
    """A message to publish; `sequence` is the caller's identifier, which the outcome repeats."""

    sequence: int
    subject: str
    headers: bytes
    payload: bytes


class Outgoings(NamedTuple):
    """Messages to publish, by column."""

    sequences: list[int]
    subjects: list[str]
    headers: list[bytes]
    payloads: list[bytes]


class Outbox(Protocol):
    """The messages that a publisher sends."""

    def take(self, most: int, free_bytes: int) -> Outgoings:
        """Return the next messages, which are then sent in this order; none if all have been taken.

        At most `most`, and none after payloads of `free_bytes`.
        """


class Items:
    """The outbox of given messages."""

    def __init__(self, items: Iterable[Outgoing]) -> None:
        self._items = iter(items)

    def take(self, most: int, free_bytes: int) -> Outgoings:
        """Return the next messages."""
        taken = Outgoings([], [], [], [])
        for sequence, subject, headers, payload in islice(self._items, most):
            taken.sequences.append(sequence)
            taken.subjects.append(subject)
            taken.headers.append(headers)
            taken.payloads.append(payload)
            free_bytes -= len(payload)
            if free_bytes <= 0:
                break
        return taken


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
        """Publish in order and yield an Ack for each message; see `publish`."""
        for outcome in self.publish(Items(items)):
            if isinstance(outcome, Stored):
                yield from map(Ack, outcome.sequences, count(outcome.first))
            else:
                yield outcome

    def publish(self, outbox: Outbox) -> Iterator[Stored | Ack]:
        """Publish in order and yield the outcomes as they arrive; sending starts with the first iteration.

        Sending stops at the first refusal; messages in flight are awaited, and unsent messages are not reported. A message
        that the server cannot accept is not sent but reported last, as a refusal: over `max_payload` as 10054, an invalid
        subject as 400. Raises WireError if the connection fails or no ack arrives in time: then read the target.
        """
        window = _Window(outbox, self._connection, self._max_messages, self._max_bytes)
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
            yield from window.settle(stored)
            for frame in self._answers.of_stream(frames):
                if ack := window.settle_frame(frame):
                    yield ack
        if window.refusal is not None:
            yield window.refusal


@dataclass(slots=True)
class _Window:
    """The unacknowledged messages, and the source of the messages still to be sent."""

    outbox: Outbox
    connection: Connection
    max_messages: int
    max_bytes: int
    sending: bool = True
    #: The refusal of a message that the server cannot accept.
    refusal: Ack | None = None
    #: Sequence and size, by the number of the inbox.
    in_flight: dict[int, tuple[int, int]] = field(default_factory=dict)
    waiting_bytes: int = 0

    def fill(self) -> bytes:
        """Return the frames to send next: none if the window is full or all messages have been sent."""
        room, free_bytes = self.max_messages - len(self.in_flight), min(SEND_BYTES, self.max_bytes - self.waiting_bytes)
        if not self.sending or room <= 0 or free_bytes <= 0:
            return b""
        items = self.outbox.take(room, free_bytes)
        prefix, first = self.connection.new_inboxes(len(items.sequences))
        chunk, sizes, self.refusal = encode(items, (prefix, b""), first, self.connection.max_payload_bytes)
        self.sending = bool(items.sequences) and self.refusal is None
        # A refused message and those after it have no size.
        self.in_flight.update(zip(count(first), zip(items.sequences, sizes, strict=False)))
        self.waiting_bytes += sum(sizes)
        return chunk

    def settle(self, runs: list[Run]) -> Iterator[Stored]:
        """Settle stored messages."""
        settle = self.in_flight.pop
        for run in runs:
            settled = [settle(number, _UNKNOWN) for number in range(run.number, run.number + run.length)]
            self.waiting_bytes -= sum([size_bytes for _, size_bytes in settled])
            if _UNKNOWN not in settled:
                yield Stored([sequence for sequence, _ in settled], run.target_sequence)
                continue
            # Some are late acknowledgements of an earlier window.
            for target_sequence, message in enumerate(settled, run.target_sequence):
                if message != _UNKNOWN:
                    yield Stored([message[0]], target_sequence)

    def settle_frame(self, frame: Frame) -> Ack | None:
        """Settle the message of any other response; None if there is no such message."""
        number = frame.subject.rpartition(b".")[2]
        message = self.in_flight.pop(int(number) if number.isdigit() else 0, _UNKNOWN)
        if message == _UNKNOWN:
            return None
        self.waiting_bytes -= message[1]
        ack = parse_ack(message[0], frame)
        self.sending = self.sending and ack.error is None
        return ack


class Encoded(NamedTuple):
    """The frames of messages, and the bytes of each one's headers and payload; the refusal before which they end, if any."""

    chunk: bytes
    sizes: list[int]
    refusal: Ack | None


def encode(items: Outgoings, reply: tuple[bytes, bytes], first: int, limit_bytes: int) -> Encoded:
    """Encode messages up to one on which the server would close the connection.

    A message's reply subject is its number, counted from `first`, between the two parts of `reply`.
    """
    sequences, subjects, headers, payloads = items
    headers_bytes = [*map(len, headers)]
    sizes = [*map(add, headers_bytes, map(len, payloads))]
    longest = MAX_CONTROL_LINE_BYTES - _LINE_BYTES - sum(map(len, reply))
    try:
        encoded = [*map(f.encode_subject, subjects)]
        usual = max(sizes, default=0) <= limit_bytes and max(map(len, encoded), default=0) <= longest
    except ValueError:
        usual = False
    if not usual:
        at, refusal = _first_refusal(items, limit_bytes, longest)
        some = Outgoings(sequences[:at], subjects[:at], headers[:at], payloads[:at])
        return encode(some, reply, first, limit_bytes)._replace(refusal=refusal)
    before, after = (text.replace(b"%", b"%%") for text in reply)
    alone = b"PUB %%b %b%%d%b %%d\r\n" % (before, after)
    with_headers = b"HPUB %%b %b%%d%b %%d %%d\r\n" % (before, after)
    lines = [
        with_headers % fields if fields[2] else alone % (fields[0], fields[1], fields[3])
        for fields in zip(encoded, count(first), headers_bytes, sizes)
    ]
    return Encoded(b"".join(chain.from_iterable(zip(lines, headers, payloads, repeat(f.CRLF)))), sizes, None)


def _first_refusal(items: Outgoings, limit_bytes: int, longest: int) -> tuple[int, Ack]:
    """Return the place and the refusal of the first message that the server cannot accept; `longest`: a subject's bytes."""
    sizes = map(add, map(len, items.headers), map(len, items.payloads))
    for at, (sequence, subject, size_bytes) in enumerate(zip(items.sequences, items.subjects, sizes, strict=True)):
        code, text = INVALID_SUBJECT, ""
        try:
            if size_bytes > limit_bytes:
                code = MESSAGE_TOO_LARGE
                text = f"{size_bytes} bytes are more than the server takes (max_payload {limit_bytes})"
            elif len(f.encode_subject(subject)) > longest:
                text = f"the subject's {len(subject)} characters are more than the server takes"
        except ValueError as error:
            text = str(error)
        if text:
            return at, Ack(sequence, error_code=code, error=text)
    raise ValueError("no message is refused")


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

    def publish(self, outbox: Outbox) -> BatchEnd:
        """Publish the next messages as one batch, and wait for its end.

        Raises WireError if the connection fails or no acknowledgement arrives in time: then read the target.
        """
        batch = _Batch(self._connection, outbox, self._max_messages, self._max_bytes)
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

    def __init__(self, connection: Connection, outbox: Outbox, max_messages: int, max_bytes: int) -> None:
        self.end = BatchEnd()
        self.opened = self.ended = False
        self.sending = True
        #: Of the last sent message, from 1.
        self.number = 0
        self._outbox, self._limit_bytes = outbox, connection.max_payload_bytes
        self._max_messages, self._left_bytes = max_messages, max_bytes
        self._reply = b"%b.%b.%d.fail." % (connection.new_inbox(), secrets.token_hex(8).encode(), _FLOW)
        self._subject = ""
        self._commit_number = 0
        #: The number of the first message that is known to be refused.
        self._refused = max_messages + 1

    def fill(self, window: int) -> bytes:
        """Return the frames to send next; the last one ends the batch."""
        chunk, sent, reply = b"", self.end.sent, self._reply
        most = min(self._max_messages, self.end.stored + window) - len(sent)
        if self.sending and most > 0:
            items = self._outbox.take(most, min(SEND_BYTES, self._left_bytes))
            end = b".%d.$FI" % (_APPEND if sent else _START)
            chunk, sizes, refusal = encode(items, (reply, end), len(sent) + 1, self._limit_bytes)
            if not sent and sizes:
                self._subject = items.subjects[0]
            sent += items.sequences[: len(sizes)]
            self._left_bytes -= sum(sizes)
            self.number = len(sent)
            if not items.sequences:
                self.end.exhausted, self.sending = True, False
            elif refusal is not None:
                # The server may still refuse an earlier message.
                self.end.refusal, self._refused, self.sending = refusal, len(sent) + 1, False
            elif len(sent) >= self._max_messages or self._left_bytes <= 0:
                self.sending = False
        if not self.sending and not self._commit_number and sent and (self.opened or chunk):
            self._commit_number = len(sent) + 1
            end = b"%b%d.%d.$FI" % (reply, self._commit_number, _COMMIT_WITHOUT_STORING)
            chunk += f.encode_pub(self._subject, end, b"", b"")
        return chunk

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
