"""Sessions on a cluster that shares nothing with us: `spark://host:port` and `sc://host:port`.

Here: what has to be there before a session is opened, shipping the package into it, and ending a job that no executor takes.
Not here: the local engine (`spark.engine`), the jobs (`spark.remote`).
"""

from __future__ import annotations

import contextlib
import platform
import re
import socket
import threading
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, Self

from sr_assets.adapters.spark.config import JAVA_OPTIONS
from sr_assets.adapters.spark.connect import is_remote
from sr_assets.adapters.spark.shipping import package_archive
from sr_assets.domain.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

_CONNECT_SECONDS: Final = 5.0
#: How long a job waits for an executor that takes one of its tasks.
IDLE_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 1.0
_PORTS: Final = {"spark": 7077, "sc": 15002}
#: As it is installed: to import Spark for it would slow down every process that only loads the definitions.
_VERSION: Final = version("pyspark")
_SERIES: Final = ".".join(_VERSION.split(".")[:2])
_PYTHON: Final = ".".join(platform.python_version_tuple()[:2])


def reach_cluster(mode: str) -> str:
    """Return this machine's address as the cluster's host sees it; raises RunError when nobody answers there.

    Of several masters (`spark://a:7077,b:7077`) one has to answer.
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
        f"spark.mode {without_secret(mode)}: nobody answers there ({'; '.join(problems)}): correct it, or start it"
    )


def without_secret(mode: str) -> str:
    """Return a mode without what may be a secret in it."""
    return mode.partition(";")[0]


def cluster_config(address: str, folder: Path) -> dict[str, str]:
    """Return the settings of a driver for a cluster, which calls it back at `address`; its log is in `folder`."""
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
    """Raise RunError unless the cluster runs Spark of our series."""
    version = str(session.version)
    if not version.startswith(f"{_SERIES}."):
        raise RunError(f"it runs Spark {version}, and we need {_SERIES}: install that there")


def ship_package(session: SparkSession, folder: Path) -> None:
    """Give the executors of a session this package."""
    archive = str(package_archive(folder))
    if is_remote(session):
        session.addArtifacts(archive, pyfile=True)
    else:
        session.sparkContext.addPyFile(archive)


_NAMED: Final = "in spark.pyspark.python, or for sc:// in the server's PYSPARK_PYTHON"
#: What Spark says of a machine of the cluster, and what is to be done there.
_FAILURES: Final = {
    r'Cannot run program "([^"]+)"': f"the workers have no program {{}}: install it, or name theirs {_NAMED}",
    r"Python in worker has different version: (\S+) than": (
        f"the workers' Python is {{}} and ours {_PYTHON}: install {_PYTHON} there and name it {_NAMED}"
    ),
    r"(PyArrow|Pandas|NumPy) >= \S+ must be installed": "the workers' Python lacks {}: install it there",
    r"No module named '([^']+)'": "the workers' Python lacks {}: install it there",
    r"(?:All masters are unresponsive|stopped SparkContext|SparkContext was shut down|Promise already)()": (
        f"it did not take our application, or ended it: are its master and workers of Spark {_SERIES}?"
    ),
    r"Error from python worker:\n(?:.*\n)*?\s*(.+)\nPYTHONPATH was": "the workers' Python does not start: {}",
}


def explained(text: str) -> str | None:
    """Return one line on what a machine of the cluster lacks, from all that Spark said; None for anything else."""
    for pattern, remedy in _FAILURES.items():
        if match := re.search(pattern, text):
            return remedy.format(match[1])
    return None


@contextlib.contextmanager
def watched(session: SparkSession) -> Iterator[None]:
    """End the session's work when no executor has taken a task for IDLE_SECONDS: raises RunError with what to look at."""
    with _Watch(session) as watch:
        try:
            yield
        except Exception:
            if watch.idle:
                raise RunError(
                    f"Spark: no executor took a task for {IDLE_SECONDS:g} s: are workers there, of Spark"
                    f" {_VERSION}, with as many cores and as much memory free as spark.executor.cores and"
                    " spark.executor.memory ask for, and can they reach the driver, which is this host or the Connect server?"
                ) from None
            raise


class _Watch:
    """Looks, from a thread or as progress is reported, whether any task runs."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._remote = is_remote(session)
        self._busy_at = time.monotonic()
        self._ended = threading.Event()
        self._waiting: dict[str, bool] = {}
        self.idle = False
        self._thread = threading.Thread(target=self._look_on, daemon=True)

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
        """Note what a Connect server reports of one of the session's operations: whether it waits for an executor."""
        self._waiting[operation_id] = not inflight_tasks and not done and not all(stage.done for stage in stages)

    def _running(self) -> bool:
        """Return whether a task runs, or nothing is there to run."""
        if self._remote:
            return not self._waiting or not all(list(self._waiting.values()))
        tracker = self._session.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        return not stages or any(stage is not None and stage.numActiveTasks for stage in stages)

    def _look_on(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            # A context that has ended says so to whoever waits for the job.
            with contextlib.suppress(Exception):
                if self._running():
                    self._busy_at = time.monotonic()
                elif time.monotonic() - self._busy_at > IDLE_SECONDS:
                    self.idle = True
                    if self._remote:
                        self._session.interruptAll()
                    else:
                        self._session.sparkContext.cancelAllJobs()
                    return
