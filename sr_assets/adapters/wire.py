"""Bulk traffic with a NATS server over our own socket: read ranges and single messages, publish with acknowledgements.

Synchronous, one connection for one task, headers and payloads as bytes from end to end. The protocol's bytes are in
`frames`; what is read, sent again or given up is decided by the callers; administration is in `jetstream`.
"""

import contextlib
import json
import re
import secrets
import select
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from sr_assets.adapters import frames as f
from sr_assets.adapters.frames import Frame
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange, merge_ranges

REQUEST_SECONDS: Final = 30.0
RECEIVE_BYTES: Final = 1 << 20
SEND_BYTES: Final = 256 << 10
BATCH_MESSAGES: Final = 5_000
BATCH_BYTES: Final = 8 << 20
MAX_CONTROL_LINE_BYTES: Final = 4096
CONSUMER_INACTIVE_NS: Final = 300 * 1_000_000_000

# What a server, or the publisher in its place, answers to a publish that it does not store.
NO_STREAM: Final = 503
INVALID_SUBJECT: Final = 400
MESSAGE_TOO_LARGE: Final = 10054
WRONG_LAST_SEQUENCE: Final = 10071
STREAM_FULL: Final = 10077
HEADERS_TOO_LARGE: Final = 10097

_NO_MESSAGE: Final = 10037
_STORED: Final = re.compile(rb'\{"stream":"[^"]*",(?:"domain":"[^"]*",)?"seq":(\d+)\}')


class WireError(RunError):
    """The connection cannot go on: refused, closed, out of time, or not the NATS protocol. Never contains a secret."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to publish; `sequence` is the caller's own name for it and comes back in the Ack."""

    sequence: int
    subject: str
    headers: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class Ack:
    """What became of a publish: stored at `target_sequence` (earlier when `duplicate`), or not stored, and then why."""

    sequence: int
    target_sequence: int | None = None
    duplicate: bool = False
    error_code: int | None = None
    error: str | None = None


