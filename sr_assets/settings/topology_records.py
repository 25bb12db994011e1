"""The native mirrors and sources as frozen records."""

from collections.abc import Mapping
from dataclasses import dataclass

from sr_assets.domain.clusters import OWN_API, ClusterSettings
from sr_assets.domain.topology.plan import Manage
from sr_assets.domain.topology.wanted import WantedStream


@dataclass(frozen=True, slots=True)
class TopologyCluster:
    """A cluster of `topology`: its connection, and the API prefix of its JetStream for other clusters' servers.

    Without `api`, all share one JetStream.
    """

    name: str
    settings: ClusterSettings
    domain: str | None = None
    api: str | None = None


@dataclass(frozen=True, slots=True)
class TopologySettings:
    """The native mirrors and sources, and the permitted changes; `clusters` by name."""

    manage: Manage
    clusters: Mapping[str, TopologyCluster]
    streams: tuple[WantedStream, ...]

    def cluster_of(self, settings: ClusterSettings) -> TopologyCluster | None:
        """Return the cluster of an entry's source or target, or None.

        An entry may omit the domain of its servers.
        """
        same = [cluster for cluster in self.clusters.values() if cluster.settings.same_as(settings)]
        if not same and settings.api_prefix == OWN_API:
            same = [cluster for cluster in self.clusters.values() if cluster.settings.shares_subjects(settings)]
        return same[0] if len(same) == 1 else None
