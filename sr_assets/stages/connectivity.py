"""The probes of `sr-assets check --connect`: every connection, permission, election and native link, without changing anything.

A request that cannot succeed proves the permission to create or publish: a stream whose name contradicts its subject,
or a message that expects an impossible last sequence. The probes of an election concern the buckets, their keys, the duplicate
windows of streams, and each site's checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Final

from sr_assets.adapters.connection_file import pack_cluster
from sr_assets.adapters.copying.fence import probe_fence
from sr_assets.adapters.jetstream import STREAM_NOT_FOUND, ApiError
from sr_assets.adapters.lease_bucket import BUCKET_TTL_NS, bucket_ttl_seconds, lock_ttl_seconds
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.progress_lines import tracked
from sr_assets.adapters.spark.config import is_cluster
from sr_assets.adapters.spark.jobs import try_links
from sr_assets.adapters.spark.remote_session import count_cores, without_secret
from sr_assets.adapters.spark.session import leave_session, open_session, spark_error
from sr_assets.adapters.wire import Connection, read_range
from sr_assets.domain.election_keys import election_key, heartbeats_key, lock_key
from sr_assets.domain.errors import RunError, SrAssetsError, TransientError
from sr_assets.domain.positions import SECOND_NS, SequenceRange
from sr_assets.domain.subjects import advisory_pattern, advisory_subject
from sr_assets.domain.topology.wanted import Upstream, WantedStream
from sr_assets.domain.tracking.rules import Event
from sr_assets.settings import (
    AdvisorySettings,
    ClusterSettings,
    Entry,
    HeartbeatSettings,
    Settings,
    StreamSettings,
    TopologyCluster,
    TopologySettings,
)
from sr_assets.settings.data import split_label
from sr_assets.stages.checkpointing import find_checkpoint
from sr_assets.stages.connection_users import probe_permissions
from sr_assets.stages.locks import site_locks
from sr_assets.stages.probes import Probe, Probes
from sr_assets.stages.replication.target_setup import (
    check_target,
    new_target,
    publishing_method,
    refuse_doubled,
    refuse_drift,
    refuse_unstorable,
)
from sr_assets.stages.source.lanes import lanes_begin
from sr_assets.stages.source.suitability import check_source, try_classes, try_partitions, try_senders
from sr_assets.stages.topology.planning import probe_update

_CLIENT: Final = "sr-assets check"
_LINKS: Final = 16
#: A node name in the subjects of probes.
_NODE: Final = "sr-assets-check"
#: A site's name has no slash, so this session belongs to no site.
_SESSION: Final = "run/check"


def _probe_cluster(topology: TopologySettings, known: TopologyCluster) -> list[Probe]:
    """Probe the requirements of native streams at a cluster: connection, JetStream, streams, incoming links."""
    probes = Probes(f"topology {known.name}")
    with closing(Cluster(known.settings, _CLIENT)) as cluster:
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
    with closing(Cluster(settings, _CLIENT)) as cluster:
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


def probe_election(settings: Settings, entry: Entry) -> list[Probe]:
    """Probe the election of an entry, if it has one; nothing is created or stored."""
    if not entry.leader_election_name:
        return []
    probes = Probes(entry.label)
    cluster, key = settings.election_cluster(entry), election_key(entry.name, entry.stream)
    ttl_seconds = probe_key(probes, cluster, settings.leader_election.bucket, key)
    if ttl_seconds and isinstance(entry, StreamSettings):
        _probe_windows(probes, entry, ttl_seconds)
    return probes.made


def probe_key(probes: Probes, where: ClusterSettings, bucket: str, key: str) -> float | None:
    """Probe a bucket and a key in it; return the bucket's TTL in seconds, or None if it is unusable."""
    with closing(Cluster(where, _CLIENT)) as cluster:
        ttl_seconds = probes.attempt(
            cluster,
            f"bucket {bucket}",
            lambda: _ttl_seconds(cluster, bucket),
            lambda seconds: f"TTL {seconds:g} s",
        )
        if ttl_seconds:
            subject = f"$KV.{bucket}.{key}"
            probes.attempt(cluster, f"publish {subject}", lambda: _try_key(cluster, bucket, subject))
    return ttl_seconds


