"""Probes of native streams for `sr-assets check --connect`: clusters, routes of links, permissions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.jetstream import STREAM_NOT_FOUND, ApiError
from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.domain.errors import RunError, TransientError
from sr_assets.domain.topology.wanted import Upstream, WantedStream
from sr_assets.stages.probes import Probe, Probes
from sr_assets.stages.topology.planning import probe_update

if TYPE_CHECKING:
    from sr_assets.settings import TopologyCluster, TopologySettings

_NAME: Final = "sr-assets check"


def probe_topology(topology: TopologySettings, pool: ThreadPoolExecutor) -> list[Probe]:
    """Probe the requirements of native streams at each cluster: connection, JetStream, streams, incoming links."""
    return list(chain.from_iterable(pool.map(partial(_probe_cluster, topology), topology.clusters.values())))


def _probe_cluster(topology: TopologySettings, known: TopologyCluster) -> list[Probe]:
    probes = Probes(f"topology {known.name}")
    with closing(Cluster(known.settings, _NAME)) as cluster:
        if not probes.attempt(cluster, "connect", lambda: "nats-server " + ".".join(map(str, cluster.server_version))):
            return probes.made
        if not probes.attempt(cluster, known.settings.api("INFO"), partial(_about, cluster)):
            return probes.made
        own = {wanted.stream: wanted for wanted in topology.streams if wanted.cluster == known.name}
        origins = [
            upstream.stream for wanted in topology.streams for upstream in wanted.upstreams if _is_at(known, upstream)
        ]
        for stream in dict.fromkeys([*own, *origins]):
            subject = known.settings.api(f"STREAM.INFO.{stream}")
            probes.attempt(cluster, subject, partial(_held, cluster, stream, made=stream in own))
        if topology.manage != "observe":
            operations = ("CREATE", "UPDATE") if topology.manage == "reconcile" else ("CREATE",)
            for operation, stream in ((operation, stream) for stream in own for operation in operations):
                probes.attempt(
                    cluster,
                    known.settings.api(f"STREAM.{operation}.{stream}"),
                    partial(_allowed, cluster, operation, stream),
                )
        for wanted in own.values():
            for upstream in wanted.upstreams:
                _probe_link(probes, known, wanted, upstream)
    return probes.made


def _is_at(known: TopologyCluster, upstream: Upstream) -> bool:
    """Return whether an origin is reachable at this cluster's own API, not behind a prefix."""
    return upstream.cluster == known.name and upstream.api in (None, known.api)


def _about(cluster: Cluster) -> str:
    try:
        about = cluster.request_api("INFO")
    except (ApiError, TransientError):
        raise
    except RunError:
        return "not permitted and not needed"
    domain = about.get("domain")
    return f"JetStream of domain {domain}" if domain else "JetStream without a domain"


def _held(cluster: Cluster, stream: str, *, made: bool) -> str:
    try:
        info = cluster.stream_info(stream)
    except ApiError as error:
        if error.code == STREAM_NOT_FOUND and made:
            return "does not exist yet"
        raise
    return f"{info.messages} messages, last sequence {info.last_sequence}"


def _allowed(cluster: Cluster, operation: str, stream: str) -> str:
    probe_update(cluster, operation, stream)
    return "allowed; no stream was changed"


def _probe_link(probes: Probes, known: TopologyCluster, wanted: WantedStream, upstream: Upstream) -> None:
    """Query an origin on the servers' route: through a leafnode, a gateway or another account's export."""
    if upstream.api is None:
        return
    settings = replace(known.settings, api_prefix=upstream.api)
    with closing(Cluster(settings, _NAME)) as cluster:
        probes.attempt(
            cluster, settings.api(f"STREAM.INFO.{upstream.stream}"), partial(_through, cluster, wanted, upstream)
        )


def _through(cluster: Cluster, wanted: WantedStream, upstream: Upstream) -> str:
    way = f"the route from {wanted.label} to {upstream.cluster}/{upstream.stream}"
    try:
        cluster.request_api(f"STREAM.INFO.{upstream.stream}")
    except ApiError as error:
        if error.code == STREAM_NOT_FOUND:
            return f"{way} is open; the stream does not exist yet"
        raise RunError(f"{way} is closed: {error}") from None
    except TransientError as error:
        raise RunError(f"{way} is closed: {error}") from None
    except RunError:
        return f"{way}: our user has no permission there; servers have their own"
    return f"{way} is open"
