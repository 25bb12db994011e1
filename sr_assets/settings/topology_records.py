"""The native mirrors and sources as frozen records, which the rest of the package uses.

Not here: how the file is read (`topology`), what is then sent to a server (`domain.topology.wanted`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sr_assets.domain.clusters import OWN_API, ClusterSettings
from sr_assets.domain.topology.plan import Manage
from sr_assets.domain.topology.wanted import WantedStream


@dataclass(frozen=True, slots=True)
class TopologyCluster:
    """A cluster of `topology`: how we reach it, and where other clusters' servers ask its JetStream (`api`).

    Without `api` it is one JetStream with them.
    """

    name: str
    settings: ClusterSettings
    domain: str | None = None
    api: str | None = None


@dataclass(frozen=True, slots=True)
class TopologySettings:
    """The native mirrors and sources, and what may be done with them; `clusters` by name."""

    manage: Manage
    clusters: Mapping[str, TopologyCluster]
    streams: tuple[WantedStream, ...]

    def cluster_of(self, settings: ClusterSettings) -> TopologyCluster | None:
        """Return the cluster that an entry reads or writes; None when it is none of these.

        An entry may leave out the domain of the servers that it names.
        """
        same = [cluster for cluster in self.clusters.values() if cluster.settings.same_as(settings)]
        if not same and settings.api_prefix == OWN_API:
            same = [cluster for cluster in self.clusters.values() if cluster.settings.shares_subjects(settings)]
        return same[0] if len(same) == 1 else None
