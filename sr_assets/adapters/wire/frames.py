"""The NATS client protocol without I/O: encoding and parsing of frames, and of JetStream's messages in them."""

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import lru_cache, partial
from itertools import chain, repeat
from typing import Any, Final, Generic, NamedTuple, TypeVar

from sr_assets.adapters.jetstream import EMPTY_HEADERS
from sr_assets.domain.messages import Message

T = TypeVar("T")

CRLF: Final = b"\r\n"
MAX_LINE_BYTES: Final = 1 << 20
# More than any server accepts for a message: waiting for more bytes would only fill the memory.
MAX_MESSAGE_BYTES: Final = 1 << 30

_SIZES: Final = re.compile(rb"\d+ \d+\r\n")
# Part of no header block and of no control line.
_BETWEEN: Final = b"\n"
# Half the time of the constructor.
_NEW_MESSAGE: Final = partial(tuple.__new__, Message)
_NOT_IN_A_SUBJECT: Final = bytes(range(0x21))
# The block that a direct get appends to a message's headers; the last two lines only in a batch.
_DIRECT_BLOCK: Final = re.compile(
    rb"Nats-Stream: ([^\r\n]*)\r\n"
    rb"Nats-Subject: ([^\r\n]*)\r\n"
    rb"Nats-Sequence: (\d+)\r\n"
    rb"Nats-Time-Stamp: (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z\r\n"
    rb"(?:Nats-Num-Pending: (\d+)\r\nNats-Last-Sequence: \d+\r\n)?\r\n"
)
# The whole block of a message in a batch, for a stream: the sender's own lines, then those of the server.
_BATCH_BLOCK: Final = (
    rb"NATS/1\.0\r\n((?:[^\r\n]+\r\n)+?)??Nats-Stream: %b\r\n"
    rb"Nats-Subject: ([^\r\n]*)\r\n"
    rb"Nats-Sequence: (\d+)\r\n"
    rb"Nats-Time-Stamp: (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.(\d{1,9})Z\r\n"
    rb"Nats-Num-Pending: (\d+)\r\nNats-Last-Sequence: \d+\r\n\r\n"
)
# The control line of a delivery, for a stream and a consumer. Servers may add domain, account and a last token.
_DELIVERY: Final = (
    rb"H?MSG ([^ \n]+) 1 (\$JS\.ACK\.(?:[^ .\n]+\.[^ .\n]+\.)??%b\.%b\.\d+\.(\d+)\.(\d+)\.(\d+)\.(\d+)(?:\.[^ \n]+)?)"
    rb"(?: \d+)? \d+"
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


class MessageParser(FirstParser[Message]):
    """Takes stored messages into `messages`; `pending` is how many follow the last one."""

    def __init__(self, pending: int = 0) -> None:
        super().__init__()
        self.messages: list[Message] = []
        self.pending = pending

    def collect(self) -> None:
        """Move what was taken to `messages`."""
        self.messages += self.take()


class DirectParser(MessageParser):
    """Takes the messages of a batched direct get.

    It stops at the end of the batch, at a message of another stream, and at headers that lack bytes.
    """

    def __init__(self, inbox: bytes, stream: bytes) -> None:
        super().__init__()
        # The connection has one subscription, 1.
        self._start = b"HMSG %b 1 " % inbox
        self._blocks = re.compile(_BATCH_BLOCK % re.escape(stream))

    def parse(self, buffer: bytes) -> int:
        """Take the messages and return their end."""
        blocks, payloads, ends = self._cut(buffer)
        count, columns = _match_each(self._blocks, blocks)
        if not count:
            return 0
        own, subjects, sequences, seconds, fractions, following = columns
        try:
            known_ns = {second: _second_ns(second) for second in set(seconds)}
        except ValueError:
            return 0
        stored_ns = [
            known_ns[second] + int(digits.ljust(9, b"0")) for second, digits in zip(seconds, fractions, strict=True)
        ]
        headers = [b"NATS/1.0\r\n%b\r\n" % lines if lines else b"" for lines in own]
        self.taken += _messages(sequences, stored_ns, subjects, headers, payloads)
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


class DeliveryParser(MessageParser):
    """Takes the deliveries of a consumer that has just been created, as long as none is lost.

    `delivered` counts the deliveries, `delivered_bytes` their sizes as the server does: subjects, headers and payloads.
    """

    def __init__(self, stream: bytes, consumer: bytes, pending: int, *, headers_only: bool) -> None:
        super().__init__(pending)
        self._lines = re.compile(_DELIVERY % (re.escape(stream), re.escape(consumer)))
        self._headers_only = headers_only
        self.delivered = self.delivered_bytes = 0

    def parse(self, buffer: bytes) -> int:
        """Take the deliveries and return their end."""
        try:
            lines, headers, payloads, ends = _cut_deliveries(buffer)
            count, columns = _match_each(self._lines, lines)
            if not count:
                return 0
            subjects, replies, sequences, numbers, times, following = columns
            delivered = self.delivered + count
            if list(map(int, numbers)) != list(range(self.delivered + 1, delivered + 1)):
                return 0
            sizes = map(len, chain(subjects, replies, headers[:count], payloads[:count]))
            blocks: Iterable[bytes] = headers
            unread_bytes: Iterable[int] = repeat(0)
            if self._headers_only:
                blocks, unread_bytes = zip(*map(_without_size, headers[:count]), strict=True)
        except ValueError:
            # Invalid numbers: the slow path names them.
            return 0
        own = [b"" if block == EMPTY_HEADERS else block for block in blocks]
        self.taken += _messages(sequences, map(int, times), subjects, own, payloads, unread_bytes)
        self.delivered, self.delivered_bytes = delivered, self.delivered_bytes + sum(sizes)
        self.pending = int(following[-1])
        return ends[count - 1]


def _cut_deliveries(buffer: bytes) -> tuple[list[bytes], list[bytes], list[bytes], list[int]]:
    """Return control line, headers and payload of each message with a reply subject at the start, and the end of each.

    Raises ValueError for an invalid size.
    """
    position, last, find = 0, len(buffer) - 2, buffer.find
    lines, headers, payloads, ends = list[bytes](), list[bytes](), list[bytes](), list[int]()
    while buffer.startswith((b"HMSG ", b"MSG "), position) and (begin := find(CRLF, position) + 2) > 1:
        line = buffer[position : begin - 2]
        _, before, size = line.rsplit(b" ", 2)
        middle, stop = begin + int(before) if line[:1] == b"H" else begin, begin + int(size)
        if not middle <= stop <= last or buffer[stop : stop + 2] != CRLF:
            break
        position = stop + 2
        lines.append(line)
        headers.append(buffer[begin:middle])
        payloads.append(buffer[middle:stop])
        ends.append(position)
    return lines, headers, payloads, ends


def _match_each(pattern: re.Pattern[bytes], texts: list[bytes]) -> tuple[int, Iterator[list[bytes]]]:
    """Return how many texts, from the first, match a pattern, and the values of each of its groups."""
    if not texts:
        return 0, iter(())
    matched, step = pattern.split(_BETWEEN.join(texts)), pattern.groups + 1
    # A match contains no `_BETWEEN`: what is between the matches tells which text is the first other.
    between, expected = matched[::step], [b"", *[_BETWEEN] * (len(texts) - 1), b""]
    count = len(texts)
    if between != expected:
        count = next(at for at, text in enumerate(between) if text != expected[at])
    return count, (matched[at : step * count : step] for at in range(1, step))


def _messages(
    sequences: Iterable[bytes],
    stored_ns: Iterable[int],
    subjects: Iterable[bytes],
    headers: Iterable[bytes],
    payloads: Iterable[bytes],
    unread_bytes: Iterable[int] = repeat(0),
) -> Iterator[Message]:
    texts = CRLF.join(subjects).decode(errors="surrogateescape").split("\r\n")
    columns = map(int, sequences), stored_ns, texts, headers, payloads, unread_bytes
    return map(_NEW_MESSAGE, zip(*columns, strict=False))


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
