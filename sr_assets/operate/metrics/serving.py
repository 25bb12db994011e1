"""The HTTP server of metrics and status page, and the text file for the node exporter.

A problem with either never stops replication: a busy port or a missing folder logs one line.
"""

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET6, SHUT_RDWR, getaddrinfo, socket
from types import MappingProxyType
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.connection_table import peer_user
from sr_assets.adapters.logs import print_warning
from sr_assets.adapters.private import write_private
from sr_assets.adapters.threads import BackgroundThread
from sr_assets.domain.errors import RunError
from sr_assets.domain.exposition import CONTENT_TYPE
from sr_assets.operate.bounded import shut_after
from sr_assets.operate.health import HEALTH_PATHS, Health
from sr_assets.operate.metrics.samples import Exposition
from sr_assets.operate.page import PAGE_HEADERS, PAGE_PATHS, PagePublisher
from sr_assets.operate.run_output import print_line
from sr_assets.settings import MetricsSettings, Settings

PATH: Final = "/metrics"
#: The default port of `sr-assets metrics`, as in the Stream Replicator's shipped configuration.
DEFAULT_PORT: Final = 9100
_TEXTFILE_SECONDS: Final = 15.0
#: The interval of checks for new published tables, and the share of a core that querying them may take.
_RENEW_SECONDS: Final = 1.0
_RENEW_SHARE: Final = 0.02
_CLIENT_SECONDS: Final = 10.0
_MOST_CONNECTIONS: Final = 32
#: The share of a core for finding out which user is at the other end of a connection.
_LOOKUP_SHARE: Final = 0.1
_TURN_SECONDS: Final = 0.5
_PLAIN: Final = "text/plain; charset=utf-8"


_Request = socket | tuple[bytes, socket]
_Address = tuple[str, int]


class MetricsServer:
    """An HTTP server for metrics, health and status page in threads of this process, as a context manager."""

    def __init__(
        self,
        exposition: Exposition | None,
        host: str,
        port: int,
        page: PagePublisher | None = None,
        health: Health | None = None,
    ) -> None:
        """Listen on `port` (0: a free one); raises RunError if that is impossible. Only given parts are served."""
        try:
            family, *_, address = getaddrinfo(host, port)[0]
            kind = type(
                "Server",
                (_Server,),
                {"address_family": family, "exposition": exposition, "health": health, "page": page},
            )
            self._server: _Server = kind((address[0], port), _Handler)
        except (OSError, UnicodeError) as error:
            # UnicodeError: the host has an empty label or one that is too long.
            problem = getattr(error, "strerror", None) or error
            block = "metrics" if exposition else "health"
            raise RunError(
                f"{block}: cannot listen on {host}:{port} ({problem}); set {block}.port to a free port and "
                f"{block}.host to an address of this machine"
            ) from None
        self._exposition, self._threads = exposition, contextlib.ExitStack()
        shown = f"[{host}]" if family == AF_INET6 else host
        self.url = f"http://{shown}:{self._server.server_address[1]}{PATH}"

    def __enter__(self) -> str:
        """Start serving and return the URL."""
        if exposition := self._exposition:
            exposition.renew()
            self._threads.enter_context(
                BackgroundThread("metrics tables", lambda: self._keep_new(exposition), join_seconds=0.0)
            )
        self._threads.enter_context(BackgroundThread("metrics", self._serve))
        return self.url

    def _keep_new(self, exposition: Exposition) -> Generator[float]:
        pause_seconds = _RENEW_SECONDS
        while True:
            yield pause_seconds
            started = times.monotonic()
            exposition.renew()
            pause_seconds = max(_RENEW_SECONDS, (times.monotonic() - started) / _RENEW_SHARE)

    def _serve(self) -> Generator[float]:
        while True:
            self._server.handle_request()
            yield 0.0

    def __exit__(self, *_: object) -> None:
        self._threads.close()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    #: The longest wait for a request.
    timeout = _TURN_SECONDS
    #: The connections that may wait to be accepted.
    request_queue_size = _MOST_CONNECTIONS
    exposition: Exposition | None
    health: Health | None
    page: PagePublisher | None

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        #: The connections without a complete request, in the order of their arrival.
        self._waiting: OrderedDict[_Request, None] = OrderedDict()
        self._guard, self._next_lookup = threading.Lock(), 0.0
        super().__init__(address, handler)

    def process_request(self, request: _Request, client_address: _Address) -> None:
        """Serve a connection in a thread, if need be instead of the oldest that has sent no complete request.

        Descriptors are for the work, so with a request from each of the others it is closed.
        """
        if not self._free.acquire(blocking=False) and not self._take_oldest():
            self.shutdown_request(request)
            return
        try:
            self._waiting[request] = None
            super().process_request(request, client_address)
        except BaseException:  # no thread serves it
            self._waiting.pop(request, None)
            self._free.release()
            raise

    def _take_oldest(self) -> bool:
        """End the oldest connection without a complete request; return whether its place is free."""
        try:
            oldest, _ = self._waiting.popitem(last=False)
        except KeyError:
            return False
        with contextlib.suppress(OSError):
            assert isinstance(oldest, socket)
            oldest.shutdown(SHUT_RDWR)
        return self._free.acquire(timeout=_TURN_SECONDS)

    def note_request(self, request: _Request) -> None:
        """Note that a connection has sent a complete request."""
        self._waiting.pop(request, None)

    def process_request_thread(self, request: _Request, client_address: _Address) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._waiting.pop(request, None)
            self._free.release()

    def is_owner(self, client: tuple[str, int], server: tuple[str, int]) -> bool:
        """Return whether this user or root is at the other end of a connection, if the system reveals it.

        Other users control the size of the table that it searches, so all searches together take at most a share of a core.
        """
        with self._guard:
            times.sleep(max(0.0, self._next_lookup - times.monotonic()))
            began = times.monotonic()
            user = peer_user(client, server)
            self._next_lookup = times.monotonic() + (times.monotonic() - began) / _LOOKUP_SHARE
        return user in (None, 0, os.geteuid())

    def handle_error(self, *_: object) -> None:
        """Ignore clients that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CLIENT_SECONDS

    def setup(self) -> None:
        """Limit the time in which a client sends its whole request."""
        super().setup()
        self._limit = shut_after(_CLIENT_SECONDS, lambda: self.connection)

    def finish(self) -> None:
        self._limit.cancel()
        super().finish()

    def do_GET(self) -> None:
        """Serve the configured parts; other paths get a 404 that names them."""
        self._limit.cancel()
        self.server.note_request(self.connection)
        path, page = self.path.partition("?")[0], self.server.page
        exposition, health = self.server.exposition, self.server.health
        if health and path in HEALTH_PATHS:
            code, text = health.answer(path, in_full=health.is_public or self._is_owner())
            self._answer(code, _PLAIN, text)
        elif exposition and path == PATH:
            self._answer(200, CONTENT_TYPE, exposition.text())
        elif page is None or path not in PAGE_PATHS:
            parts = [
                *([f"metrics are at {PATH}"] if exposition else []),
                *([f"the status page is at {PAGE_PATHS[-1]}"] if page else []),
                *([f"health is at {' and '.join(HEALTH_PATHS)}"] if health else []),
            ]
            self._answer(404, _PLAIN, f"{', '.join(parts)}\n")
        elif refusal := page.refusal(self.headers.items(), self._is_owner):
            self._answer(403, _PLAIN, f"{refusal}\n")
        else:
            self._answer(200, "text/html; charset=utf-8", page.page(), PAGE_HEADERS)

    def _is_owner(self) -> bool:
        return self.server.is_owner(self.client_address, self.connection.getsockname())

    do_HEAD = do_GET  # noqa: N815  the name is the base class's

    def _answer(self, code: int, kind: str, text: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log no requests."""


