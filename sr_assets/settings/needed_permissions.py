"""The least permissions that a configuration needs: one table of all subjects that our connections use.

Add a line here with each new request, publish or subscription. A test compares the table with the traffic of a run.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Literal

from sr_assets.domain.clusters import OWN_API, ClusterSettings
from sr_assets.domain.election_keys import election_key, heartbeats_key, heartbeats_site, lock_key, record_key
from sr_assets.domain.permissions import USER_INFO, Action, Facts, StreamFacts
from sr_assets.domain.subjects import advisory_pattern, object_subject, rule_subject
from sr_assets.settings.data import split_label
from sr_assets.settings.election import CheckpointSettings
from sr_assets.settings.streams import Entry, StreamSettings
from sr_assets.settings.top_level import Settings
from sr_assets.settings.topology import TopologySettings

Role = Literal["source", "target", "feed", "topology", "election", "checkpoint", "heartbeats", "data"]

#: Operations of JetStream's API on a stream, with their purposes.
_READ: Final = {
    "STREAM.INFO.{}": "read the stream's state and configuration",
    "STREAM.MSG.GET.{}": "read single messages from the leader",
    "DIRECT.GET.{}": "read batches of messages",
    "CONSUMER.CREATE.{}.>": "read headers and filtered messages, and count messages",
    "CONSUMER.MSG.NEXT.{}.*": "read from such a consumer",
    "CONSUMER.DELETE.{}.*": "delete such a consumer",
}
_READ_STORED: Final = {operation: purpose for operation, purpose in _READ.items() if "DIRECT" not in operation}
_COMPARE: Final = {"STREAM.INFO.{}": "compare the stream with the configuration"}
_MEASURE: Final = _COMPARE | {"STREAM.MSG.GET.{}": "measure the lag of a link"}
_COUNT: Final = _MEASURE | {
    "CONSUMER.CREATE.{}.>": "count the messages that wait for a link",
    "CONSUMER.DELETE.{}.*": "delete such a consumer",
}
_FENCE: Final = {"CONSUMER.INFO.{}.*": "check the fence of writers on a Spark cluster"}
_CREATE: Final = {"STREAM.CREATE.{}": "create the missing stream"}
_UPDATE: Final = {"STREAM.UPDATE.{}": "update the stream (manage: reconcile)"}
_BUCKET: Final = {
    "STREAM.INFO.{}": "check the bucket and list members",
    "STREAM.CREATE.{}": "create the missing bucket",
    "STREAM.MSG.GET.{}": "read keys",
}
_OBJECTS: Final = {
    "STREAM.INFO.{}": "find the object store",
    "STREAM.CREATE.{}": "create the missing object store",
    "STREAM.MSG.GET.{}": "read the description of a checkpoint",
    "STREAM.PURGE.{}": "delete the previous checkpoint",
    "CONSUMER.CREATE.{}": "read a checkpoint",
}
_VALUES: Final = {"STREAM.MSG.GET.{}": "read values", "STREAM.INFO.{}": "list keys, and check the bucket of locks"}
_FIND: Final = {"STREAM.NAMES": "find the streams that take a subject"}
_SURVEY: Final = {"INFO": "read the domain and API level", "STREAM.LIST": "list the streams"}


@dataclass(frozen=True, slots=True)
class Permission:
    """One permission of a connection's user; `about` is its entry (`name/stream`), site or cluster of `topology`.

    With a `problem`, only the servers know the subject, and `subject` is empty.
    """

    cluster: ClusterSettings
    role: Role
    about: str
    action: Action
    subject: str
    purpose: str
    problem: str = ""


def needed_permissions(
    settings: Settings, facts: Facts | None = None, entries: Iterable[Entry] | None = None
) -> list[Permission]:
    """Return the permissions of every connection, without duplicates; `facts` fill in unknown subjects.

    With `entries`, return only the permissions for them.
    """
    known, chosen = facts or Facts(), settings.entries if entries is None else tuple(entries)
    needs = list(chain.from_iterable(_of_entry(settings, entry, known.streams.get(entry.label)) for entry in chosen))
    for site in dict.fromkeys(entry.name for entry in chosen):
        if (store := settings.checkpoint_store(site)) is not None:
            needs += _of_store(store, site, settings.checkpoint_name(site))
    needs += _of_sources(settings, chosen)
    if entries is None:
        if settings.topology is not None:
            needs += _of_topology(settings, settings.topology)
        if settings.heartbeats is not None:
            subjects = [beat.subject for beat in settings.heartbeats.subjects]
            cluster = settings.heartbeats.cluster
            needs += _publishes(cluster, "heartbeats", settings.replicator, subjects, "publish heartbeats")
            if settings.heartbeats.leader_election:
                where = settings.heartbeat_election_cluster(settings.heartbeats)
                key = heartbeats_key(settings.replicator)
                records = heartbeats_site(settings.replicator)
                needs += _of_election(settings, where, settings.replicator, key, records)
    roles = dict.fromkeys((need.cluster, need.role, need.about) for need in needs)
    needs += chain.from_iterable(_of_connection(*role) for role in roles)
    return list(dict.fromkeys(chain.from_iterable(_at_server(need, known.domains) for need in needs)))


def trusted_subjects(needs: Iterable[Permission]) -> list[str]:
    """Return the subjects whose publishers a site trusts: they name its leader and its checkpoints."""
    return [
        need.subject
        for need in needs
        if need.role in ("checkpoint", "election") and re.search(r"(^|\.)\$(KV\.|O\.[^.]+\.M\.)", need.subject)
    ]


def used_clusters(settings: Settings) -> list[ClusterSettings]:
    return list(dict.fromkeys(need.cluster for need in needed_permissions(settings)))


def _at_server(need: Permission, domains: Mapping[ClusterSettings, str]) -> Iterator[Permission]:
    """Yield a permission as the connected server tests it.

    A server maps the API of its own domain to `$JS.API` before it tests the permission. Yield both forms if the server's
    domain is unknown.
    """
    prefix, domain = need.cluster.api_prefix, domains.get(need.cluster)
    of_domain = prefix != OWN_API and need.subject.startswith(f"{prefix}.") and need.cluster.domain is not None
    if not of_domain or domain != need.cluster.domain:
        yield need
    if of_domain and need.action is Action.PUBLISH and domain in (None, need.cluster.domain):
        operation = need.subject.removeprefix(f"{prefix}.")
        yield replace(need, subject=operation if operation.startswith("$KV.") else f"{OWN_API}.{operation}")


def _of_connection(cluster: ClusterSettings, role: Role, about: str) -> Iterator[Permission]:
    yield Permission(cluster, role, about, Action.PUBLISH, USER_INFO, "read the user's own permissions")
    # A Choria broker permits the token's own inbox.
    inbox = f"{cluster.choria.collective}.reply.*" if cluster.choria else cluster.inbox_prefix
    yield Permission(cluster, role, about, Action.SUBSCRIBE, f"{inbox}.>", "receive responses")
    if cluster.api_prefix != OWN_API:
        purpose = f"reach the API of {cluster.api_owner}: through a leafnode, or as an imported service"
        yield Permission(cluster, role, about, Action.IMPORT, f"{cluster.api_prefix}.>", purpose)


def _of_entry(settings: Settings, entry: Entry, facts: StreamFacts | None) -> Iterator[Permission]:
    facts, is_stream = facts or StreamFacts(), isinstance(entry, StreamSettings)
    role: Role = "source" if is_stream else "feed"
    yield from _requests(entry.source, role, entry.label, _READ, entry.stream)
    if isinstance(entry, StreamSettings):
        for origin in facts.origins:
            yield from _requests(
                entry.source, role, entry.label, {"STREAM.INFO.{}": "find the source's subjects"}, origin
            )
        yield from _of_target(settings, entry, facts)
        if entry.advisory is not None:
            yield from _of_advisories(entry, facts)
    if entry.leader_election_name:
        key = election_key(entry.name, entry.stream)
        yield from _of_election(settings, settings.election_cluster(entry), entry.label, key, entry.name)


def _of_election(
    settings: Settings, cluster: ClusterSettings, about: str, key: str, records: str
) -> Iterator[Permission]:
    """Yield the permissions of a campaign for a key; `records` names the records of the members."""
    bucket = settings.leader_election.bucket
    subjects = _key_subjects(cluster, bucket, (key, record_key(records, "*")))
    yield from _requests(cluster, "election", about, _BUCKET, f"KV_{bucket}")
    yield from _publishes(cluster, "election", about, subjects, "campaign, and describe this member")


def _key_subjects(cluster: ClusterSettings, bucket: str, keys: Iterable[str]) -> list[str]:
    subjects = [f"$KV.{bucket}.{key}" for key in keys]
    return subjects if cluster.api_prefix == OWN_API else list(map(cluster.api, subjects))


def _of_target(settings: Settings, stream: StreamSettings, facts: StreamFacts) -> Iterator[Permission]:
    target, about, name = stream.target, stream.label, stream.target_stream
    yield from _requests(target, "target", about, _READ, name)
    if "://" in settings.spark.mode:
        yield from _requests(target, "target", about, _FENCE, name)
    if stream.create_target:
        yield from _requests(target, "target", about, _CREATE | _FIND, name)
    # The configuration first, so that the list does not depend on the servers.
    copies = configured_copies(settings, stream) or facts.copies
    if copies:
        yield from _publishes(target, "target", about, copies, "publish copies")
    else:
        problem = "the configuration does not name the subjects of the copies; set filter_subject"
        yield Permission(target, "target", about, Action.PUBLISH, "", "publish copies", problem)


def _of_advisories(stream: StreamSettings, facts: StreamFacts) -> Iterator[Permission]:
    advisory, cluster = stream.advisory, stream.advisory_cluster
    assert advisory is not None
    assert cluster is not None
    role, about, pattern = advisory.cluster, stream.label, advisory_pattern(advisory.subject)
    yield from _publishes(cluster, role, about, [pattern], "publish advisories")
    yield from _publishes(cluster, role, about, [advisory.observer_subject], "publish the site's heartbeat")
    if stream.guard is not None:
        events = rule_subject("site", "*", stream.replicator, stream.name, stream.stream)
        yield from _publishes(cluster, role, about, [events], "publish site events")
    events = rule_subject("node", "*", stream.replicator, stream.name, stream.stream)
    yield from _publishes(cluster, role, about, [events], "publish events of nodes")
    yield from _requests(cluster, role, about, _FIND, "")
    if advisory.reliable is False:
        return
    for keeper in facts.keepers or ():
        yield from _requests(cluster, role, about, _READ_STORED, keeper)
    if facts.keepers is None:
        problem = f"the configuration does not name the stream that takes {pattern}"
        yield Permission(cluster, role, about, Action.PUBLISH, "", "read stored advisories", problem)


def _of_store(store: CheckpointSettings, site: str, name: str) -> Iterator[Permission]:
    """Yield the permissions to store and read a site's checkpoints.

    Each put has another subject of chunks. The message of the site's own subject names it, with the digest of the chunks.
    """
    cluster, bucket = store.cluster, store.bucket
    assert isinstance(cluster, ClusterSettings)
    yield from _requests(cluster, "checkpoint", site, _OBJECTS | _FIND, f"OBJ_{bucket}")
    subjects = [f"$O.{bucket}.C.*", object_subject(bucket, name)]
    yield from _publishes(cluster, "checkpoint", site, subjects, "store checkpoints")
    flow = [f"$JS.FC.OBJ_{bucket}.>"]
    yield from _publishes(cluster, "checkpoint", site, flow, "confirm the flow of a checkpoint that is read")


def _of_sources(settings: Settings, entries: Iterable[Entry]) -> Iterator[Permission]:
    """Yield the permissions to read values and to hold the entries' locks."""
    locks = {lock for entry in entries for lock in entry.locks or ()}
    for name, source in ((name, source) for name, source in settings.data.items() if source.type == "kv"):
        cluster, about = source.cluster, name
        yield from _requests(cluster, "data", about, _VALUES, f"KV_{source.bucket}")
        keys = sorted(lock_key(key) for owner, key in map(split_label, locks) if owner == name)
        subjects = _key_subjects(cluster, str(source.bucket), keys)
        yield from _publishes(cluster, "data", about, subjects, "take, renew and release a lock")


