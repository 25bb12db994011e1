"""The services of `sr-assets up`: Dagster's code server, daemon and webserver as child processes.

Not here: stopping processes and signals (`processes`), the instance's folder (`instance`).
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from sr_assets.adapters.private import open_private
from sr_assets.domain.errors import RunError
from sr_assets.operate.instance import mark_start, prepare_instance, prepare_storage
from sr_assets.operate.processes import child_environment, signals_as_interrupt, stop_groups
from sr_assets.operate.report import print_line

if TYPE_CHECKING:
    from sr_assets.settings import Settings

_MODULE: Final = "sr_assets.definitions"
_LOOPBACK: Final = "127.0.0.1"
_START_SECONDS: Final = 180.0
_LOG_LEVELS: Final = {"debug": "debug", "info": "info", "warn": "warning", "error": "error"}


class Services:
    """The code server, the daemon and the webserver as child processes, from `with` to its end.

    Each leads a process group of its own, so Ctrl-C in a terminal reaches their owner only, who stops them in order: the
    daemon, which starts runs; the code server with the runs; the webserver. Raises RunError when one does not come up.
    """

    def __init__(self, settings: Settings, port: int, *, ui: bool = True) -> None:
        self._settings = settings
        self._port = port
        self._ui = ui
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        """Where the UI is."""
        return f"http://{_LOOPBACK}:{self._port}"

    def __enter__(self) -> Self:
        """Start the processes and wait until the UI answers."""
        folder = prepare_instance(self._settings)
        if self._ui:
            _refuse_used_port(self._port)
        prepare_storage(folder)
        try:
            self._start(folder)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, folder: Path) -> None:
        level = _LOG_LEVELS[self._settings.loglevel]
        code_port = _free_port()
        # Dagster looks for modules in the working directory first, which is the current folder if it is not given.
        served = ("-m", _MODULE, "-d", str(folder), "-h", _LOOPBACK, "-p", str(code_port), "--log-level", level)
        self._launch("code server", "dagster", "code-server", "start", *served)
        # The location has the name that a workspace of the module gives it: sensors and schedules keep their state under it.
        workspace = folder / "workspace.yaml"
        workspace.write_text(
            f"load_from:\n  - grpc_server: {{host: {_LOOPBACK}, port: {code_port}, location_name: {_MODULE}}}\n"
        )
        self._await_port("code server", code_port)
        self._launch("daemon", "dagster-daemon", "run", "-w", str(workspace), "--log-level", level)
        if self._ui:
            address = ("-h", _LOOPBACK, "-p", str(self._port))
            levels = ("--log-level", "warning", "--dagster-log-level", level)
            self._launch("webserver", "dagster-webserver", *address, "-w", str(workspace), *levels)
            self._await_port("webserver", self._port)

    def _launch(self, name: str, script: str, *arguments: str) -> None:
        with contextlib.ExitStack() as stack:
            logfile = self._settings.logfile
            output = stack.enter_context(logfile.open("ab")) if logfile else None
            self._children[name] = subprocess.Popen(
                [sys.executable, str(_find_script(script)), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output or sys.stderr.fileno(),
                stderr=output,
                start_new_session=True,
                env={**child_environment(), "PYTHONUNBUFFERED": "1"},
            )

    def _await_port(self, name: str, port: int) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            self.check()
            if _listens(port):
                return
            time.sleep(0.1)
        raise RunError(f"the Dagster {name} did not answer within {_START_SECONDS:.0f} s")

    def check(self) -> None:
        """Raise RunError when one of the processes has ended."""
        for name, child in self._children.items():
            if child.poll() is not None:
                raise RunError(f"the Dagster {name} ended with exit code {child.returncode}; see its last lines")

    def stop(self, *names: str) -> None:
        """Stop the named processes, by default all, the daemon first; one that does not end within a minute is killed."""
        for name in names or ("daemon", "code server", "webserver"):
            child = self._children.pop(name, None)
            if child is not None:
                stop_groups([child])


def serve(settings: Settings, port: int) -> int:
    """Run webserver and daemon until Ctrl-C or SIGTERM, then stop them and our Spark engine; returns the exit code.

    Raises RunError when the port is in use, another `up` has this home, or a process ends by itself.
    """
    from sr_assets.adapters.spark.engine import stop_engine

    prepare_instance(settings)
    mark_start()
    with open_private(settings.home / "up.lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another `sr-assets up` works in {settings.home}; stop it, or name another home with SR_ASSETS_HOME"
            ) from None
        try:
            with signals_as_interrupt(), Services(settings, port) as services:
                print_line(f"Dagster: {services.url}  (Ctrl-C stops it)")
                while True:
                    services.check()
                    time.sleep(0.5)
        except KeyboardInterrupt:
            return 0
        finally:
            stop_engine(settings.home.resolve())


def _find_script(name: str) -> Path:
    """Return one of the commands that Dagster's packages install; raises RunError when it is not there.

    The commands are public, their modules are not. The first folder is pip's, the second a virtual environment's.
    """
    folders = (Path(sysconfig.get_path("scripts")), Path(sys.executable).parent)
    script = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if script is None:
        raise RunError(f"the command {name} is not in {folders[0]}; install dagster and dagster-webserver there")
    return script


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((_LOOPBACK, port)) == 0


def _refuse_used_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOOPBACK, port))
        except OSError as error:
            raise RunError(
                f"port {port} on {_LOOPBACK} cannot be used ({error.strerror}); choose another with --port"
            ) from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])
