"""The whole configuration: the keys of the top level, contradictions between keys, lookups of entries, and its digest.

Each function on contradictions raises ValueError with the message about the first one.
"""

import hashlib
import json
import os
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, Field, InstanceOf, model_validator

from sr_assets.domain import subjects
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import ConfigurationError, did_you_mean
from sr_assets.domain.positions import DAY_NS, SECOND_NS
from sr_assets.domain.subjects import object_subject
from sr_assets.settings.blocks import (
    DagsterSettings,
    DailySettings,
    HealthSettings,
    InventorySettings,
    MetricsSettings,
    RetentionSettings,
    SensorSettings,
    SparkSettings,
)
from sr_assets.settings.cluster_urls import ChoriaBlock, TlsBlock, with_security
from sr_assets.settings.data import Locks, LockTtl, SourceSettings, refuse_unusable_locks
from sr_assets.settings.election import CheckpointSettings, ElectionSettings, Member
from sr_assets.settings.entries import FeedSettings
from sr_assets.settings.heartbeats import HeartbeatSettings
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.names import SiteName, asset_name, rewritten
from sr_assets.settings.notify import NotifySettings, refuse_unknown_sites
from sr_assets.settings.operator_rules import (
    ClassBlocks,
    FlappingBlock,
    MaintenanceBlock,
    OutageGuardBlock,
    refuse_other_sites,
    refuse_unknown_classes,
)
from sr_assets.settings.references import Loaded
from sr_assets.settings.streams import NUMBER, CatchUp, Entry, StreamSettings
from sr_assets.settings.topology import TopologySettings
from sr_assets.settings.values import Duration, File, FileMode, Flag, Port, Positive, Span, Texts, Value, choice, shown

#: Fields of any block that differ between hosts and do not affect a run.
_OF_THE_HOST: Final = frozenset({"leader_election_name"})
_EXTRACTORS = "one of inspect_field, inspect_header or inspect_subject_token"
T = TypeVar("T")
AnyEntry = TypeVar("AnyEntry", StreamSettings, FeedSettings)
LogLevel = Literal["debug", "info", "warn", "error"]
LogFormat = Literal["text", "json"]
#: A day of `inventory_daily` becomes final after its end, and is compared with the day before.
_INVENTORY_NS: Final = 3 * DAY_NS
#: Settings that differ between hosts and do not affect a run.
_WITHOUT_EFFECT: Final = frozenset(
    {
        "home",
        "logfile",
        "log_format",
        "clear_text_hosts",
        "named_concurrency",
        "run_retention",
        "metrics",
        "health",
        "notify",
        "data",
        "dagster",
        "lock_timeout_ns",
    }
)


