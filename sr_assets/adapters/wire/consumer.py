"""Reading of a range through temporary pull consumers on the stream's leader, optionally filtered or without payloads."""

import contextlib
import itertools
import secrets
from collections.abc import Generator, Iterator
from typing import Any, Final

from sr_assets.adapters import times
from sr_assets.adapters.jetstream import (
    CONSUMER_WITHOUT_ACKS,
    NO_RESPONDERS,
    consumer_creation,
    encode_json,
    is_leaderless,
    temporary_consumer,
)
from sr_assets.adapters.wire import frames as f
from sr_assets.adapters.wire.connection import Connection, SilenceError
from sr_assets.adapters.wire.frames import Frame
from sr_assets.adapters.wire.gets import StreamRead, next_message, refused, stored_message
from sr_assets.adapters.wire.link import RefusedError, WireError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange

CONSUMER_INACTIVE_NS: Final = 300 * 1_000_000_000
#: Less than `connection.SILENCE_SECONDS`: a pull without messages ends with a status before the stream counts as silent.
EXPIRES_NS: Final = 2 * 1_000_000_000
#: So many placements follow each other without a pause.
_HASTY_PLACEMENTS: Final = 32
_PLACEMENT_SECONDS: Final = 0.02
_DELETE_SECONDS: Final = 2.0
_UNREACHABLE_SECONDS: Final = 0.02
_NO_MESSAGES: Final = 404
_TIMED_OUT: Final = 408
_TOO_LARGE: Final = 409


