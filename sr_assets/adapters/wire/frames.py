"""The NATS client protocol without I/O: encoding and parsing of frames, and of JetStream's messages in them."""

import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, Generic, NamedTuple, TypeVar

from sr_assets.adapters.jetstream import EMPTY_HEADERS
from sr_assets.domain.messages import Message

T = TypeVar("T")

CRLF: Final = b"\r\n"
MAX_LINE_BYTES: Final = 1 << 20
# More than any server accepts for a message: waiting for more bytes would only fill the memory.
MAX_MESSAGE_BYTES: Final = 1 << 30

_NOT_IN_A_SUBJECT: Final = bytes(range(0x21))
# The block that a direct get appends to a message's headers; the last two lines only in a batch.
_STORED_LINES: Final = (
    rb"Nats-Stream: ([^\r\n]*)\r\n"
    rb"Nats-Subject: ([^\r\n]*)\r\n"
    rb"Nats-Sequence: (\d+)\r\n"
    rb"Nats-Time-Stamp: (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z\r\n"
)
_PENDING_LINES: Final = rb"Nats-Num-Pending: (\d+)\r\nNats-Last-Sequence: \d+\r\n"
_DIRECT_BLOCK: Final = re.compile(rb"%b(?:%b)?\r\n" % (_STORED_LINES, _PENDING_LINES))
# The same as a frame without its payload: subject, sizes, the sender's own header lines, the block.
_DIRECT_FRAME: Final = re.compile(
    rb"HMSG ([^ \r\n]+) [^ \r\n]+ (\d+) (\d+)\r\nNATS/1\.0\r\n((?:[^\r\n]+\r\n)+?)??%b%b\r\n"
    % (_STORED_LINES, _PENDING_LINES)
)
# The header line that a headers-only consumer appends to those of a message.
_SIZE_LINE: Final = re.compile(rb"Nats-Msg-Size: (\d+)\r\n\r\n")


class Frame(NamedTuple):
    """One protocol message from the server.

    `verb` is MSG, HMSG, PING, PONG, INFO, +OK or -ERR; the text of INFO and -ERR is the payload. `headers` is the whole
    block as it was sent, or empty.
    """

    verb: bytes
    subject: bytes = b""
    reply: bytes = b""
    headers: bytes = b""
    payload: bytes = b""

    @property
    def status(self) -> int | None:
        """The code of a status message (404, 503 …), which is never data; None for other frames."""
        code = self.headers[9:12]
        return int(code) if self.headers.startswith(b"NATS/1.0 ") and code.isdigit() else None

    @property
    def status_text(self) -> str:
        """The first header line without the version, for error messages."""
        return self.headers[9:].split(CRLF, 1)[0].decode(errors="replace")


class FirstParser(Generic[T]):
    """A fast path for many frames of one kind at the start of a buffer; `FrameParser` handles all others."""

    def __init__(self) -> None:
        self.taken: list[T] = []

    def parse(self, buffer: bytes) -> int:
        """Add the frames' contents to `taken` and return their end."""
        raise NotImplementedError

    def take(self) -> list[T]:
        """Return and forget `taken`."""
        taken, self.taken = self.taken, []
        return taken


