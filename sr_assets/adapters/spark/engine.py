"""The warm local Spark Connect server: start it, know it, keep it, stop it.

Not here: sessions on it (`spark.session`), the process that watches over it (`spark.watch`).

The server is ours alone: it lives under `<home>/spark`, in its own process session (so it outlives the run that started
it, and is never hit by that run's signals), with a bounded heap, on a loopback port behind a random token. It is
started anew when the interpreter, the versions, this package's own source or the settings differ from those it was
started with: its Python workers are forked from a warm daemon and would otherwise go on running old code. It ends by
itself when nobody has used it for the time its last user asked for, or when its home is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.spark.java import find_java
from sr_assets.domain.errors import RunError

if TYPE_CHECKING:
    from sr_assets.settings import SparkSettings

logger = logging.getLogger(__name__)

_SERVER_CLASS: Final = "org.apache.spark.sql.connect.service.SparkConnectServer"
_START_SECONDS: Final = 120.0
_UNUSED_SECONDS: Final = 30.0
_SCRUBBED: Final = (
    "PYSPARK_SUBMIT_ARGS",
    "SPARK_HOME",
    "SPARK_CONF_DIR",
    "JAVA_TOOL_OPTIONS",
    "SPARK_REMOTE",
    "SPARK_LOCAL_REMOTE",
)
#: How long the server stays warm after its last use: between the runs that a sensor asks for, and after a single run.
KEEP_SECONDS: Final = 900.0
KEEP_ONCE_SECONDS: Final = 60.0
_WATCHER: Final = "sr_assets.adapters.spark.watch"
#: Settings every engine of ours runs with; `spark.config` in the configuration overrides them.
_DEFAULTS: Final = {
    "spark.ui.enabled": "false",
    "spark.speculation": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.memory": "768m",
    # Its work comes in short bursts, and most of it is done in Python: the optimizing compiler and a collector with
    # threads of its own took two thirds of the JVM's processor time and gave nothing back.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "4000",
    # Larger relations would be cached in the session, which is never left: a batch's rows travel in the plan instead.
    "spark.sql.session.localRelationCacheThreshold": str(64 * 1024 * 1024),
    "spark.sql.artifact.isolation.enabled": "false",
    "spark.connect.session.manager.defaultSessionTimeout": "24h",
    "spark.connect.grpc.maxInboundMessageSize": str(256 * 1024 * 1024),
    "spark.sql.execution.pyspark.udf.faulthandler.enabled": "false",
}


@dataclass(frozen=True, slots=True)
class Engine:
    """A running local Connect server: how to reach it, and what it was started with."""

    port: int
    pid: int
    token: str
    fingerprint: str
    started_at: float

    @property
    def running(self) -> bool:
        """Whether that process still is our server, which may be on its way yet."""
        try:
            command = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except OSError:
            command = subprocess.run(
                ["ps", "-ww", "-p", str(self.pid), "-o", "command="], capture_output=True, check=False
            ).stdout
        return _WATCHER.encode() in command

    @property
    def alive(self) -> bool:
        """Whether it runs and listens."""
        if not self.running:
            return False
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def _source_digest() -> str:
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _fingerprint(config: Mapping[str, str]) -> str:
    parts = [
        sys.executable,
        sys.version,
        version("pyspark"),
        _source_digest(),
        json.dumps(dict(config), sort_keys=True),
        # What only a new process can have more of.
        str(resource.getrlimit(resource.RLIMIT_FSIZE)[1]),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def child_environment(home: Path) -> dict[str, str]:
    """Return the environment for everything of Spark: our Java, our interpreter, nothing that steers another Spark."""
    environ = {key: value for key, value in os.environ.items() if key not in _SCRUBBED}
    environ["JAVA_HOME"] = str(find_java(home))
    environ["PYSPARK_PYTHON"] = environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    # glibc keeps an arena per thread; the JVM's own threads then hold hundreds of MB that nothing uses.
    environ.setdefault("MALLOC_ARENA_MAX", "4")
    return environ


def engine_config(settings: SparkSettings, home: Path) -> dict[str, str]:
    """Return the settings an engine is started with; `spark.config` overrides ours."""
    scratch = home / "spark" / "scratch"
    return {
        **_DEFAULTS,
        "spark.local.dir": str(scratch),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        **settings.config,
    }


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "engine.lock").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _recorded(folder: Path) -> Engine | None:
    try:
        return Engine(**json.loads((folder / "engine.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _record(folder: Path, engine: Engine) -> None:
    """Write down which server there is; it ends by itself when it is not the one that stands there."""
    draft = folder / ".engine.json"
    draft.touch(mode=0o600)
    draft.write_text(json.dumps(asdict(engine)))
    draft.replace(folder / "engine.json")


def engine_status(home: Path) -> Engine | None:
    """Return the warm local server of this home, or None when none is running."""
    engine = _recorded(home / "spark")
    return engine if engine is not None and engine.alive else None


def stop_engine(home: Path) -> bool:
    """Stop this home's local server by its pid; False when none was running."""
    with _locked(home / "spark"):
        return _stop(home / "spark")


