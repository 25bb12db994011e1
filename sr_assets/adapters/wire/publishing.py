"""Publishing into a stream with a bounded window, and the outcome of each message."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sr_assets.adapters.wire import frames as f
from sr_assets.adapters.wire.acknowledgements import Ack, Answers, parse_ack
from sr_assets.adapters.wire.connection import Connection
from sr_assets.domain.refusals import INVALID_SUBJECT, MESSAGE_TOO_LARGE

SEND_BYTES: Final = 256 << 10
MAX_CONTROL_LINE_BYTES: Final = 4096

_UNKNOWN: Final = (0, 0)


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
