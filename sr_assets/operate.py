"""What starts Dagster: its instance, the services of `sr-assets up`, the runs of `sr-assets run`.

Here: folders, child processes, signals, exit codes. Not here: what a run does (`assets`, `stages`), when the sensor asks for one
(`automation`).

`run` works a site in a child process of its own, `python -m sr_assets.operate SITE`, which executes that site's job in the same
Dagster instance that `up` uses.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from sr_assets.domain.errors import ConfigurationError, RunError, SrAssetsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dagster import DagsterEvent, DagsterInstance, ExecuteInProcessResult, JobDefinition

    from sr_assets.settings import Settings, StreamSettings

_MODULE: Final = "sr_assets.definitions"
_LOOPBACK: Final = "127.0.0.1"
_INTERRUPTED: Final = 130
_START_SECONDS: Final = 180.0
_STOP_SECONDS: Final = 60.0
_REMOTE_DISKS: Final = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "ncpfs",
        "afs",
        "ceph",
        "glusterfs",
        "lustre",
        "gpfs",
        "beegfs",
        "fuse.sshfs",
        "fuse.glusterfs",
        "fuse.s3fs",
    }
)
_LOG_LEVELS: Final = {"debug": "debug", "info": "info", "warn": "warning", "error": "error"}


# -------------------------------------------------------------------------------------------------------- the instance


def check_home(home: Path) -> None:
    """Refuse a home that cannot be written or lies on a network disk, whose locks and memory maps are no good.

    Raises ConfigurationError; nothing is made: of a home that does not exist the folder it would be made in is looked at.
    """
    folder = next(folder for folder in (home, *home.parents) if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"{home}: {folder} cannot be written; name another folder with SR_ASSETS_HOME or state_store"
        )
    kind = _disk_kind(folder.resolve())
    if kind in _REMOTE_DISKS:
        raise ConfigurationError(
            f"{home} lies on a network disk ({kind}), where locks cannot be trusted; "
            "name a local one with SR_ASSETS_HOME or state_store"
        )


def _disk_kind(folder: Path) -> str:
    """Return the kind of file system a folder lies on; empty when the system does not tell."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    # Blanks in a mount point are written \040; the innermost mount counts, of two on one point the later.
    points = [(mount[1].replace("\\040", " "), mount[2]) for mount in mounts]
    around = [(len(point), place, kind) for place, (point, kind) in enumerate(points) if folder.is_relative_to(point)]
    return max(around)[2] if around else ""


def prepare_instance(settings: Settings) -> Path:
    """Make the home and the Dagster instance's folder ready, set DAGSTER_HOME for us and our children, and return it.

    `DAGSTER_HOME` if it is set, else `<home>/dagster`; the package's dagster.yaml is written there when it has none. Raises
    ConfigurationError when a folder is unusable.
    """
    folder = Path(os.environ.get("DAGSTER_HOME") or settings.home / "dagster").expanduser().absolute()
    for place in (settings.home, folder):
        check_home(place)
        try:
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            raise ConfigurationError(
                f"{place} cannot be written: {error.strerror}; name another with SR_ASSETS_HOME or state_store"
            ) from None
    os.environ["DAGSTER_HOME"] = str(folder)
    if not (folder / "dagster.yaml").exists():
        draft = folder / f".dagster.yaml.{os.getpid()}"
        draft.write_bytes(files("sr_assets").joinpath("dagster.yaml").read_bytes())
        draft.replace(folder / "dagster.yaml")
    return folder