def abandon_start(home: Path) -> None:
    """End a local server that is on its way: whoever waits for it in `start_engine` gets a RunError at once."""
    engine = _recorded(home / "spark")
    if engine is not None and engine.running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)


def _stop(folder: Path) -> bool:
    engine = _recorded(folder)
    running = engine is not None and engine.running
    if engine is not None and running:
        # The server leads its own process group, so its Python workers go with it.
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
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def start_engine(settings: SparkSettings, home: Path) -> Engine:
    """Return the warm local server, starting it when there is none or when it was started with something else.

    Raises RunError with the server's log when it does not come up within two minutes, and when the one that would have to
    be replaced is still used by a run after half a minute.
    """
    config = engine_config(settings, home)
    fingerprint = _fingerprint(config)
    folder = home / "spark"
    with _locked(folder):
        engine = _recorded(folder)
        if engine is not None and engine.fingerprint == fingerprint:
            # A run that was killed may have begun to start it: then it is on its way.
            _wait_until(lambda: engine.alive or not engine.running, _START_SECONDS)
            if engine.alive:
                keep_engine(home, KEEP_ONCE_SECONDS)
                return engine
        elif engine is not None and engine.alive:
            _await_unused(folder, engine)
        _stop(folder)
        return _launch(folder, home, config, fingerprint)


def _await_unused(folder: Path, engine: Engine) -> None:
    """Wait until no run uses the server: to stop it would leave that run without an answer."""

    def unused() -> bool:
        with (folder / "users").open("a") as users:
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    if not _wait_until(unused, _UNUSED_SECONDS):
        raise RunError(f"the Spark engine (pid {engine.pid}) has other settings or another version and is in use")


@contextlib.contextmanager
def use_engine(home: Path, keep_seconds: float) -> Iterator[None]:
    """Keep the server from `with` to its end, and warm for `keep_seconds` after."""
    folder = home / "spark"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "users").open("a") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        try:
            yield
        finally:
            keep_engine(home, keep_seconds)


def keep_engine(home: Path, seconds: float) -> None:
    """Ask the server to stay warm for at least so long from now; whoever asked for longer is still heard."""
    file = home / "spark" / "keep"
    try:
        until = float(file.read_text())
    except (OSError, ValueError):
        until = 0.0
    if time.monotonic() + seconds > until:
        draft = file.with_name(f".keep.{os.getpid()}")
        draft.write_text(f"{time.monotonic() + seconds:.0f}")
        draft.replace(file)


def _launch(folder: Path, home: Path, config: Mapping[str, str], fingerprint: str) -> Engine:
    import pyspark

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    token = secrets.token_urlsafe(24)
    properties = folder / "engine.properties"
    lines = {
        **config,
        "spark.master": config.get("spark.master", "local[*,3]"),
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
    }
    properties.write_text("".join(f"{key}={value}\n".replace("\\", "\\\\") for key, value in lines.items()))
    log = folder / "engine.log"
    spark_home = Path(pyspark.__file__).parent
    environ = {**child_environment(home), "SPARK_HOME": str(spark_home), "SPARK_CONNECT_AUTHENTICATE_TOKEN": token}
    # What an earlier engine was asked for may be of before the machine's last start, whose clock went further.
    (folder / "keep").unlink(missing_ok=True)
    keep_engine(home, _START_SECONDS)
    command = [
        sys.executable,
        "-m",
        _WATCHER,
        str(folder),
        str(spark_home / "bin" / "spark-submit"),
        "--class",
        _SERVER_CLASS,
        "--name",
        "sr-assets",
        "--properties-file",
        str(properties),
        "spark-internal",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=folder,
        )
    engine = Engine(port, process.pid, token, fingerprint, time.time())
    _record(folder, engine)
    # Not by its command: that cannot be read yet in the first moments of a process.
    if _wait_until(lambda: process.poll() is not None or engine.alive, _START_SECONDS) and process.poll() is None:
        # On a busy machine the start has used up what it was kept for, and nobody has joined yet.
        keep_engine(home, KEEP_ONCE_SECONDS)
        logger.info("started the Spark engine: pid %d, port %d", process.pid, port)
        # It is to outlive us, so Python must not warn that nobody waits for it.
        process.returncode = 0
        return engine
    _stop(folder)
    process.wait()
    tail = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
    raise RunError(f"the Spark engine did not start: {tail[0]!r}; its log is {log}")
