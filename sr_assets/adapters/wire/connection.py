"""One synchronous connection to a NATS server: its socket, login, frames, and requests to the JetStream API."""

import contextlib
import errno
import secrets
import select
import socket
import ssl
import struct
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self

from sr_assets.adapters import times
from sr_assets.adapters.jetstream import ApiError, PermissionDeniedError, check_response, decode_response, encode_json
from sr_assets.adapters.security import (
    NO_TLS,
    Login,
    denied_text,
    no_responder_hint,
    read_login,
    silence_hint,
    tls_context,
    tls_error_text,
)
from sr_assets.adapters.wire import frames as f
from sr_assets.adapters.wire.frames import Frame
from sr_assets.domain.clusters import ClusterSettings, TlsSettings
from sr_assets.domain.errors import RunError, TransientError
from sr_assets.domain.foreign_text import visible

RECEIVE_BYTES: Final = 1 << 20
#: The default of `vanished_ms`.
VANISHED_MS: Final = 30_000
CLOSED: Final = "the server closed the connection"
_TLS_RECORD_BYTES: Final = 1 << 14
# Raised by a non-blocking socket that would have to wait.
_LATER: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
# A server that closes while we still send resets the link: its FIN or its RST may arrive first.
_CLOSED: Final = (
    ConnectionResetError,
    BrokenPipeError,
    ConnectionAbortedError,
    ssl.SSLEOFError,
    ssl.SSLZeroReturnError,
)

REQUEST_SECONDS: Final = 30.0
RESEND_SECONDS: Final = 2.0
#: After this time without a response, a reader switches to its alternative, if it has one.
SILENCE_SECONDS: Final = 3.0


class WireError(TransientError):
    """The connection failed: refused, closed, timed out, or not the NATS protocol. Never contains a secret."""

    def __init__(self, message: str) -> None:
        # A server may send control characters.
        super().__init__(visible(message))


class DeniedError(WireError, PermissionDeniedError):
    """The user lacks a permission of a task's request."""


