"""A survey: streams, domain and version of every configured cluster, queried in parallel."""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from sr_assets.adapters.jetstream import STREAM_NOT_FOUND, ApiError
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.nats.stream_info import Version
from sr_assets.domain.clusters import OWN_API
from sr_assets.domain.errors import RunError, TransientError
from sr_assets.domain.topology.found import FoundLink, FoundStream, read_stream
from sr_assets.settings import ClusterSettings, Settings, StreamSettings, TopologyCluster

T = TypeVar("T")
R = TypeVar("R")

_SIDE_BY_SIDE: Final = 32
#: The lowest server version with each API level, the highest first; servers before 2.11 send none.
_LEVELS: Final = ((5, (2, 15, 0)), (4, (2, 14, 0)), (2, (2, 12, 0)), (1, (2, 11, 0)), (0, (2, 10, 0)))
#: A stream's domain, name and created time.
_Identity = tuple[str | None, str, str | None]


@dataclass(frozen=True, slots=True)
class ClusterSurvey:
    """The response of one cluster; `answers` has the raw stream infos. With an `error`, it is unreachable.

    `silent` are configured streams that did not respond: without a leader they neither exist nor lack. `elsewhere` maps
    a stream to the other cluster that lists it: clusters that gateways connect, or that are reachable in two ways,
    share one JetStream and each list all streams.
    """

    name: str
    settings: ClusterSettings
    domain: str | None = None
    version: Version = (0, 0, 0)
    api_level: int | None = None
    streams: Mapping[str, FoundStream] = field(default_factory=dict)
    answers: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    error: str | None = None
    silent: frozenset[str] = frozenset()
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def lists(self, stream: str) -> bool:
        return stream in self.streams and stream not in self.elsewhere


