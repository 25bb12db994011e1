r"""A stored message and its headers: the headers that a copy keeps and the added ones.

Headers stay unchanged bytes: `b""`, or a block `NATS/1.0\r\nName: value\r\n\r\n`. Names are case-sensitive, as on the
server, except for the list of headers that a copy must not have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

SOURCE_HEADER: Final = b"Choria-SR-Source"
MESSAGE_ID_HEADER: Final = b"Nats-Msg-Id"

_VERSION: Final = b"NATS/1.0"
_CRLF: Final = b"\r\n"
_EMPTY_LINE: Final = 2 * _CRLF
#: The last time in unix ns of a server, which stores 64 bits; also the last sequence that a column of the state holds.
LAST_NS: Final = 2**63 - 1
_LAST_SEQUENCE: Final = LAST_NS
_LAST_MS: Final = LAST_NS // 1_000_000
#: More digits, leading zeros included, are no number: Python refuses to convert thousands of them.
_MOST_DIGITS: Final = 20
_DROPPED: Final = frozenset(
    {
        b"nats-msg-id",
        b"nats-rollup",
        b"nats-ttl",
        b"nats-incr",
        b"nats-stream-source",
        b"nats-required-api-level",
        b"nats-stream",
        b"nats-subject",
        b"nats-sequence",
        b"nats-time-stamp",
        b"nats-num-pending",
        b"nats-last-sequence",
    }
)
_DROPPED_PREFIXES: Final = (b"nats-expected-", b"nats-batch-", b"nats-schedule", b"nats-trace-")
_MAY_BE_DROPPED: Final = b"\r\nnats-"
_MESSAGE_ID: Final = re.compile(rb".*/(\d{1,19})/(\d{1,19})(?:/r(\d{1,19}))?", re.DOTALL)


class Message(NamedTuple):
    """A stored message; `headers` is its published block, without the headers that a direct get adds.

    Invalid UTF-8 in a subject becomes lone surrogates (`surrogateescape`). `unread_bytes` is the size of a payload that
    was not fetched; `payload` is then empty. A tuple, because there are millions.
    """

    sequence: int
    stored_ns: int
    subject: str
    headers: bytes
    payload: bytes
    unread_bytes: int = 0

    @property
    def payload_bytes(self) -> int:
        """The size of the payload, fetched or not."""
        return len(self.payload) + self.unread_bytes

    def without_payload(self) -> Message:
        """Return the message without its payload, as if the payload had not been fetched."""
        return self._replace(payload=b"", unread_bytes=self.payload_bytes)


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a copy: source stream and sequence, replicator, entry's name, stored time in ms."""

    stream: str
    sequence: int
    replicator: str
    name: str
    stored_ms: int

    def is_of_same_entry(self, other: Origin) -> bool:
        """Return whether both are copies of one entry."""
        return (self.stream, self.replicator, self.name) == (other.stream, other.replicator, other.name)

    def encode(self) -> bytes:
        """Return the value of `Choria-SR-Source`."""
        return f"{self.stream} {self.sequence} {self.replicator} {self.name} {self.stored_ms}".encode()


def parse_origin(value: bytes) -> Origin | None:
    """Parse a value of `Choria-SR-Source`, or return None."""
    try:
        stream, sequence, replicator, name, stored_ms = value.decode().split(" ")
    except ValueError:
        return None
    if not (_is_number(sequence, _LAST_SEQUENCE) and _is_number(stored_ms, _LAST_MS)):
        return None
    return Origin(stream, int(sequence), replicator, name, int(stored_ms))


def last_origin(headers: bytes) -> Origin | None:
    """Return the origin recorded by the last hop, or None; of several values the last one counts."""
    values = header_values(headers, SOURCE_HEADER)
    return parse_origin(values[-1]) if values else None


def header_values(headers: bytes, name: bytes) -> list[bytes]:
    """Return the values of a header in order, without surrounding spaces and tabs; the name is case-sensitive."""
    start = name + b":"
    if start not in headers:
        return []
    return [line[len(start) :].strip(b" \t") for line in headers.split(_CRLF)[1:] if line.startswith(start)]