class RefusedError(WireError, ApiError):
    """JetStream answered a task's request with an error; a later attempt may succeed."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Link:
    """A TCP connection to `host:port`, secured on demand. Connecting, `secure`, `await_bytes` and `await_room` wait."""

    def __init__(
        self, server: str, timeout_seconds: float, *, abrupt: bool = False, vanished_ms: int = VANISHED_MS
    ) -> None:
        """Connect; raises WireError if the server does not respond, or `server` is not an address.

        `abrupt`: when the socket is closed or the process ends, the kernel drops unsent bytes. `vanished_ms`: how long sent
        bytes may stay unacknowledged before the kernel closes the connection to a vanished peer.
        """
        self.address = server
        host, _, port = server.rpartition(":")
        if not host or not port.isdigit():
            raise WireError(f"{server}: not host:port")
        self.host = host.strip("[]")
        try:
            self._socket = socket.create_connection((self.host, int(port)), timeout=timeout_seconds)
        except (OSError, UnicodeError, OverflowError) as error:
            raise WireError(f"{server}: {_words(error)}") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if abrupt:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Linux only.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, vanished_ms)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._polled = select.POLLIN
        self._buffer = bytearray(RECEIVE_BYTES)
        self._timeout_seconds = timeout_seconds
        self.renew_deadline()

    @property
    def login_seconds(self) -> float:
        """The remaining time for the login; 0 or less once it is over."""
        return self._deadline - times.monotonic()

    def renew_deadline(self) -> None:
        """Let the time limit of the login begin again."""
        self._deadline = times.monotonic() + self._timeout_seconds

    def secure(self, context: ssl.SSLContext) -> None:
        """Start TLS; raises WireError if either side does not trust the other, or on a timeout."""
        try:
            # On a socket that was reset, Python would leave the wrapped socket open.
            self._socket.getpeername()
            secured = context.wrap_socket(self._socket, server_hostname=self.host, do_handshake_on_connect=False)
            self._socket = secured
            while True:
                try:
                    return secured.do_handshake()
                except ssl.SSLWantReadError:
                    events = select.POLLIN
                except ssl.SSLWantWriteError:
                    events = select.POLLOUT
                if self.login_seconds <= 0 or not self._await(events, self.login_seconds):
                    raise WireError(f"{self.address}: no TLS within {self._timeout_seconds:g} s")
        except OSError as error:
            raise WireError(f"{self.address}: {_words(error)}") from None

    def await_bytes(self, timeout_seconds: float) -> bool:
        """Wait until bytes can be received; return False on a timeout."""
        return self._await(select.POLLIN, timeout_seconds)

    def await_room(self, timeout_seconds: float) -> bool:
        """Wait until bytes can be sent or received; return False on a timeout."""
        return self._await(select.POLLIN | select.POLLOUT, timeout_seconds)

    def send(self, data: memoryview) -> int:
        """Send as many bytes as the socket accepts and return their number; raises WireError if the link is closed."""
        try:
            return self._socket.send(data)
        except _LATER:
            return 0
        except OSError as error:
            raise self._ended(error) from None

    def receive(self) -> bytes | None:
        """Return the received bytes, or None if there are none yet; raises WireError if the link is closed."""
        try:
            count = self._socket.recv_into(self._buffer)
        except _LATER:
            return None
        except OSError as error:
            raise self._ended(error) from None
        if not count:
            raise WireError(f"{self.address}: {CLOSED}")
        if isinstance(self._socket, ssl.SSLSocket):
            # TLS returns one record at a time, and `poll` ignores the remainder of a record: start none without room for it.
            with contextlib.suppress(OSError):
                room = memoryview(self._buffer)
                while RECEIVE_BYTES - count >= _TLS_RECORD_BYTES and (more := self._socket.recv_into(room[count:])):
                    count += more
        return bytes(memoryview(self._buffer)[:count])

    def close(self) -> None:
        """Close without waiting; the kernel still sends accepted bytes, unless the link is abrupt."""
        self._socket.close()

    def _await(self, events: int, timeout_seconds: float) -> bool:
        if events != self._polled:
            self._poll.modify(self._socket, events)
            self._polled = events
        return bool(self._poll.poll(timeout_seconds * 1000))

    def _ended(self, error: OSError) -> WireError:
        words = _words(error)
        return WireError(f"{self.address}: {words if words == CLOSED else f'connection lost ({words})'}")


def _words(error: Exception) -> str:
    if isinstance(error, _CLOSED) or getattr(error, "errno", None) == errno.ENOTCONN:
        return CLOSED
    if isinstance(error, ssl.SSLError):
        return tls_error_text(error)
    return getattr(error, "strerror", None) or str(error)


class SilenceError(WireError):
    """The server did not respond in time, on a connection that is still open."""


class Connection:
    """A connection to the first server of a cluster that responds; opened by `with`, closed at its end.

    For one thread. It replies to PING, and raises WireError as soon as the server reports an error or takes longer than
    `request_seconds` to respond or to accept bytes.
    """

    def __init__(
        self,
        cluster: ClusterSettings,
        name: str = "sr-assets",
        *,
        request_seconds: float = REQUEST_SECONDS,
        abrupt: bool = False,
        vanished_ms: int = VANISHED_MS,
    ) -> None:
        self.max_payload_bytes = 1 << 20
        self.server_version = self.server_domain = self.server_id = ""
        self.address = cluster.label
        self.request_seconds = request_seconds
        #: How long a reader waits before it switches to its alternative.
        self.silence_seconds = min(SILENCE_SECONDS, request_seconds)
        self.cluster = cluster
        self._name = name
        self._abrupt, self._vanished_ms = abrupt, vanished_ms
        self._link: Link | None = None
        self._parser = f.FrameParser()
        self._received: list[Frame] = []
        self._pongs: list[bytes] = []
        self._inbox = b""
        self._requests = 0

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Connect, log in and subscribe to the inbox.

        Raises WireError with the reason for each server, RunError that names an unusable file.
        """
        problems = []
        login = read_login(self.cluster)
        self._inbox = b"%b.%b." % (login.inbox_prefix.encode(), secrets.token_hex(11).encode())
        for server in self.cluster.servers:
            try:
                self._open(server, login)
                return
            except WireError as error:
                problems.append(str(error))
            except BaseException:
                self.close()
                raise
            self.close()
        raise WireError("cannot connect to NATS: " + ("; ".join(problems) or "no server is configured"))

    def close(self) -> None:
        """Close the connection without waiting for the server; do nothing if it is closed."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def new_inbox(self) -> bytes:
        """Return an unused reply subject; its responses arrive through `receive`."""
        self._requests += 1
        return b"%b%d" % (self._inbox, self._requests)

    def new_inboxes(self, count: int) -> tuple[bytes, int]:
        """Return what unused reply subjects, as of `new_inbox`, begin with, and the first of their `count` numbers."""
        first = self._requests + 1
        self._requests += count
        return self._inbox, first

    def send(self, data: bytes) -> None:
        """Send whole frames.

        Frames that arrive during the send are stored for `receive`, so two full sockets never wait for each other.
        """
        view = memoryview(b"".join((data, *self._pongs)))
        self._pongs.clear()
        while view:
            link = self._open_link()
            try:
                count = link.send(view)
            except WireError as error:
                raise self._last_complaint(error) from None
            view = view[count:]
            if not count:
                if not link.await_room(self.request_seconds):
                    raise WireError(f"{self.address}: accepted no data for {self.request_seconds:g} s")
                self._received += self._read()

    def receive(self, timeout_seconds: float, first: f.FirstParser[Any] | None = None) -> list[Frame]:
        """Return messages as soon as some have arrived, or an empty list after the timeout.

        `first` takes frames that arrived before all others; the list is also empty if there are only such frames.
        """
        deadline = times.monotonic() + timeout_seconds
        while True:
            self._received += self._read(first=None if self._received else first)
            if self._pongs:
                self.send(b"")
            if self._received or (first and first.taken):
                received, self._received = self._received, []
                return received
            left_seconds = deadline - times.monotonic()
            if left_seconds <= 0 or not self._open_link().await_bytes(left_seconds):
                return []

    def answers(
        self, question: str, timeout_seconds: float | None = None, first: f.DirectParser | None = None
    ) -> Iterator[Frame]:
        """Yield messages as they arrive, without end; `first` collects the frames that it takes before them.

        Raises SilenceError if none arrived within the timeout (default `request_seconds`).
        """
        seconds = self.request_seconds if timeout_seconds is None else timeout_seconds
        while True:
            received = self.receive(seconds, first)
            if first and first.taken:
                first.collect()
            elif not received:
                raise SilenceError(f"{self.address}: no answer to {question} within {seconds:g} s")
            yield from received

    def request_api(
        self, operation: str, body: dict[str, Any] | None = None, timeout_seconds: float | None = None
    ) -> dict[str, Any]:
        """Return the response to an API operation such as `STREAM.NAMES`, as `request` does; raises RefusedError for an error."""
        return self.check(operation, self.request(self.cluster.api(operation), body or {}, timeout_seconds))

    def check(self, operation: str, response: dict[str, Any]) -> dict[str, Any]:
        """Return a response of the API; raises RefusedError if it is an error, WireError if the API is unavailable."""
        try:
            return check_response(self.address, operation, response)
        except ApiError as error:
            raise RefusedError(str(error), error.code) from None
        except RunError as error:
            raise WireError(str(error)) from None

    def request(self, subject: str, body: dict[str, Any], timeout_seconds: float | None = None) -> dict[str, Any]:
        """Send a JSON request to a subject and return its JSON, `error` included; raises WireError without responders.

        The request is resent every 2 s until the timeout (default `request_seconds`), because a stream without a leader
        does not respond and its next leader has not received the request. Use it only for requests that may be repeated.
        """
        seconds = self.request_seconds if timeout_seconds is None else timeout_seconds
        inbox, deadline = self.new_inbox(), times.monotonic() + seconds
        question = f.encode_pub(subject, inbox, b"", encode_json(body) if body else b"")
        while times.monotonic() < deadline:
            self.send(question)
            again = min(deadline, times.monotonic() + RESEND_SECONDS)
            while (left_seconds := again - times.monotonic()) > 0:
                for frame in self.receive(left_seconds):
                    if frame.subject == inbox:
                        return self.response(frame, subject)
        raise SilenceError(f"{self.address}: no answer to {subject} within {seconds:g} s")

    def note_denied(self, complaint: str) -> None:
        """Raise DeniedError for the server's complaint about a permission; a probe of permissions collects it instead."""
        raise DeniedError(f"{self.address}: {denied_text(complaint)}")

    def response(self, frame: Frame, question: str) -> dict[str, Any]:
        """Return the JSON in a frame, `error` included; raises WireError for a status, or if it is not from JetStream."""
        if frame.status is not None:
            hint = no_responder_hint(self.cluster)
            raise WireError(f"{self.address}: {question}: answered {frame.status_text} ({hint})")
        try:
            return decode_response(frame.payload)
        except ValueError as error:
            raise WireError(f"{self.address}: {question}: {error}") from None

    def _open(self, server: str, login: Login) -> None:
        self.address = server
        self._forget_received()
        self._link = Link(
            server, self.cluster.connect_timeout_seconds, abrupt=self._abrupt, vanished_ms=self._vanished_ms
        )
        info = self._greeting()
        options: dict[str, Any] = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True}
        options |= {"protocol": 1, "lang": "python", "version": "1", "name": self._name, "echo": False}
        options |= {"tls_required": self.cluster.tls is not None} | login.connect_options(info.get("nonce"))
        self.send(b"CONNECT %b\r\nSUB %b> 1\r\nPING\r\n" % (encode_json(options), self._inbox))
        self._await_frame(b"PONG")

    def ping(self) -> None:
        """Wait until the server has processed all that was sent; the time limit of the login begins again."""
        self._open_link().renew_deadline()
        self.send(b"PING\r\n")
        self._await_frame(b"PONG")

    def _greeting(self) -> dict[str, Any]:
        """Return the server's INFO; start TLS before or after it, if either side requires it."""
        tls = self.cluster.tls
        secured = bool(tls and tls.handshake_first)
        if secured:
            self._secure()
        info = self.response(self._await_frame(b"INFO"), "INFO")
        if not secured:
            if info.get("tls_required") or (tls and info.get("tls_available")):
                self._secure()
            elif tls:
                raise WireError(f"{self.address}: {NO_TLS}")
        if not info.get("headers"):
            raise WireError(f"{self.address}: the server does not support headers")
        limit, version = info.get("max_payload"), info.get("version")
        if not isinstance(limit, int) or limit <= 0 or not isinstance(version, str):
            raise WireError(f"{self.address}: not the NATS protocol: INFO has neither max_payload nor version")
        self.max_payload_bytes, self.server_version = limit, version
        self.server_domain, self.server_id = (str(info.get(key) or "") for key in ("domain", "server_id"))
        return info

    def _secure(self) -> None:
        # Bytes between INFO and TLS are not authenticated.
        self._forget_received()
        self._open_link().secure(tls_context(self.cluster.tls or TlsSettings()))

    def _forget_received(self) -> None:
        self._parser, self._received, self._pongs = f.FrameParser(), [], []

    def _await_frame(self, verb: bytes) -> Frame:
        """Return the first frame of a verb; raises WireError when the login times out."""
        link = self._open_link()
        while (left_seconds := link.login_seconds) > 0 and link.await_bytes(left_seconds):
            for frame in self._read(controls=True):
                if frame.verb == verb:
                    return frame
        hint = silence_hint(self.cluster) if verb == b"INFO" else ""
        seconds = self.cluster.connect_timeout_seconds
        raise WireError(f"{self.address}: no {verb.decode()} within {seconds:g} s{hint}")

    def _open_link(self) -> Link:
        if self._link is None:
            raise WireError(f"{self.address}: the connection is closed")
        return self._link

    def _read(self, *, controls: bool = False, first: f.FirstParser[Any] | None = None) -> list[Frame]:
        """Read once without waiting; return the messages, and with `controls` also other frames."""
        data = self._open_link().receive()
        if data is None:
            return []
        try:
            received = self._parser.feed(data, first)
        except ValueError as error:
            raise WireError(f"{self.address}: {error}") from None
        messages = []
        for frame in received:
            if frame.verb == b"HMSG" or frame.verb == b"MSG":  # noqa: PLR1714 - the hot line: two comparisons, no tuple
                messages.append(frame)
            elif frame.verb == b"PING":
                self._pongs.append(b"PONG\r\n")
            elif frame.verb == b"-ERR":
                complaint = frame.payload.decode(errors="replace").strip("'")
                if not complaint.lower().startswith("permissions violation"):
                    raise WireError(f"{self.address}: {complaint}")
                self.note_denied(complaint)
            elif controls:
                messages.append(frame)
        return messages

    def _last_complaint(self, error: WireError) -> WireError:
        """Return the error that the server sent before it closed the connection, or else `error`."""
        try:
            self._read()
        except WireError as complaint:
            return complaint
        return error
