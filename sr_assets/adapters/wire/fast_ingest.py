"""Publishing into a stream with `allow_batched` (nats-server 2.14+): one acknowledgement for many messages.

A message's number in its batch and the operation are in its reply subject, `<inbox>.<id>.<flow>.fail.<number>.<op>.$FI`. In
the mode `fail` the server stores the messages in order and ends the batch at the first one that it refuses.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from sr_assets.adapters.jetstream import NO_RESPONDERS, decode_response
from sr_assets.adapters.wire import frames as f
from sr_assets.adapters.wire.acknowledgements import Ack, Answers
from sr_assets.adapters.wire.connection import Connection
from sr_assets.adapters.wire.frames import Frame
from sr_assets.adapters.wire.publishing import SEND_BYTES, Outgoing, encode_item

_START, _APPEND, _COMMIT_WITHOUT_STORING = 0, 1, 3
#: The server acknowledges at least every so many messages; it may choose fewer.
_FLOW: Final = 500
#: Errors of the batch, not of a message: disabled, invalid pattern or id, unknown (after 10 s without a message), and more
#: batches than the server's limit.
_BATCH_ERRORS: Final = frozenset({10205, 10206, 10207, 10208, 10211})


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