class Survey:
    """Connections to all clusters inside `with`, and their responses to `refresh`."""

    def __init__(self, settings: Settings, name: str = "sr-assets topology") -> None:
        """Store the configuration, and the client name at the servers."""
        self._settings, self._known = settings, known_clusters(settings)
        self._named = _named_streams(settings, self._known)
        self._name = name
        self._stack = ExitStack()
        self._open: dict[str, Cluster] = {}
        self._foreign: dict[ClusterSettings, Cluster] = {}
        self._guard = threading.Lock()
        self.of: dict[str, ClusterSurvey] = {}

    def __enter__(self) -> Self:
        self._pool = self._stack.enter_context(ThreadPoolExecutor(_SIDE_BY_SIDE))
        for name, known in self._known.items():
            self._open[name] = Cluster(known.settings, self._name)
            self._stack.callback(self._open[name].close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def refresh(self) -> Self:
        """Query every cluster once, in parallel."""
        survey = {surveyed.name: surveyed for surveyed in self._pool.map(self._query, self._known.values())}
        self.of = list_once(survey, self._named)
        return self

    def side_by_side(self, ask: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Query many items in parallel; return the responses in order."""
        return list(self._pool.map(ask, items))

    def cluster(self, name: str) -> Cluster:
        """Return the connection to a cluster."""
        return self._open[name]

    def name_of(self, settings: ClusterSettings) -> str:
        """Return the name of an entry's cluster."""
        return _name(self._settings, self._known, settings) or ""

    def origin(self, surveyed: ClusterSurvey, link: FoundLink) -> ClusterSurvey | None:
        """Return the cluster of a link's origin, or None if it is unknown."""
        if link.api is None:
            if surveyed.lists(link.stream):
                return surveyed
            # Clusters that gateways connect share one JetStream.
            same = (other for other in self.of.values() if other.domain == surveyed.domain and other.lists(link.stream))
            return next(same, surveyed)
        others = [
            other
            for other in self.of.values()
            if self._known[other.name].api == link.api or (link.domain and other.domain == link.domain)
        ]
        return next((other for other in others if other.lists(link.stream)), next(iter(others), None))

    def through(self, surveyed: ClusterSurvey, link: FoundLink) -> tuple[FoundStream, Cluster] | None:
        """Query the origin of a link at an unknown cluster through the link; return None without a response."""
        settings = replace(surveyed.settings, api_prefix=link.api or "")
        with self._guard:
            cluster = self._foreign.get(settings)
            if cluster is None:
                cluster = self._foreign[settings] = Cluster(settings, self._name)
                self._stack.callback(cluster.close)
                with suppress(RunError):
                    # Open it before other threads use it, or each would open it.
                    cluster.request_api("INFO")
        try:
            return read_stream(cluster.request_api(f"STREAM.INFO.{link.stream}")), cluster
        except RunError:
            return None

    def _query(self, known: TopologyCluster) -> ClusterSurvey:
        cluster = self._open[known.name]
        try:
            about = _about(cluster)
            infos, silent = self._list(cluster, known.name)
            version = _version(cluster, about)
        except RunError as error:
            return ClusterSurvey(known.name, known.settings, known.domain, error=str(error))
        streams = {info["config"]["name"]: info for info in infos}
        return ClusterSurvey(
            known.name,
            known.settings,
            known.domain or about.get("domain"),
            version,
            (about.get("api") or {}).get("level"),
            {name: read_stream(response) for name, response in sorted(streams.items())},
            streams,
            silent=frozenset(silent),
        )

    def _list(self, cluster: Cluster, name: str) -> tuple[list[dict[str, Any]], list[str]]:
        """Return all streams of a cluster, and the configured ones that did not respond."""
        infos, silent, refusal = [], [], None
        try:
            infos = cluster.list_streams()
        except TransientError:
            raise
        except RunError as error:
            # A restricted user may not list all streams.
            refusal = error
        # The list omits a stream whose leader does not respond.
        listed = {info["config"]["name"] for info in infos}
        for stream in self._named[name]:
            if stream not in listed:
                try:
                    infos.append(cluster.request_api(f"STREAM.INFO.{stream}"))
                except ApiError as error:
                    if error.code != STREAM_NOT_FOUND:
                        silent.append(stream)
                except TransientError:
                    silent.append(stream)
        if refusal is not None and not infos:
            raise refusal
        return infos, silent


def list_once(survey: Mapping[str, ClusterSurvey], named: Mapping[str, Collection[str]]) -> dict[str, ClusterSurvey]:
    """Return surveys in which one cluster lists each stream: the configured one, else the first.

    Streams with the same name and created time (ns) are identical.
    """
    homes: dict[_Identity, str] = {}
    for by_name in (True, False):
        for surveyed in survey.values():
            for name in surveyed.streams:
                if not by_name or name in named.get(surveyed.name, ()):
                    homes.setdefault(_identity(surveyed, name), surveyed.name)
    return {
        surveyed.name: replace(
            surveyed,
            elsewhere={
                name: home for name in surveyed.streams if (home := homes[_identity(surveyed, name)]) != surveyed.name
            },
        )
        for surveyed in survey.values()
    }


def _identity(surveyed: ClusterSurvey, name: str) -> _Identity:
    return surveyed.domain, name, surveyed.answers[name].get("created")


def known_clusters(settings: Settings) -> dict[str, TopologyCluster]:
    """Return every cluster by name: the clusters of `topology`, and those of the entries, named after their servers."""
    known = dict(settings.topology.clusters) if settings.topology else {}
    for entry in settings.entries:
        for cluster in entry.clusters:
            if _name(settings, known, cluster) is not None:
                continue
            name, number = cluster.label, 1
            while name in known:
                # Another account, or another domain, of the same servers.
                number += 1
                name = f"{cluster.label}#{number}"
            known[name] = TopologyCluster(
                name, cluster, api=None if cluster.api_prefix == OWN_API else cluster.api_prefix
            )
    return known


def _name(settings: Settings, known: Mapping[str, TopologyCluster], cluster: ClusterSettings) -> str | None:
    """Return the name of an entry's cluster."""
    named = settings.topology.cluster_of(cluster) if settings.topology else None
    if named is not None:
        return named.name
    return next((name for name, candidate in known.items() if candidate.settings.same_as(cluster)), None)


def _named_streams(settings: Settings, known: Mapping[str, TopologyCluster]) -> dict[str, list[str]]:
    """Return the configured streams of each cluster."""
    named: dict[str, dict[str, None]] = {name: {} for name in known}
    for wanted in settings.topology.streams if settings.topology else ():
        named[wanted.cluster][wanted.stream] = None
        for upstream in wanted.upstreams:
            named[upstream.cluster][upstream.stream] = None
    for entry in settings.entries:
        ends = [(entry.source, entry.stream)]
        if isinstance(entry, StreamSettings):
            ends.append((entry.target, entry.target_stream))
        for cluster, stream in ends:
            named[_name(settings, known, cluster) or ""][stream] = None
    return {name: list(streams) for name, streams in named.items()}


def _version(cluster: Cluster, about: Mapping[str, Any]) -> Version:
    """Return the server version of a cluster's JetStream; of another domain's, the lowest with its API level."""
    if not cluster.settings.api_owner or "api" not in about:
        return cluster.server_version
    level = about["api"].get("level", 0)
    return next(version for since, version in _LEVELS if level >= since)


def _about(cluster: Cluster) -> dict[str, Any]:
    """Return JetStream's account info, or an empty one without permission or JetStream."""
    try:
        return cluster.request_api("INFO")
    except TransientError:
        raise
    except RunError:
        return {}
