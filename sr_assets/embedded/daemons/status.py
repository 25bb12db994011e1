"""The fleet's counters by HTTP: `/debug/vars` as in Choria's emulator, and `/metrics` for Prometheus."""

import json
import os
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from sr_assets.domain.errors import RunError
from sr_assets.domain.exposition import CONTENT_TYPE, MetricKind, Sample, expose
from sr_assets.embedded.daemons.job import MEANING, Counters, Job

_PREFIX: Final = "sr_assets_emulate_"
_VARS: Final = "/debug/vars"
_METRICS: Final = "/metrics"


class StatusServer:
    """Serves a fleet's counters on a port of 127.0.0.1 (0: a free one), as a context manager that returns the URL."""

    def __init__(self, job: Job, counters: Callable[[], Counters], port: int) -> None:
        """Listen; raises RunError if the port is in use."""

        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0

            def do_GET(self) -> None:
                """Serve the two paths."""
                path = self.path.partition("?")[0]
                if path == _VARS:
                    self._reply(200, "application/json; charset=utf-8", json.dumps(_variables(job, counters())))
                elif path == _METRICS:
                    self._reply(200, CONTENT_TYPE, _metrics(job, counters()))
                else:
                    self._reply(404, "text/plain; charset=utf-8", f"counters are at {_VARS} and {_METRICS}\n")

            def _reply(self, code: int, kind: str, text: str) -> None:
                body = text.encode()
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise RunError(f"--http-port {port}: cannot listen: {error.strerror}; choose a free port") from None
        self._server.daemon_threads = True

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, name="status", daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _variables(job: Job, counters: Counters) -> dict[str, Any]:
    config = {
        "instances": job.plan.nodes,
        "agents": len(job.agents),
        "collectives": len(job.collectives),
        "processes": job.processes,
        "pid": os.getpid(),
    }
    return {"cmdline": sys.argv, "name": job.cluster.label, "config": config, **counters.as_dict()}


def _metrics(job: Job, counters: Counters) -> str:
    lines = [*expose(f"{_PREFIX}nodes", "gauge", "Nodes of the fleet.", [Sample("", job.plan.nodes)])]
    for name, value in counters.as_dict().items():
        text, suffix = MEANING[name][1], "_total" if MEANING[name][0] == "counter" else ""
        kind: MetricKind = "counter" if suffix else "gauge"
        lines += expose(f"{_PREFIX}{name}{suffix}", kind, text, [Sample("", value)])
    return "\n".join([*lines, ""])