def _prepare_storage(folder: Path) -> None:
    """Let one process make the storage's tables before several use it: made side by side they collide."""
    with (folder / ".storage.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Where SQLite keeps the runs by default; elsewhere, and the first time, opening the storage makes what is missing.
        if (folder / "history" / "runs.db").exists():
            return
        with _instance() as instance:
            instance.get_runs_count()
            instance.all_asset_keys()
            instance.all_instigator_state()


def _instance() -> DagsterInstance:
    from dagster import DagsterInstance

    return DagsterInstance.get()


# ------------------------------------------------------------------------------------------------------- the services


class Services:
    """The code server, the daemon and the webserver as child processes, from `with` to its end.

    Each leads a process group of its own, so Ctrl-C in a terminal reaches their owner only, who stops them in order: first who
    starts runs, then the runs, then who shows them. Raises RunError when one does not come up.
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
        _prepare_storage(folder)
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
        self._launch(
            "code server",
            "dagster",
            "code-server",
            "start",
            "-m",
            _MODULE,
            "-h",
            _LOOPBACK,
            "-p",
            str(code_port),
            "--log-level",
            level,
        )
        # The name is the one that a workspace of the module has: the state of sensors and schedules hangs on it.
        workspace = folder / "workspace.yaml"
        workspace.write_text(
            f"load_from:\n  - grpc_server: {{host: {_LOOPBACK}, port: {code_port}, location_name: {_MODULE}}}\n"
        )
        self._await_port("code server", code_port)
        self._launch("daemon", "dagster._daemon", "run", "-w", str(workspace), "--log-level", level)
        if self._ui:
            quiet = ("--log-level", "warning", "--dagster-log-level", level)
            self._launch(
                "webserver", "dagster_webserver", "-h", _LOOPBACK, "-p", str(self._port), "-w", str(workspace), *quiet
            )
            self._await_port("webserver", self._port)

    def _launch(self, name: str, module: str, *arguments: str) -> None:
        with contextlib.ExitStack() as stack:
            logfile = self._settings.logfile
            output = stack.enter_context(logfile.open("ab")) if logfile else None
            self._children[name] = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output or sys.stderr.fileno(),
                stderr=output,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
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
                raise RunError(f"the Dagster {name} ended with exit code {child.returncode}; its last lines say why")

    def stop(self, *names: str) -> None:
        """Stop the named ones, by default all, the daemon first; what does not end within a minute is killed."""
        for name in names or ("daemon", "code server", "webserver"):
            child = self._children.pop(name, None)
            if child is not None:
                stop_groups([child])


def stop_groups(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask children that lead process groups to end, with all that they started, and wait; after a minute they are killed."""
    for child in children:
        _signal_group(child, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))
        # The leader is gone or hangs; what is left of its group ends now.
        _signal_group(child, signal.SIGKILL)
        child.wait()


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


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