def page_url(url: str) -> str:
    """Return the status page's URL for a metrics URL."""
    return url.removesuffix(PATH) + PAGE_PATHS[-1]


@contextlib.contextmanager
def metrics_beside(settings: Settings, health: Health | None = None) -> Iterator[str | None]:
    """Serve metrics and health and write the metrics' file in the background, as configured.

    Yields the URL of the metrics, or None without a metrics port.
    """
    configured, exposition = settings.metrics, Exposition(settings)
    with contextlib.ExitStack() as stack:
        url = None
        try:
            if configured.port is not None:
                page = PagePublisher(settings)
                server = MetricsServer(exposition, configured.host, configured.port, page, health)
                url = stack.enter_context(server)
            elif health and settings.health.port is not None:
                stack.enter_context(MetricsServer(None, settings.health.host, settings.health.port, health=health))
        except RunError as error:
            print_warning(str(error))
        stack.enter_context(_textfile_beside(exposition, configured))
        yield url


def serve_metrics(settings: Settings) -> None:
    """Serve metrics and write their file until an interrupt. Raises RunError if the port is unusable."""
    configured, exposition = settings.metrics, Exposition(settings)
    port = DEFAULT_PORT if configured.port is None else configured.port
    server = MetricsServer(exposition, configured.host, port, PagePublisher(settings), Health(settings))
    with server as url, _textfile_beside(exposition, configured):
        print_line(f"Metrics: {url}, status page: {page_url(url)}  (Ctrl-C stops it)")
        while True:
            times.sleep(3600)


def write_textfile_once(settings: Settings) -> None:
    """Write the file for the node exporter, if configured; a failure prints one warning."""
    if settings.metrics.textfile is not None and (problem := _write(Exposition(settings), settings.metrics.textfile)):
        print_warning(problem)


@contextlib.contextmanager
def _textfile_beside(exposition: Exposition, configured: MetricsSettings) -> Iterator[None]:
    """Write the file for the node exporter every 15 seconds in a thread; print a new problem once."""
    file = configured.textfile
    if file is None:
        yield
        return

    def keep_writing() -> Generator[float]:
        printed = None
        while True:
            problem = _write(exposition, file)
            if problem is not None and problem != printed:
                print_warning(problem)
            printed = problem
            yield _TEXTFILE_SECONDS

    with BackgroundThread("metrics file", keep_writing):
        yield


def _write(exposition: Exposition, file: Path) -> str | None:
    """Replace the file atomically, readable by all users; returns a warning on failure."""
    try:
        exposition.renew()
        # The node exporter reads files that end in .prom; the draft does not.
        write_private(file, exposition.text(), 0o644)
    except OSError as error:
        return f"metrics.textfile {file}: cannot be written ({error.strerror}); retrying at the next interval"
    return None