class Connection:
    """A connection to the first of `servers` (`host:port`) that answers; opened by `with`, closed at its end.

    Used by one thread. Answers PING by itself; raises WireError as soon as the server complains.
    """

    def __init__(
        self,
        servers: Sequence[str],
        user: str | None = None,
        password: str | None = None,
        token: str | None = None,
        connect_timeout_seconds: float = 5.0,
        name: str = "sr-assets",
    ) -> None:
        self.max_payload_bytes = 1 << 20
        self.server_version = ""
        self.address = ", ".join(servers)
        self._servers = tuple(servers)
        self._login = {"user": user, "pass": password, "auth_token": token}
        self._connect_timeout_seconds = connect_timeout_seconds
        self._name = name
        self._socket: socket.socket | None = None
        self._poll = select.poll()
        self._polled = 0
        self._buffer = bytearray(RECEIVE_BYTES)
        self._parser = f.FrameParser()
        self._kept: list[Frame] = []
        self._owed: list[bytes] = []
        self._inbox = b"_INBOX.%b." % secrets.token_hex(11).encode()
        self._requests = 0

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Connect, log in and subscribe to the inbox; raises WireError naming what each server said."""
        problems = []
        for server in self._servers:
            try:
                self._open(server)
            except (OSError, WireError) as error:
                self.close()
                said = str(error) if isinstance(error, WireError) else f"{server}: {error.strerror or error}"
                problems.append(said)
            else:
                return
        raise WireError("cannot connect to NATS: " + ("; ".join(problems) or "no server is configured"))

    def close(self) -> None:
        """Close the socket; harmless when it is closed."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def new_inbox(self) -> bytes:
        """A reply subject nobody used before; its answers arrive through `receive`."""
        self._requests += 1
        return b"%b%d" % (self._inbox, self._requests)

    def send(self, data: bytes) -> None:
        """Send whole frames.

        What arrives meanwhile is read and kept for `receive`, so two full sockets never wait for each other.
        """
        view = memoryview(b"".join((data, *self._owed)))
        self._owed.clear()
        while view:
            try:
                view = view[self._open_socket().send(view) :]
            except BlockingIOError:
                if not self._wait(select.POLLIN | select.POLLOUT, REQUEST_SECONDS):
                    raise WireError(f"{self.address}: took no bytes for {REQUEST_SECONDS:.0f} s") from None
                self._kept += self._read()
            except OSError as error:
                raise self._lost(error) from None

    def receive(self, timeout_seconds: float) -> list[Frame]:
        """Return the messages that are here, at the latest after the timeout, and then possibly none."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            self._kept += self._read()
            if self._owed:
                self.send(b"")
            if self._kept:
                received, self._kept = self._kept, []
                return received
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0 or not self._wait(select.POLLIN, left_seconds):
                return []

    def answers(self, what: str) -> Iterator[Frame]:
        """Return messages as they arrive, for ever; raises WireError when `what` was not answered for 30 s."""
        while True:
            received = self.receive(REQUEST_SECONDS)
            if not received:
                raise WireError(f"{self.address}: no answer to {what} within {REQUEST_SECONDS:.0f} s")
            yield from received

    def request(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the JetStream API and return its JSON, `error` included; raises WireError when nobody listens there."""
        inbox = self.new_inbox()
        self.send(f.encode_pub(subject, inbox, b"", f.encode_json(body) if body else b""))
        for frame in self.answers(subject):
            if frame.subject == inbox:
                if frame.status is not None:
                    raise WireError(f"{self.address}: {subject} answered {frame.status_text} (is JetStream enabled?)")
                answer: dict[str, Any] = json.loads(frame.payload)
                return answer
        raise AssertionError  # answers() never ends

    def _open(self, server: str) -> None:
        self.address = server
        host, _, port = server.rpartition(":")
        if not host or not port.isdigit():
            raise WireError(f"{server}: not host:port")
        self._parser, self._kept, self._owed = f.FrameParser(), [], []
        timeout_seconds = self._connect_timeout_seconds
        self._socket = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._polled = select.POLLIN
        deadline = time.monotonic() + timeout_seconds
        info = json.loads(self._handshake(b"INFO", deadline).payload)
        if info.get("tls_required"):
            raise WireError(f"{server}: the server wants TLS, which this connection does not speak")
        if not info.get("headers"):
            raise WireError(f"{server}: the server does not support headers")
        self.max_payload_bytes = int(info["max_payload"])
        self.server_version = str(info["version"])
        options: dict[str, Any] = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True}
        options |= {"protocol": 1, "lang": "python", "version": "1", "name": self._name}
        options |= {key: value for key, value in self._login.items() if value}
        self.send(b"CONNECT %b\r\nSUB %b* 1\r\nPING\r\n" % (f.encode_json(options), self._inbox))
        self._handshake(b"PONG", deadline)

    def _handshake(self, verb: bytes, deadline: float) -> Frame:
        while (left_seconds := deadline - time.monotonic()) > 0 and self._wait(select.POLLIN, left_seconds):
            for frame in self._read(controls=True):
                if frame.verb == verb:
                    return frame
        raise WireError(f"{self.address}: no {verb.decode()} within {self._connect_timeout_seconds:g} s")

    def _open_socket(self) -> socket.socket:
        if self._socket is None:
            raise WireError(f"{self.address}: the connection is closed")
        return self._socket

    def _wait(self, events: int, timeout_seconds: float) -> bool:
        if events != self._polled:
            self._poll.modify(self._open_socket(), events)
            self._polled = events
        return bool(self._poll.poll(timeout_seconds * 1000))

    def _read(self, *, controls: bool = False) -> list[Frame]:
        """Read once without waiting; messages, and with `controls` the other frames too."""
        try:
            count = self._open_socket().recv_into(self._buffer)
        except BlockingIOError:
            return []
        except OSError as error:
            raise WireError(f"{self.address}: connection lost ({error.strerror or error})") from None
        if not count:
            raise WireError(f"{self.address}: the server closed the connection")
        try:
            received = self._parser.feed(bytes(memoryview(self._buffer)[:count]))
        except ValueError as error:
            raise WireError(f"{self.address}: {error}") from None
        messages = []
        for frame in received:
            if frame.verb == b"HMSG" or frame.verb == b"MSG":  # noqa: PLR1714 - the hot line: two comparisons, no tuple
                messages.append(frame)
            elif frame.verb == b"PING":
                self._owed.append(b"PONG\r\n")
            elif frame.verb == b"-ERR":
                raise WireError(f"{self.address}: {frame.payload.decode(errors='replace').strip(chr(39))}")
            elif controls:
                messages.append(frame)
        return messages

    def _lost(self, error: OSError) -> WireError:
        """The server's last words when it had some, else the socket's."""
        try:
            self._read()
        except WireError as said:
            return said
        return WireError(f"{self.address}: connection lost ({error.strerror or error})")