@contextlib.contextmanager
def interrupted_in_order() -> Iterator[None]:
    """Let SIGTERM end what is inside as Ctrl-C does, so that everything is stopped in order.

    SIGINT gets a handler too: a shell's `&` has it ignored, our children would inherit that, and Dagster takes what it finds
    there for SIGTERM as well.
    """

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {one: signal.signal(one, interrupt) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _mark_start() -> None:
    """Tell the processes to come that this is another start, after which ephemeral streams are copied again."""
    from sr_assets.stages.position import START_VARIABLE

    os.environ[START_VARIABLE] = uuid.uuid4().hex


def serve(settings: Settings, port: int) -> int:
    """Run webserver and daemon until Ctrl-C or SIGTERM, then stop them and our Spark engine; returns the exit code.

    Raises RunError when the port is in use, another `up` has this home, or a process ends by itself.
    """
    from sr_assets.adapters.spark_engine import stop_engine

    prepare_instance(settings)
    _mark_start()
    with (settings.home / "up.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another `sr-assets up` works in {settings.home}; stop it, or name another home with SR_ASSETS_HOME"
            ) from None
        try:
            with interrupted_in_order(), Services(settings, port) as services:
                _say(f"Dagster: {services.url}  (Ctrl-C stops it)")
                while True:
                    services.check()
                    time.sleep(0.5)
        except KeyboardInterrupt:
            return 0
        finally:
            stop_engine(settings.home.resolve())


# ------------------------------------------------------------------------------------------------------------ the runs


def run_sites(settings: Settings, streams: Sequence[StreamSettings], *, once: bool) -> int:
    """Run each site that has one of the streams, in processes side by side, as many as there are cores; returns the exit code.

    0; 1 when a stream failed, the others ran all the same; 2 when a site found its configuration wrong. Ctrl-C and SIGTERM
    end the sites in order: their batches under way are done again by the next run.
    """
    folder = prepare_instance(settings)
    _mark_start()
    _prepare_storage(folder)
    sites = list(dict.fromkeys(stream.name for stream in streams))
    chosen = {site: [stream.label for stream in streams if stream.name == site] for site in sites}
    crew = _Crew()
    with (
        interrupted_in_order(),
        ThreadPoolExecutor(len(sites) if not once else min(len(sites), os.cpu_count() or 1)) as pool,
    ):
        working = [pool.submit(crew.work, site, chosen[site], once) for site in sites]
        try:
            codes = [future.result() for future in working]
        except KeyboardInterrupt:
            crew.dismiss()
            return _INTERRUPTED if once else 0
    return _worst(codes)


def _worst(codes: Sequence[int]) -> int:
    return 2 if 2 in codes else int(any(codes))


class _Crew:
    """The child processes of a `run`, one for each site, until they are dismissed."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._children: list[subprocess.Popen[bytes]] = []
        self._dismissed = False

    def work(self, site: str, labels: Sequence[str], once: bool) -> int:
        """Let a child work a site and return its exit code; after a dismissal nobody begins."""
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "sr_assets.operate",
            site,
            "--mode",
            "once" if once else "follow",
        ]
        for label in labels:
            command += ["--stream", label]
        with self._guard:
            if self._dismissed:
                return 0
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
            self._children.append(child)
        return child.wait()

    def dismiss(self) -> None:
        """Stop all children and let no other begin."""
        with self._guard:
            self._dismissed = True
        stop_groups(self._children)


def run_site(settings: Settings, site: str, labels: Sequence[str], *, once: bool) -> int:
    """Execute a site's job here, recorded in the Dagster instance, and say what came of it; returns the exit code.

    One line for each stream on stdout, one for each that failed on stderr. Without `once` the job is repeated until an
    interrupt, whenever the site's sensor would ask for a run.
    """
    from sr_assets.automation import site_job_name
    from sr_assets.definitions import build

    streams = [stream for stream in settings.sites[site] if stream.label in labels]
    job = build(settings).resolve_job_def(site_job_name(site))
    with _noticed_signals() as interrupted:
        while True:
            before = _published(settings)
            with _instance() as instance:
                result = _execute(job, instance, streams, whole=len(streams) == len(settings.sites[site]), once=once)
            if interrupted():
                raise KeyboardInterrupt
            code = _report(settings, streams, result, before)
            if once:
                return code
            while not _has_work(settings, site):
                time.sleep(settings.sensor.interval_ns / 1e9)


@contextlib.contextmanager
def _noticed_signals() -> Iterator[Callable[[], bool]]:
    """Tell whether SIGTERM or SIGINT arrived meanwhile: Dagster, while it executes, has their handlers and ends but the run."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def arrived() -> bool:
        try:
            return not {signal.SIGTERM, signal.SIGINT}.isdisjoint(os.read(reader, 4096))
        except BlockingIOError:
            return False

    try:
        yield arrived
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def _has_work(settings: Settings, site: str) -> bool:
    from sr_assets.automation import find_work

    try:
        return find_work(settings, site)[0] is not None
    except SrAssetsError as error:
        _complain(str(error))
        return False


def _execute(
    job: JobDefinition, instance: DagsterInstance, streams: Sequence[StreamSettings], *, whole: bool, once: bool
) -> ExecuteInProcessResult:
    from sr_assets.resources import LINGER, MODE_TAG, ONCE

    prefixes = [stream.asset_prefix for stream in streams]
    keys = job.asset_layer.executable_asset_keys
    return job.execute_in_process(
        instance=instance,
        asset_selection=None
        if whole
        else [key for key in keys if key.path[0] == "fleet" or list(key.path[:2]) in prefixes],
        tags={MODE_TAG: ONCE if once else LINGER},
        # The event log has it all; the console is for our lines.
        run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
        raise_on_error=False,
    )


def _report(
    settings: Settings,
    streams: Sequence[StreamSettings],
    result: ExecuteInProcessResult,
    before: Mapping[tuple[str, str], Mapping[str, Any]],
) -> int:
    """Say what a run did for each stream: what its counters gained, which begin anew with a new state."""
    published = _published(settings)
    for stream in streams:
        row, old = published.get((stream.name, stream.stream)), before.get((stream.name, stream.stream), {})
        if row is not None and row["as_of"] != old.get("as_of"):
            copied, skipped = (
                row[column] - old[column] if old and row[column] >= old[column] else row[column]
                for column in ("copied_messages", "skipped_messages")
            )
            _say(f"{stream.label}: copied {copied}, skipped {skipped}, lag {row['lag_messages']}")
    if result.success:
        return 0
    for line in failures(result.all_events):
        _complain(line)
    return 2 if _misconfigured(result.all_events) else 1


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  what `run` and `up` have to say


def _complain(line: str) -> None:
    print(f"error: {line}", file=sys.stderr, flush=True)  # noqa: T201  as above


def _published(settings: Settings) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the table `replication` by name and stream; empty when nothing is published."""
    from sr_assets.adapters.fleet import open_fleet, read_rows

    try:
        with open_fleet(settings.home) as connection:
            rows = read_rows(connection, "SELECT * FROM replication")
    except SrAssetsError:
        return {}
    found = [dict(zip(rows.columns, values, strict=True)) for values in rows.values]
    return {(row["name"], row["stream"]): row for row in found}


def failures(events: Sequence[DagsterEvent]) -> list[str]:
    """Return why a run failed, in lines without repeats: a step's own words, else the error under it."""
    lines: list[str] = []
    for event in events:
        data = event.event_specific_data
        if (said := getattr(data, "user_failure_data", None)) is not None and said.description:
            lines += said.description.splitlines()
        elif (error := getattr(data, "error", None)) is not None and (event.is_step_failure or not lines):
            lines.append(_innermost(error))
    return list(dict.fromkeys(line for line in lines if line.strip())) or [
        "the run failed; its log is in the Dagster UI"
    ]


def _misconfigured(events: Sequence[DagsterEvent]) -> bool:
    """Tell whether a step said that its configuration is wrong."""
    from sr_assets.resources import MISCONFIGURED

    said = (getattr(event.event_specific_data, "user_failure_data", None) for event in events)
    marks = (failure.metadata.get(MISCONFIGURED) for failure in said if failure is not None)
    return any(mark is not None and mark.value for mark in marks)


def _innermost(error: Any) -> str:
    while error.cause is not None:
        error = error.cause
    text = " ".join(error.message.split())
    return text.partition(": ")[2] or text


def _main() -> int:
    """Work one site: the child process of `run_sites`."""
    from sr_assets.resources import configure_logging
    from sr_assets.settings import load_settings

    parser = argparse.ArgumentParser(prog="sr_assets.operate")
    parser.add_argument("site")
    parser.add_argument("--mode", choices=("once", "follow"), default="once")
    parser.add_argument("--stream", action="append", default=[])
    given = parser.parse_args()
    try:
        with interrupted_in_order():
            settings = load_settings()
            configure_logging(settings)
            _leave_errors_to_the_report()
            return run_site(settings, given.site, given.stream, once=given.mode == "once")
    except SrAssetsError as error:
        _complain(str(error))
        return 2 if isinstance(error, ConfigurationError) else 1
    except KeyboardInterrupt:
        return _INTERRUPTED


def _leave_errors_to_the_report() -> None:
    """Keep errors off the log on stderr: a stream's failure is said there once, as a line of its own, at the end."""
    for handler in logging.getLogger("sr_assets").handlers:
        if not isinstance(handler, logging.FileHandler):
            handler.addFilter(lambda record: record.levelno < logging.ERROR)


if __name__ == "__main__":
    sys.exit(_main())
