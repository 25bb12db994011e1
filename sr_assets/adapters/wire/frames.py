"""The NATS client protocol without I/O: encoding and parsing of frames, and of JetStream's messages in them."""

import re
from datetime import UTC, datetime
from functools import lru_cache, partial
from itertools import repeat
from typing import Any, Final, Generic, NamedTuple, TypeVar

from sr_assets.adapters.jetstream import EMPTY_HEADERS
from sr_assets.domain.messages import Message

T = TypeVar("T")

CRLF: Final = b"\r\n"
MAX_LINE_BYTES: Final = 1 << 20
# More than any server accepts for a message: waiting for more bytes would only fill the memory.
MAX_MESSAGE_BYTES: Final = 1 << 30

_SIZES: Final = re.compile(rb"\d+ \d+\r\n")
# Part of no header block.
_BETWEEN: Final = b"\n"
# Half the time of the constructor.
_NEW_MESSAGE: Final = partial(tuple.__new__, Message)
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
# The whole block of a message in a batch, for a stream: the sender's own lines, then those of the server.
_BATCH_BLOCK: Final = (
    rb"NATS/1\.0\r\n((?:[^\r\n]+\r\n)+?)??Nats-Stream: %b\r\n"
    rb"Nats-Subject: ([^\r\n]*)\r\n"
    rb"Nats-Sequence: (\d+)\r\n"
    rb"Nats-Time-Stamp: (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.(\d{1,9})Z\r\n"
    rb"Nats-Num-Pending: (\d+)\r\nNats-Last-Sequence: \d+\r\n\r\n"
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
        # The connection has one subscription, 1.
        self._start = b"HMSG %b 1 " % inbox
        self._blocks = re.compile(_BATCH_BLOCK % re.escape(stream))
        self.messages: list[Message] = []
        self.pending = 0

    def collect(self) -> None:
        """Move what was taken to `messages`."""
        self.messages += self.take()

    def parse(self, buffer: bytes) -> int:
        """Take the messages and return their end."""
        blocks, payloads, ends = self._cut(buffer)
        if not blocks:
            return 0
        # Between two blocks is what none of them contains, so what is between the matches tells which is the first other.
        matched = self._blocks.split(_BETWEEN.join(blocks))
        between = matched[::7]
        expected = [b"", *[_BETWEEN] * (len(blocks) - 1), b""]
        count = len(blocks)
        if between != expected:
            count = next(at for at, text in enumerate(between) if text != expected[at])
        if not count:
            return 0
        own, subjects, sequences, seconds, fractions, following = (matched[at : 7 * count : 7] for at in range(1, 7))
        try:
            known_ns = {second: _second_ns(second) for second in set(seconds)}
        except ValueError:
            return 0
        self.taken += map(
            _NEW_MESSAGE,
            zip(
                map(int, sequences),
                [
                    known_ns[second] + int(digits.ljust(9, b"0"))
                    for second, digits in zip(seconds, fractions, strict=True)
                ],
                CRLF.join(subjects).decode(errors="surrogateescape").split("\r\n"),
                [b"NATS/1.0\r\n%b\r\n" % lines if lines else b"" for lines in own],
                payloads,
                repeat(0),
                strict=False,
            ),
        )
        self.pending = int(following[-1])
        return ends[count - 1]

    def _cut(self, buffer: bytes) -> tuple[list[bytes], list[bytes], list[int]]:
        """Return the header blocks and the payloads of the batch's frames at the start, and the end of each frame."""
        start, is_next, find, skipped = self._start, buffer.startswith, buffer.find, len(self._start)
        position, last, known, headers_bytes, size_bytes = 0, len(buffer) - 2, b"", 0, 0
        blocks, payloads, ends = list[bytes](), list[bytes](), list[int]()
        while is_next(start, position):
            begin = find(CRLF, position) + 2
            # Consecutive messages often have equal sizes.
            if (sizes := buffer[position + skipped : begin]) != known:
                if not _SIZES.fullmatch(sizes):
                    break
                known, (headers_bytes, size_bytes) = sizes, map(int, sizes.split())
            stop = begin + size_bytes
            if stop > last or headers_bytes > size_bytes:
                break
            middle, position = begin + headers_bytes, stop + 2
            blocks.append(buffer[begin:middle])
            payloads.append(buffer[middle:stop])
            ends.append(position)
        # The start of a frame proves the end of the one before it.
        if ends and buffer[ends[-1] - 2 : ends[-1]] != CRLF:
            return blocks[:-1], payloads[:-1], ends[:-1]
        return blocks, payloads, ends


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


def encode_pub(subject: str, reply: bytes, headers: bytes, payload: bytes) -> bytes:
    """Return one complete PUB (no headers) or HPUB frame, with headers and payload unchanged."""
    to, size_bytes = encode_subject(subject), len(headers) + len(payload)
    to = b"%b %b" % (to, reply) if reply else to
    line = b"HPUB %b %d %d" % (to, len(headers), size_bytes) if headers else b"PUB %b %d" % (to, size_bytes)
    return b"".join((line, CRLF, headers, payload, CRLF))


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
