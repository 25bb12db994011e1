"""The block `topology`: the native streams with their mirrors and sources, the permitted changes, and contradictions.

Contradictions include settings that a server would refuse or ignore.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, model_validator

from sr_assets.domain import subjects
from sr_assets.domain.clusters import OWN_API, ClusterSettings, domain_api
from sr_assets.domain.errors import did_you_mean
from sr_assets.domain.topology.plan import Manage
from sr_assets.domain.topology.wanted import Transform, Upstream, WantedStream
from sr_assets.settings.cluster_urls import ChoriaBlock, TlsBlock, Url, with_api, with_security
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.names import ApiPrefix, Domain, Filter, SiteName, StreamName, asset_name
from sr_assets.settings.streams import (
    JETSTREAM_NAMES,
    Compression,
    Discard,
    PlacementBlock,
    Replicas,
    Retention,
    Storage,
)
from sr_assets.settings.values import (
    Flag,
    NumberLimit,
    Positive,
    Size,
    Span,
    Text,
    Time,
    Value,
    choice,
    read_text,
    shown,
)

#: Keys of a stream that are not settings, and JetStream's names that differ from ours.
_NO_SETTINGS: Final = frozenset({"cluster", "stream", "placement", "mirror", "sources"})


def _destination(value: object) -> str:
    """Read the destination of a transform: a subject whose tokens may be `$1`, `{{wildcard(1)}}` and the like."""
    text = read_text(value)
    if re.search(r"\s", re.sub(r"\{\{.*?\}\}", "", text)) or ".." in text or text.startswith(".") or text.endswith("."):
        raise ValueError(f"{shown(text)} is not a subject: tokens separated by single dots, no spaces")
    return text


class TransformBlock(Block):
    """One of `subject_transforms`."""

    src: Filter = file_key("the subjects to copy")
    dest: Annotated[str, Value(_destination, type="subject, with `$1` or `{{wildcard(1)}}`")] = file_key(
        "their subject in the copy", "", default_text="unchanged"
    )


class UpstreamBlock(Block):
    """`mirror`, or one of `sources`."""

    stream: StreamName = file_key("the origin")
    cluster: Text | None = file_key("the origin's cluster", None, default_text="the stream's")
    filter_subject: Filter | None = file_key("the subjects to copy", None, default_text="all")
    subject_transforms: tuple[TransformBlock, ...] = file_key(
        "[transforms](#subject-transforms), instead of a filter", []
    )
    start_sequence: Positive | None = file_key(
        "the start of a new mirror or source; without effect on an existing one", None, default_text="all"
    )
    start_time: Time | None = file_key("instead of a sequence", None, default_text="all")
    api_prefix: ApiPrefix | None = file_key(
        "the API prefix of the origin's JetStream at the copying server, for example of an imported account",
        None,
        default_text="the cluster's",
    )
    deliver_prefix: ApiPrefix | None = file_key("the prefix of delivered messages; needs `api_prefix`", None)


class NativeStreamBlock(Block):
    """One of `topology.streams`, with `mirror`, `sources`, `subjects`, or the last two."""

    cluster: Text | None = file_key("its cluster", None, default_text="the only one")
    stream: StreamName = file_key("its name")
    subjects: tuple[Filter, ...] | None = file_key("its subjects", None)
    description: Text | None = file_key("a description", None)
    storage: Annotated[Storage, choice(Storage)] | None = file_key("the storage", None)
    retention: Annotated[Retention, choice(Retention)] | None = file_key("the retention policy", None)
    replicas: Replicas | None = file_key("the number of replicas", None)
    placement: PlacementBlock | None = file_key("[placement](#block-placement)", None)
    max_msgs: Positive | None = file_key("maximum number of messages", None)
    max_bytes: Size | None = file_key("maximum size", None)
    max_age: Span | None = file_key("maximum age of a message", None)
    max_msgs_per_subject: Positive | None = file_key("maximum number of messages of a subject", None)
    max_msg_size: Size | None = file_key("maximum size of a message", None)
    discard: Annotated[Discard, choice(Discard)] | None = file_key("the messages that a full stream discards", None)
    duplicate_window: Span | None = file_key("the duration of the detection of duplicates", None)
    compression: Annotated[Compression, choice(Compression)] | None = file_key("the compression", None)
    allow_direct: Flag | None = file_key("whether replicas serve messages", None)
    mirror_direct: Flag | None = file_key("whether a mirror serves its origin's messages", None)
    deny_delete: Flag | None = file_key("whether the server refuses to delete messages; permanent", None)
    deny_purge: Flag | None = file_key("whether the server refuses to purge the stream; permanent", None)
    allow_rollup: Flag | None = file_key("whether a message with `Nats-Rollup` replaces earlier ones", None)
    max_consumers: NumberLimit | None = file_key("maximum number of consumers; permanent", None)
    sealed: Flag | None = file_key("whether the stream refuses all messages and changes; permanent", None)
    metadata: dict[Text, Text] | None = file_key("names with text", None)
    mirror: UpstreamBlock | None = file_key("the [origin](#mirror-and-sources) of a mirror", None)
    sources: tuple[UpstreamBlock, ...] = file_key("the [origins](#mirror-and-sources) of a stream with sources", [])

    @property
    def settings(self) -> dict[str, Any]:
        """The configured settings, by JetStream's names."""
        configured = {name: getattr(self, name) for name in self.keys().values() if name not in _NO_SETTINGS}
        if self.subjects is not None:
            configured["subjects"] = list(self.subjects)
        named = {JETSTREAM_NAMES.get(name, name): value for name, value in configured.items() if value is not None}
        if self.placement is not None:
            place = {"cluster": self.placement.cluster or "", "tags": list(self.placement.tags)}
            named["placement"] = {key: value for key, value in place.items() if value}
        return named


