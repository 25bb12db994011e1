"""Publishing into a stream with a bounded window, and what became of each message.

What is sent again or given up is decided by the callers.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from sr_assets.adapters.wire import frames as f
from sr_assets.adapters.wire.connection import Connection, WireError
from sr_assets.adapters.wire.frames import Frame

SEND_BYTES: Final = 256 << 10
MAX_CONTROL_LINE_BYTES: Final = 4096

# What a server, or the publisher in its place, answers to a publish that it does not store.
NO_STREAM: Final = f.NO_RESPONDERS
INVALID_SUBJECT: Final = 400
MESSAGE_TOO_LARGE: Final = 10054
WRONG_LAST_SEQUENCE: Final = 10071
STREAM_FULL: Final = 10077
HEADERS_TOO_LARGE: Final = 10097

_UNKNOWN: Final = (0, 0)


class Outgoing(NamedTuple):
    """A message to publish; `sequence` is the caller's own name for it and comes back in the Ack."""

    sequence: int
    subject: str
    headers: bytes
    payload: bytes


class Ack(NamedTuple):
    """What became of a publish: stored at `target_sequence` (earlier when `duplicate`), or not stored, and then why."""

    sequence: int
    target_sequence: int | None = None
    duplicate: bool = False
    error_code: int | None = None
    error: str | None = None


class Publisher:
    """Publishes into a stream with a bounded window of messages and bytes that are not acknowledged yet."""

    def __init__(
        self,
        connection: Connection,
        *,
        max_messages: int = 4000,
        max_bytes: int = 32 << 20,
        ack_timeout_seconds: float = 30.0,
    ) -> None:
        self._connection = connection
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._ack_timeout_seconds = ack_timeout_seconds

    def publish_all(self, items: Iterable[Outgoing], *, expect_last: int | None = None) -> Iterator[Ack]:
        """Publish in order and return the acks as they arrive; nothing is sent before they are asked for.

        Sending stops at the first refusal; what is under way is awaited; what was not sent is not reported. With
        `expect_last`, the target's last sequence, each message expects the one before it as the last: the first ack
        is awaited before the rest follows, and nothing after a refusal, or a duplicate, is stored or reported. The
        exception: a second writer that fills just the place of what was refused lets later ones in; their acks are
        reported. A message the server cannot take is not sent but reported as a refusal, in its turn: over
        `max_payload` as 10054, an impossible subject as 400. Raises WireError when the connection fails or no ack
        comes in time: then the target has to be read.
        """
        source = iter(items)
        under_way: dict[bytes, tuple[int, int]] = {}
        waiting_bytes = 0
        expected = expect_last
        refusal: Ack | None = None
        # Were `expect_last` one too low, the first message would be refused and the second find just what it expects.
        window = self._max_messages if expected is None else 1
        going = True
        refused = False
        while True:
            chunk: list[bytes] = []
            free_bytes = min(SEND_BYTES, self._max_bytes - waiting_bytes)
            chunk_bytes = 0
            while going and chunk_bytes < free_bytes and len(under_way) < window:
                item = next(source, None)
                if item is None:
                    going = False
                    break
                inbox = self._connection.new_inbox()
                framed = self._frame(item, inbox, expected)
                if isinstance(framed, Ack):
                    going, refusal = False, framed
                    break
                size_bytes = len(framed[0]) + len(framed[1]) + len(item.payload)
                under_way[inbox] = (item.sequence, size_bytes)
                chunk += framed
                chunk_bytes += size_bytes
                if expected is not None:
                    expected += 1
            waiting_bytes += chunk_bytes
            if chunk:
                self._connection.send(b"".join(chunk))
            elif not under_way:
                break
            stored: list[tuple[bytes, int]] = []
            frames = self._connection.receive(0 if chunk else self._ack_timeout_seconds, stored)
            if not (chunk or stored or frames):
                said = f"no acknowledgement within {self._ack_timeout_seconds:g} s"
                raise WireError(f"{self._connection.address}: {said}")
            for inbox, target_sequence in stored:
                sequence, size_bytes = under_way.pop(inbox, _UNKNOWN)
                if size_bytes:
                    waiting_bytes -= size_bytes
                    window = self._max_messages
                    yield Ack(sequence, target_sequence)
            for frame in frames:
                sequence, size_bytes = under_way.pop(frame.subject, _UNKNOWN)
                if not size_bytes:
                    continue
                waiting_bytes -= size_bytes
                ack = parse_ack(sequence, frame)
                if ack.error is not None or (ack.duplicate and expect_last is not None):
                    going = False
                    if not (refused and expect_last is not None):
                        yield ack
                    refused = True
                else:
                    window = self._max_messages
                    yield ack
        if refusal is not None and not (refused and expect_last is not None):
            yield refusal

    def _frame(self, item: Outgoing, inbox: bytes, expected: int | None) -> tuple[bytes, ...] | Ack:
        sequence, subject, headers, payload = item
        if expected is not None:
            headers = f.with_first_header(headers, b"Nats-Expected-Last-Sequence", b"%d" % expected)
        size_bytes, limit_bytes = len(headers) + len(payload), self._connection.max_payload_bytes
        if size_bytes > limit_bytes:
            text = f"{size_bytes} bytes are more than the server takes (max_payload {limit_bytes})"
            return Ack(sequence, error_code=MESSAGE_TOO_LARGE, error=text)
        try:
            line = f.pub_line(f.encode_subject(subject), inbox, len(headers), len(payload))
        except ValueError as error:
            return Ack(sequence, error_code=INVALID_SUBJECT, error=str(error))
        if len(line) > MAX_CONTROL_LINE_BYTES:
            text = f"the subject's {len(subject)} characters are more than the server takes"
            return Ack(sequence, error_code=INVALID_SUBJECT, error=text)
        return line, headers, payload, f.CRLF


def parse_ack(sequence: int, frame: Frame) -> Ack:
    """Read the answer to a publish; what is no answer of a stream counts as an error."""
    stored = f.STORED.fullmatch(frame.payload)
    if stored:
        return Ack(sequence, int(stored[1]))
    if frame.status == NO_STREAM:
        return Ack(sequence, error_code=NO_STREAM, error="no stream takes this subject")
    try:
        answer = json.loads(frame.payload)
        error = answer.get("error")
        if error:
            return Ack(sequence, error_code=error.get("err_code") or error.get("code"), error=error.get("description"))
        return Ack(sequence, int(answer["seq"]), duplicate=bool(answer.get("duplicate")))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Ack(sequence, error=f"not the answer of a stream: {frame.payload[:80]!r}")
