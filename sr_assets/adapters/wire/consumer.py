"""A range read through pull consumers on the stream's leader, which live as long as the reading.

For every stream, with a filter, and for headers alone. Not here: whether what is missing at the end is really absent
(`reading`).
"""

import contextlib
import secrets
import time
from collections.abc import Iterator
from typing import Any, Final

from sr_assets.adapters.wire import frames as f
from sr_assets.adapters.wire.connection import Connection, SilenceError
from sr_assets.adapters.wire.frames import Frame
from sr_assets.adapters.wire.gets import refused, stored_message, succeeded
from sr_assets.adapters.wire.link import WireError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange

CONSUMER_INACTIVE_NS: Final = 300 * 1_000_000_000
#: Less than `connection.SILENCE_SECONDS`: a request that waits in vain ends with a status before it counts as silent.
EXPIRES_NS: Final = 2 * 1_000_000_000
#: The server places a consumer of one copy at random: of three replicas, twice in a thousand times none of these is the leader.
_PLACEMENTS: Final = 16
_DELETE_SECONDS: Final = 2.0
_UNREACHABLE_SECONDS: Final = 0.02
_NO_MESSAGES: Final = 404
_TIMED_OUT: Final = 408
_TOO_LARGE: Final = 409


class NoConsumerError(WireError):
    """No consumer is made: the user may not, the stream takes no more, or the stream is gone."""


