"""Consul for tests: the binary `consul` where the host has it, and a stand-in with the part of the HTTP API that we use.

The stand-in passes the same tests as Consul. Debian 11 and HashiCorp's repository have a package `consul`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from sr_assets_tests.rig import PATIENCE_SECONDS, wait_until

BINARY = shutil.which("consul")
_WAIT_SECONDS = 30


@contextlib.contextmanager
def real_consul(folder: Path) -> Iterator[str]:
    """Run Consul's agent as a single server; yield its URL."""
    assert BINARY is not None
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        http, server, lan, wan = (probe.getsockname()[1] for probe in probes)
    ports = {"http": http, "server": server, "serf_lan": lan, "serf_wan": wan, "dns": -1, "grpc": -1, "grpc_tls": -1}
    options = {"server": True, "bootstrap": True, "bind_addr": "127.0.0.1", "data_dir": str(folder), "ports": ports}
    file = folder / "consul.json"
    file.write_text(json.dumps(options))
    with (folder / "log").open("w") as log:
        agent = subprocess.Popen([BINARY, "agent", "-config-file", str(file)], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{http}"
        wait_until(lambda: _has_leader(url), "Consul to elect itself")
        yield url
    finally:
        agent.kill()
        agent.wait()


def _has_leader(url: str) -> bool:
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"{url}/v1/status/leader", timeout=PATIENCE_SECONDS) as response,
    ):
        return len(response.read()) > 4
    return False


class _Store(BaseHTTPRequestHandler):
    """`/v1/kv`: GET with `raw`, `keys`, `index` and `wait`; PUT; DELETE. A token `wrong` is refused."""

    protocol_version = "HTTP/1.1"
    values: dict[str, bytes]
    changed: threading.Condition
    index: list[int]

    def do_GET(self) -> None:
        key, query = self._asked()
        with self.changed:
            if (index := int(query.get("index", ["0"])[0])) and key is not None:
                self.changed.wait_for(lambda: self.index[0] > index, _WAIT_SECONDS)
            if key is None:
                return
            if "keys" in query:
                keys = sorted(each for each in self.values if each.startswith(key))
                self._answer(200 if keys else 404, json.dumps(keys).encode() if keys else b"")
            elif key in self.values:
                self._answer(200, self.values[key])
            else:
                self._answer(404, b"")

    def do_PUT(self) -> None:
        key, _ = self._asked()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if key is not None:
            self._change(lambda: self.values.update({key: body}))

    def do_DELETE(self) -> None:
        key, _ = self._asked()
        if key is not None:
            self._change(lambda: self.values.pop(key, None))

    def _change(self, change: object) -> None:
        with self.changed:
            assert callable(change)
            change()
            self.index[0] += 1
            self.changed.notify_all()
            self._answer(200, b"true")

    def _asked(self) -> tuple[str | None, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        if self.headers.get("X-Consul-Token") == "wrong":
            self._answer(403, b"ACL not found")
            return None, {}
        return unquote(parts.path.removeprefix("/v1/kv/")), parse_qs(parts.query, keep_blank_values=True)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("X-Consul-Index", str(self.index[0]))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def stand_in(port: int = 0) -> Iterator[str]:
    """Serve the stand-in in a thread, by default on a free port; yield its URL."""
    shared = {"values": {}, "changed": threading.Condition(), "index": [1]}
    server = ThreadingHTTPServer(("127.0.0.1", port), type("Store", (_Store,), shared))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
