"""The warm local Spark Connect server: starting, finding, keeping and stopping it.

It lives under `<home>/spark`, with a bounded heap, on a loopback port behind a random token, which a port of another user
never gets. It has its own process session, so it outlives its first run and gets none of that run's signals. It is
restarted if interpreter, versions, this package's source or the settings change, because its Python workers are forked from
a warm daemon and would run old code. It ends when it was unused for the requested time, or its home was deleted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sr_assets.adapters import times
from sr_assets.adapters.connection_table import NOBODY, listener_user
from sr_assets.adapters.locking import lock
from sr_assets.adapters.private import open_private, own_folder, write_private
from sr_assets.adapters.spark.config import child_environment, engine_config, fingerprint
from sr_assets.domain.errors import RunError

if TYPE_CHECKING:
    from sr_assets.settings import SparkSettings

logger = logging.getLogger(__name__)

HOST: Final = "127.0.0.1"
_SERVER_CLASS: Final = "org.apache.spark.sql.connect.service.SparkConnectServer"
_START_SECONDS: Final = 120.0
_UNUSED_SECONDS: Final = 30.0
#: How long the server stays warm after its last use: between sensor runs, and after a single run.
KEEP_SECONDS: Final = 900.0
KEEP_ONCE_SECONDS: Final = 60.0
_LOG: Final = "engine.log"
_PORT: Final = re.compile(r"SparkConnectService' on port (\d+)")
_WATCHER: Final = "sr_assets.adapters.spark.watch"


@dataclass(frozen=True, slots=True)
class Engine:
    """A running local Connect server: process, port, token, and the fingerprint of its start."""

    #: 0 while the server starts: it chooses the port.
    port: int
    pid: int
    token: str
    fingerprint: str
    started_at: float

    @property
    def running(self) -> bool:
        """Whether that process is still our server; it may still be starting.

        Another user may have a process with the number and the command of an engine that has ended.
        """
        try:
            if Path("/proc/self").exists():
                process = Path(f"/proc/{self.pid}")
                user, command = process.stat().st_uid, (process / "cmdline").read_bytes()
            else:
                ps = ["ps", "-ww", "-p", str(self.pid), "-o", "uid=", "-o", "command="]
                number, _, command = subprocess.run(ps, capture_output=True, check=False).stdout.strip().partition(b" ")
                user = int(number)
        except (OSError, ValueError):
            return False
        return user == os.geteuid() and _WATCHER.encode() in command

    @property
    def alive(self) -> bool:
        """Whether it runs and listens; not if another user listens on its port."""
        if not self.running or not self.port or not self.listens_for_us:
            return False
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex((HOST, self.port)) == 0

    @property
    def listens_for_us(self) -> bool:
        """Whether a process of this user listens on the port, so that it may have the token."""
        return listener_user(HOST, self.port) in (None, os.geteuid())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    own_folder(folder)
    with open_private(folder / "engine.lock") as file:
        lock(file, None)
        yield


def _recorded(folder: Path) -> Engine | None:
    try:
        return Engine(**json.loads((folder / "engine.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def engine_status(home: Path) -> Engine | None:
    """Return the warm local server of this home, or None."""
    engine = _recorded(home / "spark")
    return engine if engine is not None and engine.alive else None


def is_warm(settings: SparkSettings, home: Path) -> bool:
    """Return whether a local server of this home listens that `start_engine` would return, and not replace."""
    engine = engine_status(home)
    if engine is None or _is_renewable(home / "spark", engine):
        return False
    return engine.fingerprint == fingerprint(engine_config(settings, home))


def stop_engine(home: Path) -> bool:
    """Stop this home's local server by its pid; return False if none was running."""
    with _locked(home / "spark"):
        return _stop(home / "spark")


def abandon_start(home: Path) -> None:
    """End a starting local server: a caller waiting in `start_engine` gets a RunError immediately."""
    engine = _recorded(home / "spark")
    if engine is not None and engine.running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)


def _stop(folder: Path) -> bool:
    engine = _recorded(folder)
    running = engine is not None and engine.running
    if engine is not None and running:
        # The server leads its own process group, so its Python workers end with it.
        for stop_signal, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine.pid, stop_signal)
            if _wait_until(lambda: not engine.running, seconds):
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)
    (folder / "engine.json").unlink(missing_ok=True)
    return running


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = times.monotonic() + seconds
    while times.monotonic() < deadline:
        if condition():
            return True
        times.sleep(0.05)
    return False


def start_engine(settings: SparkSettings, home: Path) -> Engine:
    """Return the warm local server; start it if there is none or its fingerprint differs.

    Raises RunError with the server's log if it is not up within two minutes, or if a run still uses the outdated one
    after half a minute.
    """
    config = engine_config(settings, home)
    started_with = fingerprint(config)
    folder = home / "spark"
    with _locked(folder):
        engine = _recorded(folder)
        if engine is not None and engine.fingerprint == started_with and not _is_renewable(folder, engine):
            # A killed run may have started it: then it is still starting.
            if listening := _await_listening(folder, engine, lambda: not engine.running):
                keep_engine(home, KEEP_ONCE_SECONDS)
                return listening
        elif engine is not None and engine.alive:
            _await_unused(folder, engine)
        _stop(folder)
        return _launch(folder, home, config, started_with)


