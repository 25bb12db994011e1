"""A run's connections: one per cluster and thread, and one Spark session for all threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sr_assets.adapters import times
from sr_assets.adapters.connection_file import CONNECTIONS, remove_connections, write_connection
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.nats.client import PublishRules
from sr_assets.adapters.spark.config import is_cluster, uses_spark
from sr_assets.adapters.spark.engine import renew_engine, use_engine
from sr_assets.adapters.spark.remote_session import count_cores
from sr_assets.adapters.spark.session import (
    leave_session,
    local_cores,
    open_session,
    spark_error,
    stop_work,
)
from sr_assets.domain.errors import EngineLostError
from sr_assets.settings import ClusterSettings, SparkSettings
from sr_assets.stages.leadership import Leadership

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_COUNTED_SECONDS: Final = 60.0


class Clusters:
    """The connections of one thread, one per cluster. After `close`, the next use opens them again.

    They publish only while this home leads the site.
    """

    def __init__(self, site: str, leadership: Leadership) -> None:
        self.leadership = leadership
        self._name = f"sr-assets {site}"
        self._open: dict[ClusterSettings, Cluster] = {}

    def connect(self, settings: ClusterSettings) -> Cluster:
        """Return the open connection to a cluster."""
        if settings not in self._open:
            rules = PublishRules(self.leadership.ensure, self.leadership.vanished_ms)
            self._open[settings] = Cluster(settings, self._name, rules)
        return self._open[settings]

    def close(self) -> None:
        """Close all connections: a connection that the server closed may still look open."""
        while self._open:
            _, cluster = self._open.popitem()
            cluster.close()


class ConnectionFiles:
    """The connection files for Spark's tasks; they exist only during a run."""

    def __init__(self, folder: Path, clusters: Sequence[ClusterSettings]) -> None:
        self._folder = folder
        self._clusters = list(dict.fromkeys(clusters))

    def path(self, settings: ClusterSettings) -> str:
        """Return the path of a cluster's file, written if it is missing or differs."""
        file = self._folder / CONNECTIONS / f"{self._clusters.index(settings)}.json"
        return str(write_connection(file, settings).resolve())

    def remove(self) -> None:
        """Delete all files after the run, because they may contain passwords."""
        remove_connections(self._folder)


class SparkConnection:
    """The site's Spark session, joined by its first user in a run and shared by all threads.

    The engine stays warm for `keep_seconds` after the run. Joining interrupts the remaining operations of an earlier
    run.
    """

    def __init__(self, settings: SparkSettings, home: Path, site: str, keep_seconds: float) -> None:
        self._settings, self._home, self._site, self._keep_seconds = settings, home, site, keep_seconds
        self._guard = threading.Lock()
        self._stack = contextlib.ExitStack()
        self._session: SparkSession | None = None
        self._cores, self._counted_until = 1, 0.0

    def needed(self, messages: int, payload_bytes: int) -> bool:
        """Return whether Spark processes a batch of this size; on a cluster, it processes every batch."""
        return uses_spark(self._settings, messages, payload_bytes)

    @property
    def remote(self) -> bool:
        """Whether tasks run on a cluster without shared disks."""
        return is_cluster(self._settings.mode)

    def session(self) -> SparkSession:
        """Return the session. Raises RunError, or TransientError if the engine ends before the session is joined."""
        with self._guard:
            if self._session is None:
                self._session = open_session(self._settings, self._home, self._site)
                self._stack.callback(leave_session, self._session)
                self._stack.enter_context(use_engine(self._home, self._keep_seconds))
            return self._session

    def cores(self) -> int:
        """Return the number of parallel tasks of the engine; a cluster, which may grow, is queried once a minute."""
        if "://" not in self._settings.mode:
            return local_cores(self._settings)
        if times.monotonic() >= self._counted_until:
            with self.use() as session:
                self._cores = count_cores(session)
            self._counted_until = times.monotonic() + _COUNTED_SECONDS
        return self._cores

    @contextlib.contextmanager
    def use(self) -> Iterator[SparkSession]:
        """Yield the session, and raise every exception inside as RunError in one line.

        If the engine has ended, the next use joins again, unless another thread already did.
        """
        session = self.session()
        try:
            yield session
        except Exception as error:
            failed = spark_error(error)
            with self._guard:
                if isinstance(failed, EngineLostError) and session is self._session:
                    self._session = None
                    self._stack.close()
                    if self._settings.mode == "connect-local":
                        renew_engine(self._home)
            raise failed from error

    def interrupt(self) -> None:
        """Interrupt the session's tasks, because the run is abandoned."""
        if self._session is not None:
            stop_work(self._session)

    def close(self) -> None:
        """Leave the session; the next use joins it again."""
        with self._guard:
            self._session = None
            self._stack.close()
