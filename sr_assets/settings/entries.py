"""The entries of a site: the keys of streams and feeds, the keys of one kind, and their common properties."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import model_validator

from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.received import SitePath
from sr_assets.settings.cluster_urls import ChoriaBlock, TlsBlock, Url, with_api, with_security
from sr_assets.settings.data import Locks, LockTtl
from sr_assets.settings.election import Member
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.names import ApiPrefix, Domain, Filter, SiteName, StreamName, asset_name
from sr_assets.settings.values import (
    Duration,
    Flag,
    Natural,
    Positive,
    Size,
    Span,
    Time,
    Value,
    as_list,
    choice,
    read_text,
    shown,
)

Kind = Literal["stream", "feed"]
OnSourceReset = Literal["stop", "recopy", "skip_to_now"]


@dataclass(frozen=True, slots=True)
class Start:
    """The start of an entry without a position; `value` is a sequence, a time in unix ns, a delta in ns, or 0."""

    kind: Literal["all", "end", "sequence", "time", "delta"]
    value: int = 0


class CommonKeys(Block):
    """The keys that streams and feeds have in common."""

    #: The purpose of the entry: a copy in a target (`stream`), or the global view (`feed`).
    kind: ClassVar[Kind]
    #: The keys that an entry without them takes from the top level.
    inherited: ClassVar[tuple[str, ...]] = (
        "tls",
        "choria",
        "leader_election_name",
        "locks",
        "lock_timeout_ns",
        "lock_ttl_ns",
    )

    stream: StreamName = file_key("the source stream")
    name: SiteName = file_key("the site; unique together with `stream`", "", default_text="the top-level `name`")
    filter_subject: Filter | None = file_key("the subjects to read", None, default_text="all")
    start_at_end: Flag = file_key("an entry without a position starts with the next message", False)
    start_sequence: Natural = file_key("it starts at this sequence, unless `start_at_end` is set", 0)
    start_delta: Duration | None = file_key("it starts this long ago, unless one of the keys above is set", None)
    start_time: Time | None = file_key("it starts at this time, unless one of the keys above is set", None)
    on_source_reset: Annotated[OnSourceReset, choice(OnSourceReset)] = file_key(
        "the reaction to a source that was recreated or rolled back", "stop"
    )
    batch_bytes: Size = file_key("the maximum size of a batch", "64 MiB")
    tls: TlsBlock | None = file_key("see [URLs and TLS](#urls-and-tls)", None, default_text="the outer block")
    choria: ChoriaBlock | None = file_key("see [Choria](#choria)", None, default_text="the outer block")
    leader_election_name: Member | None = file_key(
        "this member's name in the [election](#block-leader_election); `false`: no election",
        None,
        default_text="the top level's",
    )
    locks: Locks | None = file_key(
        "[locks](data.md#locks) that the run of its site holds; `[]`: none", None, default_text="the top level's"
    )
    lock_timeout_ns: Span | None = file_key(
        "how long a run waits for its locks", None, name="lock_timeout", default_text="the top level's"
    )
    lock_ttl_ns: LockTtl | None = file_key(
        "how long the locks of a killed run remain", None, name="lock_ttl", default_text="the top level's"
    )

    @property
    def asset_prefix(self) -> list[str]:
        """The first two parts of this entry's asset keys."""
        return [asset_name(self.name), asset_name(self.stream)]

    @property
    def label(self) -> str:
        """`name/stream`, unique in a configuration."""
        return f"{self.name}/{self.stream}"

    @property
    def start(self) -> Start:
        """The start option; the first one set applies, in the Stream Replicator's order."""
        if self.start_at_end:
            return Start("end")
        if self.start_sequence:
            return Start("sequence", self.start_sequence)
        if self.start_delta is not None:
            return Start("delta", self.start_delta)
        return Start("all") if self.start_time is None else Start("time", self.start_time)

    def within(self, top: Any) -> Self:
        """Return the entry with the keys of the top level, `Settings`; raises ValueError if they contradict its own."""
        missing = {key: getattr(top, key) for key in self.inherited if getattr(self, key) is None}
        entry = self.changed(name=self.name or top.replicator, **missing)
        entry = entry.changed(leader_election_name=entry.leader_election_name or None)
        _ = entry.clusters
        return entry

    @property
    def clusters(self) -> tuple[ClusterSettings, ...]:
        """The clusters of its source and target."""
        raise NotImplementedError