class FrameParser:
    """Parses the byte stream into frames, whatever its chunks."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._held_bytes = 0
        self._wanted_bytes = 0

    def feed(self, data: bytes, first: FirstParser[Any] | None = None) -> list[Frame]:
        """Return the frames that are now complete; raises ValueError at the first byte that violates the protocol.

        `first` may take frames at the start.
        """
        self._chunks.append(data)
        self._held_bytes += len(data)
        # A large message arrives in many chunks: join them only after the last one.
        if self._held_bytes < self._wanted_bytes:
            return []
        buffer = data if len(self._chunks) == 1 else b"".join(self._chunks)
        position = first.parse(buffer) if first else 0
        frames, position, self._wanted_bytes = _parse(buffer, position)
        rest = buffer[position:]
        self._chunks = [rest] if rest else []
        self._held_bytes = len(rest)
        return frames


def _parse(buffer: bytes, position: int) -> tuple[list[Frame], int, int]:
    """Return the complete frames, the position of an incomplete one, and how many bytes that needs (0: unknown)."""
    frames: list[Frame] = []
    add, find, size = frames.append, buffer.find, len(buffer)
    while (end := find(CRLF, position)) >= 0:
        fields = buffer[position:end].split(b" ")
        verb, start = fields[0], end + 2
        if verb == b"HMSG" and 5 <= len(fields) <= 6:
            middle, stop = start + int(fields[-2]), start + int(fields[-1])
        elif verb == b"MSG" and 4 <= len(fields) <= 5:
            middle, stop = start, start + int(fields[-1])
        else:
            add(_control(buffer[position:end]))
            position = start
            continue
        if stop + 2 > size:
            if stop - start > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of an impossible size: {buffer[position:end][:80]!r}")
            return frames, position, stop + 2 - position
        if not start <= middle <= stop or buffer[stop : stop + 2] != CRLF:
            raise ValueError(f"a message whose lengths do not fit: {buffer[position:end][:80]!r}")
        reply = fields[3] if len(fields) == (6 if verb == b"HMSG" else 5) else b""
        add(Frame(verb, fields[1], reply, buffer[start:middle], buffer[middle:stop]))
        position = stop + 2
    if size - position > MAX_LINE_BYTES:
        raise ValueError(f"a line without an end: {buffer[position : position + 80]!r}")
    return frames, position, 0


class DirectParser(FirstParser[Message]):
    """Takes the messages of a batched direct get into `messages`; `pending` is how many follow the last one.

    It stops at the end of the batch, at a message of another stream, and at headers that lack bytes.
    """

    def __init__(self, inbox: bytes, stream: bytes) -> None:
        super().__init__()
        self._inbox, self._stream = inbox, stream
        self.messages: list[Message] = []
        self.pending = 0

    def collect(self) -> None:
        """Move what was taken to `messages`."""
        self.messages += self.take()

    def parse(self, buffer: bytes) -> int:
        """Take the messages and return their end."""
        position, last, inbox, stream, add = 0, len(buffer) - 2, self._inbox, self._stream, self.taken.append
        match, new, pending, known, known_ns = _DIRECT_FRAME.match, tuple.__new__, b"", b"", 0
        while line := match(buffer, position):
            subject, headers_size, size, own, responder, stored_as, sequence, second, fraction, following = (
                line.groups()
            )
            # The sizes tell the end of the payload, and whether the block is the end of the headers.
            middle, headers_bytes = line.end(), int(headers_size)
            stop = middle - headers_bytes + int(size)
            whole = line.end(3) + 2 + headers_bytes == middle <= stop <= last
            if not whole or subject != inbox or responder != stream or buffer[stop : stop + 2] != CRLF:
                break
            if second != known:
                try:
                    known, known_ns = second, _second_ns(second)
                except ValueError:
                    break
            stored_ns = known_ns + int(fraction.ljust(9, b"0")) if fraction else known_ns
            text = stored_as.decode("utf-8", "surrogateescape")
            kept = b"NATS/1.0\r\n%b\r\n" % own if own else b""
            # Half the time of the constructor.
            add(new(Message, (int(sequence), stored_ns, text, kept, buffer[middle:stop], 0)))
            pending, position = following, stop + 2
        if pending:
            self.pending = int(pending)
        return position


def _control(line: bytes) -> Frame:
    verb, _, text = line.partition(b" ")
    if verb in (b"PING", b"PONG", b"+OK", b"INFO", b"-ERR"):
        return Frame(verb, payload=text.strip())
    raise ValueError(f"not the NATS protocol: {line[:80]!r}")


@lru_cache(maxsize=1 << 16)
def encode_subject(subject: str) -> bytes:
    """Return the subject's bytes (`surrogateescape`); raises ValueError on bytes that would end the control line."""
    encoded = subject.encode(errors="surrogateescape")
    if not encoded or len(encoded.translate(None, _NOT_IN_A_SUBJECT)) != len(encoded):
        raise ValueError(f"not a subject: {subject!r}")
    return encoded