def probe_store(settings: Settings, site: str) -> list[Probe]:
    """Probe the store of a site's checkpoints, if it has one; nothing is created or stored."""
    store = settings.checkpoint_store(site)
    if store is None:
        return []
    probes = Probes(site)
    assert isinstance(store.cluster, ClusterSettings)
    with closing(Cluster(store.cluster, _CLIENT)) as cluster:
        probes.attempt(
            cluster,
            f"object store {store.bucket}",
            lambda: find_checkpoint(settings, site),
            lambda newest: "holds a checkpoint" if newest else "holds no checkpoint yet",
        )
    return probes.made


def probe_locks(settings: Settings) -> list[Probe]:
    """Probe the bucket and the key of each lock; nothing is stored."""
    locks = sorted({lock for site in settings.sites for lock in site_locks(settings, site)})
    return [probe for lock in locks for probe in _probe_lock(settings, lock)]


def _probe_lock(settings: Settings, lock: str) -> list[Probe]:
    probes, (name, key) = Probes(f"lock {lock}"), split_label(lock)
    bucket, ttl_seconds = settings.data[name].bucket or "", settings.lock_ttl_ns / SECOND_NS
    with closing(Cluster(settings.data[name].cluster, _CLIENT)) as cluster:

        def ttl() -> float:
            info = cluster.stream_info(f"KV_{bucket}")
            return lock_ttl_seconds(cluster.settings.label, bucket, info.config, ttl_seconds)

        if probes.attempt(cluster, f"bucket {bucket}", ttl, lambda _: "allows a TTL per message"):
            subject, allowed = f"$KV.{bucket}.{lock_key(key)}", "allowed; no key was stored"
            probes.attempt(cluster, f"publish {subject}", lambda: cluster.try_publishing(subject), lambda _: allowed)
    return probes.made


def _ttl_seconds(cluster: Cluster, bucket: str) -> float:
    """Return the TTL of a bucket, or the one that it will have; raises RunError if it is unusable."""
    info = cluster.find_stream(f"KV_{bucket}")
    if info is not None:
        return bucket_ttl_seconds(cluster.settings.label, bucket, info.config)
    probe_update(cluster, "CREATE", f"KV_{bucket}")
    return BUCKET_TTL_NS / SECOND_NS


def _try_key(cluster: Cluster, bucket: str, subject: str) -> str:
    """Return a text about a key that we may write; raises RunError if we may not."""
    if not cluster.stream_exists(f"KV_{bucket}"):
        return "not tried: the first member creates the bucket"
    cluster.try_publishing(subject)
    return "allowed; no key was stored"


def _probe_windows(probes: Probes, stream: StreamSettings, ttl_seconds: float) -> None:
    """Probe the streams into which two members may send the same message when the leadership changes."""
    with closing(Cluster(stream.target, _CLIENT)) as target:
        _probe_window(probes, target, stream.target_stream, ttl_seconds)
    if stream.advisory is not None and stream.advisory_cluster is not None and stream.advisory.reliable is not False:
        with closing(Cluster(stream.advisory_cluster, _CLIENT)) as cluster:
            pattern = advisory_pattern(stream.advisory.subject)
            names = probes.attempt(cluster, f"streams of {pattern}", lambda: cluster.stream_names(pattern), ", ".join)
            for name in names or ():
                _probe_window(probes, cluster, name, ttl_seconds)