def _of_topology(settings: Settings, topology: TopologySettings) -> Iterator[Permission]:
    for name, known in topology.clusters.items():
        yield from _requests(known.settings, "topology", name, _SURVEY, "")
    changes = {"observe": {}, "create": _CREATE, "reconcile": _CREATE | _UPDATE}[topology.manage]
    for wanted in topology.streams:
        known = topology.clusters[wanted.cluster]
        operations = (_MEASURE if wanted.sources else _COMPARE) | changes
        yield from _requests(known.settings, "topology", known.name, operations, wanted.stream)
        for upstream in wanted.upstreams:
            origin = topology.clusters[upstream.cluster]
            if upstream.api in (None, origin.api):
                yield from _requests(origin.settings, "topology", origin.name, _COUNT, upstream.stream)
    # The survey includes the entries' clusters, and measures the lag of their streams.
    for entry in settings.entries:
        for cluster in entry.clusters:
            named = topology.cluster_of(cluster)
            if named is None:
                yield from _requests(cluster, "topology", cluster.label, _SURVEY, "")
            elif cluster is entry.source:
                yield from _requests(named.settings, "topology", named.name, _MEASURE, entry.stream)
            elif isinstance(entry, StreamSettings):
                yield from _requests(named.settings, "topology", named.name, _COMPARE, entry.target_stream)