def read_range(
    connection: Connection,
    stream: str,
    wanted: SequenceRange,
    *,
    filter_subject: str | None = None,
    batch_messages: int = BATCH_MESSAGES,
    max_bytes: int = BATCH_BYTES,
    direct: bool,
) -> Iterator[list[Message]]:
    """Read what the stream holds of a range, in sequence order.

    Lists have at most `batch_messages` messages and about `max_bytes`, and are never empty. `direct` asks by batched
    direct get (2.11+, `allow_direct`), which any replica may answer; otherwise a pull consumer is made, and deleted
    at the end. An answer that ends early is not an error: the caller compares. While a list is with the caller
    nothing is on its way, so a slow caller is no slow consumer.
    """
    read = _read_direct if direct else _read_consumer
    for messages in read(connection, stream, wanted, filter_subject, batch_messages, max_bytes):
        inside = messages if messages[-1].sequence < wanted.next else [m for m in messages if m.sequence in wanted]
        if inside:
            yield inside


def read_confirmed(
    connection: Connection,
    stream: str,
    wanted: SequenceRange,
    *,
    filter_subject: str | None = None,
    max_bytes: int = BATCH_BYTES,
    direct: bool,
) -> Iterator[list[Message]]:
    """Read a range like `read_range` until the leader confirms that nothing more of it is there.

    Any replica may answer a direct get, and one that lags ends early: then the leader is asked for the next message,
    and the rest is read again from behind it.
    """
    first = wanted.first
    while first < wanted.next:
        rest = SequenceRange(first, wanted.next)
        for messages in read_range(
            connection, stream, rest, filter_subject=filter_subject, max_bytes=max_bytes, direct=direct
        ):
            yield messages
            first = messages[-1].sequence + 1
        if first >= wanted.next:
            return
        found = next_message(connection, stream, first, filter_subject)
        if found is None or found.sequence >= wanted.next:
            return
        yield [found]
        first = found.sequence + 1


def next_message(
    connection: Connection, stream: str, sequence: int, filter_subject: str | None = None
) -> Message | None:
    """The first message at or after a sequence as the leader has it; None when there is none."""
    subject = f"$JS.API.STREAM.MSG.GET.{stream}"
    request = {"seq": sequence, "next_by_subj": filter_subject or ">"}
    return _stored(connection, stream, connection.request(subject, request))


def read_headers(connection: Connection, stream: str, wanted: SequenceRange) -> Iterator[list[Message]]:
    """Read a range without payloads, in sequence order: for looking through a target. Uses a pull consumer."""
    for messages in _read_consumer(connection, stream, wanted, None, BATCH_MESSAGES, BATCH_BYTES, headers_only=True):
        inside = [m for m in messages if m.sequence in wanted]
        if inside:
            yield inside


