"""Many small connections to NATS servers in one event loop: an emulated daemon's own connection.

A connection takes about 4 KB, with TLS about 42 KB: all of them share one buffer for reading, and have no tasks or timers.
"""

import asyncio
import os
import ssl
from typing import Any, Final, Protocol

from sr_assets.adapters.jetstream import decode_response, encode_json
from sr_assets.adapters.security import NO_TLS, read_login, tls_context, tls_error_text
from sr_assets.adapters.wire.connection import CLOSED, WireError
from sr_assets.adapters.wire.frames import Frame, FrameParser
from sr_assets.domain.clusters import ClusterSettings, TlsSettings

_BUFFER_BYTES: Final = 256 << 10


class Owner(Protocol):
    """The receiver of a connection's messages and events."""

    def received(self, link: "LightConnection", frame: Frame) -> None:
        """Take a message of a connection, which may come before `Dialer.open` returns it."""

    def denied(self, complaint: str) -> None:
        """Take the server's complaint about a missing permission; the connection stays open."""

    def lost(self, reason: str) -> None:
        """Note that an open connection has ended."""


class Dialer:
    """Opens light connections to the servers of a cluster, in turn, with one login; raises RunError for an unusable file."""

    def __init__(self, cluster: ClusterSettings) -> None:
        self.cluster = cluster
        self.login = read_login(cluster)
        self.context = tls_context(cluster.tls or TlsSettings())
        self.buffer = memoryview(bytearray(_BUFFER_BYTES))

    async def open(
        self, owner: Owner, name: str, subscriptions: bytes, turn: int = 0, source: str | None = None
    ) -> "LightConnection":
        """Connect, log in and send the SUB frames; raises WireError in one line. `source` is the local address."""
        server = self.cluster.servers[turn % len(self.cluster.servers)]
        host, _, port = server.rpartition(":")
        host, loop = host.strip("[]"), asyncio.get_running_loop()
        connection = LightConnection(self, owner, server, name, subscriptions)
        try:
            async with asyncio.timeout(self.cluster.connect_timeout_seconds):
                local = (source, 0) if source else None
                await loop.create_connection(lambda: connection, host, int(port), local_addr=local)
                assert connection.opened is not None
                await connection.opened
                connection.opened = None
        except TimeoutError:
            connection.close()
            raise WireError(f"{server}: no login within {self.cluster.connect_timeout_seconds:g} s") from None
        except OSError as error:
            raise WireError(f"{server}: {os.strerror(error.errno) if error.errno else error}") from None
        except BaseException:
            connection.close()
            raise
        return connection