def configured_copies(settings: Settings, stream: StreamSettings) -> tuple[str, ...] | None:
    """Return patterns of the copies' subjects as far as the configuration determines them, or None."""
    if stream.filter_subject not in (None, ">"):
        return (stream.target_pattern(str(stream.filter_subject)),)
    patterns = _declared(settings, stream) or stream.lanes or None
    if patterns is None:
        return (stream.target_pattern(">"),) if stream.prefix else None
    return tuple(map(stream.target_pattern, patterns))


def _declared(settings: Settings, stream: StreamSettings) -> tuple[str, ...] | None:
    """Return the subjects of a source that `topology` defines, or None."""
    topology = settings.topology
    cluster = topology.cluster_of(stream.source) if topology else None
    if topology is None or cluster is None:
        return None
    wanted = next(
        (each for each in topology.streams if (each.cluster, each.stream) == (cluster.name, stream.stream)), None
    )
    if wanted is None or wanted.upstreams or not wanted.config.get("subjects"):
        return None
    return tuple(wanted.config["subjects"])


def _requests(
    cluster: ClusterSettings, role: Role, about: str, operations: Mapping[str, str], stream: str
) -> Iterator[Permission]:
    for operation, purpose in operations.items():
        yield Permission(cluster, role, about, Action.PUBLISH, cluster.api(operation.format(stream)), purpose)


def _publishes(
    cluster: ClusterSettings, role: Role, about: str, subjects: Iterable[str], purpose: str
) -> Iterator[Permission]:
    for subject in subjects:
        yield Permission(cluster, role, about, Action.PUBLISH, subject, purpose)