def _probe_window(probes: Probes, cluster: Cluster, stream: str, ttl_seconds: float) -> None:
    def window_seconds() -> float:
        info = cluster.find_stream(stream)
        seconds = float(info.config.get("duplicate_window", 0) / SECOND_NS) if info else 2 * ttl_seconds
        if seconds < 2 * ttl_seconds:
            raise RunError(
                f"stream {stream} on {cluster.settings.label} has a duplicate window of {seconds:g} s, less than two TTLs of the"
                f" leader election; set duplicate_window to {2 * ttl_seconds:g}s or more"
            )
        return seconds

    probes.attempt(
        cluster, f"a duplicate window of two TTLs in {stream}", window_seconds, lambda seconds: f"{seconds:g} s"
    )


def probe_connectivity(settings: Settings) -> list[Probe]:
    """Probe every connection of every stream, in parallel; return the probes in the order of the file."""
    topology, heartbeats = settings.topology, settings.heartbeats
    links: list[tuple[str, Callable[[], list[Probe]]]] = [("permissions", partial(probe_permissions, settings))]
    links += [(entry.label, partial(_try_entry, settings, entry)) for entry in settings.entries]
    links += [(f"election of {entry.label}", partial(probe_election, settings, entry)) for entry in settings.entries]
    if topology is not None:
        links += [
            (f"topology {known.name}", partial(_probe_cluster, topology, known)) for known in topology.clusters.values()
        ]
    links.append(("locks", partial(probe_locks, settings)))
    links += [(f"checkpoints of {site}", partial(probe_store, settings, site)) for site in settings.sites]
    if heartbeats is not None:
        links.append(("heartbeats", partial(_try_heartbeats, settings, heartbeats)))
    with ThreadPoolExecutor(_LINKS) as pool:
        tests = [(label, pool.submit(probe).result) for label, probe in links]
        if is_cluster(settings.spark.mode):
            tests.append(("spark", partial(_try_executors, settings)))
        return [probe for _, probes in tracked("testing links:", tests, itemgetter(0)) for probe in probes()]


def _try_entry(settings: Settings, entry: Entry) -> list[Probe]:
    probes = Probes(entry.label)
    with closing(Cluster(entry.source, _CLIENT)) as source:
        info = _try_source(probes, entry, source)
        if isinstance(entry, StreamSettings):
            _try_stream(settings, probes, entry, source, info)
    return probes.made


def _try_stream(
    settings: Settings, probes: Probes, stream: StreamSettings, source: Cluster, info: StreamInfo | None
) -> None:
    if info is not None and stream.tracked:
        probes.attempt(source, "a sender in each message", lambda: try_senders(stream, source, info))
        if stream.node_classes is not None:
            classifier = stream.node_classes.classifier
            probes.attempt(source, "classes", lambda: try_classes(stream, classifier, source, info))
    if info is not None and stream.lanes:
        begins = lanes_begin(settings.home, stream, info)
        probes.attempt(source, "a partition of each sender", lambda: try_partitions(stream, source, info, begins))
    with closing(Cluster(stream.target, _CLIENT)) as target:
        reached, advisory = _try_target(probes, stream, source, info, target), stream.advisory
        if advisory is not None and (reached if advisory.cluster == "target" else info is not None):
            _try_advisories(probes, advisory, target if advisory.cluster == "target" else source)


def _try_source(probes: Probes, stream: Entry, source: Cluster) -> StreamInfo | None:
    if not _try_connecting(probes, source):
        return None
    request = source.settings.api(f"STREAM.INFO.{stream.stream}")
    info = probes.attempt(
        source,
        request,
        lambda: source.stream_info(stream.stream),
        lambda info: f"{info.messages} messages, last sequence {info.last_sequence}",
    )
    if info is not None:
        accepted, readable = "limits retention", "a source to read by sequence"
        probes.attempt(source, readable, lambda: check_source(stream, info), lambda _: accepted)
        _try_reading(probes, source, info)
    return info


def _try_connecting(probes: Probes, cluster: Cluster) -> bool:
    def describe(version: tuple[int, ...]) -> str:
        return f"nats-server {'.'.join(map(str, version))}"

    return probes.attempt(cluster, "connect", lambda: cluster.server_version, describe) is not None


