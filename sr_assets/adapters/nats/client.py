"""A nats-py client in its own thread, with a synchronous interface."""

import asyncio
import contextlib
import logging
import math
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, NamedTuple, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from sr_assets.adapters.jetstream import NO_RESPONDERS, ApiError, PermissionDeniedError
from sr_assets.adapters.security import (
    NO_TLS,
    denied_text,
    no_responder_hint,
    read_login,
    silence_hint,
    tls_context,
    tls_error_text,
)
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import RunError, TransientError

REQUEST_SECONDS: Final = 10.0
_CLOSE_SECONDS: Final = 1.0
_CLOSE_AT_ONCE_SECONDS: Final = 0.1
_REFUSED: Final = re.compile(r'permissions violation for publish to "([^"]+)"')
T = TypeVar("T")


class SecuredClient(Client):
    """A nats-py client that never sends plain text to a server when TLS is configured.

    It overrides private methods: nats-py decides by the server's `tls_required` alone, has no public hook between the
    server's greeting and the login, and may lose a connection without a report. It reads a private attribute, because
    nats-py gives no access to its socket.
    """

    def __init__(self, settings: ClusterSettings) -> None:
        super().__init__()
        self._tls = settings.tls

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self._tls and not self._tls.handshake_first:
            if not (info.get("tls_required") or info.get("tls_available")):
                raise nats.errors.Error(NO_TLS)
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    async def _process_op_err(self, e: Exception) -> None:
        # nats-py would try to send the waiting data, fail again, and neither close the socket nor report the loss.
        self._pending, self._pending_data_size = [], 0
        await super()._process_op_err(e)

    def bound_delivery(self, vanished_ms: int | None) -> None:
        """Let the kernel close the connection if sent data stays unacknowledged for this long; None changes nothing."""
        writer = self._writer
        if vanished_ms is not None and writer is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, vanished_ms)

    async def close_soon(self, seconds: float) -> None:
        """Close the connection; after this time without its unsent data, because the server may never take it."""
        writer = self._writer
        try:
            await asyncio.wait_for(self.close(), seconds)
        except OSError:
            # TimeoutError is one.
            if writer is not None:
                writer.transport.abort()

    @property
    def _writer(self) -> asyncio.StreamWriter | None:
        writer = getattr(self._transport, "_io_writer", None)
        return writer if isinstance(writer, asyncio.StreamWriter) else None


def secure_options(settings: ClusterSettings) -> dict[str, Any]:
    """Return nats-py's options for TLS and the login; raises RunError that names an unusable file."""
    options = read_login(settings).client_options()
    if settings.tls:
        options |= {"tls": tls_context(settings.tls), "tls_handshake_first": settings.tls.handshake_first}
    return options


def error_text(error: Exception) -> str:
    """Return the text of an error without the library's prefix."""
    if isinstance(error, ssl.SSLError):
        return tls_error_text(error)
    if isinstance(error, TimeoutError):
        return "no response in time"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error).removeprefix("nats: ").strip("'") or type(error).__name__


class PublishRules(NamedTuple):
    """Rules for the messages that a connection publishes.

    `guard` is called before messages are sent, and raises an error if that is forbidden. `vanished_ms`: how long sent data
    may stay unacknowledged before the kernel closes the connection; None means the system's default.
    """

    guard: Callable[[], None] = lambda: None
    vanished_ms: int | None = None


ANY: Final = PublishRules()


