"""One synchronous connection to a NATS server: log in, send and receive frames, ask the JetStream API.

Here: the login, PING, waiting for answers, what counts as a broken connection. Not here: the socket (`link`), the
protocol's bytes (`frames`), certificates and credentials (`security`), what is asked for (`reading`, `publishing`).
"""

import json
import secrets
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self

from sr_assets.adapters.login import Login
from sr_assets.adapters.security import (
    NO_TLS,
    denied_text,
    no_responder_hint,
    read_login,
    silence_hint,
    tls_context,
)
from sr_assets.adapters.wire import frames as f
from sr_assets.adapters.wire.frames import Frame
from sr_assets.adapters.wire.link import DeniedError, Link, WireError
from sr_assets.domain.clusters import ClusterSettings, TlsSettings

REQUEST_SECONDS: Final = 30.0
ASK_AGAIN_SECONDS: Final = 2.0
#: After so long without an answer it is asked for in another way, where there is one.
SILENCE_SECONDS: Final = 3.0


class SilenceError(WireError):
    """Nothing was answered in time, on a connection that is still open."""


class Connection:
    """A connection to the first of a cluster's servers that answers; opened by `with`, closed at its end.

    Used by one thread. Answers PING by itself; raises WireError as soon as the server complains, or takes
    longer than `request_seconds` to answer or to take what is sent.
    """

    def __init__(
        self,
        cluster: ClusterSettings,
        name: str = "sr-assets",
        *,
        request_seconds: float = REQUEST_SECONDS,
        abrupt: bool = False,
    ) -> None:
        self.max_payload_bytes = 1 << 20
        self.server_version = ""
        self.address = cluster.label
        self.request_seconds = request_seconds
        #: How long to wait before asking in another way.
        self.silence_seconds = min(SILENCE_SECONDS, request_seconds)
        self._cluster = cluster
        self._name = name
        self._abrupt = abrupt
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

        Raises WireError with the reason of each server, RunError naming a file that cannot be used.
        """
        problems = []
        login = read_login(self._cluster)
        self._inbox = b"%b.%b." % (login.inbox_prefix.encode(), secrets.token_hex(11).encode())
        for server in self._cluster.servers:
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
        """Close the connection without waiting for the server; harmless when it is closed."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def new_inbox(self) -> bytes:
        """A reply subject nobody used before; its answers arrive through `receive`."""
        self._requests += 1
        return b"%b%d" % (self._inbox, self._requests)

    def api(self, operation: str) -> str:
        """The subject of a request to the cluster's JetStream, such as `STREAM.NAMES`."""
        return self._cluster.api(operation)

    @property
    def api_owner(self) -> str:
        """Whose JetStream is asked, when it is not the server's own."""
        return self._cluster.api_owner

    def send(self, data: bytes) -> None:
        """Send whole frames.

        What arrives meanwhile is read and kept for `receive`, so two full sockets never wait for each other.
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
                    raise WireError(f"{self.address}: took no bytes for {self.request_seconds:g} s")
                self._received += self._read()

    def receive(self, timeout_seconds: float, stored: list[tuple[bytes, int]] | None = None) -> list[Frame]:
        """Return the messages that are here, at the latest after the timeout, and then possibly none.

        Acknowledgements that arrived before them go to `stored` when it is given: their inbox and the sequence.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            self._received += self._read(stored=None if self._received else stored)
            if self._pongs:
                self.send(b"")
            if self._received or stored:
                received, self._received = self._received, []
                return received
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0 or not self._open_link().await_bytes(left_seconds):
                return []

    def answers(self, question: str, timeout_seconds: float | None = None) -> Iterator[Frame]:
        """Return messages as they arrive, for ever.

        Raises SilenceError when none came for the timeout, `request_seconds` unless given.
        """
        seconds = self.request_seconds if timeout_seconds is None else timeout_seconds
        while True:
            received = self.receive(seconds)
            if not received:
                raise SilenceError(f"{self.address}: no answer to {question} within {seconds:g} s")
            yield from received

    def request(self, subject: str, body: dict[str, Any], timeout_seconds: float | None = None) -> dict[str, Any]:
        """Ask the JetStream API and return its JSON, `error` included; raises WireError when nobody listens there.

        Without an answer it is asked again every 2 s until the timeout, `request_seconds` unless given, is over: a stream
        that has lost its leader is silent, and its next leader has never received the question. So only ask what may be
        asked twice.
        """
        seconds = self.request_seconds if timeout_seconds is None else timeout_seconds
        inbox, deadline = self.new_inbox(), time.monotonic() + seconds
        question = f.encode_pub(subject, inbox, b"", f.encode_json(body) if body else b"")
        while time.monotonic() < deadline:
            self.send(question)
            again = min(deadline, time.monotonic() + ASK_AGAIN_SECONDS)
            while (left_seconds := again - time.monotonic()) > 0:
                for frame in self.receive(left_seconds):
                    if frame.subject == inbox:
                        return self._answer(subject, frame)
        raise SilenceError(f"{self.address}: no answer to {subject} within {seconds:g} s")

    def _answer(self, subject: str, frame: Frame) -> dict[str, Any]:
        if frame.status is not None:
            raise WireError(
                f"{self.address}: {subject} answered {frame.status_text} ({no_responder_hint(self._cluster)})"
            )
        return self.decoded(frame.payload, subject)

    def decoded(self, payload: bytes, question: str) -> dict[str, Any]:
        """Return the JSON of an answer, `error` included; raises WireError when it is none."""
        try:
            answer = json.loads(payload)
            if isinstance(answer, dict) and isinstance(answer.get("error") or {}, dict):
                return answer
        except (ValueError, RecursionError):
            pass
        raise WireError(f"{self.address}: {question} sent an answer that is none of JetStream's: {payload[:80]!r}")

    def _open(self, server: str, login: Login) -> None:
        self.address = server
        self._forget_received()
        self._link = Link(server, self._cluster.connect_timeout_seconds, abrupt=self._abrupt)
        info = self._greeting()
        options: dict[str, Any] = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True}
        options |= {"protocol": 1, "lang": "python", "version": "1", "name": self._name, "echo": False}
        options |= {"tls_required": self._cluster.tls is not None} | login.connect_options(info.get("nonce"))
        self.send(b"CONNECT %b\r\nSUB %b* 1\r\nPING\r\n" % (f.encode_json(options), self._inbox))
        self._await_frame(b"PONG")

    def _greeting(self) -> dict[str, Any]:
        """Read the server's INFO, and see that the link is secured, before or after it, if either side wants that."""
        tls = self._cluster.tls
        secured = bool(tls and tls.handshake_first)
        if secured:
            self._secure()
        info = self.decoded(self._await_frame(b"INFO").payload, "INFO")
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
        return info

    def _secure(self) -> None:
        # What came after INFO, before TLS, may be from anybody.
        self._forget_received()
        self._open_link().secure(tls_context(self._cluster.tls or TlsSettings()))

    def _forget_received(self) -> None:
        self._parser, self._received, self._pongs = f.FrameParser(), [], []

    def _await_frame(self, verb: bytes) -> Frame:
        """Return the first frame of a verb, as long as the login may take."""
        link = self._open_link()
        while (left_seconds := link.login_seconds) > 0 and link.await_bytes(left_seconds):
            for frame in self._read(controls=True):
                if frame.verb == verb:
                    return frame
        hint = silence_hint(self._cluster) if verb == b"INFO" else ""
        seconds = self._cluster.connect_timeout_seconds
        raise WireError(f"{self.address}: no {verb.decode()} within {seconds:g} s{hint}")

    def _open_link(self) -> Link:
        if self._link is None:
            raise WireError(f"{self.address}: the connection is closed")
        return self._link

    def _read(self, *, controls: bool = False, stored: list[tuple[bytes, int]] | None = None) -> list[Frame]:
        """Read once without waiting; messages, and with `controls` the other frames too."""
        data = self._open_link().receive()
        if data is None:
            return []
        try:
            received = self._parser.feed(data, stored)
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
                if complaint.lower().startswith("permissions violation"):
                    raise DeniedError(f"{self.address}: {denied_text(complaint)}")
                raise WireError(f"{self.address}: {complaint}")
            elif controls:
                messages.append(frame)
        return messages

    def _last_complaint(self, error: WireError) -> WireError:
        """The server's last complaint when it sent one before it closed, else the error."""
        try:
            self._read()
        except WireError as complaint:
            return complaint
        return error
