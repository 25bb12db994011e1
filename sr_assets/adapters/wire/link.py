"""One socket to one server: connect, TLS, wait, send and receive bytes without blocking, close.

Every way in which a link ends is one WireError. Not here: what the bytes mean (`frames`), the login (`connection`),
certificates (`security`).
"""

import contextlib
import errno
import select
import socket
import ssl
import struct
import time
from typing import Final

from sr_assets.adapters.security import tls_error_text
from sr_assets.domain.errors import TransientError

RECEIVE_BYTES: Final = 1 << 20
#: How long bytes may be on their way unacknowledged before the kernel gives the peer up: it may have vanished.
VANISHED_MS: Final = 30_000
CLOSED: Final = "the server closed the connection"
_TLS_RECORD_BYTES: Final = 1 << 14
# What a socket that does not wait raises in place of waiting.
_LATER: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
# A server that closes while we still send resets the link: whether its FIN or its RST comes first is chance.
_CLOSED: Final = (
    ConnectionResetError,
    BrokenPipeError,
    ConnectionAbortedError,
    ssl.SSLEOFError,
    ssl.SSLZeroReturnError,
)


class WireError(TransientError):
    """The connection cannot go on: refused, closed, out of time, or not the NATS protocol. Never contains a secret."""

    def __init__(self, message: str) -> None:
        # What a server sends may be anything.
        super().__init__("".join(letter if letter.isprintable() else " " for letter in message))


class DeniedError(WireError):
    """The user may not do what was asked: another attempt is denied too."""


class Link:
    """A TCP connection to `host:port`, secured on demand. Connecting, `secure`, `await_bytes` and `await_room` wait."""

    def __init__(self, server: str, timeout_seconds: float, *, abrupt: bool = False) -> None:
        """Connect; raises WireError when nobody answers there, or when `server` is no address.

        `abrupt`: when it is closed, however its process ends, the kernel drops what it has not sent yet.
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
        # Linux has it.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, VANISHED_MS)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._polled = select.POLLIN
        self._buffer = bytearray(RECEIVE_BYTES)
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds

    @property
    def login_seconds(self) -> float:
        """How long TLS and login may still take; not above 0 when they are out of time."""
        return self._deadline - time.monotonic()

    def secure(self, context: ssl.SSLContext) -> None:
        """Begin TLS; raises WireError when either side does not trust the other, or out of time."""
        try:
            # Python would leave open what it wraps around a socket that was reset.
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
        """Wait until there is something to receive; False when nothing came in time."""
        return self._await(select.POLLIN, timeout_seconds)

    def await_room(self, timeout_seconds: float) -> bool:
        """Wait until something can be sent or received; False when neither came in time."""
        return self._await(select.POLLIN | select.POLLOUT, timeout_seconds)

    def send(self, data: memoryview) -> int:
        """Send what fits and return how many bytes that was; raises WireError when the link has ended."""
        try:
            return self._socket.send(data)
        except _LATER:
            return 0
        except OSError as error:
            raise self._ended(error) from None

    def receive(self) -> bytes | None:
        """Return what is here, None when there is nothing yet; raises WireError when the link has ended."""
        try:
            count = self._socket.recv_into(self._buffer)
        except _LATER:
            return None
        except OSError as error:
            raise self._ended(error) from None
        if not count:
            raise WireError(f"{self.address}: {CLOSED}")
        if isinstance(self._socket, ssl.SSLSocket):
            # TLS gives a record at a time. What is left of one would not wake `poll`, so none is begun without room.
            with contextlib.suppress(OSError):
                room = memoryview(self._buffer)
                while RECEIVE_BYTES - count >= _TLS_RECORD_BYTES and (more := self._socket.recv_into(room[count:])):
                    count += more
        return bytes(memoryview(self._buffer)[:count])

    def close(self) -> None:
        """Close without waiting; the kernel still sends what it has taken, unless the link is abrupt."""
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