class ClientThread:
    """A connection to the first server of a cluster that responds, and the thread of its event loop.

    The first call opens the connection; after a loss, the next call reopens it. `woken` is set by every error outside a
    response, and by each acknowledgement of an `ItemPublisher`. `complaint` is the last error of the server or the socket.
    """

    def __init__(self, settings: ClusterSettings, name: str, rules: PublishRules) -> None:
        self.settings = settings
        self._vanished_ms = rules.vanished_ms
        self.complaint: str | None = None
        self.woken: asyncio.Event
        # The subjects of the requests that await a response, in lower case like nats-py's errors.
        self._pending: dict[asyncio.Future[str], str] = {}
        self._name = name
        self._client: SecuredClient | None = None
        self._runner: asyncio.Runner | None = None
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """Close the connection and end its thread; do nothing if it is not open."""
        if self._runner is None or self._thread is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._runner.get_loop().call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._runner = self._thread = self._client = None

    @property
    def is_lost(self) -> bool:
        """Whether an opened connection was lost, so that the next call reopens it."""
        return self._client is not None and self._client.is_closed

    def connected(self) -> Client:
        """Return the open connection; reopen a lost one."""
        if self._client is None or self.is_lost:
            seconds = self.settings.connect_timeout_seconds * len(self.settings.servers)
            self._client = self._submit(self._connect(), seconds)
        return self._client

    def run(self, work: Coroutine[Any, Any, T], timeout_seconds: float = REQUEST_SECONDS) -> T:
        """Run a coroutine in the connection's thread and wait for its result.

        Raises TransientError if the connection is lost or the server does not respond in time.
        """
        try:
            self.connected()
        except BaseException:
            work.close()
            raise
        return self._submit(work, timeout_seconds)

    # ----------------------------------------------------------------------------- in the connection's own thread

    def opened(self) -> Client:
        """Return the open connection; raises RunError if it is closed."""
        if self._client is None:
            raise RunError(f"{self.settings.label}: the connection is closed")
        return self._client

    async def ask(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> Msg:
        """Return the response to a request.

        Raises ApiError if the subject has no responder, PermissionDeniedError if the user lacks the permission, and
        TransientError if the connection is lost or the server does not respond in time.
        """
        request = self.opened().request(subject, payload, timeout=REQUEST_SECONDS, headers=headers)
        try:
            return await self.heed(subject, request, subject)
        except nats.errors.NoRespondersError:
            text = f"{self.settings.label}: {subject}: no responder ({no_responder_hint(self.settings)})"
            raise ApiError(text, NO_RESPONDERS) from None
        except nats.errors.TimeoutError:
            raise TransientError(
                f"{self.settings.label}: {subject}: no response within {REQUEST_SECONDS:.0f} s"
            ) from None

    async def heed(self, about: str, requests: Coroutine[Any, Any, T], subject: str = "") -> T:
        """Return the result of requests, unless the server complains meanwhile; `about` begins the error's text.

        With a `subject`, a complaint about the permission for another one does not count.

        Raises PermissionDeniedError if the user lacks a permission, TransientError if the connection is lost.
        """
        if not self._pending:
            self.complaint = None
        answer = asyncio.ensure_future(requests)
        complaint: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pending[complaint] = subject.lower()
        try:
            # The server reports a missing permission as an error of the connection, and never sends a response.
            await asyncio.wait((answer, complaint), return_when=asyncio.FIRST_COMPLETED)
            if complaint.done() and not answer.done():
                raise _complaint_error(f"{self.settings.label}: {about}: {complaint.result()}")
            return await answer
        finally:
            del self._pending[complaint]
            # What nats-py makes of the end is nobody's error; asyncio would log it.
            answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            answer.cancel()

    def _complain(self, line: str) -> None:
        """Pass an error of the server or the socket on to the pending requests; a refused subject to its own request."""
        self.complaint = line
        self.woken.set()
        refused = _REFUSED.search(line.lower())
        # A server names a subject of its own domain by `$JS.API`.
        own = refused[1].replace("$js.", f"$js.{self.settings.domain}.".lower(), 1) if refused else ""
        for complaint, subject in self._pending.items():
            if not complaint.done() and (refused is None or subject in {"", refused[1], own}):
                complaint.set_result(line)

    async def send(self, items: Iterable[tuple[str, bytes]]) -> None:
        """Publish (subject, payload) without a reply, and wait until the server has processed them.

        Raises PermissionDeniedError if the user may not publish one of them.
        """
        client, self.complaint = self.opened(), None
        for subject, payload in items:
            await client.publish(subject, payload)
        # The PING of nats-py's first flush overtakes messages that wait in its buffer; the second follows them.
        for _ in range(2):
            await client.flush(int(REQUEST_SECONDS))
        if self.complaint:
            raise _complaint_error(f"{self.settings.label}: {self.complaint}")

    async def _serve(self) -> None:
        await self._ended.wait()
        if self._client is not None:
            await self._client.close_soon(_CLOSE_SECONDS)

    async def _connect(self) -> SecuredClient:
        problems = []
        options = secure_options(self.settings)
        for server in self.settings.servers:
            client, self.complaint = SecuredClient(self.settings), None
            try:
                await asyncio.wait_for(self._connect_to(client, server, options), self.settings.connect_timeout_seconds)
            except (OSError, TimeoutError, nats.errors.Error) as error:
                # nats-py waits forever for a connection on which TLS failed.
                await client.close_soon(_CLOSE_AT_ONCE_SECONDS)
                hint = silence_hint(self.settings) if isinstance(error, TimeoutError) else ""
                problem = self.complaint or error_text(error)
                if "authorization violation" in problem.lower():
                    hint = " (correct the login in the URL)"
                problems.append(f"{server}: {problem}{hint}")
            else:
                client.bound_delivery(self._vanished_ms)
                return client
        raise TransientError(f"cannot connect to NATS: {'; '.join(problems)}")

    async def _connect_to(self, client: Client, server: str, options: dict[str, Any]) -> None:
        async def on_error(error: Exception) -> None:
            self._complain(error_text(error))

        async def on_closed() -> None:
            if client is self._client:
                # A refused request before has nothing to do with it.
                before = self.complaint or ""
                self._complain("connection lost" if _REFUSED.search(before.lower()) else before or "connection lost")

        await client.connect(
            servers=f"nats://{server}",
            name=self._name,
            # Our own timeout around the call is exact.
            connect_timeout=math.ceil(self.settings.connect_timeout_seconds) + 1,
            # Makes nats-py read the response to CONNECT before it writes more: otherwise a reset may overtake the
            # server's error about wrong credentials.
            verbose=True,
            # The next call reopens a lost connection: waiting here would only hide the loss.
            allow_reconnect=False,
            # The lowest number that nats-py counts: 0 means no limit.
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            error_cb=on_error,
            **options,
            closed_cb=on_closed,
        )

    def _submit(self, work: Coroutine[Any, Any, T], timeout_seconds: float) -> T:
        try:
            loop = self._running_loop()
        except OSError as error:
            work.close()
            raise TransientError(f"{self.settings.label}: {error_text(error)}") from None
        try:
            # The coroutine has its own deadline; this one guards against a hanging thread.
            return asyncio.run_coroutine_threadsafe(work, loop).result(timeout_seconds + 2 * REQUEST_SECONDS)
        except (OSError, TimeoutError, nats.errors.Error) as error:
            raise TransientError(f"{self.settings.label}: {self.complaint or error_text(error)}") from None

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of the connection's thread, which the first call starts.

        Raises OSError if the process may open no more files.
        """
        if self._runner is None:
            self._runner = self._start()
        return self._runner.get_loop()

    def _start(self) -> asyncio.Runner:
        # The loop is made here: an error in the thread would leave nobody to answer the caller.
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        runner.get_loop()
        self._ended, self.woken = asyncio.Event(), asyncio.Event()
        logging.getLogger("asyncio").addFilter(_worth_logging)

        def serve() -> None:
            with runner:
                runner.run(self._serve())

        self._thread = threading.Thread(target=serve, name=self._name, daemon=True)
        self._thread.start()
        return runner


def _complaint_error(line: str) -> RunError:
    """Return the error for a server's complaint; only a missing permission is permanent."""
    return PermissionDeniedError(denied_text(line)) if "violation" in line.lower() else TransientError(line)


def _worth_logging(record: logging.LogRecord) -> bool:
    """Drop a meaningless line that asyncio logs at the end of each TLS connection of nats-py."""
    return "eof_received() has no effect" not in record.getMessage()