def refuse_contradiction(stream: NativeStreamBlock) -> NativeStreamBlock:
    """Return a stream of `topology`; raises ValueError with the first contradiction in it."""
    upstreams = filter(None, [stream.mirror, *stream.sources])
    for rules in (_stream_contradictions(stream), *map(_upstream_contradictions, upstreams)):
        for contradicted, message in rules:
            if contradicted:
                raise ValueError(message)
    return stream


def _stream_contradictions(block: NativeStreamBlock) -> Iterator[tuple[bool, str]]:
    """Yield each rule about the keys of one stream: whether it is broken, and the message."""
    yield block.mirror is not None and bool(block.sources), "mirror, sources: a stream has either one mirror or sources"
    yield (
        block.mirror is not None and block.subjects is not None,
        ("mirror, subjects: a mirror stores no messages of its own; remove subjects, or use sources"),
    )
    yield (
        block.mirror is not None and block.duplicate_window is not None,
        ("mirror, duplicate_window: a mirror does not detect duplicates; remove duplicate_window"),
    )
    yield block.mirror is None and bool(block.mirror_direct), "mirror_direct: needs mirror"
    yield (
        bool(block.deny_purge and block.allow_rollup),
        "deny_purge, allow_rollup: a rollup purges messages; set one of them to false",
    )
    yield not (block.mirror or block.sources or block.subjects), "needs mirror, sources or subjects"
    window, age = block.duplicate_window, block.max_age
    yield bool(window and age) and window > age, "duplicate_window: must not be longer than max_age"  # type: ignore[operator]
    yield from _overlapping(block.subjects or (), "subjects")
    named = Counter(_identity(source) for source in block.sources)
    for source in block.sources:
        twice = named[_identity(source)] > 1
        yield twice, f"sources: {source.stream!r} appears twice with the same filter; give each another filter"


def _upstream_contradictions(block: UpstreamBlock) -> Iterator[tuple[bool, str]]:
    """Yield each rule about the keys of one mirror or source: whether it is broken, and the message."""
    yield (
        block.filter_subject is not None and bool(block.subject_transforms),
        ("filter_subject, subject_transforms: use one of them; the src of a transform is a filter"),
    )
    yield (
        block.start_sequence is not None and block.start_time is not None,
        ("start_sequence, start_time: exclude each other; use one"),
    )
    yield block.deliver_prefix is not None and block.api_prefix is None, "deliver_prefix: needs api_prefix"
    yield from _overlapping([transform.src for transform in block.subject_transforms], "subject_transforms")


def refuse_same_streams(wanted: Sequence[WantedStream]) -> None:
    """Refuse streams that are equal or have equal asset keys."""
    keys: dict[tuple[str, str], str] = {}
    for stream in wanted:
        key = asset_name(stream.cluster), asset_name(stream.stream)
        other = keys.setdefault(key, stream.label)
        if other != stream.label:
            raise ValueError(f"streams: {other!r} and {stream.label!r} get the same asset key; rename one")
    for label, count in Counter(stream.label for stream in wanted).items():
        if count > 1:
            raise ValueError(f"streams: {label!r} appears twice; merge the entries")


def refuse_loops(wanted: Iterable[WantedStream]) -> None:
    """Refuse links that form a loop, in which messages would circulate."""
    links = [
        (upstream, (upstream.cluster, upstream.stream), (stream.cluster, stream.stream))
        for stream in wanted
        for upstream in stream.upstreams
    ]
    after = {
        index: [
            other for other, (upstream, origin, _) in enumerate(links) if origin == copy and _passes(link, upstream)
        ]
        for index, (link, _, copy) in enumerate(links)
    }
    for start in after:
        path = _way_back(start, after)
        if path:
            names = [f"{links[index][1][0]}/{links[index][1][1]}" for index in path]
            raise ValueError(
                f"streams: {' → '.join([*names, names[0]])}: the links form a loop; remove one or filter it"
            )


def _way_back(start: int, after: dict[int, list[int]]) -> list[int]:
    """Return a path from a link back to itself over consecutive links, or an empty one."""
    ways = [[start]]
    seen = set()
    while ways:
        way = ways.pop()
        for following in after[way[-1]]:
            if following == start:
                return way
            if following not in seen:
                seen.add(following)
                ways.append([*way, following])
    return []


def _passes(link: Upstream, following: Upstream) -> bool:
    """Return whether the next link may copy a message of one link."""
    return any(subjects.overlaps(output, other) for output in link.outputs for other in following.inputs)


def _overlapping(patterns: Sequence[str], key: str) -> Iterator[tuple[bool, str]]:
    for index, pattern in enumerate(patterns):
        for other in patterns[index + 1 :]:
            yield subjects.overlaps(pattern, other), f"{key}: {pattern!r} and {other!r} overlap; make them distinct"


def _identity(source: UpstreamBlock) -> tuple[object, ...]:
    transforms = tuple((transform.src, transform.dest) for transform in source.subject_transforms)
    return source.stream, source.cluster, source.filter_subject, transforms, source.api_prefix


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

    def within(self, top: Any) -> Self:
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