def read_consumer(
    connection: Connection,
    stream: str,
    wanted: SequenceRange,
    filter_subject: str | None,
    batch_messages: int,
    max_bytes: int,
    *,
    headers_only: bool = False,
) -> Iterator[list[Message]]:
    """Pull the range, possibly with messages after it, until nothing follows.

    A request that stays silent for some seconds is given up, and the rest pulled through a new consumer with smaller
    requests: what the old one has sent it does not send again. Raises WireError when nothing came for `request_seconds`,
    or a delivery was lost.
    """
    cursor = max(wanted.first, 1)
    deadline = time.monotonic() + connection.request_seconds
    while cursor < wanted.next:
        config = _config(cursor, filter_subject, headers_only)
        consumer = _create_on_leader(connection, stream, config, deadline)
        try:
            for messages in consumer.pull(SequenceRange(cursor, wanted.next), batch_messages, max_bytes):
                cursor = messages[-1].sequence + 1
                yield _with_whole_headers(connection, stream, messages) if headers_only else messages
                deadline = time.monotonic() + connection.request_seconds
            return
        except SilenceError:
            if time.monotonic() >= deadline:
                raise
            # Never the same limits again: they may be why the server ended the request without a status.
            max_bytes, batch_messages = max(1, max_bytes * 2 // 3), max(1, batch_messages * 2 // 3)
        finally:
            consumer.delete()


def _config(first: int, filter_subject: str | None, headers_only: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": first,
        "ack_policy": "none",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": CONSUMER_INACTIVE_NS,
    }
    if filter_subject:
        config["filter_subject"] = filter_subject
    if headers_only:
        config["headers_only"] = True
    return config


def _with_whole_headers(connection: Connection, stream: str, messages: list[Message]) -> list[Message]:
    for at, message in enumerate(messages):
        if not f.has_whole_headers(message) and (whole := stored_message(connection, stream, message.sequence)):
            messages[at] = whole.without_payload()
    return messages


def _create_on_leader(connection: Connection, stream: str, config: dict[str, Any], deadline: float) -> "_Consumer":
    """Create a consumer where the stream's leader is: on another replica, which may lag, it would deliver less.

    After some attempts the last one is taken: a replica has all that its leader has, up to some sequence.
    """
    leader: str | None = None
    attempts = _PLACEMENTS
    while True:
        attempts -= 1
        consumer = _create(connection, stream, config, deadline)
        # A server outside a cluster names no leader.
        if consumer.server is None or not attempts:
            return consumer
        if leader is None:
            answer = succeeded(connection, stream, connection.request(connection.api(f"STREAM.INFO.{stream}"), {}))
            leader = _server(answer)
        if consumer.server == leader or leader is None:
            return consumer
        consumer.delete()


def _create(connection: Connection, stream: str, config: dict[str, Any], deadline: float) -> "_Consumer":
    name, filter_subject = f"sr_{secrets.token_hex(8)}", config.get("filter_subject")
    subject = connection.api(f"CONSUMER.CREATE.{stream}.{name}" + (f".{filter_subject}" if filter_subject else ""))
    config = {"name": name, **config}
    left_seconds = deadline - time.monotonic()
    try:
        answer = connection.request(subject, {"stream_name": stream, "config": config}, left_seconds)
        succeeded(connection, stream, answer)
    except SilenceError:
        raise
    except WireError as error:
        raise NoConsumerError(str(error)) from None
    return _Consumer(connection, stream, config, answer.get("num_pending"), _server(answer))


def _server(answer: dict[str, Any]) -> str | None:
    """The name of the server that leads what an answer describes."""
    cluster = answer.get("cluster")
    leader = cluster.get("leader") if isinstance(cluster, dict) else None
    return leader if isinstance(leader, str) else None


class _Consumer:
    """A consumer that was just created, on `server`; `pending` messages follow what it has delivered."""

    def __init__(
        self, connection: Connection, stream: str, config: dict[str, Any], pending: int | None, server: str | None
    ) -> None:
        self.server = server
        self._connection = connection
        self._stream = stream
        self._name: str = config["name"]
        self._headers_only = "headers_only" in config
        self._pending = pending
        self._delivered = 0
        self._frames = connection.answers(f"a pull from {stream}", connection.silence_seconds)
        self._silence: SilenceError | None = None

    def pull(self, wanted: SequenceRange, batch_messages: int, max_bytes: int) -> Iterator[list[Message]]:
        """Pull batch after batch until the range is passed or nothing follows; raises SilenceError when stuck."""
        cursor, limit_bytes = wanted.first, max_bytes
        reachable_until = time.monotonic() + self._connection.silence_seconds
        while cursor < wanted.next and self._pending != 0:
            batch = min(batch_messages, wanted.next - cursor) if limit_bytes else 1
            messages, status = self._pull_batch(batch, limit_bytes)
            if messages:
                cursor = messages[-1].sequence + 1
                yield messages
                reachable_until = time.monotonic() + self._connection.silence_seconds
            if self._silence:
                raise self._silence
            if not messages and status == f.NO_RESPONDERS:
                if time.monotonic() > reachable_until:
                    address = self._connection.address
                    raise SilenceError(f"{address}: stream {self._stream}: its consumer is gone")
                # A server learns of a consumer that was just created on another one a moment later.
                time.sleep(_UNREACHABLE_SECONDS)
                continue
            if not messages and status != _TOO_LARGE:
                return
            # A message larger than the limit is taken by a request without one, alone.
            limit_bytes = max_bytes if messages else 0

    def delete(self) -> None:
        """Delete it; what is left when this fails is removed by the server once it is inactive."""
        with contextlib.suppress(WireError):
            subject = self._connection.api(f"CONSUMER.DELETE.{self._stream}.{self._name}")
            self._connection.request(subject, {}, min(_DELETE_SECONDS, self._connection.request_seconds))

    def _pull_batch(self, batch_messages: int, max_bytes: int) -> tuple[list[Message], int | None]:
        """One request: its messages and the status that ended it.

        No status ends a request whose messages use its limits up: the server sends none, and none is waited for.
        """
        inbox = self._connection.new_inbox()
        request: dict[str, Any] = {"batch": batch_messages, "no_wait": True, "expires": EXPIRES_NS}
        if max_bytes:
            request["max_bytes"] = max_bytes
        question = self._connection.api(f"CONSUMER.MSG.NEXT.{self._stream}.{self._name}")
        self._connection.send(f.encode_pub(question, inbox, b"", f.encode_json(request)))
        mark, left_bytes = b".%b." % self._name.encode(), max_bytes
        messages: list[Message] = []
        late = time.monotonic() + self._connection.silence_seconds
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
                elif not messages and time.monotonic() > late:
                    raise SilenceError(f"{self._connection.address}: stream {self._stream} does not answer a pull")
        except SilenceError as silence:
            self._silence = silence
        return messages, None

    def _message(self, frame: Frame) -> Message:
        """The message of the next delivery; raises WireError when it is none, or one before it was lost."""
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
        """The status that ended a request; raises WireError when it says that the consumer cannot go on."""
        too_large = frame.status == _TOO_LARGE and "MaxBytes" in frame.status_text
        if frame.status in (_NO_MESSAGES, _TIMED_OUT, f.NO_RESPONDERS) or too_large:
            return frame.status
        raise refused(self._connection, self._stream, frame)
