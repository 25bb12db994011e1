"""The configuration as frozen records for the rest of the package."""

import difflib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Literal

from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import ConfigurationError
from sr_assets.domain.positions import DAY_NS, SECOND_NS
from sr_assets.domain.senders import HeaderName, JsonField, SubjectToken
from sr_assets.domain.sizing import MAX_FOLD_MESSAGES
from sr_assets.domain.subjects import target_subject
from sr_assets.domain.target_stream import TargetOptions
from sr_assets.domain.tracking.rules import Policy
from sr_assets.settings.daily import DailySettings
from sr_assets.settings.digest import digest_of
from sr_assets.settings.heartbeats import HeartbeatSettings
from sr_assets.settings.monitoring import MetricsSettings, NotifySettings
from sr_assets.settings.names import asset_name, rewritten
from sr_assets.settings.spark import SparkSettings
from sr_assets.settings.topology_records import TopologySettings
from sr_assets.settings.values import MEBIBYTE, MINUTE_NS, shown

Kind = Literal["stream", "feed"]
Order = Literal["stream", "sender", "none"]
OnSourceReset = Literal["stop", "recopy", "skip_to_now"]
OnTargetReset = Literal["continue", "recopy", "stop"]
OnPoison = Literal["park", "stop"]


@dataclass(frozen=True, slots=True)
class Start:
    """The start of an entry without a position; `value` is a sequence, a time in unix ns, a delta in ns, or 0."""

    kind: Literal["all", "end", "sequence", "time", "delta"]
    value: int = 0


@dataclass(frozen=True, slots=True)
class AdvisorySettings:
    """The announcement of transitions; `reliable` None means JetStream if a stream takes the subject."""

    subject: str
    reliable: bool | None
    cluster: Literal["source", "target"]
    observer_subject: str
    """Where the site sends its heartbeat: another subject than the transitions', unless the file sets it."""
    format: Literal["v2", "v1"] = "v2"
    """The old replicator's format v1 has no `new`, which is then not sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of a site, a stream or a feed: its source and how to read it.

    `retired_retention_ns` None keeps retired nodes forever. It declares the properties of both kinds.
    """

    #: The purpose of the entry: a copy in a target (`stream`), or the global view (`feed`).
    kind: ClassVar[Kind]

    name: str
    stream: str
    source: ClusterSettings
    filter_subject: str | None = None
    start: Start = Start("all")
    on_source_reset: OnSourceReset = "stop"
    batch_messages: int = 50_000
    batch_bytes: int = 64 * MEBIBYTE
    retired_retention_ns: int | None = None

    @property
    def asset_prefix(self) -> list[str]:
        """The first two parts of this entry's asset keys."""
        return [asset_name(self.name), asset_name(self.stream)]

    @property
    def label(self) -> str:
        """`name/stream`, unique in a configuration."""
        return f"{self.name}/{self.stream}"

    @property
    def clusters(self) -> tuple[ClusterSettings, ...]:
        """The clusters of its source and target."""
        return (self.source,)

    @property
    def policy(self) -> Policy | None:
        """The sampling and tracking of senders, or None."""
        return None

    @property
    def tracked(self) -> bool:
        """Whether senders are sampled and tracked."""
        return self.policy is not None

    @property
    def advisory(self) -> AdvisorySettings | None:
        """The announcement of its senders' transitions, or None."""
        return None

    @property
    def advisory_cluster(self) -> ClusterSettings | None:
        """The cluster for announcements, or None."""
        return None

    @property
    def catch_up_messages(self) -> int:
        """The largest batch while it is far behind."""
        return self.batch_messages

    @property
    def ephemeral(self) -> bool:
        """Whether each start of `up` or `run` copies it from the start."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings(Entry):
    """One of `streams`: source, target, sampling and tracking."""

    kind: ClassVar[Kind] = "stream"

    replicator: str
    target: ClusterSettings
    target_stream: str
    prefix: str = ""
    remove: str = ""
    max_age_ns: int | None = None
    extractor: JsonField | HeaderName | SubjectToken | None = None
    force_path: tuple[str, ...] | None = None
    policy: Policy | None = None
    advisory: AdvisorySettings | None = None
    catch_up_messages: int = MAX_FOLD_MESSAGES
    workers: int = 1
    order: Order = "stream"
    on_target_reset: OnTargetReset = "continue"
    on_poison: OnPoison = "park"
    create_target: bool = True
    target_options: TargetOptions | None = None
    ephemeral: bool = False

    @property
    def clusters(self) -> tuple[ClusterSettings, ...]:
        """The clusters of source and target."""
        return self.source, self.target

    @property
    def advisory_cluster(self) -> ClusterSettings | None:
        """The cluster for announcements, or None."""
        if self.advisory is None:
            return None
        return self.source if self.advisory.cluster == "source" else self.target

    @property
    def copies_all_unchanged(self) -> bool:
        """Whether its target gets every message of its source with an unchanged subject."""
        chosen = self.tracked or self.filter_subject not in (None, ">") or self.max_age_ns is not None
        return not (chosen or self.prefix or self.remove or self.ephemeral)

    @property
    def copies_pattern(self) -> str | None:
        """The pattern of all subjects of our copies, or None if it is every subject or unknown."""
        pattern = target_subject(self.filter_subject or ">", self.prefix)
        return None if self.remove or pattern == ">" else pattern

    def target_pattern(self, pattern: str) -> str:
        """Rewrite a subject of the source, with or without wildcards, as its messages are rewritten.

        Raises ConfigurationError if the result is invalid. Without a filter the source's own subjects decide, so a run
        calls this for each of them before it copies a message.
        """
        try:
            return rewritten(pattern, self.prefix, self.remove)
        except ValueError as error:
            raise ConfigurationError(f"stream {self.stream!r} (name {self.name!r}): {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSettings(Entry):
    """One of `feeds`: an advisory stream that is folded into its site's global view."""

    kind: ClassVar[Kind] = "feed"

    batch_messages: int = 200_000
    retired_retention_ns: int | None = 365 * DAY_NS


