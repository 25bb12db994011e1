"""A Spark cluster that shares nothing with us: a standalone master, workers, and optionally a Connect server.

If the tests run as root, its processes run as the user `nobody`, in a separate folder, with a Python that has only the
packages that workers need. Otherwise, or if that user cannot read the packages, they run as our user with another home
and working directory.
"""

import contextlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import psutil
import pyspark

from sr_assets.adapters.spark.config import JAVA_OPTIONS, find_java
from sr_assets_tests.rig import PATIENCE_SECONDS, wait_until
from sr_assets_tests.servers import free_port

_USER = "nobody"
#: The packages that docs/hosts.md requires for a worker's Python, with their dependencies.
_NEEDED = ("pyspark", "py4j", "pyarrow", "numpy", "numpy.libs", "orjson")
_SPARK = Path(pyspark.__file__).parent
_DEPLOY = "org.apache.spark.deploy"
_CONNECT = "org.apache.spark.sql.connect.service.SparkConnectServer"
HOST = "127.0.0.1"


class SparkCluster:
    """A master and two workers of one core each, inside `with`."""

    def __init__(self) -> None:
        """Create its folder without starting a process."""
        self.folder = Path(tempfile.mkdtemp(prefix="spark-cluster-"))
        self._port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.user: str | None = None
        self.ui = ""

    @property
    def mode(self) -> str:
        """The cluster's value of `spark.mode`."""
        return f"spark://{HOST}:{self._port}"

    @property
    def python(self) -> str:
        """The workers' Python, the value of `spark.pyspark.python`."""
        return str(self.folder / "bin" / "python3")

    @property
    def config(self) -> dict[str, str]:
        """The options of `spark.config` for the cluster."""
        return {"spark.pyspark.python": self.python}

    def __enter__(self) -> Self:
        """Start the master and two workers, and wait until both are registered."""
        self._prepare()
        daemons = ["--host", HOST, "--webui-port", "0"]
        self._start("master", f"{_DEPLOY}.master.Master", *daemons, "--port", str(self._port))
        wait_until(lambda: listens(self._port), "the master")
        for number in (1, 2):
            self.start_worker(f"worker{number}")
        for number in (1, 2):
            self._await_line(f"worker{number}", "Successfully registered")
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all processes and remove the folder."""
        self._kill([each for process in self._processes for each in family(process.pid)])
        for process in self._processes:
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start_worker(self, name: str) -> None:
        """Start a worker with one core."""
        shape = ["--cores", "1", "--memory", "1g", "--work-dir", str(self.folder / "work" / name)]
        self._start(name, f"{_DEPLOY}.worker.Worker", "--host", HOST, "--webui-port", "0", *shape, self.mode)

    @contextlib.contextmanager
    def connect(self) -> Iterator[str]:
        """Run a Connect server, whose tasks run on the workers, inside `with`; yield its value of `spark.mode`."""
        port, shown, events = free_port(), free_port(), self.folder / "work" / "events"
        events.mkdir()
        events.chmod(0o777)
        options = {
            "spark.master": self.mode,
            "spark.connect.grpc.binding.address": HOST,
            "spark.connect.grpc.binding.port": str(port),
            "spark.driver.host": HOST,
            "spark.driver.extraJavaOptions": JAVA_OPTIONS,
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": JAVA_OPTIONS,
            "spark.ui.port": str(shown),
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": events.as_uri(),
        }
        settings = [part for key, value in options.items() for part in ("--conf", f"{key}={value}")]
        self._start(
            "connect", f"{_DEPLOY}.SparkSubmit", *settings, "--class", _CONNECT, "spark-internal", memory="768m"
        )
        server = self._processes[-1]
        try:
            wait_until(lambda: server.poll() is not None or listens(port), "the Connect server")
            assert server.poll() is None, (self.folder / "connect.log").read_text()
            self.ui = f"http://{HOST}:{shown}"
            yield f"sc://{HOST}:{port}"
        finally:
            self._kill(family(server.pid))

    @property
    def events(self) -> str:
        """The event log of the Connect server."""
        files = (file for file in (self.folder / "work" / "events").rglob("*") if file.is_file())
        return "".join(file.read_text(errors="replace") for file in files)

    def shown(self) -> str:
        """Return the public information of the Connect server: the pages and data of its UI."""
        root = f"{self.ui}/api/v1/applications"
        (application,) = json.loads(fetched(root))
        parts = ("environment", "sql?details=true&planDescription=true&length=1000", "stages?details=true", "jobs")
        return "".join(fetched(f"{root}/{application['id']}/{part}") for part in parts) + fetched(f"{self.ui}/connect/")

    def logs(self) -> str:
        """Return the logs of the cluster's processes and executors."""
        files = [*self.folder.rglob("*.log"), *self.folder.rglob("std*")]
        return "".join(file.read_text(errors="replace") for file in files)

    def python_that(self, does: str, code: str) -> str:
        """Return another Python for the workers, which runs this code at its start."""
        folder = self.folder / f"that-{does}"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(code)
        program = self.folder / "bin" / folder.name
        program.write_text(Path(self.python).read_text().replace('PYTHONPATH="', f'PYTHONPATH="{folder}:'))
        for path in (folder, program):
            path.chmod(0o755)
        (folder / "sitecustomize.py").chmod(0o644)
        return str(program)

    def python_without(self, package: str) -> str:
        """Return another Python for the workers, without a package."""
        packages = self.folder / f"without-{package}"
        packages.mkdir()
        for link in (self.folder / "packages").iterdir():
            if link.name != package:
                (packages / link.name).symlink_to(link.readlink())
        program = self.folder / "bin" / packages.name
        program.write_text(Path(self.python).read_text().replace(str(self.folder / "packages"), str(packages)))
        program.chmod(0o755)
        packages.chmod(0o755)
        return str(program)

    def executors(self) -> list[psutil.Process]:
        """Return the executors' Java processes."""
        return self._named("CoarseGrainedExecutorBackend")

    def workers(self) -> list[psutil.Process]:
        """Return the workers' Java processes."""
        return self._named("worker.Worker")

    def pythons(self) -> list[psutil.Process]:
        """Return the Python processes of the executors."""
        return self._named("pyspark.daemon")

    def connected_to(self, port: int) -> list[psutil.Process]:
        """Return the Python processes of the executors that have a connection to a port of this host."""
        connected = []
        for process in self.pythons():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(each.raddr and each.raddr.port == port for each in process.net_connections("tcp")):
                    connected.append(process)
        return connected

    def kill(self, process: psutil.Process) -> None:
        """Kill a process and its descendants."""
        self._kill(family(process.pid))

    def _named(self, text: str) -> list[psutil.Process]:
        processes = []
        for process in (each for parent in self._processes for each in family(parent.pid)):
            with contextlib.suppress(psutil.Error):
                if text in " ".join(process.cmdline()) and process.name() != "bash":
                    processes.append(process)
        return processes

    def _kill(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(processes, timeout=PATIENCE_SECONDS)

    def _prepare(self) -> None:
        """Create the folder: a Python, a Java, and links to the packages that workers need."""
        packages, programs = self.folder / "packages", self.folder / "bin"
        packages.mkdir()
        programs.mkdir()
        (self.folder / "work").mkdir()
        for name in _NEEDED:
            if (package := Path(sysconfig.get_path("purelib"), name)).exists():
                (packages / name).symlink_to(package)
        self._java = find_java(self.folder)
        self.folder.chmod(0o755)
        for path in [self.folder, *self.folder.rglob("*")]:
            if not path.is_symlink():
                path.chmod(0o755)
        for user in (_USER, None):
            for python in (os.path.realpath(sys.executable), f"/usr/bin/python3.{sys.version_info.minor}"):
                if (user is None or os.geteuid() == 0) and self._works(python, packages, user):
                    self.user = user
                    self._give_away()
                    return
        raise AssertionError("no Python imports the packages that workers need")

    def _works(self, python: str, packages: Path, user: str | None) -> bool:
        """Write the workers' Python, and return whether a user can run it."""
        program = Path(self.python)
        program.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}:$PYTHONPATH" exec "{python}" -s "$@"\n')
        program.chmod(0o755)
        needed = [name for name in _NEEDED if "." not in name]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            tried = [self.python, "-c", f"import {', '.join(needed)}"]
            done = subprocess.run(
                tried,
                user=user,
                cwd=self.folder,
                env=self._environ,
                capture_output=True,
                check=False,
                timeout=PATIENCE_SECONDS,
            )
            return done.returncode == 0
        return False

    def _give_away(self) -> None:
        if self.user is not None:
            entry = pwd.getpwnam(self.user)
            for path in [self.folder, *self.folder.rglob("*")]:
                os.chown(path, entry.pw_uid, entry.pw_gid, follow_symlinks=False)

    @property
    def _environ(self) -> dict[str, str]:
        return {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder / "work"),
            "JAVA_HOME": str(self._java),
            "SPARK_HOME": str(_SPARK),
            "SPARK_CONF_DIR": str(self.folder / "work"),
            "SPARK_LOCAL_DIRS": str(self.folder / "work"),
            "SPARK_LOCAL_IP": HOST,
            # As the engine's: no process lasts until the optimizing compiler pays off.
            "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
            "PYSPARK_PYTHON": self.python,
            "PYTHONDONTWRITEBYTECODE": "1",
            "MALLOC_ARENA_MAX": "2",
        }

    def _start(self, name: str, main: str, *arguments: str, memory: str = "256m") -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(_SPARK / "bin" / "spark-class"), main, *arguments],
                env={**self._environ, "SPARK_DAEMON_MEMORY": memory},
                cwd=self.folder / "work",
                user=self.user,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._processes.append(process)

    def _await_line(self, name: str, text: str) -> None:
        wait_until(lambda: text in (self.folder / f"{name}.log").read_text(), f"{name}: {text}")


def fetched(url: str) -> str:
    """Return a page."""
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as page:
        return str(page.read().decode())


def family(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants, or none if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def listens(port: int) -> bool:
    """Return whether a process listens on a port."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0
