"""The services of `sr-assets up`: Dagster's code server, daemon and webserver as child processes.

Not here: stopping processes and signals (`processes`), the instance's folder (`instance`), whom the UI answers (`gate`).
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from sr_assets.adapters.extras import require_extra
from sr_assets.adapters.locking import lock
from sr_assets.adapters.private import open_private, write_private
from sr_assets.domain.errors import RunError
from sr_assets.operate.instance import mark_start, prepare_instance, prepare_storage
from sr_assets.operate.log_lines import ChildLogs
from sr_assets.operate.metrics import metrics_beside, page_url
from sr_assets.operate.notify import notify_beside
from sr_assets.operate.processes import child_environment, signals_as_interrupt, stop_groups
from sr_assets.operate.report import print_error, print_line
from sr_assets.operate.ui_access import read_logins

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sr_assets.settings import Settings

_MODULE: Final = "sr_assets.definitions"
_LOOPBACK: Final = "127.0.0.1"
_START_SECONDS: Final = 180.0
_CODE_SERVER: Final = "code server"
_AGAIN_SECONDS: Final = 10.0
_LOG_LEVELS: Final = {"debug": "debug", "info": "info", "warn": "warning", "error": "error"}


@dataclass(frozen=True, slots=True)
class Ui:
    """How the UI is served: where, whether it may change anything, and the file of the logins of which it wants one."""

    port: int = 3000
    read_only: bool = False
    auth_file: Path | None = None


class Services:
    """The code server, the daemon and the webserver as child processes, from `with` to its end; `ui` None: no webserver.

    The code server, which does whatever it is asked, listens on a socket that only our user can reach; when it ends by
    itself it is started again. Each leads a process group of its own, so Ctrl-C in a terminal reaches their owner only,
    who stops them in order: the daemon, which starts runs; the code server with the runs; the webserver. Raises RunError
    when one does not come up.
    """

    def __init__(self, settings: Settings, ui: Ui | None) -> None:
        self._settings = settings
        self._ui = ui
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._logs = ChildLogs(settings, to_file=True)
        self._stack = contextlib.ExitStack()
        self._code_answered = False

    @property
    def url(self) -> str | None:
        """Where the UI is."""
        return f"http://{_LOOPBACK}:{self._ui.port}" if self._ui else None

    def __enter__(self) -> Self:
        """Start the processes and wait until the UI answers."""
        if self._ui:
            require_extra("the Dagster UI", "ui", "dagster_webserver")
        folder = prepare_instance(self._settings)
        if self._ui:
            _refuse_used_port(self._ui.port)
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
        sockets = self._stack.enter_context(
            tempfile.TemporaryDirectory(prefix="sr-assets-", ignore_cleanup_errors=True)
        )
        self._socket = Path(sockets) / "code"
        self._folder = folder
        # The location has the name that a workspace of the module gives it: sensors and schedules keep their state under it.
        workspace = folder / "workspace.yaml"
        server = f"{{socket: {json.dumps(str(self._socket))}, location_name: {_MODULE}}}"
        write_private(workspace, f"load_from:\n  - grpc_server: {server}\n")
        self._start_code_server()
        self._await(_CODE_SERVER, lambda: self._code_answered)
        self._launch("daemon", _dagsters("dagster-daemon"), "run", "-w", str(workspace), "--log-level", level)
        if self._ui:
            options = ["--port", str(self._ui.port), "--log-level", level]
            options += ["--read-only"] if self._ui.read_only else []
            options += ["--auth-file", str(self._ui.auth_file.absolute())] if self._ui.auth_file else []
            self._launch("webserver", ("-m", "sr_assets.operate.webserver"), str(workspace), *options)
            address = (_LOOPBACK, self._ui.port)
            self._await("webserver", lambda: _listens(socket.AF_INET, address))

    def _start_code_server(self) -> None:
        self._code_answered = False
        self._socket.unlink(missing_ok=True)
        level = _LOG_LEVELS[self._settings.loglevel]
        # Dagster looks for modules in the working directory first, which is the current folder if it is not given.
        served = ("-m", _MODULE, "-d", str(self._folder), "-s", str(self._socket), "--log-level", level)
        self._launch(_CODE_SERVER, _dagsters("dagster"), "code-server", "start", *served)

    def _launch(self, name: str, program: Sequence[str], *arguments: str) -> None:
        with self._logs.output(name) as output:
            self._children[name] = subprocess.Popen(
                [sys.executable, *program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if output is None else output,
                stderr=output,
                start_new_session=True,
                # Dagster takes variables, its own home too, from a file .env in the current folder. Only the code server
                # reads our configuration, whose paths may be relative, and it reads no such file.
                cwd=None if name == _CODE_SERVER else self._folder,
                env={**child_environment(), "PYTHONUNBUFFERED": "1"},
            )

    def _await(self, name: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            self.check()
            if condition():
                return
            time.sleep(0.1)
        raise RunError(f"the Dagster {name} did not answer within {_START_SECONDS:.0f} s")

    def check(self) -> None:
        """Start the code server again when it has ended; raise RunError when another process has, or it cannot start."""
        for name, child in list(self._children.items()):
            if child.poll() is None:
                continue
            ended = f"the Dagster {name} ended with exit code {child.returncode}"
            if name != _CODE_SERVER or not self._code_answered:
                raise RunError(f"{ended}; see its last lines")
            print_error(f"{ended}; it is started again")
            # What it started, runs too, must not go on beside its successor's.
            stop_groups([child])
            self._start_code_server()
        self._code_answered = self._code_answered or _listens(socket.AF_UNIX, str(self._socket))

    def stop(self, *names: str) -> None:
        """Stop the named processes, by default all, the daemon first; one that does not end within a minute is killed."""
        for name in names or ("daemon", _CODE_SERVER, "webserver"):
            child = self._children.pop(name, None)
            if child is not None:
                stop_groups([child], again_seconds=_AGAIN_SECONDS)
        if not self._children:
            self._stack.close()
            self._logs.close()


def serve(settings: Settings, ui: Ui) -> int:
    """Run webserver and daemon until Ctrl-C or SIGTERM, then stop them and our Spark engine; returns the exit code.

    Raises ConfigurationError when the file of logins cannot be used, RunError when the port is in use, another `up` has this
    home, or a process ends by itself.
    """
    from sr_assets.adapters.spark.engine import stop_engine
    from sr_assets.stages.heartbeat_publisher import HeartbeatPublisher

    if ui.auth_file:
        read_logins(ui.auth_file)
    prepare_instance(settings)
    mark_start()
    with open_private(settings.home / "up.lock") as file:
        if not lock(file):
            raise RunError(
                f"another `sr-assets up` works in {settings.home}; stop it, or name another home with SR_ASSETS_HOME"
            )
        try:
            with (
                signals_as_interrupt(),
                notify_beside(settings),
                Services(settings, ui) as services,
                metrics_beside(settings) as metrics,
                HeartbeatPublisher(settings.heartbeats, print_error),
            ):
                print_line(f"Dagster: {services.url}  (Ctrl-C stops it)")
                if metrics:
                    print_line(f"Metrics: {metrics}, status page: {page_url(metrics)}")
                while True:
                    services.check()
                    time.sleep(0.5)
        except KeyboardInterrupt:
            return 0
        finally:
            stop_engine(settings.home.resolve())


def _dagsters(name: str) -> tuple[str]:
    """Return one of the commands that Dagster's packages install; raises RunError when it is not there.

    The commands are public, their modules are not. The first folder is pip's, the second a virtual environment's.
    """
    folders = (Path(sysconfig.get_path("scripts")), Path(sys.executable).parent)
    script = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if script is None:
        raise RunError(f"the command {name} is not in {folders[0]}; install dagster there")
    return (str(script),)


def _listens(family: socket.AddressFamily, address: str | tuple[str, int]) -> bool:
    with socket.socket(family) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(address) == 0


def _refuse_used_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOOPBACK, port))
        except OSError as error:
            raise RunError(
                f"port {port} on {_LOOPBACK} cannot be used ({error.strerror}); choose another with --port"
            ) from None
