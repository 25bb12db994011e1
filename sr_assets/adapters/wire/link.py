"""A non-blocking socket to one server, with or without TLS; every failure is a WireError."""

import contextlib
import errno
import select
import socket
import ssl
import struct
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.jetstream import ApiError, PermissionDeniedError
from sr_assets.adapters.security import tls_error_text
from sr_assets.domain.errors import TransientError
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