def pub_line(subject: bytes, reply: bytes, headers_bytes: int, size_bytes: int) -> bytes:
    """Return the control line of a PUB, or of an HPUB if there are headers, with its CR LF; `size_bytes` includes them."""
    if headers_bytes and reply:
        return b"HPUB %b %b %d %d\r\n" % (subject, reply, headers_bytes, size_bytes)
    to = b"%b %b" % (subject, reply) if reply else subject
    if headers_bytes:
        return b"HPUB %b %d %d\r\n" % (to, headers_bytes, size_bytes)
    return b"PUB %b %d\r\n" % (to, size_bytes)


def encode_pub(subject: str, reply: bytes, headers: bytes, payload: bytes) -> bytes:
    """Return one complete PUB (no headers) or HPUB frame, with headers and payload unchanged."""
    line = pub_line(encode_subject(subject), reply, len(headers), len(headers) + len(payload))
    return b"".join((line, headers, payload, CRLF))


def direct_get_message(frame: Frame) -> tuple[Message, int | None, bytes] | None:
    """Return the message in a response to a direct get, how many follow (batches only), and the responding stream.

    Return None for a status. Only the last block, which the server appended, is parsed and removed: a sender can forge
    earlier ones. A mirror may respond for its origin.
    """
    headers = frame.headers
    at = headers.rfind(b"Nats-Stream: ")
    added = _DIRECT_BLOCK.fullmatch(headers, at) if at >= 0 else None
    if added is None:
        return None
    stream, subject, sequence, second, fraction, pending = added.groups()
    try:
        stored_ns = _second_ns(second) + (int(fraction.ljust(9, b"0")) if fraction else 0)
    except ValueError:
        return None
    own = b"" if at == 10 and headers.startswith(b"NATS/1.0\r\n") else headers[:at] + CRLF
    text = subject.decode(errors="surrogateescape")
    message = Message(int(sequence), stored_ns, text, own, frame.payload)
    return message, None if pending is None else int(pending), stream


def has_whole_headers(message: Message) -> bool:
    """Return whether a direct get or a headers-only consumer returned all bytes of the headers.

    The server always overwrites the last two bytes of the block with its own lines, so a block without a final blank line
    loses two bytes. `STREAM.MSG.GET` returns them.
    """
    return not message.headers or message.headers.endswith(b"\r\n\r\n")


@lru_cache(maxsize=64)
def _second_ns(text: bytes) -> int:
    # Consecutive messages often share their second.
    return int(datetime.fromisoformat(text.decode()).replace(tzinfo=UTC).timestamp()) * 1_000_000_000


def delivered_message(frame: Frame, *, headers_only: bool = False) -> tuple[Message, int, int]:
    """Return a consumer's message, its delivery number (from 1), and how many follow it.

    The numbers are parsed from the reply subject, in its short form or the form with domain and account. The size of a
    payload that a `headers_only` consumer omits is in the header that it adds. Raises ValueError on any other frame.
    """
    tokens = frame.reply.split(b".")
    if len(tokens) < 9 or tokens[0] != b"$JS" or tokens[1] != b"ACK":
        raise ValueError(f"not a delivery of a stream: {frame.reply[:80]!r}")
    sequence, number, stored_ns, pending = tokens[5:9] if len(tokens) == 9 else tokens[7:11]
    headers, unread_bytes = _without_size(frame.headers) if headers_only else (frame.headers, 0)
    if headers == EMPTY_HEADERS:
        headers = b""
    subject = frame.subject.decode(errors="surrogateescape")
    message = Message(int(sequence), int(stored_ns), subject, headers, frame.payload, unread_bytes)
    return message, int(number), int(pending)


def _without_size(headers: bytes) -> tuple[bytes, int]:
    """Return the block without the server's last line, and the size in it: a publisher's own `Nats-Msg-Size` is data."""
    at = headers.rfind(b"Nats-Msg-Size: ")
    added = _SIZE_LINE.fullmatch(headers, at) if at >= 0 else None
    if added is None:
        raise ValueError(f"not headers with the size of a message: {headers[-80:]!r}")
    return headers[:at] + CRLF, int(added[1])
