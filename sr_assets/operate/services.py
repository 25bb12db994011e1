"""The services of `sr-assets up`: Dagster's code server, daemon and webserver as child processes."""

import contextlib
import io
import json
import os
import runpy
import shutil
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Self

from sr_assets.adapters import times
from sr_assets.adapters.extras import require_extra
from sr_assets.adapters.locking import lock
from sr_assets.adapters.logs import configure_logging, print_error, print_warning
from sr_assets.adapters.private import open_private, refuse_foreign, write_private
from sr_assets.automation.run_processes import LONGEST_FOLDER
from sr_assets.dagster_internals import SERVICES
from sr_assets.domain.errors import RunError
from sr_assets.operate.forking import Copies
from sr_assets.operate.health import Health, daemon_parts, watchdog_beside
from sr_assets.operate.instance import mark_start, open_instance, prepare_instance, prepare_storage
from sr_assets.operate.log_lines import ChildLogs
from sr_assets.operate.metrics import metrics_beside, page_url
from sr_assets.operate.notify import notify_beside
from sr_assets.operate.processes import (
    Child,
    Restarts,
    allow_descriptors,
    end_of,
    signals_as_interrupt,
    stop_groups,
)
from sr_assets.operate.run_output import print_line
from sr_assets.operate.static_values import static_values_watched
from sr_assets.operate.ui_access import Ui, listens, read_logins, weak_logins
from sr_assets.operate.webserver import serve_ui
from sr_assets.settings import Settings

_MODULE: Final = "sr_assets.definitions"
#: What the processes of `Services` import.
_IMPORTED: Final = (*SERVICES, "uvicorn")
_START_SECONDS: Final = 180.0
_CODE_SERVER: Final = "code server"
_WEBSERVER: Final = "webserver"
_AGAIN_SECONDS: Final = 10.0
_PREFIX: Final = "sr-"
#: The length of a private folder's name in its parent: a slash, the prefix and eight letters.
_NAME_BYTES: Final = 12
_SHORT: Final = "/tmp"  # noqa: S108  the parent of a private folder
#: The file in the home that names the folder.
_RECORD: Final = "up.tmp"
_LOG_LEVELS: Final = {"debug": "debug", "info": "info", "warn": "warning", "error": "error"}


