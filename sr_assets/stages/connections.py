"""A run's connections to clusters, one for each thread, and the files of connections for Spark's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sr_assets.adapters.connection_file import CONNECTIONS, remove_connections, write_connection
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.nats.client import PublishRules
from sr_assets.settings import ClusterSettings
from sr_assets.stages.leadership import Leadership


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