def _try_reading(probes: Probes, cluster: Cluster, info: StreamInfo) -> None:
    """Read the last message in each way that a run may need, and delete the temporary consumer."""
    last = SequenceRange(max(1, info.last_sequence), max(1, info.last_sequence) + 1)

    def read(*, direct: bool) -> int:
        with Connection(cluster.settings, _CLIENT) as connection:
            return sum(map(len, read_range(connection, info.stream, last, direct=direct)))

    def describe(messages: int) -> str:
        return "read" if messages else "no message at that sequence"

    request = cluster.settings.api(f"STREAM.MSG.GET.{info.stream}")
    # The leader's response with a message may be too large for a leaf node's link: ask for the one after the last.
    first = last.next if cluster.settings.api_owner else last.first
    probes.attempt(cluster, request, lambda: int(cluster.next_message(info.stream, first) is not None), describe)
    if info.supports_batched_direct_get:
        probes.attempt(cluster, cluster.settings.api(f"DIRECT.GET.{info.stream}"), lambda: read(direct=True), describe)
    request = cluster.settings.api(f"CONSUMER.CREATE.{info.stream}")
    probes.attempt(cluster, request, lambda: read(direct=False), describe)


def _try_target(
    probes: Probes, stream: StreamSettings, source: Cluster, source_info: StreamInfo | None, target: Cluster
) -> bool:
    """Probe a run's operations on the target; return whether its cluster responds."""
    if not _try_connecting(probes, target):
        return False
    request = target.settings.api(f"STREAM.INFO.{stream.target_stream}")
    exists = probes.attempt(
        target,
        request,
        lambda: target.stream_exists(stream.target_stream),
        lambda info: "exists" if info else "does not exist yet",
    )
    if exists is None:
        return False
    if exists:
        info = target.stream_info(stream.target_stream)
        if source_info is not None:
            planned, accepted = source_info, f"takes {', '.join(info.subjects)}"
            fits = "a target for the copies"
            probes.attempt(target, fits, lambda: check_target(stream, planned, info), lambda _: accepted)
            storable = "a target for every message of the source"
            probes.attempt(target, storable, lambda: refuse_unstorable(stream, planned, source, info))
        _try_reading(probes, target, info)
        if stream.target_options:
            probes.attempt(target, "a target without drift", lambda: refuse_drift(stream, info))
        probes.note(target, "publishing", works=True, learned=publishing_method(stream, info))
        if source_info is not None and info.messages:
            probes.attempt(
                target, "no other copies of the source", lambda: refuse_doubled(stream, planned, target, info)
            )
    elif not stream.create_target:
        learned = f"{stream.target_stream} does not exist; no_target_create, or create_target: false, is set: create it"
        probes.note(target, "a target for the copies", works=False, learned=learned)
    elif source_info is not None:
        _try_creating(probes, stream, source, source_info, target)
    if exists and source_info is not None:
        subject = _subject(stream, source, source_info)
        if subject is not None:
            _try_publishing(probes, target, subject)
    return True


def _try_creating(
    probes: Probes, stream: StreamSettings, source: Cluster, source_info: StreamInfo, target: Cluster
) -> None:
    request = target.settings.api(f"STREAM.CREATE.{stream.target_stream}")
    probes.attempt(
        target,
        request,
        lambda: probe_update(target, "CREATE", stream.target_stream),
        lambda _: "allowed; no stream was created",
    )

    def free() -> list[str]:
        subjects: list[str] = new_target(stream, source_info, source)["subjects"]
        for subject in subjects:
            if others := target.stream_names(subject):
                raise RunError(
                    f"subject {subject} of the copies belongs to stream {others[0]}; set another target_subject_prefix"
                    f" or target_stream: {others[0]}"
                )
        return subjects

    probes.attempt(
        target, "a target for the copies", free, lambda subjects: f"would be created with {', '.join(subjects)}"
    )


