"""One synchronous connection to a NATS server over our own socket: log in, send, receive, ask the JetStream API.

Here: the socket, waiting, PING, what counts as a broken connection. Not here: the protocol's bytes (`frames`), what is
asked for (`reading`, `publishing`).
"""

import json
import secrets
import select
import socket
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Self

from sr_assets.adapters.wire import frames as f
from sr_assets.adapters.wire.frames import Frame
from sr_assets.domain.errors import PassingError

REQUEST_SECONDS: Final = 30.0
ASK_AGAIN_SECONDS: Final = 2.0
RECEIVE_BYTES: Final = 1 << 20


class WireError(PassingError):
    """The connection cannot go on: refused, closed, out of time, or not the NATS protocol. Never contains a secret."""


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
        """Ask the JetStream API and return its JSON, `error` included; raises WireError when nobody listens there.

        Without an answer it is asked again every 2 s, for 30 s in all: a stream that has lost its leader is silent, and
        has never heard the question once it has another. So only ask what may be asked twice.
        """
        inbox, deadline = self.new_inbox(), time.monotonic() + REQUEST_SECONDS
        question = f.encode_pub(subject, inbox, b"", f.encode_json(body) if body else b"")
        while time.monotonic() < deadline:
            self.send(question)
            again = time.monotonic() + ASK_AGAIN_SECONDS
            while (left_seconds := again - time.monotonic()) > 0:
                for frame in self.receive(left_seconds):
                    if frame.subject == inbox:
                        return self._answer(subject, frame)
        raise WireError(f"{self.address}: no answer to {subject} within {REQUEST_SECONDS:.0f} s")

    def _answer(self, subject: str, frame: Frame) -> dict[str, Any]:
        if frame.status is not None:
            raise WireError(f"{self.address}: {subject} answered {frame.status_text} (is JetStream enabled?)")
        answer: dict[str, Any] = json.loads(frame.payload)
        return answer

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
