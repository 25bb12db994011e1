"""The block `topology` of the file, checked and converted to records."""

import difflib
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from sr_assets.domain.topology.wanted import Transform, Upstream, WantedStream
from sr_assets.settings.links import Inherited, with_api, with_security
from sr_assets.settings.mapping import Raw
from sr_assets.settings.names import read_site_name
from sr_assets.settings.topology_records import TopologyCluster, TopologySettings
from sr_assets.settings.topology_rules import (
    refuse_loops,
    refuse_same_streams,
    source_contradictions,
    stream_contradictions,
)
from sr_assets.settings.topology_shape import RawNativeStream, RawTopologyCluster, RawUpstream
from sr_assets.settings.values import one_of, shown


class CheckedNativeStream(RawNativeStream):
    """An entry of `topology.streams` without contradictory keys."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        _refuse(stream_contradictions(self))
        for upstream in filter(None, [self.mirror, *self.sources]):
            _refuse(source_contradictions(upstream))
        return self


class RawTopology(Raw):
    """`topology`."""

    manage: Annotated[
        Literal["observe", "create", "reconcile"], BeforeValidator(one_of("observe", "create", "reconcile"))
    ] = "observe"
    clusters: dict[Annotated[str, BeforeValidator(read_site_name)], RawTopologyCluster]
    streams: list[CheckedNativeStream] = Field(default_factory=list)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.clusters:
            raise ValueError("clusters: is empty; name each cluster with its url")
        wanted = self.wanted()
        refuse_same_streams(wanted)
        refuse_loops(wanted)
        return self

    def settings(self, top: Inherited) -> TopologySettings:
        """Return the records; `top` has the blocks of the top level."""
        clusters = {
            name: TopologyCluster(
                name,
                with_security(
                    with_api(raw.url, raw.domain, raw.api_prefix), [raw.tls, top.tls], [raw.choria, top.choria]
                ),
                raw.domain,
                raw.api,
            )
            for name, raw in self.clusters.items()
        }
        return TopologySettings(self.manage, clusters, self.wanted())

    def wanted(self) -> tuple[WantedStream, ...]:
        """Return the streams; raises ValueError for an unknown cluster."""
        return tuple(self._stream(raw) for raw in self.streams)

    def _stream(self, raw: RawNativeStream) -> WantedStream:
        where = f"stream {raw.stream!r}"
        cluster = self._cluster(raw.cluster, next(iter(self.clusters)) if len(self.clusters) == 1 else None, where)
        mirror = self._upstream(raw.mirror, cluster, f"{where}: mirror") if raw.mirror else None
        sources = tuple(self._upstream(source, cluster, f"{where}: sources") for source in raw.sources)
        return WantedStream(cluster, raw.stream, mirror, sources, raw.settings)

    def _upstream(self, raw: RawUpstream, own: str, where: str) -> Upstream:
        cluster = self._cluster(raw.cluster, own, where)
        api = raw.api_prefix or self.clusters[cluster].api
        return Upstream(
            cluster,
            raw.stream,
            raw.filter_subject,
            tuple(Transform(transform.src, transform.dest) for transform in raw.subject_transforms),
            raw.start_sequence,
            raw.start_time,
            None if cluster == own and raw.api_prefix is None else api,
            raw.deliver_prefix or "",
        )

    def _cluster(self, name: str | None, default: str | None, where: str) -> str:
        if name is None and default is None:
            raise ValueError(f"{where}: cluster is required, because there are several: {', '.join(self.clusters)}")
        chosen = name or default or ""
        if chosen not in self.clusters:
            near = difflib.get_close_matches(chosen, self.clusters, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"{where}: unknown cluster {shown(chosen)}; {hint}clusters: {', '.join(self.clusters)}")
        return chosen


def _refuse(contradictions: Iterator[tuple[bool, str]]) -> None:
    for contradicted, message in contradictions:
        if contradicted:
            raise ValueError(message)