class Services:
    """The code server, daemon and webserver as child processes, as a context manager; no webserver if `ui` is None.

    The code server executes any request, so it listens on a socket that only this user can open. It is restarted if it
    ends; the webserver, which serves strangers, after a pause. Each process leads its own group, so Ctrl-C reaches only
    their parent. It stops the daemon first, which starts runs, then the code server with the runs, then the webserver.
    Raises RunError if a process does not start.
    """

    def __init__(self, settings: Settings, ui: Ui | None, copies: Copies | None = None) -> None:
        """Without `copies` of a process that has imported `_IMPORTED`, each process imports it."""
        self._settings = settings
        self._ui = ui
        self._copies = copies or Copies()
        self._children: dict[str, Child] = {}
        self._logs = ChildLogs(settings, to_file=True)
        self._stack = contextlib.ExitStack()
        self._code_answered = False
        self._ui_answered = False
        self._ui_restarts = Restarts()
        #: When to start a webserver that has ended.
        self._ui_start_at: float | None = None
        #: The time of the last check, in unix seconds.
        self.checked_at = 0.0

    @property
    def url(self) -> str | None:
        """The UI's URL."""
        return self._ui.url if self._ui else None

    def __enter__(self) -> Self:
        """Start the processes and wait until the UI responds."""
        if self._ui:
            require_extra("the Dagster UI", "ui", "dagster_webserver")
        folder = prepare_instance(self._settings)
        if self._ui:
            self._ui.refuse_used_address()
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
        self._temporary = self._stack.enter_context(_temporary_folder(self._settings.home))
        self._socket = self._temporary / "code"
        self._folder = folder
        # Keep the module's name as the location: sensors and schedules store their state under it.
        workspace = folder / "workspace.yaml"
        server = f"{{socket: {json.dumps(str(self._socket))}, location_name: {_MODULE}}}"
        write_private(workspace, f"load_from:\n  - grpc_server: {server}\n")
        self._start_code_server()
        self._await(_CODE_SERVER, lambda: self._code_answered)
        self._launch("daemon", _command("dagster-daemon", "run", "-w", str(workspace), "--log-level", level))
        if self._ui:
            self._start_webserver(self._ui)
            self._await(_WEBSERVER, self._ui.listens)
            self._ui_answered = True

    def _start_webserver(self, ui: Ui) -> None:
        self._ui_start_at = None
        self._ui_restarts.note_start()
        level = _LOG_LEVELS[self._settings.loglevel]
        self._launch(_WEBSERVER, partial(serve_ui, self._folder / "workspace.yaml", ui.absolute(), level))

    def _start_code_server(self) -> None:
        self._code_answered = False
        self._socket.unlink(missing_ok=True)
        level = _LOG_LEVELS[self._settings.loglevel]
        # Without -d Dagster imports modules from the current folder first.
        served = ("-m", _MODULE, "-d", str(self._folder), "-s", str(self._socket), "--log-level", level)
        self._launch(_CODE_SERVER, _command("dagster", "code-server", "start", *served))

    def _launch(self, name: str, work: Callable[[], int]) -> None:
        # Dagster reads variables, even DAGSTER_HOME, from .env in the current folder; the code server does not, and it must
        # resolve relative paths of the configuration.
        folder = None if name == _CODE_SERVER else self._folder
        environ = {"PYTHONUNBUFFERED": "1", "TMPDIR": str(self._temporary)}
        with self._logs.output(name) as output:
            self._children[name] = self._copies.start(
                name,
                partial(_run_in, folder, work),
                imports=_IMPORTED,
                errors=output,
                output=2 if output is None else output,
                environ=environ,
            )

    def _await(self, name: str, condition: Callable[[], bool]) -> None:
        deadline = times.monotonic() + _START_SECONDS
        while times.monotonic() < deadline:
            self.check()
            if condition():
                return
            times.sleep(0.1)
        raise RunError(f"the Dagster {name} did not respond within {_START_SECONDS:.0f} s")

    def check(self) -> None:
        """Restart the code server and the webserver if they ended; raise RunError for the daemon or a failed restart.

        A webserver that cannot be started is tried again: the platform works without it.
        """
        self.checked_at = times.time()
        if self._ui and self._ui_start_at is not None and times.monotonic() >= self._ui_start_at:
            self._start_webserver(self._ui)
        for name, child in list(self._children.items()):
            if (code := child.poll()) is None:
                continue
            ended = f"the Dagster {name} {end_of(code)}"
            if name == _WEBSERVER and self._ui_answered:
                stop_groups([self._children.pop(name)])
                pause_seconds = self._ui_restarts.pause_seconds()
                print_error(f"{ended}; restarting it in {pause_seconds:g} s")
                self._ui_start_at = times.monotonic() + pause_seconds
                continue
            if name != _CODE_SERVER or not self._code_answered:
                raise RunError(f"{ended}; see its last lines")
            print_error(f"{ended}; restarting it")
            # Its children, including runs, must not continue next to those of its successor.
            stop_groups([child])
            self._start_code_server()
        self._code_answered = self._code_answered or listens(socket.AF_UNIX, str(self._socket))

    def stop(self, *names: str) -> None:
        """Stop the named processes, by default all, the daemon first; kill a process that takes over a minute."""
        for name in names or ("daemon", _CODE_SERVER, _WEBSERVER):
            if name == _WEBSERVER:
                self._ui_start_at = None
            child = self._children.pop(name, None)
            if child is not None:
                stop_groups([child], again_seconds=_AGAIN_SECONDS)
        if not self._children:
            self._stack.close()
            self._logs.close()