def _subject(stream: StreamSettings, source: Cluster, info: StreamInfo) -> str | None:
    """Return a subject of a possible copy, or None if neither a message nor a pattern is known."""
    # The leader's response with a message may be too large for a leaf node's link.
    if not source.settings.api_owner:
        with suppress(SrAssetsError):
            last = source.last_message(stream.stream, stream.filter_subject or ">")
            if last is not None:
                return stream.target_pattern(last.subject)
    patterns = [stream.filter_subject] if stream.filter_subject else list(info.subjects)
    if not patterns:
        return None
    rewritten = stream.target_pattern(patterns[0])
    return ".".join(_NODE if token in ("*", ">") else token for token in rewritten.split("."))


def _try_publishing(probes: Probes, cluster: Cluster, subject: str) -> None:
    allowed = "allowed; no message was stored"
    probes.attempt(cluster, f"publish {subject}", lambda: cluster.try_publishing(subject), lambda _: allowed)


def _try_advisories(probes: Probes, advisory: AdvisorySettings, cluster: Cluster) -> None:
    subject = advisory_subject(advisory.subject, Event.NEW.value, _NODE)

    def find_takers(wanted: str, none: str) -> list[str] | None:
        return probes.attempt(
            cluster,
            cluster.settings.api("STREAM.NAMES"),
            lambda: cluster.stream_names(wanted),
            lambda takers: f"{wanted}: {', '.join(takers) or none}",
        )

    names = find_takers(subject, "no stream")
    observers = find_takers(advisory.observer_subject, "no stream, so only current subscribers receive it")
    if observers and advisory.reliable is not False:
        _try_publishing(probes, cluster, advisory.observer_subject)
    if names and advisory.reliable is not False:
        _try_publishing(probes, cluster, subject)
    elif names is not None and advisory.reliable:
        learned = f"no stream takes {subject}: advisories wait for one; create it, or set reliable: false"
        probes.note(cluster, "advisories", works=False, learned=learned)
    elif names is not None:
        learned = f"{subject}, to current subscribers; not tried, because they would receive it"
        probes.note(cluster, "advisories", works=True, learned=learned)


def _try_heartbeats(settings: Settings, heartbeats: HeartbeatSettings) -> list[Probe]:
    probes = Probes("heartbeats")
    with closing(Cluster(heartbeats.cluster, _CLIENT)) as cluster:
        for heartbeat in heartbeats.subjects:
            _try_publishing(probes, cluster, heartbeat.subject)
    if heartbeats.leader_election:
        where, key = settings.heartbeat_election_cluster(heartbeats), heartbeats_key(settings.replicator)
        probe_key(probes, where, settings.leader_election.bucket, key)
    return probes.made


def _try_executors(settings: Settings) -> list[Probe]:
    """Probe each executor's packages and its routes to every server, and the permission for the writers' fence."""
    label, made, failure = without_secret(settings.spark.mode), [], None
    try:
        clusters = dict.fromkeys(cluster for entry in settings.entries for cluster in entry.clusters)
        links = {cluster.label: pack_cluster(cluster) for cluster in clusters}
        session = open_session(settings.spark, settings.home.resolve(), _SESSION)
        try:
            for executor, link, error in try_links(session, links, count_cores(session)):
                tried = f"connect from executor {executor}" if link else executor
                made.append(Probe("spark", link or label, tried, error is None, error or "works"))
        finally:
            leave_session(session, forget=True)
    except SrAssetsError as error:
        failure = str(error)
    except Exception as error:  # noqa: BLE001  any exception of Spark is a result here
        failure = str(spark_error(error))
    if failure is not None:
        made.append(Probe("spark", label, "an executor that accepts a task", works=False, learned=failure))
    fences = Probes("spark")
    for stream in settings.streams:
        with closing(Cluster(stream.target, _CLIENT)) as target:
            _try_fence(fences, target, stream.target_stream)
    return made + fences.made


def _try_fence(probes: Probes, target: Cluster, stream: str) -> None:
    request = target.settings.api(f"CONSUMER.INFO.{stream}")
    probes.attempt(target, request, lambda: probe_fence(target, stream), lambda _: "works")