def header_map(headers: bytes) -> dict[str, list[str]] | None:
    """Return the values of each header as text, in order, or None without headers; invalid UTF-8 becomes `�`."""
    if not headers:
        return None
    values: dict[str, list[str]] = {}
    for line in headers.split(_CRLF)[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            values.setdefault(name.decode(errors="replace"), []).append(value.strip(b" \t").decode(errors="replace"))
    return values


def encode_headers(headers: Mapping[str, Iterable[str]]) -> bytes:
    """Return the block of a message's headers. Raises ValueError for a name or value that would break the protocol."""
    lines = [_VERSION]
    for name, values in headers.items():
        if not name or set(name) & set(": \t\r\n"):
            raise ValueError(f"header {name!r}: is not a header's name")
        for value in values:
            if set(value) & set("\r\n"):
                raise ValueError(f"header {name}: value {value!r} has a line break")
            lines.append(f"{name}: {value}".encode())
    return _CRLF.join(lines) + 2 * _CRLF


def kept_headers(headers: bytes) -> bytes:
    """Return the block without headers that control the server or belong to the previous hop; the others unchanged."""
    if _MAY_BE_DROPPED not in headers.lower():
        return headers
    return _CRLF.join(line for line in headers.split(_CRLF) if not _is_dropped(line))


def header_writer(replicator: str, name: str, stream: str, created_ns: int) -> Callable[[bytes, int, int, int], bytes]:
    """Return a function that writes the headers of a source's copies; `created_ns` is the source's created time.

    The function takes a message's block, its sequence, its stored time in ns and the number of the resend (0: none). It
    returns the copy's block: `kept_headers`, then `Choria-SR-Source`, then `Nats-Msg-Id`. The constant text is prepared
    once.
    """
    of, by, identity = (
        text.encode().replace(b"%", b"%%")
        for text in (stream, f"{replicator} {name}", message_id(replicator, name, stream, created_ns, 0)[:-1])
    )
    lines = b"%b: %b %%d %b %%d\r\n%b: %b%%d" % (SOURCE_HEADER, of, by, MESSAGE_ID_HEADER, identity)
    alone, added = _VERSION + _CRLF + lines + _EMPTY_LINE, lines + b"%b" + _EMPTY_LINE

    def write(headers: bytes, sequence: int, stored_ns: int, resend: int) -> bytes:
        # The usual case.
        if not headers and not resend:
            return alone % (sequence, stored_ns // 1_000_000, sequence)
        own = kept_headers(headers) or _VERSION + _EMPTY_LINE
        head = own[:-2] if own.endswith(_EMPTY_LINE) else own.removesuffix(_CRLF) + _CRLF
        return head + added % (sequence, stored_ns // 1_000_000, sequence, b"/r%d" % resend if resend else b"")

    return write


def message_id(replicator: str, name: str, stream: str, created_ns: int, sequence: int, resend: int = 0) -> str:
    """Return the `Nats-Msg-Id` of a copy; `created_ns` is the source's. A resend has another id, so that it is not a
    duplicate.
    """
    first = f"{replicator}/{name}/{stream}/{created_ns}/{sequence}"
    return f"{first}/r{resend}" if resend else first


def parse_message_id(value: bytes) -> tuple[int, int, int] | None:
    """Return the source's created time, the sequence and the resend of a `message_id`, or None if it is invalid."""
    parts = _MESSAGE_ID.fullmatch(value)
    numbers = (int(parts[1]), int(parts[2]), int(parts[3] or 0)) if parts else None
    return numbers if numbers and max(numbers) <= LAST_NS else None


def _is_number(text: str, last: int) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text) <= last


def _is_dropped(line: bytes) -> bool:
    name, colon, _ = line.partition(b":")
    name = name.lower()
    return bool(colon) and (name in _DROPPED or name.startswith(_DROPPED_PREFIXES))