def digest_of(record: Any, without: Collection[str]) -> str:
    """Return the sha256 of a record's fields except those in `without`."""
    effective = {key: value for key, value in _plain(record).items() if key not in without}
    return hashlib.sha256(json.dumps(effective, sort_keys=True).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Convert records to JSON, without hidden fields; of a record with a public part, only that part."""
    if hasattr(value, "public"):
        return value.public
    if isinstance(value, BaseModel):
        names = (name for name, field in type(value).model_fields.items() if field.repr and name not in _OF_THE_HOST)
        return {"is": type(value).__name__, **{name: _plain(getattr(value, name)) for name in names}}
    if is_dataclass(value):
        visible = {item.name: _plain(getattr(value, item.name)) for item in fields(value) if item.repr}
        return {"is": type(value).__name__, **visible}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def refuse_contradiction(entry: StreamSettings) -> StreamSettings:
    """Return a stream; raises ValueError with the first contradiction in it."""
    divided = _partition_contradictions(entry) if entry.partitions else ()
    for contradicted, message in (*_sampling_contradictions(entry), *divided, *_copying_contradictions(entry)):
        if contradicted:
            raise ValueError(message)
    _refuse_loop(entry, rewritten(entry.filter_subject or ">", entry.prefix, entry.remove))
    _refuse_advisory_into_source(entry)
    return entry


def refuse_same_names(pairs: Sequence[tuple[str, str]]) -> None:
    """Refuse a file without entries, and (name, stream) pairs that are equal or yield equal folder or asset names."""
    if not pairs:
        raise ValueError("streams: is empty; add a stream or a feed")
    sites: dict[str, dict[str, None]] = defaultdict(dict)
    for name, stream in pairs:
        if stream in sites[name]:
            raise ValueError(f"stream {stream!r} (name {name!r}): appears twice; give one entry another name")
        sites[name][stream] = None
    _refuse_collision(sites, "name", "share a folder on a case-insensitive disk", _folder)
    _refuse_collision(sites, "name", "get the same asset group, job and sensor", asset_name)
    for site, streams in sites.items():
        _refuse_collision(streams, f"name {site!r}: stream", "get the same asset keys", asset_name)


def _refuse_shared_lakes(streams: Sequence[StreamSettings]) -> None:
    """Refuse a lake in the folder of another: its files would be taken for the other's."""
    owners: dict[str, StreamSettings] = {}
    for stream in streams:
        if stream.lake and (owner := owners.setdefault(stream.lake.path, stream)) is not stream:
            raise ValueError(
                f"stream {stream.stream!r}: lake.path: is the lake of stream {owner.stream!r} too; set another path"
            )
    for path, stream in owners.items():
        for outer in (path[:end] for end, letter in enumerate(path) if letter == "/"):
            if outer in owners:
                owner = owners[outer]
                raise ValueError(
                    f"stream {stream.stream!r}: lake.path: is inside the lake of stream {owner.stream!r}; set another path"
                )


def _sampling_contradictions(entry: StreamSettings) -> Iterable[tuple[bool, str]]:
    modes = [key for key in ("inspect_field", "inspect_header", "inspect_subject_token") if getattr(entry, key)]
    sampled, interval, warning = bool(modes), entry.inspect_duration_ns, entry.warn_duration_ns
    yield len(modes) > 1, f"{' and '.join(modes)} exclude each other; keep one way to find the sender"
    yield sampled and interval is None, f"{''.join(modes[:1])}: needs inspect_duration, the copy interval"
    yield not sampled and interval is not None, f"inspect_duration: needs {_EXTRACTORS} to find the sender"
    for key in (
        "warn_duration",
        "inspect_force_field",
        "size_trigger",
        "advisory",
        "retired_retention",
        "purge_after",
        "classes",
    ):
        value = getattr(entry, entry.keys()[key])
        yield value not in (None, 0) and not sampled, f"{key}: needs sampling with inspect_duration and {_EXTRACTORS}"
    if warning is not None and interval is not None:
        both = f"{warning / SECOND_NS:g}s must be shorter than inspect_duration ({interval / SECOND_NS:g}s)"
        yield warning >= interval, f"warn_duration: {both}"
    if interval is not None:
        yield interval < 2, f"inspect_duration: {interval} ns is too short; use a longer one, such as 1s"
    yield entry.target_initiated and sampled, "target_initiated: cannot be used with sampling; remove it"
    # Each start would announce every node again, from messages that are long past.
    yield entry.ephemeral and sampled, f"ephemeral: cannot be used with {''.join(modes[:1])}; remove one of them"


def _copying_contradictions(entry: StreamSettings) -> Iterable[tuple[bool, str]]:
    order, both = entry.order, None not in (entry.creates_target, entry.no_target_create)
    yield entry.target_initiated and entry.max_age_ns is not None, "target_initiated: cannot be used with max_age"
    yield both and entry.creates_target == entry.no_target_create, "create_target: contradicts no_target_create"
    unused = entry.target_block is not None and not entry.create_target
    yield unused, "target: configures a new target, but no_target_create forbids creating one; remove one of them"
    yield entry.workers > 1 and order == "stream", "order: 'stream' needs workers: 1; use sender or none"
    no_sender = entry.workers > 1 and order == "sender" and entry.extractor is None
    yield no_sender, f"order: 'sender' (the default when workers > 1) needs {_EXTRACTORS}; or set order: none"


def _partition_contradictions(entry: StreamSettings) -> Iterable[tuple[bool, str]]:
    divided = "cannot be used with partitions"
    several = (
        f"stream: {shown(entry.stream)} names several streams, which have no common order; combine them in a native stream"
        " with sources (topology), and divide that stream with partitions"
    )
    yield NUMBER in entry.stream, several
    selected = (
        f"filter_subject: {shown(entry.filter_subject)} {divided}, whose filters are the subjects to read; remove it"
    )
    yield entry.filter_subject is not None, selected
    yield entry.workers > 1, f"workers: {entry.workers} {divided}, which have a writer each; remove it"
    in_order = len(entry.lanes) > 1 and entry.named_order == "stream"
    yield in_order, f"order: 'stream' {divided}, which keep each sender's order; use sender or none"


def _refuse_loop(entry: StreamSettings, pattern: str) -> None:
    """Refuse to copy a stream into itself, directly or through the target's subjects, as far as the keys show."""
    source, target = entry.source, entry.target
    if not source.shares_subjects(target):
        return
    where = f"is the cluster of source_url ({entry.source_url.label})"
    if source.same_as(target) and entry.target_stream == entry.stream:
        raise ValueError(f"target_url: {where}, so {entry.stream!r} would be copied into itself; set target_stream")
    # A filter of everything does not show the source's subjects; unrewritten subjects always overlap.
    known = entry.filter_subject not in (None, ">")
    if pattern == (entry.filter_subject or ">") or (known and subjects.overlaps(pattern, entry.filter_subject or "")):
        raise ValueError(
            f"target_url: {where} and the subjects of both streams overlap ({shown(pattern)}); "
            "set target_subject_prefix or target_subject_remove so that they do not"
        )


def _refuse_advisory_into_source(entry: StreamSettings) -> None:
    if entry.advisory is None or entry.advisory.cluster == "target" or entry.filter_subject in (None, ">"):
        return
    templates = {"subject": entry.advisory.subject, "observer_subject": entry.advisory.observer_subject}
    for key, template in templates.items():
        # A sender may be several tokens, so any tokens may follow from its token on.
        head, sender, _ = (template or "").partition("%v")
        tokens = [*head.split(".")[:-1], ">"] if sender else head.split(".")
        pattern = ".".join("*" if "%s" in token else token for token in tokens)
        if template and subjects.overlaps(pattern, entry.filter_subject or ""):
            raise ValueError(
                f"advisory.{key}: {shown(template)} belongs to the tracked source stream itself "
                f"(filter_subject {shown(entry.filter_subject)}); use another subject"
            )


def _folder(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _refuse_collision(values: Iterable[str], key: str, consequence: str, derive: Callable[[str], str]) -> None:
    """Refuse two values of a key that yield the same folder or asset name."""
    first: dict[str, str] = {}
    for value in values:
        other = first.setdefault(derive(value), value)
        if other != value:
            raise ValueError(f"{key}: {other!r} and {value!r} {consequence}; rename one")


class Settings(Block):
    """The settings of a deployment. Streams and feeds have the inherited keys filled in."""

    replicator: SiteName = file_key("the replicator, and the default `name` of entries", name="name")
    streams: tuple[Annotated[StreamSettings, AfterValidator(refuse_contradiction)], ...] = file_key(
        "the [streams](#a-stream); a file needs a stream, a feed, `heartbeats` or `topology`", [], default_text="none"
    )
    feeds: tuple[FeedSettings, ...] = file_key(
        "[advisory streams](#a-feed) for the global view", [], default_text="none"
    )
    home: File = file_key("the home, on a local disk; `SR_ASSETS_HOME` overrides it", ".sr_assets", name="state_store")
    published_mode: FileMode = file_key(
        "readers of the tables and the Parquet history, payloads included: `'0600'` owner, `'0640'` owner and group,"
        " `'0644'` everyone. [All other files are private](access.md#security-on-a-shared-machine)",
        "0600",
        default_text="`'0600'`",
    )
    run_budget_ns: Duration = file_key("duration of a run, retries included", "5m", name="run_budget")
    named_linger_ns: Span | None = file_key(
        "how long a run waits for new messages", None, name="linger", default_text="twice the `interval` of `sensor`"
    )
    named_concurrency: Positive | None = file_key(
        "simultaneous site runs: sensors' runs, which also serve queued sites, and those of `run --once`. A lower"
        " `max_concurrent_runs` of the Dagster instance takes precedence",
        None,
        name="concurrency",
        default_text="number of cores",
    )
    run_retention: Flag | None = file_key(
        "delete [old runs](storage.md#old-runs) of this platform every night",
        None,
        default_text="in a Dagster instance that `sr-assets` created",
    )
    catch_up: CatchUp | None = file_key("default of all [streams](#a-stream)", None, name="catch_up_messages")
    classes: ClassBlocks = file_key(
        "[classes](#block-classes) of nodes, the default of all [streams](#a-stream)", [], default_text="none"
    )
    purge_after_ns: Duration | None = file_key(
        "when the rows of retired nodes are deleted, the default of all [streams](#a-stream)",
        None,
        name="purge_after",
        default_text="never",
    )
    maintenance: tuple[MaintenanceBlock, ...] = file_key(
        "[windows](#block-maintenance) without announcements, the default of all streams", [], default_text="none"
    )
    flapping: FlappingBlock | None = file_key(
        "announcements of a [flapping](#block-flapping) node, the default of all streams", None, default_text="none"
    )
    recover_after_ns: Span = file_key(
        "announce `recover` once the node was up for this time, the default of all streams", "0s", name="recover_after"
    )
    outage_guard: OutageGuardBlock | None = file_key(
        "the [guard](#block-outage_guard) against announcements of a site's outage, the default of all streams",
        None,
        default_text="none",
    )
    leader_election_name: Member | None = file_key(
        "this member's name in the [election](#block-leader_election), the default of all entries",
        None,
        default_text="no election",
    )
    leader_election: ElectionSettings = file_key("[location](#block-leader_election) of the election's keys", {})
    checkpoint: CheckpointSettings | None = file_key(
        "[store](#block-checkpoint) of the sites' states",
        None,
        default_text="that block's defaults with an election, else no store",
    )
    data: dict[str, SourceSettings] = file_key(
        "[sources](#a-data-source) of values, by name", {}, default_text="none", local=True
    )
    locks: Locks = file_key("default of all entries: [locks](data.md#locks) that a run holds", [], default_text="none")
    lock_timeout_ns: Span = file_key("how long a run waits for its locks", "60s", name="lock_timeout")
    lock_ttl_ns: LockTtl = file_key("how long the locks of a killed run remain", "10s", name="lock_ttl")
    sensor: SensorSettings = file_key("[polling](#block-sensor)", {})
    dagster: DagsterSettings = file_key("[the place in a Dagster deployment](#block-dagster)", {})
    spark: SparkSettings = file_key("[the Spark engine](#block-spark)", {})
    snapshots: RetentionSettings = file_key("[retention](#retention-blocks) of the Parquet history", {})
    advisories: RetentionSettings = file_key(
        "[retention](#retention-blocks) of `node_advisories` (the last one of each node stays), `global_advisories` and"
        " `global_rejects`",
        {},
    )
    gaps: RetentionSettings = file_key("[retention](#retention-blocks) of `gaps` and `parked_messages`", {})
    availability: DailySettings = file_key("[days](#daily-blocks) of `availability_daily`", {})
    inventory: InventorySettings = file_key("[days](#daily-blocks) of `inventory_daily`", {})
    tls: TlsBlock | None = file_key("the default of every link; see [URLs and TLS](#urls-and-tls)", None)
    clear_text_hosts: Texts = file_key(
        "patterns of hosts to which [logins may travel unencrypted](access.md#logins-without-tls) without a warning",
        [],
        default_text="none",
    )
    choria: ChoriaBlock | None = file_key("the default of every link; see [Choria](#choria)", None)
    heartbeats: HeartbeatSettings | None = file_key(
        "[heartbeats](#heartbeats) published by `up` and `run --follow`", None
    )
    loglevel: Annotated[LogLevel, choice(LogLevel)] = file_key("the least important lines of the log", "info")
    logfile: File | None = file_key("a log file in addition to stderr", None)
    log_format: Annotated[LogFormat, choice(LogFormat)] = file_key("see [logs](monitoring.md#logs)", "text")
    metrics: MetricsSettings = file_key("[where metrics go](#block-metrics)", {})
    health: HealthSettings = file_key("[health](#block-health) without a metrics port", {})
    monitor_port: Port | None = file_key("the port of `/metrics`, same as `port` of `metrics`", None)
    notify: tuple[NotifySettings, ...] = file_key("[notifications](#block-notify)", [], default_text="none")
    profiling: Annotated[Any, Value(lambda value: value, type="any")] = file_key(
        "accepted with a warning; without effect", None
    )
    topology: TopologySettings | None = file_key("[native mirrors and sources](#native-mirrors-and-sources)", None)

    #: The file and the origins of its values.
    loaded: InstanceOf[Loaded] | None = Field(None, repr=False)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        """Check the entries against each other and fill in the inherited keys."""
        if "streams" not in self.model_fields_set and not (self.feeds or self.heartbeats or self.topology):
            raise ValueError("streams: is required")
        if self.monitor_port and self.metrics.port not in (None, self.monitor_port):
            raise ValueError(f"monitor_port: is {self.monitor_port}, metrics.port {self.metrics.port}; remove one")
        names = [(entry.name or self.replicator, entry.stream) for entry in self.entries]
        if names or not (self.heartbeats or self.topology):
            refuse_same_names(names)
        refuse_unknown_sites(self.notify, {name for name, _ in names})
        refuse_unusable_locks(self.data, [self.locks, *(entry.locks or () for entry in self.entries)])
        refuse_other_sites(self.maintenance, dict.fromkeys(stream.name or self.replicator for stream in self.streams))
        streams = tuple(map(self._filled_in, self.streams))
        _refuse_shared_lakes(streams)
        refuse_unknown_classes(self.maintenance, [name for stream in streams for name in stream.class_names])
        return self.changed(
            streams=streams,
            feeds=tuple(map(self._filled_in, self.feeds)),
            topology=self.topology and self._topology_filled_in(self.topology),
            metrics=self.metrics.changed(port=self.metrics.port or self.monitor_port or None),
            notify=tuple(entry.changed(name=entry.name or str(n)) for n, entry in enumerate(self.notify, 1)),
        )

    def _filled_in(self, entry: AnyEntry) -> AnyEntry:
        try:
            return entry.within(self)
        except ValueError as error:
            raise ValueError(f"stream {entry.stream!r}: {error}") from None

    def _topology_filled_in(self, topology: TopologySettings) -> TopologySettings:
        try:
            return topology.within(self)
        except ValueError as error:
            raise ValueError(f"topology: {error}") from None

    @property
    def dynamic_keys(self) -> list[tuple[str | int, ...]]:
        """The locations of the keys with dynamic values."""
        return [loc for loc, origin in (self.loaded.origins if self.loaded else {}).items() if origin.reference.dynamic]

    @property
    def linger_ns(self) -> int:
        """How long a run waits for new messages."""
        return 2 * self.sensor.interval_ns if self.named_linger_ns is None else self.named_linger_ns

    @cached_property
    def concurrency(self) -> int:
        """The maximum number of simultaneous site runs."""
        return self.named_concurrency or os.cpu_count() or 1

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The streams and the feeds, in the order of the file."""
        return (*self.streams, *self.feeds)

    @cached_property
    def sites(self) -> Mapping[str, tuple[Entry, ...]]:
        """The entries of each site, in the order of the file, streams before feeds."""
        return _grouped((entry.name, entry) for entry in self.entries)

    @cached_property
    def _by_name(self) -> Mapping[str, tuple[Entry, ...]]:
        return _grouped((name, entry) for entry in self.entries for name in (entry.stream, entry.label))

    @cached_property
    def _by_target(self) -> Mapping[str, tuple[StreamSettings, ...]]:
        return _grouped((stream.target_stream, stream) for stream in self.streams)

    @cached_property
    def digest(self) -> str:
        """The sha256 of the effective settings without secrets: equal digests mean equal behaviour."""
        return digest_of(self, _WITHOUT_EFFECT)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Lines for the user: keys without effect, a history too short, and links that the Stream Replicator would not verify."""
        patient = [stream.stream for stream in self.streams if stream.target_initiated]
        blocks = {"snapshots": self.snapshots, "advisories": self.advisories}
        tracked = any(stream.tracked for stream in self.streams)
        short = [key for key, block in blocks.items() if tracked and block.retention_ns < _INVENTORY_NS]
        notes = (
            (self.profiling, "profiling has no effect: there is no profiler"),
            (patient, f"target_initiated has no effect ({', '.join(patient)}); copying always tolerates latency"),
            *((key, f"{key}.retention: too short for inventory_daily; set it to 3d or more") for key in short),
        )
        of_data = self.loaded.warnings if self.loaded else ()
        return tuple(note for condition, note in notes if condition) + self._verified() + of_data

    def _verified(self) -> tuple[str, ...]:
        """Return a warning about the links with `choria` whose server the Stream Replicator would not verify."""
        links = [link for entry in self.entries for link in entry.clusters]
        named = [link.label for link in links if link.choria and link.tls and not link.tls.ca and not link.tls.insecure]
        if not named:
            return ()
        verified = "the server's certificate is verified, against the system's CAs"
        before = "the Stream Replicator does not verify it without tls.cert"
        remedy = "set its CA in tls.ca, or insecure=true in the URL"
        return (f"choria without tls.ca ({', '.join(dict.fromkeys(named))}): {verified}; {before}: {remedy}",)

    def checkpoint_store(self, site: str) -> CheckpointSettings | None:
        """Return the store of a site's checkpoints, with the address of its cluster, or None."""
        entries = self.sites[site]
        elected = any(entry.leader_election_name for entry in entries)
        store = self.checkpoint or (CheckpointSettings() if elected else None)
        if store is None or not store.interval_ns:
            return None
        return store.changed(cluster=self._cluster(store.cluster, entries[0]))

    def checkpoint_name(self, site: str) -> str:
        """Return the name of a site's checkpoint in the store."""
        return f"{self.replicator}/{site}"

    def unsigned_checkpoints(self, site: str) -> str | None:
        """Return a warning about a site whose checkpoints have no signature, or None."""
        store = self.checkpoint_store(site)
        if store is None or store.key:
            return None
        assert isinstance(store.cluster, ClusterSettings)
        subject = object_subject(store.bucket, self.checkpoint_name(site))
        return (
            f"{site}: checkpoints are unsigned: whoever may publish to {subject} on {store.cluster.label} can replace the"
            " site's state; set checkpoint.key at every member, and permit this subject to them alone"
        )

    def election_cluster(self, entry: Entry) -> ClusterSettings:
        """Return the cluster of an entry's key in the leader election; a feed has only a source."""
        return self._cluster(self.leader_election.cluster, entry)

    def heartbeat_election_cluster(self, heartbeats: HeartbeatSettings) -> ClusterSettings:
        """Return the cluster of the heartbeats' key: their own, unless `leader_election` names a URL."""
        where = self.leader_election.cluster
        return (
            with_security(where, [self.tls], [self.choria])
            if isinstance(where, ClusterSettings)
            else heartbeats.cluster
        )

    def _cluster(self, where: Literal["source", "target"] | ClusterSettings, entry: Entry) -> ClusterSettings:
        if isinstance(where, ClusterSettings):
            return with_security(where, [self.tls], [self.choria])
        return entry.clusters[-1] if where == "target" else entry.source

    def linked(self, first: ClusterSettings, second: ClusterSettings) -> bool:
        """Return whether the servers of two clusters are linked, according to the configuration."""
        return self.topology is not None and None not in map(self.topology.cluster_of, (first, second))

    def copied_into(self, entry: Entry) -> list[StreamSettings]:
        """Return the streams whose target an entry reads."""
        return [stream for stream in self._by_target.get(entry.stream, ()) if stream.target.same_as(entry.source)]

    def find(self, name: str) -> tuple[Entry, ...]:
        """Return the entries with a name: a stream at every site that has it, or `name/stream`.

        Raises ConfigurationError if there is none.
        """
        entries = self._by_name.get(name)
        if entries is None:
            hint = did_you_mean(name, self._by_name)
            labels = ", ".join(entry.label for entry in self.entries)
            raise ConfigurationError(f"stream {shown(name)} is not configured; {hint}configured: {labels}")
        return entries

    def stream_named(self, name: str, refusal: str) -> StreamSettings:
        """Return the stream with a name or a `name/stream`; `refusal` is the error text for a feed.

        Raises ConfigurationError for an unknown or ambiguous name, and for a feed.
        """
        entries = self.find(name)
        if len(entries) > 1:
            labels = ", ".join(entry.label for entry in entries)
            raise ConfigurationError(f"--stream {name} is ambiguous; choose one of: {labels}")
        (entry,) = entries
        if not isinstance(entry, StreamSettings):
            raise ConfigurationError(f"--stream {name}: {refusal}")
        return entry


def _grouped(pairs: Iterable[tuple[str, T]]) -> dict[str, tuple[T, ...]]:
    """Return the values of each key, in their order."""
    groups = defaultdict[str, list[T]](list)
    for key, value in pairs:
        groups[key].append(value)
    return {key: tuple(values) for key, values in groups.items()}