def _hop(value: object) -> str:
    """Read `REPLICATOR/NAME`, as an entry writes both into `Choria-SR-Source`."""
    text = read_text(value)
    if len(text.split("/")) != 2 or not all(text.split("/")):
        raise ValueError(f"{shown(text)} is not an entry; use REPLICATOR/NAME such as EAST/paris")
    return text


class FeedSite(Block):
    """One of `sites` of a feed: a site, and the way of its messages. At least one of `subjects` and `copied_by` is set."""

    replicator: SiteName = file_key("its replicator")
    name: SiteName = file_key("its entries' name", "", default_text="none: a Stream Replicator's site")
    subjects: Annotated[tuple[Filter, ...], Value(as_list, type="subject, or a list of them, with wildcards")] = (
        file_key("the subjects of its advisories, heartbeats and events in this stream", [], default_text="all")
    )
    copied_by: Annotated[tuple[Annotated[str, Value(_hop)], ...], Value(as_list, type="REPLICATOR/NAME, or a list")] = (
        file_key("the entries that copied its messages, first to last: all `Choria-SR-Source`", [], default_text="any")
    )

    @model_validator(mode="after")
    def _restricted(self) -> Self:
        if not (self.subjects or self.copied_by):
            raise ValueError("needs subjects or copied_by, the way that only messages of this site take")
        return self


class FeedSettings(CommonKeys):
    """One of `feeds`: an advisory stream that is folded into its site's global view."""

    kind: ClassVar[Kind] = "feed"
    policy: ClassVar[None] = None
    tracked: ClassVar[bool] = False
    advisory: ClassVar[None] = None
    advisory_cluster: ClassVar[None] = None
    shortest_warning_ns: ClassVar[None] = None
    ephemeral: ClassVar[bool] = False
    paused: ClassVar[bool] = False

    url: Url = file_key("the cluster; see [URLs and TLS](#urls-and-tls)")
    domain: Domain | None = file_key("as `source_domain` of a stream", None, default_text="the server's own")
    api_prefix: ApiPrefix | None = file_key("as `source_api_prefix` of a stream", None, default_text="`$JS.API`")
    batch_messages: Positive = file_key("the maximum number of messages in a batch", 200_000)
    retired_retention_ns: Duration = file_key(
        "retention of retired nodes in the global view", "1Y", name="retired_retention"
    )
    max_streams: Positive = file_key(
        "the most streams of each site; messages about further ones are rejected as `too_many_streams`", 1_000
    )
    max_nodes: Positive = file_key(
        "the most nodes of each site, retired ones included; advisories of further ones are rejected as"
        " `too_many_nodes`",
        5_000_000,
    )

    sites: tuple[FeedSite, ...] = file_key(
        "[who may speak](#block-sites) for which site; all other messages are rejected as `foreign_site`",
        [],
        default_text="any site",
    )

    @property
    def paths(self) -> tuple[SitePath, ...]:
        """The ways of the sites' messages."""
        return tuple(SitePath(site.replicator, site.name, site.subjects, site.copied_by) for site in self.sites)

    @property
    def unbound_sites(self) -> str | None:
        """A warning about a feed without `sites`, or None."""
        if self.sites:
            return None
        return (
            f"feed {self.label}: sites is not set, so whoever may publish to stream {self.stream} can speak for every site;"
            " list the sites in sites, with the subjects of each"
        )

    @cached_property
    def source(self) -> ClusterSettings:
        """The cluster of the advisory stream; raises ValueError if keys about it contradict each other."""
        return with_security(with_api(self.url, self.domain, self.api_prefix), [self.tls], [self.choria])

    @property
    def clusters(self) -> tuple[ClusterSettings, ...]:
        """The cluster of its source."""
        return (self.source,)

    @property
    def catch_up_messages(self) -> int:
        """The largest batch while it is far behind."""
        return self.batch_messages
