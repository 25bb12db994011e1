"""The block `topology`: the native mirrors and sources, and the permitted changes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Self

from pydantic import AfterValidator, model_validator

from sr_assets.domain.clusters import OWN_API, ClusterSettings, domain_api
from sr_assets.domain.errors import did_you_mean
from sr_assets.domain.topology.plan import Manage
from sr_assets.domain.topology.wanted import Transform, Upstream, WantedStream
from sr_assets.settings.clusters import Url
from sr_assets.settings.entries import TopLevel
from sr_assets.settings.links import ChoriaBlock, TlsBlock, with_api, with_security
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.names import ApiPrefix, Domain, SiteName
from sr_assets.settings.native_streams import NativeStreamBlock, UpstreamBlock
from sr_assets.settings.topology_rules import refuse_contradiction, refuse_loops, refuse_same_streams
from sr_assets.settings.values import choice, shown


class ClusterBlock(Block):
    """One of `topology.clusters`. Without `domain` and `api_prefix`, all share one JetStream, as through gateways."""

    url: Url = file_key("see [URLs and TLS](#urls-and-tls)")
    domain: Domain | None = file_key("the domain of its JetStream, for us and the other clusters' servers", None)
    api_prefix: ApiPrefix | None = file_key("instead of a domain: the API prefix of its JetStream", None)
    tls: TlsBlock | None = file_key("see [URLs and TLS](#urls-and-tls)", None, default_text="the outer block")
    choria: ChoriaBlock | None = file_key("see [Choria](#choria)", None, default_text="the outer block")

    @cached_property
    def cluster(self) -> ClusterSettings:
        """The cluster; raises ValueError if keys about it contradict each other."""
        return with_security(with_api(self.url, self.domain, self.api_prefix), [self.tls], [self.choria])

    @property
    def api(self) -> str | None:
        """The API prefix for other clusters, or None for one common JetStream."""
        return domain_api(self.domain) if self.domain else self.api_prefix


@dataclass(frozen=True, slots=True)
class TopologyCluster:
    """A cluster of `topology`: its connection, and the API prefix of its JetStream for other clusters' servers.

    Without `api`, all share one JetStream.
    """

    name: str
    settings: ClusterSettings
    domain: str | None = None
    api: str | None = None


class TopologySettings(Block):
    """`topology`."""

    manage: Annotated[Manage, choice(Manage)] = file_key(
        "`observe` changes nothing; `create` creates missing streams and ignores manual changes; `reconcile` also"
        " updates our streams as far as possible",
        "observe",
    )
    cluster_blocks: dict[SiteName, ClusterBlock] = file_key("the [clusters](#a-cluster), by name", name="clusters")
    stream_blocks: tuple[Annotated[NativeStreamBlock, AfterValidator(refuse_contradiction)], ...] = file_key(
        "the [streams](#a-native-stream)", [], name="streams"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.cluster_blocks:
            raise ValueError("clusters: is empty; name each cluster with its url")
        _ = self.clusters
        refuse_same_streams(self.streams)
        refuse_loops(self.streams)
        return self

    def within(self, top: TopLevel) -> Self:
        """Return the block with the inherited keys filled in; raises ValueError if they contradict its own."""
        blocks = {
            name: block.changed(tls=block.tls or top.tls, choria=block.choria or top.choria)
            for name, block in self.cluster_blocks.items()
        }
        topology = self.changed(cluster_blocks=blocks)
        _ = topology.clusters
        return topology

    @cached_property
    def clusters(self) -> Mapping[str, TopologyCluster]:
        """The clusters by name."""
        return {
            name: TopologyCluster(name, block.cluster, block.domain, block.api)
            for name, block in self.cluster_blocks.items()
        }

    @cached_property
    def streams(self) -> tuple[WantedStream, ...]:
        """The streams; raises ValueError for an unknown cluster."""
        return tuple(map(self._stream, self.stream_blocks))

    def cluster_of(self, settings: ClusterSettings) -> TopologyCluster | None:
        """Return the cluster of an entry's source or target, or None.

        An entry may omit the domain of its servers.
        """
        same = [cluster for cluster in self.clusters.values() if cluster.settings.same_as(settings)]
        if not same and settings.api_prefix == OWN_API:
            same = [cluster for cluster in self.clusters.values() if cluster.settings.shares_subjects(settings)]
        return same[0] if len(same) == 1 else None

    def _stream(self, block: NativeStreamBlock) -> WantedStream:
        where = f"stream {block.stream!r}"
        cluster = self._cluster(
            block.cluster, next(iter(self.cluster_blocks)) if len(self.cluster_blocks) == 1 else None, where
        )
        mirror = self._upstream(block.mirror, cluster, f"{where}: mirror") if block.mirror else None
        sources = tuple(self._upstream(source, cluster, f"{where}: sources") for source in block.sources)
        return WantedStream(cluster, block.stream, mirror, sources, block.settings)

    def _upstream(self, block: UpstreamBlock, own: str, where: str) -> Upstream:
        cluster = self._cluster(block.cluster, own, where)
        api = block.api_prefix or self.cluster_blocks[cluster].api
        return Upstream(
            cluster,
            block.stream,
            block.filter_subject,
            tuple(Transform(transform.src, transform.dest) for transform in block.subject_transforms),
            block.start_sequence,
            block.start_time,
            None if cluster == own and block.api_prefix is None else api,
            block.deliver_prefix or "",
        )

    def _cluster(self, name: str | None, default: str | None, where: str) -> str:
        if name is None and default is None:
            raise ValueError(
                f"{where}: cluster is required, because there are several: {', '.join(self.cluster_blocks)}"
            )
        chosen = name or default or ""
        if chosen not in self.cluster_blocks:
            hint = did_you_mean(chosen, self.cluster_blocks)
            raise ValueError(
                f"{where}: unknown cluster {shown(chosen)}; {hint}clusters: {', '.join(self.cluster_blocks)}"
            )
        return chosen
