"""One synchronous connection to a NATS server over our own socket: log in, send, receive, ask the JetStream API.

Here: the socket, TLS on it, waiting, PING, what counts as a broken connection. Not here: the protocol's bytes
(`frames`), certificates and credentials (`security`), what is asked for (`reading`, `publishing`).
"""

import contextlib
import json
import secrets
import select
import socket
import ssl
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self

from sr_assets.adapters.security import NO_TLS, login_options, silence_words, tls_context, tls_words
from sr_assets.adapters.wire import frames as f
from sr_assets.adapters.wire.frames import Frame
from sr_assets.domain.clusters import ClusterSettings, TlsSettings
from sr_assets.domain.errors import TransientError

REQUEST_SECONDS: Final = 30.0
ASK_AGAIN_SECONDS: Final = 2.0
RECEIVE_BYTES: Final = 1 << 20
_TLS_RECORD_BYTES: Final = 1 << 14
# What a socket that does not wait says in place of waiting.
_LATER: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class WireError(TransientError):
    """The connection cannot go on: refused, closed, out of time, or not the NATS protocol. Never contains a secret."""

    def __init__(self, message: str) -> None:
        # What a server says may be anything.
        super().__init__("".join(letter if letter.isprintable() else " " for letter in message))


class Connection:
    """A connection to the first of a cluster's servers that answers; opened by `with`, closed at its end.

    Used by one thread. Answers PING by itself; raises WireError as soon as the server complains, or lets us wait longer
    than `request_seconds` for an answer or for taking what is sent.
    """

    def __init__(
        self, cluster: ClusterSettings, name: str = "sr-assets", *, request_seconds: float = REQUEST_SECONDS
    ) -> None:
        self.max_payload_bytes = 1 << 20
        self.server_version = ""
        self.address = cluster.label
        self._cluster = cluster
        self._name = name
        self._request_seconds = request_seconds
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
        """Connect, log in and subscribe to the inbox.

        Raises WireError naming what each server said, RunError naming a file that cannot be used.
        """
        problems = []
        for server in self._cluster.servers:
            try:
                self._open(server)
                return
            except WireError as error:
                problems.append(str(error))
            except (OSError, UnicodeError) as error:
                problems.append(f"{server}: {_words(error)}")
            except BaseException:
                self.close()
                raise
            self.close()
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
            except _LATER:
                if not self._wait(select.POLLIN | select.POLLOUT, self._request_seconds):
                    raise WireError(f"{self.address}: took no bytes for {self._request_seconds:g} s") from None
                self._kept += self._read()
            except OSError as error:
                raise self._lost(error) from None

    def receive(self, timeout_seconds: float, stored: list[tuple[bytes, int]] | None = None) -> list[Frame]:
        """Return the messages that are here, at the latest after the timeout, and then possibly none.

        Acknowledgements that arrived before them go to `stored` when it is given: their inbox and the sequence.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            self._kept += self._read(stored=None if self._kept else stored)
            if self._owed:
                self.send(b"")
            if self._kept or stored:
                received, self._kept = self._kept, []
                return received
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0 or not self._wait(select.POLLIN, left_seconds):
                return []

    def answers(self, what: str) -> Iterator[Frame]:
        """Return messages as they arrive, for ever; raises WireError when `what` was not answered in time."""
        while True:
            received = self.receive(self._request_seconds)
            if not received:
                raise WireError(f"{self.address}: no answer to {what} within {self._request_seconds:g} s")
            yield from received

    def request(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the JetStream API and return its JSON, `error` included; raises WireError when nobody listens there.

        Without an answer it is asked again every 2 s until `request_seconds` are over: a stream that has lost its leader
        is silent, and has never heard the question once it has another. So only ask what may be asked twice.
        """
        inbox, deadline = self.new_inbox(), time.monotonic() + self._request_seconds
        question = f.encode_pub(subject, inbox, b"", f.encode_json(body) if body else b"")
        while time.monotonic() < deadline:
            self.send(question)
            again = min(deadline, time.monotonic() + ASK_AGAIN_SECONDS)
            while (left_seconds := again - time.monotonic()) > 0:
                for frame in self.receive(left_seconds):
                    if frame.subject == inbox:
                        return self._answer(subject, frame)
        raise WireError(f"{self.address}: no answer to {subject} within {self._request_seconds:g} s")

    def _answer(self, subject: str, frame: Frame) -> dict[str, Any]:
        if frame.status is not None:
            raise WireError(f"{self.address}: {subject} answered {frame.status_text} (is JetStream enabled?)")
        return self.decoded(frame.payload, subject)

    def decoded(self, payload: bytes, what: str) -> dict[str, Any]:
        """Return the JSON of an answer to `what`, `error` included; raises WireError when it is none."""
        try:
            answer = json.loads(payload)
            if isinstance(answer, dict) and isinstance(answer.get("error") or {}, dict):
                return answer
        except (ValueError, RecursionError):
            pass
        raise WireError(f"{self.address}: {what} answered what is no answer of JetStream: {payload[:80]!r}")

    def _open(self, server: str) -> None:
        self.address = server
        host, _, port = server.rpartition(":")
        if not host or not port.isdigit():
            raise WireError(f"{server}: not host:port")
        host, timeout_seconds = host.strip("[]"), self._cluster.connect_timeout_seconds
        self._parser, self._kept, self._owed = f.FrameParser(), [], []
        self._socket = socket.create_connection((host, int(port)), timeout=timeout_seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._polled = select.POLLIN
        deadline = time.monotonic() + timeout_seconds
        info = self._greeted(host, deadline)
        options: dict[str, Any] = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True}
        options |= {"protocol": 1, "lang": "python", "version": "1", "name": self._name}
        options |= login_options(self._cluster, info.get("nonce"))
        self.send(b"CONNECT %b\r\nSUB %b* 1\r\nPING\r\n" % (f.encode_json(options), self._inbox))
        self._handshake(b"PONG", deadline)

    def _greeted(self, host: str, deadline: float) -> dict[str, Any]:
        """Read the server's INFO, and see that the link is secured, before or after it, if either side wants that."""
        tls = self._cluster.tls
        secured = bool(tls and tls.handshake_first)
        if secured:
            self._secure(host, deadline)
        info = self.decoded(self._handshake(b"INFO", deadline).payload, "INFO")
        if not secured:
            if info.get("tls_required") or (tls and info.get("tls_available")):
                self._secure(host, deadline)
            elif tls:
                raise WireError(f"{self.address}: {NO_TLS}")
        if not info.get("headers"):
            raise WireError(f"{self.address}: the server does not support headers")
        limit, version = info.get("max_payload"), info.get("version")
        if not isinstance(limit, int) or limit <= 0 or not isinstance(version, str):
            raise WireError(f"{self.address}: not the NATS protocol: INFO says neither max_payload nor version")
        self.max_payload_bytes, self.server_version = limit, version
        return info

    def _secure(self, host: str, deadline: float) -> None:
        """Begin TLS on the socket; raises WireError when either side does not trust the other."""
        context = tls_context(self._cluster.tls or TlsSettings())
        # What came in the clear behind INFO is from anybody.
        self._parser, self._kept, self._owed = f.FrameParser(), [], []
        try:
            link = context.wrap_socket(self._open_socket(), server_hostname=host, do_handshake_on_connect=False)
            self._socket = link
            while True:
                try:
                    return link.do_handshake()
                except ssl.SSLWantReadError:
                    events = select.POLLIN
                except ssl.SSLWantWriteError:
                    events = select.POLLOUT
                left_seconds = deadline - time.monotonic()
                if left_seconds <= 0 or not self._wait(events, left_seconds):
                    raise WireError(f"{self.address}: no TLS within {self._cluster.connect_timeout_seconds:g} s")
        except OSError as error:
            raise WireError(f"{self.address}: {_words(error)}") from None

    def _handshake(self, verb: bytes, deadline: float) -> Frame:
        while (left_seconds := deadline - time.monotonic()) > 0 and self._wait(select.POLLIN, left_seconds):
            for frame in self._read(controls=True):
                if frame.verb == verb:
                    return frame
        hint = silence_words(self._cluster) if verb == b"INFO" else ""
        seconds = self._cluster.connect_timeout_seconds
        raise WireError(f"{self.address}: no {verb.decode()} within {seconds:g} s{hint}")

    def _open_socket(self) -> socket.socket:
        if self._socket is None:
            raise WireError(f"{self.address}: the connection is closed")
        return self._socket

    def _wait(self, events: int, timeout_seconds: float) -> bool:
        if events != self._polled:
            self._poll.modify(self._open_socket(), events)
            self._polled = events
        return bool(self._poll.poll(timeout_seconds * 1000))

    def _read(self, *, controls: bool = False, stored: list[tuple[bytes, int]] | None = None) -> list[Frame]:
        """Read once without waiting; messages, and with `controls` the other frames too."""
        try:
            count = self._fill(self._open_socket())
        except _LATER:
            return []
        except OSError as error:
            raise self._broken(error) from None
        if not count:
            raise WireError(f"{self.address}: the server closed the connection")
        try:
            received = self._parser.feed(bytes(memoryview(self._buffer)[:count]), stored)
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

    def _fill(self, link: socket.socket) -> int:
        """Receive into the buffer; returns how many bytes, 0 at the end."""
        count = link.recv_into(self._buffer)
        if count and isinstance(link, ssl.SSLSocket):
            # TLS gives a record at a time. What is left of one would not wake `poll`, so none is begun without room.
            with contextlib.suppress(OSError):
                room = memoryview(self._buffer)
                while len(self._buffer) - count >= _TLS_RECORD_BYTES and (more := link.recv_into(room[count:])):
                    count += more
        return count

    def _lost(self, error: OSError) -> WireError:
        """The server's last words when it had some, else the socket's."""
        try:
            self._read()
        except WireError as said:
            return said
        return self._broken(error)

    def _broken(self, error: OSError) -> WireError:
        return WireError(f"{self.address}: connection lost ({_words(error)})")


def _words(error: OSError | UnicodeError) -> str:
    if isinstance(error, ssl.SSLError):
        return tls_words(error)
    return getattr(error, "strerror", None) or str(error)
