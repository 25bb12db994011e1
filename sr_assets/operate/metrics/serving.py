"""Who gets the metrics: Prometheus by HTTP, the node exporter by a file.

Neither ever stops the pipeline: a port that is taken or a folder that is gone is one line. Not here: the text (`reading`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET6, getaddrinfo
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, Final

from sr_assets.domain.errors import RunError
from sr_assets.domain.exposition import CONTENT_TYPE
from sr_assets.operate.metrics.reading import Exposition
from sr_assets.operate.report import print_line, print_warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sr_assets.settings import MetricsSettings, Settings

PATH: Final = "/metrics"
#: What `sr-assets metrics` serves when no port is configured: that of the Stream Replicator's shipped configuration.
DEFAULT_PORT: Final = 9100
_TEXTFILE_SECONDS: Final = 15.0
#: How often it is seen whether the published tables have changed; asking them takes at most this share of a core.
_RENEW_SECONDS: Final = 1.0
_RENEW_SHARE: Final = 0.02
_CLIENT_SECONDS: Final = 10.0


class MetricsServer:
    """An HTTP server for `/metrics` in threads of this process, from `with` to its end. Raises RunError."""

    def __init__(self, exposition: Exposition, host: str, port: int) -> None:
        """Listen; `port` 0 takes a free one."""
        try:
            family, *_, address = getaddrinfo(host, port)[0]
            kind = type("Server", (_Server,), {"address_family": family, "exposition": exposition})
            self._server: _Server = kind((address[0], port), _Handler)
        except OSError as error:
            raise RunError(
                f"metrics cannot be served on {host}:{port} ({error.strerror or error}); set metrics.port to a free one"
            ) from None
        self._exposition, self._ended = exposition, threading.Event()
        shown = f"[{host}]" if family == AF_INET6 else host
        self.url = f"http://{shown}:{self._server.server_address[1]}{PATH}"

    def __enter__(self) -> str:
        """Serve; returns the URL."""
        self._exposition.renew()
        threading.Thread(target=self._keep_new, name="metrics tables", daemon=True).start()
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        return self.url

    def _keep_new(self) -> None:
        pause_seconds = _RENEW_SECONDS
        while not self._ended.wait(pause_seconds):
            started = time.monotonic()
            self._exposition.renew()
            pause_seconds = max(_RENEW_SECONDS, (time.monotonic() - started) / _RENEW_SHARE)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    exposition: Exposition

    def handle_error(self, *_: Any) -> None:
        """Say nothing about a client that went away."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CLIENT_SECONDS

    def do_GET(self) -> None:
        """Answer with the metrics, and everything else with where they are."""
        if self.path.partition("?")[0] == PATH:
            self._answer(200, CONTENT_TYPE, self.server.exposition.text())
        else:
            self._answer(404, "text/plain; charset=utf-8", f"metrics are at {PATH}\n")

    do_HEAD = do_GET  # noqa: N815  the name is the base class's

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing: a scrape is nothing worth a line."""


@contextlib.contextmanager
def metrics_beside(settings: Settings) -> Iterator[str | None]:
    """Serve metrics and write their file beside other work, as configured; yields the URL, None without one."""
    configured, exposition = settings.metrics, Exposition(settings)
    with contextlib.ExitStack() as stack:
        url = None
        if configured.port is not None:
            try:
                url = stack.enter_context(MetricsServer(exposition, configured.host, configured.port))
            except RunError as error:
                print_warning(str(error))
        stack.enter_context(_textfile_beside(exposition, configured))
        yield url


def serve_metrics(settings: Settings) -> None:
    """Serve metrics, and write their file, until an interrupt. Raises RunError when the port cannot be used."""
    configured, exposition = settings.metrics, Exposition(settings)
    port = DEFAULT_PORT if configured.port is None else configured.port
    with MetricsServer(exposition, configured.host, port) as url, _textfile_beside(exposition, configured):
        print_line(f"Metrics: {url}  (Ctrl-C stops it)")
        while True:
            time.sleep(3600)


def write_textfile_once(settings: Settings) -> None:
    """Write the file for the node exporter, if one is configured; a failure is one line."""
    if settings.metrics.textfile is not None and (problem := _write(Exposition(settings), settings.metrics.textfile)):
        print_warning(problem)


@contextlib.contextmanager
def _textfile_beside(exposition: Exposition, configured: MetricsSettings) -> Iterator[None]:
    """Write the file for the node exporter every 15 seconds, in a thread; what goes wrong is said once, until it is well."""
    file, ended = configured.textfile, threading.Event()
    if file is None:
        yield
        return

    def keep_writing() -> None:
        said = None
        while True:
            problem = _write(exposition, file)
            if problem is not None and problem != said:
                print_warning(problem)
            said = problem
            if ended.wait(_TEXTFILE_SECONDS):
                return

    thread = threading.Thread(target=keep_writing, name="metrics file", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_CLIENT_SECONDS)


def _write(exposition: Exposition, file: Path) -> str | None:
    """Replace the file, atomically, by one that everybody may read; returns what went wrong."""
    draft = None
    try:
        # The node exporter reads what ends in .prom: a draft does not.
        with NamedTemporaryFile(
            "w", dir=file.parent, prefix=f".{file.name}.", delete=False, encoding="utf-8"
        ) as output:
            draft = Path(output.name)
            exposition.renew()
            output.write(exposition.text())
        draft.chmod(0o644)
        draft.replace(file)
    except OSError as error:
        if draft is not None:
            draft.unlink(missing_ok=True)
        return f"metrics.textfile {file}: cannot be written ({error.strerror}); the next attempt is made as usual"
    return None