@dataclass(frozen=True, slots=True)
class SensorSettings:
    """The interval of a site's sensor, and the lag at which it requests a run."""

    interval_ns: int = 30 * SECOND_NS
    lag_messages: int = 1
    lag_ns: int = 0


#: Settings that differ between hosts and do not affect a run.
_WITHOUT_EFFECT: Final = frozenset({"home", "logfile", "log_format", "warnings", "concurrency", "metrics", "notify"})


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a deployment; `warnings` are lines for the user: keys without effect, and TLS differences.

    `sites` has the entries of each site, in the order of the file, streams before feeds.
    """

    replicator: str
    home: Path
    streams: tuple[StreamSettings, ...]
    feeds: tuple[FeedSettings, ...] = ()
    spark: SparkSettings = field(default_factory=SparkSettings)
    sensor: SensorSettings = SensorSettings()
    run_budget_ns: int = 5 * MINUTE_NS
    linger_ns: int = 60 * SECOND_NS
    concurrency: int = 1
    snapshots_retention_ns: int = 90 * DAY_NS
    advisories_retention_ns: int = 90 * DAY_NS
    gaps_retention_ns: int = 90 * DAY_NS
    availability: DailySettings = field(default_factory=DailySettings)
    inventory: DailySettings = field(default_factory=DailySettings)
    inventory_facts: tuple[str, ...] = ()
    loglevel: Literal["debug", "info", "warn", "error"] = "info"
    logfile: Path | None = None
    log_format: Literal["text", "json"] = "text"
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    notify: tuple[NotifySettings, ...] = ()
    published_mode: int = 0o600
    topology: TopologySettings | None = None
    heartbeats: HeartbeatSettings | None = None
    warnings: tuple[str, ...] = ()
    sites: Mapping[str, tuple[Entry, ...]] = field(init=False, repr=False, compare=False)
    _by_name: Mapping[str, tuple[Entry, ...]] = field(init=False, repr=False, compare=False)
    _by_target: Mapping[str, tuple[StreamSettings, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the entries by site, name and target once, because every asset looks them up."""
        sites, by_name = defaultdict[str, list[Entry]](list), defaultdict[str, list[Entry]](list)
        for entry in self.entries:
            sites[entry.name].append(entry)
            for name in (entry.stream, entry.label):
                by_name[name].append(entry)
        # The only way to set a derived field of a frozen record.
        object.__setattr__(self, "sites", {name: tuple(entries) for name, entries in sites.items()})
        object.__setattr__(self, "_by_name", {name: tuple(entries) for name, entries in by_name.items()})
        by_target = defaultdict[str, list[StreamSettings]](list)
        for stream in self.streams:
            by_target[stream.target_stream].append(stream)
        object.__setattr__(self, "_by_target", {name: tuple(streams) for name, streams in by_target.items()})

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The streams and the feeds, in the order of the file."""
        return (*self.streams, *self.feeds)

    @property
    def digest(self) -> str:
        """The sha256 of the effective settings without secrets: equal digests mean equal behaviour."""
        return digest_of(self, _WITHOUT_EFFECT)

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
            near = difflib.get_close_matches(name, self._by_name, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            labels = ", ".join(entry.label for entry in self.entries)
            raise ConfigurationError(f"stream {shown(name)} is not configured; {hint}configured: {labels}")
        return entries
