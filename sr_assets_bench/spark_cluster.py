"""A standalone Spark cluster on this machine: a master and workers, as separate processes."""

from __future__ import annotations

import contextlib
import subprocess
import time
from typing import TYPE_CHECKING, Final, Self

import psutil

from sr_assets.adapters.spark.config import child_environment
from sr_assets.adapters.spark.engine import spark_home
from sr_assets.embedded.nats_server import free_port

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

_HOST: Final = "127.0.0.1"
_DEPLOY: Final = "org.apache.spark.deploy"
_DAEMON_MEMORY: Final = "256m"
_START_SECONDS: Final = 180.0


class SparkCluster:
    """A cluster inside `with`; one folder contains its logs and the workers' folders."""

    def __init__(self, folder: Path, workers: int, cores: int = 1) -> None:
        """Create the folder. Each worker offers `cores`: it runs that many executors of one core."""
        self._folder, self._workers, self._cores = folder, workers, cores
        folder.mkdir()
        self._mode = f"spark://{_HOST}:{free_port()}"
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def mode(self) -> str:
        """The cluster's URL for `spark.mode`."""
        return self._mode

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The workers' processes, the parents of their executors."""
        return tuple(process.pid for process in self._processes[1:])

    def __enter__(self) -> Self:
        """Start all processes and wait until each worker is registered; raise SystemExit on failure."""
        port = self._mode.rpartition(":")[2]
        self._start("master", f"{_DEPLOY}.master.Master", "--port", port)
        self._await("master", "I have been elected leader")
        for name in (f"worker{number}" for number in range(1, self._workers + 1)):
            shape = ("--cores", str(self._cores), "--memory", f"{self._cores}g", "--work-dir", str(self._folder / name))
            self._start(name, f"{_DEPLOY}.worker.Worker", *shape, self._mode)
        for number in range(1, self._workers + 1):
            self._await(f"worker{number}", "Successfully registered")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill all processes."""
        for process in self._processes:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for each in family:
                # An executor ends with its worker.
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()

    def _start(self, name: str, main: str, *arguments: str) -> None:
        program = spark_home() / "bin" / "spark-class"
        environ = child_environment(self._folder) | {"SPARK_DAEMON_MEMORY": _DAEMON_MEMORY}
        with self._log(name).open("wb") as log:
            command = [str(program), main, "--host", _HOST, "--webui-port", "0", *arguments]
            self._processes.append(
                subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def _await(self, name: str, text: str) -> None:
        """Wait until a process logs a text."""
        ends = time.monotonic() + _START_SECONDS
        while text not in self._log(name).read_text(errors="replace"):
            if time.monotonic() > ends:
                raise SystemExit(f"Spark's {name} did not start: see {self._log(name)}")
            time.sleep(0.1)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"
