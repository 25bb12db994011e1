"""The subjects that the configuration does not name, from the servers: of copies, and of streams with advisories."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from typing import Final

from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.wire import PermissionProbe
from sr_assets.domain.errors import SrAssetsError
from sr_assets.domain.permissions import Facts, StreamFacts
from sr_assets.domain.subjects import advisory_pattern
from sr_assets.settings import ClusterSettings, Entry, Settings, StreamSettings
from sr_assets.settings.permissions import configured_copies, used_clusters
from sr_assets.stages.replication.target import copied_subjects

_CLIENT: Final = "sr-assets permissions"
_SIDE_BY_SIDE: Final = 16


def ask_servers(settings: Settings, entries: Iterable[Entry] | None = None) -> Facts:
    """Return what the servers know; a server that does not respond leaves it unknown."""
    chosen = settings.entries if entries is None else entries
    streams = [entry for entry in chosen if isinstance(entry, StreamSettings)]
    clusters = [cluster for cluster in used_clusters(settings) if cluster.domain]
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        domains = dict(zip(clusters, pool.map(_domain, clusters), strict=True))
        answers = pool.map(partial(_facts, settings), streams)
        facts = dict(zip([stream.label for stream in streams], answers, strict=True))
    return Facts(facts, {cluster: domain for cluster, domain in domains.items() if domain is not None})


def _domain(cluster: ClusterSettings) -> str | None:
    """Return the JetStream domain of the connected server, empty without one, or None if no server responds."""
    with suppress(SrAssetsError), PermissionProbe(cluster) as connection:
        return connection.server_domain
    return None


def _facts(settings: Settings, stream: StreamSettings) -> StreamFacts:
    with (
        closing(Cluster(stream.source, _CLIENT)) as source,
        closing(Cluster(stream.target, _CLIENT)) as target,
    ):
        copies = keepers = None
        origins: tuple[str, ...] = ()
        if configured_copies(settings, stream) is None:
            with suppress(SrAssetsError):
                info = source.stream_info(stream.stream)
                origins = _origins(info)
                copies = copied_subjects(stream, info, source, target)
        if stream.advisory is not None:
            with suppress(SrAssetsError):
                cluster = source if stream.advisory.cluster == "source" else target
                keepers = tuple(cluster.stream_names(advisory_pattern(stream.advisory.subject)))
        return StreamFacts(copies, keepers, origins)


def _origins(info: StreamInfo) -> tuple[str, ...]:
    """Return the streams of the same JetStream that a run queries for the subjects of a mirror or a stream with sources."""
    upstreams = [info.config.get("mirror"), *(info.config.get("sources") or ())]
    return tuple(origin["name"] for origin in upstreams if origin and not origin.get("external"))