def read_sequences(
    connection: Connection,
    stream: str,
    sequences: Iterable[int],
    *,
    direct: bool,
    batch_messages: int = BATCH_MESSAGES,
    max_bytes: int = BATCH_BYTES,
) -> Iterator[list[Message]]:
    """Read single messages in sequence order; those that are not there are left out.

    Runs of at least 32 neighbours go through `read_range`, the others through single gets that overlap (`direct`: any
    replica; otherwise the leader's word).
    """
    scattered: list[int] = []
    for run in merge_ranges(SequenceRange(sequence, sequence + 1) for sequence in sequences):
        if len(run) < 32:
            scattered.extend(range(run.first, run.next))
            continue
        yield from _read_singles(connection, stream, scattered, direct, batch_messages, max_bytes)
        scattered = []
        yield from read_range(
            connection, stream, run, batch_messages=batch_messages, max_bytes=max_bytes, direct=direct
        )
    yield from _read_singles(connection, stream, scattered, direct, batch_messages, max_bytes)


def stored_message(connection: Connection, stream: str, sequence: int) -> Message | None:
    """The message as the leader has it (`STREAM.MSG.GET`); None when it is not there."""
    subject = f"$JS.API.STREAM.MSG.GET.{stream}"
    return _stored(connection, stream, connection.request(subject, {"seq": sequence}))


def _stored(connection: Connection, stream: str, answer: dict[str, Any]) -> Message | None:
    if (answer.get("error") or {}).get("err_code") == _NO_MESSAGE:
        return None
    return f.stored_message(_succeeded(connection, stream, answer))


def _succeeded(connection: Connection, stream: str, answer: dict[str, Any]) -> dict[str, Any]:
    error = answer.get("error")
    if error:
        said = f"{error.get('description')} ({error.get('err_code', error.get('code'))})"
        raise WireError(f"{connection.address}: stream {stream}: {said}")
    return answer


def _read_direct(
    connection: Connection,
    stream: str,
    wanted: SequenceRange,
    filter_subject: str | None,
    batch_messages: int,
    max_bytes: int,
) -> Iterator[list[Message]]:
    cursor = max(wanted.first, 1)
    while cursor < wanted.next:
        count = min(batch_messages, wanted.next - cursor)
        request: dict[str, Any] = {"seq": cursor, "batch": count, "max_bytes": max_bytes}
        if filter_subject:
            request["next_by_subj"] = filter_subject
        messages, pending = _direct_batch(connection, stream, request)
        if messages:
            yield messages
        if not pending:
            return
        cursor = messages[-1].sequence + 1


def _direct_batch(connection: Connection, stream: str, request: dict[str, Any]) -> tuple[list[Message], int]:
    """One batched direct get: its messages and how many follow (404: none, and no end marker comes)."""
    inbox = connection.new_inbox()
    connection.send(f.encode_pub(f"$JS.API.DIRECT.GET.{stream}", inbox, b"", f.encode_json(request)))
    messages: list[Message] = []
    damaged: list[int] = []
    pending: int | None = 0
    for frame in connection.answers(f"a direct get from {stream}"):
        if frame.subject != inbox:
            continue
        found = f.direct_get_message(frame)
        if found is None:
            if frame.status not in (204, 404):
                raise _refused(connection, stream, frame)
            break
        message, pending = found
        if not f.has_whole_headers(message):
            damaged.append(len(messages))
        messages.append(message)
        if pending is None:
            # A server before 2.11 knows no batches: it answers with one message and no end marker.
            pending = 1
            break
    for at in damaged:
        messages[at] = stored_message(connection, stream, messages[at].sequence) or messages[at]
    return messages, pending or 0


def _refused(connection: Connection, stream: str, frame: Frame) -> WireError:
    if frame.status == NO_STREAM:
        return WireError(f"{connection.address}: no stream {stream} with direct get (allow_direct) answers")
    said = frame.status_text if frame.status is not None else repr(frame.payload[:80])
    return WireError(f"{connection.address}: stream {stream} answered {said}")