class LightConnection(asyncio.BufferedProtocol):
    """A connection that a `Dialer` opens. It answers PING and passes messages to its owner."""

    __slots__ = (
        "_connect_name",
        "_dialer",
        "_greeted",
        "_incoming",
        "_is_secured",
        "_login",
        "_outgoing",
        "_owner",
        "_parser",
        "_subscriptions",
        "_tls",
        "_transport",
        "address",
        "max_payload_bytes",
        "opened",
        "unanswered_pings",
    )

    def __init__(self, dialer: Dialer, owner: Owner, address: str, name: str, subscriptions: bytes) -> None:
        self._dialer, self._owner, self.address = dialer, owner, address
        self._connect_name, self._subscriptions = name, subscriptions
        self._parser, self._greeted = FrameParser(), False
        self._transport: asyncio.Transport | None = None
        self._tls: ssl.SSLObject | None = None
        self._incoming: ssl.MemoryBIO | None = None
        self._outgoing: ssl.MemoryBIO | None = None
        self._is_secured, self._login = False, b""
        self.max_payload_bytes, self.unanswered_pings = 1 << 20, 0
        self.opened: asyncio.Future[None] | None = asyncio.get_running_loop().create_future()

    def send(self, data: bytes) -> None:
        """Send whole frames; do nothing if the connection is closed."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._tls is not None and self._outgoing is not None:
            self._tls.write(data)
            data = self._outgoing.read()
        self._transport.write(data)

    def ping(self) -> bool:
        """Send PING; return False if two earlier ones are unanswered, as a daemon's client closes such a connection."""
        if self.unanswered_pings >= 2:
            return False
        self.unanswered_pings += 1
        self.send(b"PING\r\n")
        return True

    @property
    def unsent_bytes(self) -> int:
        """The sent bytes that the kernel has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def close(self) -> None:
        """Close without waiting; the owner is not told."""
        self._fail(None)

    # ------------------------------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; a server that starts with TLS expects it before it greets."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        tls = self._dialer.cluster.tls
        if tls and tls.handshake_first:
            self._secure()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  the interface of asyncio
        """Return the buffer of all connections: what is read is taken before the next read."""
        return self._dialer.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take received bytes."""
        data = bytes(self._dialer.buffer[:nbytes])
        try:
            self._feed(self._decrypted(data) if self._tls is not None else data)
        except ssl.SSLError as error:
            self._fail(f"{self.address}: {tls_error_text(error)}")
        except (ValueError, WireError) as error:
            text = str(error)
            self._fail(text if isinstance(error, WireError) else f"{self.address}: {text}")

    def eof_received(self) -> None:
        """Close too."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end."""
        self._fail(f"{self.address}: {getattr(exc, 'strerror', None) or CLOSED}")

    # --------------------------------------------------------------------------------------------------- internals

    def _feed(self, data: bytes) -> None:
        for frame in self._parser.feed(data):
            if frame.verb in (b"MSG", b"HMSG"):
                self._owner.received(self, frame)
            elif frame.verb == b"PING":
                self.send(b"PONG\r\n")
            elif frame.verb == b"PONG":
                self.unanswered_pings = max(0, self.unanswered_pings - 1)
                if self.opened is not None and not self.opened.done():
                    self.opened.set_result(None)
            elif frame.verb == b"INFO" and not self._greeted:
                self._greet(decode_response(frame.payload))
            elif frame.verb == b"-ERR":
                self._complain(frame.payload.decode(errors="replace").strip("'"))

    def _greet(self, info: dict[str, Any]) -> None:
        """Answer the server's INFO: start TLS if either side requires it, and log in."""
        self._greeted, wanted = True, self._dialer.cluster.tls
        if self._tls is None:
            if info.get("tls_required") or (wanted and info.get("tls_available")):
                # Bytes between INFO and TLS are not authenticated.
                self._parser = FrameParser()
                self._secure()
            elif wanted:
                raise WireError(f"{self.address}: {NO_TLS}")
        limit = info.get("max_payload")
        self.max_payload_bytes = limit if isinstance(limit, int) and limit > 0 else self.max_payload_bytes
        options: dict[str, Any] = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True}
        options |= {"protocol": 1, "lang": "python", "version": "1", "name": self._connect_name, "echo": False}
        options |= {"tls_required": self._tls is not None} | self._dialer.login.connect_options(info.get("nonce"))
        login = b"CONNECT %b\r\n%bPING\r\n" % (encode_json(options), self._subscriptions)
        self._subscriptions = b""
        if self._tls is None or self._is_secured:
            self.send(login)
        else:
            self._login = login

    def _complain(self, complaint: str) -> None:
        if complaint.lower().startswith("permissions violation"):
            self._owner.denied(complaint)
        else:
            self._fail(f"{self.address}: {complaint}")

    def _secure(self) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        host = self.address.rpartition(":")[0].strip("[]")
        self._tls = self._dialer.context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._handshake()

    def _handshake(self) -> None:
        assert self._tls is not None
        try:
            self._tls.do_handshake()
            self._is_secured = True
        except ssl.SSLWantReadError:
            pass
        finally:
            self._flush_tls()
        if self._is_secured and self._login:
            login, self._login = self._login, b""
            self.send(login)

    def _flush_tls(self) -> None:
        assert self._outgoing is not None
        if self._outgoing.pending and self._transport is not None:
            self._transport.write(self._outgoing.read())

    def _decrypted(self, data: bytes) -> bytes:
        """Return the plain text in TLS records, after the handshake."""
        assert self._tls is not None
        assert self._incoming is not None
        self._incoming.write(data)
        if not self._is_secured:
            self._handshake()
        parts = []
        try:
            while self._is_secured and (part := self._tls.read(_BUFFER_BYTES)):
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        self._flush_tls()
        return b"".join(parts)

    def _fail(self, reason: str | None) -> None:
        """Close; report `reason` to `opened`, or to the owner of an open connection."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        if self.opened is not None and not self.opened.done():
            if reason is None:
                self.opened.cancel()
            else:
                self.opened.set_exception(WireError(reason))
        elif self.opened is None and reason is not None and transport is not None:
            self._owner.lost(reason)
