"""Sessions on a cluster without shared disks: `spark://host:port` and `sc://host:port`.

They check the requirements, ship the package, and end a job that no executor accepts.
"""

from __future__ import annotations

import contextlib
import platform
import re
import socket
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from sr_assets.adapters import times
from sr_assets.adapters.spark.config import JAVA_OPTIONS
from sr_assets.adapters.spark.connect import is_remote
from sr_assets.adapters.spark.tasks import package_archive
from sr_assets.domain.errors import RunError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CONNECT_SECONDS: Final = 5.0
#: Time that a job waits for an executor to accept one of its tasks.
IDLE_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 1.0
_PORTS: Final = {"spark": 7077, "sc": 15002}
#: The installed version; importing Spark would slow down processes that only load the definitions.
_VERSION: Final = version("pyspark")
_SERIES: Final = ".".join(_VERSION.split(".")[:2])
_PYTHON: Final = ".".join(platform.python_version_tuple()[:2])
_NAMED: Final = "in spark.pyspark.python, or for sc:// in the server's PYSPARK_PYTHON"
#: Spark's errors about a cluster's machines, and their remedies.
_FAILURES: Final = {
    r'Cannot run program "([^"]+)"': f"the workers have no program {{}}; install it, or set theirs {_NAMED}",
    r"Python in worker has different version: (\S+) than": (
        f"the workers' Python is {{}} and ours {_PYTHON}; install {_PYTHON} there and set it {_NAMED}"
    ),
    r"(PyArrow|Pandas|NumPy) >= \S+ must be installed": "the workers' Python lacks {}; install it there",
    r"No module named '([^']+)'": "the workers' Python lacks {}; install it there",
    r"(?:All masters are unresponsive|stopped SparkContext|SparkContext was shut down|Promise already)()": (
        f"it refused or ended our application; check that its master and workers run Spark {_SERIES}"
    ),
    r"Error from python worker:\n(?:.*\n)*?\s*(.+)\nPYTHONPATH was": "the workers' Python does not start: {}",
}


def reach_cluster(mode: str) -> str:
    """Return this machine's address as seen from the cluster's host; raises RunError without a responder.

    Of several masters (`spark://a:7077,b:7077`) one must respond.
    """
    scheme, _, rest = mode.partition("://")
    problems = []
    for server in re.split(r"[/;]", rest)[0].split(","):
        host, _, port = server.rpartition(":") if re.search(r":\d+$", server) else (server, "", "")
        try:
            number = int(port or _PORTS[scheme])
            with socket.create_connection((host.strip("[]"), number), timeout=_CONNECT_SECONDS) as tried:
                return str(tried.getsockname()[0])
        except (OSError, OverflowError) as error:
            problems.append(f"{server}: {getattr(error, 'strerror', None) or error}")
    raise RunError(
        f"spark.mode {without_secret(mode)}: no response ({'; '.join(problems)}); correct the address or start the cluster"
    )


def without_secret(mode: str) -> str:
    """Return a mode without possible secrets."""
    return mode.partition(";")[0]


def cluster_config(address: str, folder: Path) -> dict[str, str]:
    """Return the settings of a cluster's driver, which executors call back at `address`; its log is in `folder`."""
    log = folder / "log4j2.properties"
    log.write_text(
        f"rootLogger.level = warn\nrootLogger.appenderRef.file.ref = file\nappender.file.type = File\n"
        f"appender.file.name = file\nappender.file.fileName = {folder / 'driver.log'}\nappender.file.append = false\n"
        "appender.file.layout.type = PatternLayout\nappender.file.layout.pattern = %d %p %c: %m%n%ex\n"
    )
    return {
        "spark.driver.host": address,
        "spark.driver.bindAddress": address,
        "spark.driver.extraJavaOptions": f"{JAVA_OPTIONS} -Dlog4j2.configurationFile={log.as_uri()}",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.structuredLogging.enabled": "false",
    }


def check_series(session: SparkSession) -> None:
    """Raise RunError unless the cluster runs our series of Spark."""
    version = str(session.version)
    if not version.startswith(f"{_SERIES}."):
        raise RunError(f"it runs Spark {version}, and we need {_SERIES}; install that version there")


def ship_package(session: SparkSession, folder: Path) -> None:
    """Ship this package to a session's executors."""
    archive = str(package_archive(folder))
    if is_remote(session):
        session.addArtifacts(archive, pyfile=True)
    else:
        session.sparkContext.addPyFile(archive)


def count_cores(session: SparkSession) -> int:
    """Return the number of parallel tasks of a cluster: Spark's default number of partitions."""
    if not is_remote(session):
        return int(session.sparkContext.defaultParallelism)
    # As SQL: Spark's functions need a classic session or SPARK_REMOTE.
    return session.range(1 << 16).selectExpr("spark_partition_id() AS part").distinct().count()


def explained(text: str) -> str | None:
    """Return one line about a missing requirement on a cluster machine from Spark's messages, or None."""
    for pattern, remedy in _FAILURES.items():
        if match := re.search(pattern, text):
            return remedy.format(match[1])
    return None


@contextlib.contextmanager
def watched(session: SparkSession) -> Iterator[None]:
    """End the session's work if no executor accepts a task for IDLE_SECONDS: raises RunError with the possible causes."""
    with _Watch(session) as watch:
        try:
            yield
        except Exception:
            if watch.idle:
                raise RunError(
                    f"Spark: no executor accepted a task for {IDLE_SECONDS:g} s; check that workers of Spark {_VERSION} run,"
                    " that the cores and memory of spark.executor.cores and spark.executor.memory are free there, and that"
                    " they reach the driver, which is this host or the Connect server"
                ) from None
            raise


class _Watch:
    """Observes, in a thread or on progress reports, whether any task runs."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._remote = is_remote(session)
        self._busy_at = times.monotonic()
        self._ended = threading.Event()
        self._waiting: dict[str, bool] = {}
        self.idle = False
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> Self:
        if self._remote:
            self._session.registerProgressHandler(self._note)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._remote:
            self._session.removeProgressHandler(self._note)
        self._thread.join()

    def _note(self, stages: Any, inflight_tasks: int, operation_id: str, done: bool) -> None:
        """Record from a Connect server's report whether an operation of the session waits for an executor."""
        self._waiting[operation_id] = not inflight_tasks and not done and not all(stage.done for stage in stages)

    def _running(self) -> bool:
        """Return whether a task runs, or there is no task."""
        if self._remote:
            return not self._waiting or not all(list(self._waiting.values()))
        tracker = self._session.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        return not stages or any(stage is not None and stage.numActiveTasks for stage in stages)

    def _poll(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            # A context that has ended reports that to the waiting job.
            with contextlib.suppress(Exception):
                if self._running():
                    self._busy_at = times.monotonic()
                elif times.monotonic() - self._busy_at > IDLE_SECONDS:
                    self.idle = True
                    if self._remote:
                        self._session.interruptAll()
                    else:
                        self._session.sparkContext.cancelAllJobs()
                    return