def serve(settings: Settings, ui: Ui | None) -> int:
    """Run Dagster's services until Ctrl-C or SIGTERM, then stop them and the Spark engine; returns the exit code.

    Without `ui` there is no webserver. Raises ConfigurationError if the file of logins is unusable. Raises RunError if the
    port is in use, another `up` uses this home, or the daemon ends by itself.
    """
    allow_descriptors()
    with Copies() as copies:
        return _serve(settings, ui, copies)


def _serve(settings: Settings, ui: Ui | None, copies: Copies) -> int:
    from sr_assets.adapters.spark.engine import stop_engine
    from sr_assets.stages.heartbeat_publisher import publisher_of
    from sr_assets.stages.leadership import lead_all
    from sr_assets.stages.standby_tables import follow_checkpoints

    if ui and ui.auth_file:
        read_logins(ui.auth_file)
        for warning in weak_logins(ui.auth_file):
            print_warning(warning)
    prepare_instance(settings)
    mark_start(settings)
    configure_logging(settings)
    with open_private(settings.home / "up.lock") as file:
        if not lock(file):
            raise RunError(
                f"another `sr-assets up` uses {settings.home}; stop it, or choose another home with SR_ASSETS_HOME"
            )
        try:
            with (
                signals_as_interrupt(),
                notify_beside(settings),
                # Ends after the leaderships: it may wait for a store.
                follow_checkpoints(settings, settings.sites),
                lead_all(settings),
                Services(settings, ui, copies) as services,
                daemon_parts(open_instance, lambda: services.checked_at) as parts,
                metrics_beside(settings, health := Health(settings, parts)) as metrics,
                watchdog_beside(health),
                publisher_of(settings, print_error),
                static_values_watched(settings),
            ):
                print_line(f"Dagster: {services.url or 'without the UI'}  (Ctrl-C stops it)")
                if metrics:
                    print_line(f"Metrics: {metrics}, status page: {page_url(metrics)}")
                while True:
                    services.check()
                    times.sleep(0.5)
        except KeyboardInterrupt:
            return 0
        finally:
            stop_engine(settings.home.resolve())


@contextlib.contextmanager
def _temporary_folder(home: Path) -> Iterator[Path]:
    """Yield a private folder for the sockets and temporary files of Dagster's processes; in the end delete it.

    In the folder of all users, another user could take a socket's name before it is bound. Not in the home, whose path may
    be too long, or whose file system may have no sockets. A folder that a killed process left is deleted too: the home
    names it.
    """
    record = home / _RECORD
    with open_private(record) as file:
        left = Path(file.read().strip())
    if left.name.startswith(_PREFIX):
        with contextlib.suppress(OSError):
            refuse_foreign(left, left.lstat())
            shutil.rmtree(left, ignore_errors=True)
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > LONGEST_FOLDER - _NAME_BYTES and os.access(_SHORT, os.W_OK):
        parent = _SHORT
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True) as folder:
        write_private(record, folder, durable=False)
        yield Path(folder)
    record.unlink(missing_ok=True)


def _run_in(folder: Path | None, work: Callable[[], int]) -> int:
    """Do a child's work in a folder, or in the current one, and write its output line by line."""
    if folder:
        os.chdir(folder)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    return work()


def _command(name: str, *arguments: str) -> Callable[[], int]:
    """Return the work of a command that Dagster installs; raises RunError if it is missing.

    The commands are public, their modules are not. The first folder is pip's, the second a virtual environment's.
    """
    folders = (Path(sysconfig.get_path("scripts")), Path(sys.executable).parent)
    script = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if script is None:
        raise RunError(f"the command {name} is not in {folders[0]}; install dagster there")
    return partial(_run_script, str(script), arguments)


def _run_script(script: str, arguments: Sequence[str]) -> int:
    sys.argv[:] = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    return 0