class NoConsumerError(WireError):
    """The server did not create a consumer: no permission, too many consumers, or no such stream. `code` is the server's."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


def read_consumer(read: StreamRead, wanted: SequenceRange, *, headers_only: bool = False) -> Generator[list[Message]]:
    """Pull the range, possibly with messages after it, until no messages follow.

    If a pull gets no response for some seconds, a new consumer with smaller pulls reads the remainder, because the old one
    never redelivers. Raises WireError if no message arrives for `request_seconds`, or a delivery was lost.
    """
    connection, stream = read.connection, read.stream
    batch_messages, max_bytes = read.batch_messages, read.max_bytes
    cursor = max(wanted.first, 1)
    deadline = times.monotonic() + connection.request_seconds
    while cursor < wanted.next:
        config = temporary_consumer("", cursor, read.filter_subject, CONSUMER_INACTIVE_NS)
        if headers_only:
            config["headers_only"] = True
        try:
            consumer = _create_on_leader(connection, stream, config, deadline)
        except NoConsumerError as error:
            if error.code != CONSUMER_WITHOUT_ACKS:
                raise
            yield from _read_work_queue(read, SequenceRange(cursor, wanted.next), headers_only=headers_only)
            return
        try:
            for messages in consumer.pull(SequenceRange(cursor, wanted.next), batch_messages, max_bytes):
                cursor = messages[-1].sequence + 1
                yield _with_whole_headers(connection, stream, messages) if headers_only else messages
                deadline = times.monotonic() + connection.request_seconds
            return
        except SilenceError:
            if times.monotonic() >= deadline:
                raise
            # Reduce the limits: they may be why the server ended the pull without a status.
            max_bytes, batch_messages = max(1, max_bytes * 2 // 3), max(1, batch_messages * 2 // 3)
        finally:
            consumer.delete()


def _read_work_queue(read: StreamRead, wanted: SequenceRange, *, headers_only: bool) -> Iterator[list[Message]]:
    """Read messages one by one: a work queue permits only consumers that delete its messages."""
    cursor = wanted.first
    while cursor < wanted.next:
        message = next_message(read.connection, read.stream, cursor, read.filter_subject)
        if message is None:
            return
        yield [message.without_payload() if headers_only else message]
        cursor = message.sequence + 1


def _with_whole_headers(connection: Connection, stream: str, messages: list[Message]) -> list[Message]:
    for at, message in enumerate(messages):
        if not f.has_whole_headers(message) and (whole := stored_message(connection, stream, message.sequence)):
            messages[at] = whole.without_payload()
    return messages


def _create_on_leader(connection: Connection, stream: str, config: dict[str, Any], deadline: float) -> "_Consumer":
    """Create a consumer on the server of the stream's leader: another replica may lag and deliver less.

    The server places a consumer of one replica at random. With three servers, an average of 3 placements finds the leader.
    Raises WireError if none did until the deadline (monotonic seconds).
    """
    for misses in itertools.count(1):
        consumer = _create(connection, stream, config, deadline)
        # Ask again after each miss: the stream may have elected another leader.
        if not consumer.clustered or consumer.server in (leader := _leaders(connection, stream)):
            return consumer
        consumer.delete()
        if times.monotonic() >= deadline:
            break
        if not leader or misses % _HASTY_PLACEMENTS == 0:
            times.sleep(_PLACEMENT_SECONDS)
    raise WireError(f"{connection.address}: stream {stream}: no consumer was placed on the stream's leader in time")


def _leaders(connection: Connection, stream: str) -> set[str]:
    """Return the name of the server that leads a stream; empty if there is none now."""
    operation = f"STREAM.INFO.{stream}"
    answer = connection.request(connection.cluster.api(operation), {})
    leader = _server(answer if is_leaderless(answer) else connection.check(operation, answer))
    return {leader} if leader else set()


def _create(connection: Connection, stream: str, config: dict[str, Any], deadline: float) -> "_Consumer":
    config = {**config, "name": f"sr_{secrets.token_hex(8)}"}
    # The deadline may pass after the reader's last check of it.
    left_seconds = max(deadline - times.monotonic(), connection.silence_seconds)
    try:
        answer = connection.request_api(*consumer_creation(stream, config), left_seconds)
    except SilenceError:
        raise
    except WireError as error:
        raise NoConsumerError(str(error), error.code if isinstance(error, RefusedError) else 0) from None
    # A server outside a cluster answers without one.
    clustered = isinstance(answer.get("cluster"), dict)
    return _Consumer(connection, stream, config, answer.get("num_pending"), _server(answer), clustered=clustered)


def _server(answer: dict[str, Any]) -> str | None:
    """Return the name of the leader in a response, or None outside a cluster and without a leader."""
    cluster = answer.get("cluster")
    leader = cluster.get("leader") if isinstance(cluster, dict) else None
    return leader if isinstance(leader, str) else None


class _Consumer:
    """A new consumer on `server`, None without a leader; `pending` counts the messages that it has not delivered yet."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        config: dict[str, Any],
        pending: int | None,
        server: str | None,
        *,
        clustered: bool,
    ) -> None:
        self.server, self.clustered = server, clustered
        self._connection = connection
        self._stream = stream
        self._name: str = config["name"]
        self._headers_only = "headers_only" in config
        self._pending = pending
        self._delivered = 0
        self._frames = connection.answers(f"a pull from {stream}", connection.silence_seconds)
        self._silence: SilenceError | None = None

    def pull(self, wanted: SequenceRange, batch_messages: int, max_bytes: int) -> Iterator[list[Message]]:
        """Pull batches until the range has been read or no messages follow; raises SilenceError if none arrive."""
        cursor, limit_bytes = wanted.first, max_bytes
        reachable_until = times.monotonic() + self._connection.silence_seconds
        while cursor < wanted.next and self._pending != 0:
            batch = min(batch_messages, wanted.next - cursor) if limit_bytes else 1
            messages, status = self._pull_batch(batch, limit_bytes)
            if messages:
                cursor = messages[-1].sequence + 1
                yield messages
                reachable_until = times.monotonic() + self._connection.silence_seconds
            if self._silence:
                raise self._silence
            if not messages and status == NO_RESPONDERS:
                if times.monotonic() > reachable_until:
                    address = self._connection.address
                    raise SilenceError(f"{address}: stream {self._stream}: its consumer no longer exists")
                # A server learns of a new consumer on another server only a moment later.
                times.sleep(_UNREACHABLE_SECONDS)
                continue
            if not messages and status != _TOO_LARGE:
                return
            # A message over the limit needs a pull of one message without a limit.
            limit_bytes = max_bytes if messages else 0

    def delete(self) -> None:
        """Delete the consumer; if this fails, the server deletes it once it is inactive."""
        with contextlib.suppress(WireError):
            seconds = min(_DELETE_SECONDS, self._connection.request_seconds)
            self._connection.request_api(f"CONSUMER.DELETE.{self._stream}.{self._name}", None, seconds)

    def _pull_batch(self, batch_messages: int, max_bytes: int) -> tuple[list[Message], int | None]:
        """Return the messages of one pull, and the status that ended it.

        The server sends no status for a pull whose messages reach its limits.
        """
        inbox = self._connection.new_inbox()
        request: dict[str, Any] = {"batch": batch_messages, "no_wait": True, "expires": EXPIRES_NS}
        if max_bytes:
            request["max_bytes"] = max_bytes
        question = self._connection.cluster.api(f"CONSUMER.MSG.NEXT.{self._stream}.{self._name}")
        self._connection.send(f.encode_pub(question, inbox, b"", encode_json(request)))
        mark, left_bytes = b".%b." % self._name.encode(), max_bytes
        messages: list[Message] = []
        late = times.monotonic() + self._connection.silence_seconds
        try:
            for frame in self._frames:
                _, subject, reply, headers, payload = frame
                if mark in reply:
                    messages.append(self._message(frame))
                    # As the server counts.
                    left_bytes -= len(subject) + len(reply) + len(headers) + len(payload)
                    if len(messages) == batch_messages or not left_bytes:
                        break
                elif subject == inbox:
                    return messages, self._status(frame)
                elif not messages and times.monotonic() > late:
                    raise SilenceError(f"{self._connection.address}: stream {self._stream} does not answer a pull")
        except SilenceError as silence:
            self._silence = silence
        return messages, None

    def _message(self, frame: Frame) -> Message:
        """Return the message of the next delivery; raises WireError if it is invalid, or an earlier one was lost."""
        try:
            message, number, self._pending = f.delivered_message(frame, headers_only=self._headers_only)
        except ValueError as error:
            raise WireError(f"{self._connection.address}: {error}") from None
        self._delivered += 1
        if number != self._delivered:
            stream = f"{self._connection.address}: stream {self._stream}"
            raise WireError(f"{stream}: delivery {self._delivered} was lost")
        return message

    def _status(self, frame: Frame) -> int | None:
        """Return the status that ended a pull; raises WireError if the consumer can no longer deliver."""
        too_large = frame.status == _TOO_LARGE and "MaxBytes" in frame.status_text
        if frame.status in (_NO_MESSAGES, _TIMED_OUT, NO_RESPONDERS) or too_large:
            return frame.status
        raise refused(self._connection, self._stream, frame)