def _read_singles(
    connection: Connection, stream: str, sequences: list[int], direct: bool, batch_messages: int, max_bytes: int
) -> Iterator[list[Message]]:
    """Overlapping single gets. How many are under way follows the largest message seen: together about `max_bytes`."""
    subject = f"$JS.API.{'DIRECT.GET' if direct else 'STREAM.MSG.GET'}.{stream}"
    answers = connection.answers(f"a message of {stream}")
    window, largest_bytes, position = 32, 1, 0
    while position < len(sequences):
        under_way: set[bytes] = set()
        found: list[Message] = []
        end, left_bytes = min(position + batch_messages, len(sequences)), max_bytes
        while under_way or (position < end and left_bytes > 0):
            if position < end and left_bytes > 0 and len(under_way) <= window // 2:
                asked = sequences[position : min(position + window - len(under_way), end)]
                inboxes = [connection.new_inbox() for _ in asked]
                pairs = zip(inboxes, asked, strict=True)
                connection.send(b"".join(f.encode_pub(subject, inbox, b"", b'{"seq":%d}' % s) for inbox, s in pairs))
                under_way.update(inboxes)
                position += len(asked)
            frame = next(answers)
            if frame.subject not in under_way:
                continue
            under_way.remove(frame.subject)
            message = _single(connection, stream, frame, direct)
            if message is None:
                continue
            found.append(message)
            size_bytes = len(frame.headers) + len(frame.payload)
            left_bytes -= size_bytes
            largest_bytes = max(largest_bytes, size_bytes)
            window = max(1, min(256, window + 1, max_bytes // largest_bytes))
        found.sort(key=lambda message: message.sequence)
        for at, message in enumerate(found):
            if direct and not f.has_whole_headers(message):
                found[at] = stored_message(connection, stream, message.sequence) or message
        if found:
            yield found


def _single(connection: Connection, stream: str, frame: Frame, direct: bool) -> Message | None:
    if frame.status == 404:
        return None
    if not direct and frame.status is None:
        return _stored(connection, stream, json.loads(frame.payload))
    found = f.direct_get_message(frame)
    if found is None:
        raise _refused(connection, stream, frame)
    return found[0]


def _read_consumer(
    connection: Connection,
    stream: str,
    wanted: SequenceRange,
    filter_subject: str | None,
    batch_messages: int,
    max_bytes: int,
    *,
    headers_only: bool = False,
) -> Iterator[list[Message]]:
    if not len(wanted):
        return
    name = f"sr_{secrets.token_hex(8)}"
    config: dict[str, Any] = {
        "name": name,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": max(wanted.first, 1),
        "ack_policy": "none",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": CONSUMER_INACTIVE_NS,
    }
    if filter_subject:
        config["filter_subject"] = filter_subject
    if headers_only:
        config["headers_only"] = True
    create = f"$JS.API.CONSUMER.CREATE.{stream}.{name}" + (f".{filter_subject}" if filter_subject else "")
    _succeeded(connection, stream, connection.request(create, {"stream_name": stream, "config": config}))
    try:
        yield from _pull(connection, stream, name, wanted, batch_messages, max_bytes, headers_only)
    finally:
        # What is left when this fails is removed by the server once it is inactive.
        with contextlib.suppress(WireError):
            connection.request(f"$JS.API.CONSUMER.DELETE.{stream}.{name}", {})


def _pull(
    connection: Connection,
    stream: str,
    name: str,
    wanted: SequenceRange,
    batch_messages: int,
    max_bytes: int,
    headers_only: bool,
) -> Iterator[list[Message]]:
    """Pull batch after batch until the range is passed or nothing follows; a lost delivery raises WireError."""
    cursor, delivered, limit_bytes, batch = max(wanted.first, 1), 0, max_bytes, batch_messages
    while cursor < wanted.next:
        request: dict[str, Any] = {"batch": min(batch, wanted.next - cursor), "no_wait": True}
        if limit_bytes:
            request["max_bytes"] = limit_bytes
        messages, pending, status = _pulled(connection, stream, name, request, delivered)
        delivered += len(messages)
        if headers_only:
            messages = [
                Message(m.sequence, m.stored_ns, m.subject, f.without_message_size(m.headers), m.payload)
                for m in messages
            ]
        if messages:
            cursor = messages[-1].sequence + 1
            yield messages
        if pending == 0 or status == 404:
            return
        # A message larger than the limit alone is taken by a request without one.
        alone = not messages and status == 409
        limit_bytes, batch = (0, 1) if alone else (max_bytes, batch_messages)


def _pulled(
    connection: Connection, stream: str, name: str, request: dict[str, Any], delivered: int
) -> tuple[list[Message], int | None, int | None]:
    """One pull: its messages, how many follow as far as known, and the status that ended it."""
    inbox = connection.new_inbox()
    consumer = b".%b." % name.encode()
    connection.send(f.encode_pub(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", inbox, b"", f.encode_json(request)))
    messages: list[Message] = []
    pending: int | None = None
    for frame in connection.answers(f"a pull from {stream}"):
        if frame.subject == inbox and not frame.reply:
            too_large = frame.status == 409 and "MaxBytes" in frame.status_text
            if frame.status not in (404, 408) and not too_large:
                raise _refused(connection, stream, frame)
            return messages, pending, frame.status
        if consumer not in frame.reply:
            continue
        try:
            message, number, pending = f.delivered_message(frame)
        except ValueError as error:
            raise WireError(f"{connection.address}: {error}") from None
        messages.append(message)
        if number != delivered + len(messages):
            raise WireError(f"{connection.address}: stream {stream}: delivery {delivered + len(messages)} was lost")
        if len(messages) == request["batch"]:
            break
    return messages, pending, None


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
            chunk_bytes = 0
            while going and chunk_bytes < SEND_BYTES and waiting_bytes < self._max_bytes and len(under_way) < window:
                item = next(source, None)
                if item is None:
                    going = False
                    break
                inbox = self._connection.new_inbox()
                framed = self._frame(item, inbox, expected)
                if isinstance(framed, Ack):
                    going, refusal = False, framed
                    break
                size_bytes = sum(map(len, framed))
                under_way[inbox] = (item.sequence, size_bytes)
                chunk += framed
                chunk_bytes += size_bytes
                waiting_bytes += size_bytes
                if expected is not None:
                    expected += 1
            if chunk:
                self._connection.send(b"".join(chunk))
            elif not under_way:
                break
            for frame in self._acks(wait=not chunk):
                sequence, size_bytes = under_way.pop(frame.subject, (0, -1))
                if size_bytes < 0:
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

    def _acks(self, *, wait: bool) -> list[Frame]:
        received = self._connection.receive(self._ack_timeout_seconds if wait else 0)
        if wait and not received:
            raise WireError(f"{self._connection.address}: no acknowledgement within {self._ack_timeout_seconds:g} s")
        return received

    def _frame(self, item: Outgoing, inbox: bytes, expected: int | None) -> tuple[bytes, ...] | Ack:
        headers = item.headers
        if expected is not None:
            headers = f.with_first_header(headers, b"Nats-Expected-Last-Sequence", b"%d" % expected)
        size_bytes, limit_bytes = len(headers) + len(item.payload), self._connection.max_payload_bytes
        if size_bytes > limit_bytes:
            text = f"{size_bytes} bytes are more than the server takes (max_payload {limit_bytes})"
            return Ack(item.sequence, error_code=MESSAGE_TOO_LARGE, error=text)
        try:
            line = f.pub_line(f.encode_subject(item.subject), inbox, len(headers), len(item.payload))
        except ValueError as error:
            return Ack(item.sequence, error_code=INVALID_SUBJECT, error=str(error))
        if len(line) > MAX_CONTROL_LINE_BYTES:
            text = f"the subject's {len(item.subject)} characters are more than the server takes"
            return Ack(item.sequence, error_code=INVALID_SUBJECT, error=text)
        return line, headers, item.payload, f.CRLF


def parse_ack(sequence: int, frame: Frame) -> Ack:
    """Read the answer to a publish; what is no answer of a stream counts as an error."""
    stored = _STORED.fullmatch(frame.payload)
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