def _await_unused(folder: Path, engine: Engine) -> None:
    """Wait until no run uses the server, because stopping it would fail that run."""
    if not _wait_until(lambda: _is_unused(folder), _UNUSED_SECONDS):
        raise RunError(f"the Spark engine (pid {engine.pid}) has other settings or another version and is in use")


def _is_unused(folder: Path) -> bool:
    with open_private(folder / "users") as users:
        return lock(users)


def renew_engine(home: Path) -> None:
    """Let the next start replace the server and its token if no run uses it then: a run has lost its connection."""
    if engine := _recorded(home / "spark"):
        write_private(home / "spark" / "renew", str(engine.pid), durable=False)


def _is_renewable(folder: Path, engine: Engine) -> bool:
    try:
        return (folder / "renew").read_text() == str(engine.pid) and _is_unused(folder)
    except OSError:
        return False


def _await_listening(folder: Path, engine: Engine, ended: Callable[[], bool]) -> Engine | None:
    """Wait until the server listens, and return it with its port; None if it does not, or another user has its port."""
    deadline = times.monotonic() + _START_SECONDS
    while times.monotonic() < deadline and not ended():
        # The first line is from before the first work; later ones may quote foreign text.
        if not engine.port and (started := _PORT.search((folder / _LOG).read_text(errors="replace"))):
            engine = replace(engine, port=int(started[1]))
            write_private(folder / "engine.json", json.dumps(asdict(engine)), durable=False)
        if engine.alive:
            return engine
        if engine.port and (user := listener_user(HOST, engine.port)) not in (None, NOBODY, os.geteuid()):
            logger.warning(
                "Spark engine: port %d belongs to user %d; starting an engine on another port", engine.port, user
            )
            return None
        times.sleep(0.05)
    return None


@contextlib.contextmanager
def use_engine(home: Path, keep_seconds: float = 0.0) -> Iterator[None]:
    """Keep the server running inside `with`, and for `keep_seconds` after it."""
    folder = home / "spark"
    own_folder(folder)
    with open_private(folder / "users") as users:
        lock(users, None, shared=True)
        try:
            yield
        finally:
            keep_engine(home, keep_seconds)


def keep_engine(home: Path, seconds: float) -> None:
    """Keep the server running for at least this long; a longer earlier request stays."""
    file = home / "spark" / "keep"
    try:
        until = float(file.read_text())
    except (OSError, ValueError):
        until = 0.0
    if times.monotonic() + seconds > until:
        write_private(file, f"{times.monotonic() + seconds:.0f}", durable=False)


def _launch(folder: Path, home: Path, config: Mapping[str, str], started_with: str) -> Engine:
    """Start the server and wait until it listens; raises RunError with its log if it does not."""
    token, log = secrets.token_urlsafe(24), folder / _LOG
    # The server chooses its port, so that no other user can take it first, and its log names it. A user's settings may
    # silence the log.
    silent = "spark.log.level" in config or any("log4j" in value for value in config.values())
    port = _free_port() if silent else 0
    environ = {**child_environment(home), "SPARK_HOME": str(spark_home()), "SPARK_CONNECT_AUTHENTICATE_TOKEN": token}
    # An earlier engine's keep time may be from before a reboot, when the monotonic clock was higher.
    (folder / "keep").unlink(missing_ok=True)
    keep_engine(home, _START_SECONDS)
    with open_private(log) as output:
        output.truncate()
        process = subprocess.Popen(
            _command(folder, config, port),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=folder,
        )
    started = Engine(port, process.pid, token, started_with, times.time())
    # An unrecorded server ends itself.
    write_private(folder / "engine.json", json.dumps(asdict(started)), durable=False)
    # Not by its command, which a new process may not have yet.
    engine = _await_listening(folder, started, lambda: process.poll() is not None)
    if engine is not None and process.poll() is None:
        # On a busy machine the start may use up the keep time before the first user joins.
        keep_engine(home, KEEP_ONCE_SECONDS)
        logger.info("started the Spark engine: pid %d, port %d", process.pid, engine.port)
        # It must outlive this process, so Python must not warn that it still runs.
        process.returncode = 0
        return engine
    _stop(folder)
    process.wait()
    last_line = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
    raise RunError(f"the Spark engine did not start: {last_line[0]!r}; its log is {log}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def spark_home() -> Path:
    """Return the folder of the packaged Spark."""
    import pyspark

    return Path(pyspark.__file__).parent


def _command(folder: Path, config: Mapping[str, str], port: int) -> list[str]:
    """Write the server's properties, and return the command that starts it behind its watcher."""
    properties = folder / "engine.properties"
    lines = {
        **config,
        "spark.master": config.get("spark.master", "local[*,3]"),
        "spark.connect.grpc.binding.address": HOST,
        "spark.connect.grpc.binding.port": str(port),
    }
    # `spark.config` may contain secrets.
    write_private(
        properties, "".join(f"{key}={value}\n".replace("\\", "\\\\") for key, value in lines.items()), durable=False
    )
    submit = [str(spark_home() / "bin" / "spark-submit"), "--class", _SERVER_CLASS, "--name", "sr-assets"]
    return [
        *(sys.executable, "-m", _WATCHER, str(folder)),
        *submit,
        *("--properties-file", str(properties), "spark-internal"),
    ]
