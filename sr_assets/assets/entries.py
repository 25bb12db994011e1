"""The assets of an entry: for a stream its replica and its nodes' state, for a feed its fold.

Here: all differences between a stream and a feed as assets. Add a kind of entry here, and describe its assets in a
module of their own. Not here: the assets themselves (`streams`, `nodes`, `advisories`, `feeds`, `checks`), running them
(`sites`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.published.schema import NODE_COLUMNS, SNAPSHOT_COLUMNS, TABLES
from sr_assets.assets.advisories import NEWEST, node_advisories_metadata, node_advisories_spec
from sr_assets.assets.checks import (
    advisories_check_spec,
    check_advisories,
    check_progress,
    check_replica,
    replica_check_specs,
)
from sr_assets.assets.described import MESSAGE_COLUMNS, Page
from sr_assets.assets.feeds import check_feed, feed_check_specs, feed_metadata, feed_source_specs, feed_spec
from sr_assets.assets.nodes import node_snapshots_metadata, node_snapshots_spec, node_state_metadata, node_state_spec
from sr_assets.assets.streams import replica_metadata, replica_spec, source_spec, stream_key
from sr_assets.settings import FeedSettings, StreamSettings
from sr_assets.stages.report import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    import dagster as dg

    from sr_assets.settings import Entry, Settings
    from sr_assets.stages.report import StreamReport
    from sr_assets.stages.site import Site

    Recorded = Iterator[tuple[Stage, Mapping[str, dg.MetadataValue]]]


class EntryAssets(ABC):
    """The assets of one entry: their definitions before a run, and their materialisations from its report after it.

    `stages` are those that make its assets, in the order of the flow, in which they are recorded too.
    """

    entry: Entry
    stages: tuple[Stage, ...]

    @abstractmethod
    def source_specs(self, settings: Settings) -> list[dg.AssetSpec]:
        """Describe what is read and made by others."""

    @abstractmethod
    def specs(self, settings: Settings) -> list[dg.AssetSpec]:
        """Describe what a run makes, in the order of the flow."""

    @abstractmethod
    def check_specs(self) -> list[dg.AssetCheckSpec]:
        """Describe the checks of what a run makes."""

    @abstractmethod
    def recorded(self, site: Site, report: StreamReport) -> Recorded:
        """Yield what is recorded of each stage's asset after a run that did not fail."""

    @abstractmethod
    def verdicts(self, site: Site, report: StreamReport, *, ask: bool = True) -> Iterator[dg.AssetCheckResult]:
        """Yield the verdicts of the checks; of a run that failed those that still mean something.

        Without `ask` no server is asked: a run that goes on would have to wait for the answer.
        """

    @abstractmethod
    def page(self, stage: Stage, site: Site, report: StreamReport) -> Page:
        """Return a stage's asset as a table, and the numbers of its picture."""

    def selected_stages(self, keys: Collection[dg.AssetKey]) -> frozenset[Stage]:
        """Return the stages that make the assets asked for."""
        return frozenset(stage for stage in self.stages if stream_key(self.entry, stage.value) in keys)


class StreamAssets(EntryAssets):
    """The assets of a stream: `replica`, and when it is tracked what is known of its nodes."""

    def __init__(self, stream: StreamSettings) -> None:
        """Name the stream."""
        self.entry = self._stream = stream
        tracked = (Stage.NODE_STATE, Stage.REPLICA, Stage.NODE_SNAPSHOTS, Stage.NODE_ADVISORIES)
        self.stages = tracked if stream.tracked else (Stage.REPLICA,)

    def source_specs(self, settings: Settings) -> list[dg.AssetSpec]:
        """Describe the stream that is read."""
        return [source_spec(settings, self._stream)]

    def specs(self, settings: Settings) -> list[dg.AssetSpec]:  # noqa: ARG002  a feed asks them
        """Describe the replica, and the nodes of a tracked stream."""
        describe = {
            Stage.NODE_STATE: node_state_spec,
            Stage.REPLICA: replica_spec,
            Stage.NODE_SNAPSHOTS: node_snapshots_spec,
            Stage.NODE_ADVISORIES: node_advisories_spec,
        }
        return [describe[stage](self._stream) for stage in self.stages]

    def check_specs(self) -> list[dg.AssetCheckSpec]:
        """Describe the checks of the replica, and of a tracked stream's outbox."""
        outbox = [advisories_check_spec(self._stream)] if self._stream.tracked else []
        return [*replica_check_specs(self._stream), *outbox]

    def recorded(self, site: Site, report: StreamReport) -> Recorded:
        """Yield what was copied, and what became of a tracked stream's nodes."""
        for stage in self.stages:
            yield stage, self._metadata(stage, site, report)

    def _metadata(self, stage: Stage, site: Site, report: StreamReport) -> Mapping[str, dg.MetadataValue]:
        if stage is Stage.NODE_ADVISORIES:
            newest = site.state.outbox(self._stream.stream).newest(NEWEST)
            return node_advisories_metadata(report, newest)
        describe = {
            Stage.NODE_STATE: node_state_metadata,
            Stage.REPLICA: replica_metadata,
            Stage.NODE_SNAPSHOTS: node_snapshots_metadata,
        }
        return describe[stage](report)

    def page(self, stage: Stage, site: Site, report: StreamReport) -> Page:
        """Return the messages of the replica, or the rows of the published table that a tracked stream's asset fills."""
        stream = self._stream.stream
        match stage:
            case Stage.NODE_STATE:
                counts = site.state.nodes(stream).counts()
                levels = {status: counts.get(status, 0) for status in ("up", "timeout", "retired")}
                return Page(NODE_COLUMNS, sum(levels.values()), levels=levels)
            case Stage.NODE_SNAPSHOTS:
                return Page(SNAPSHOT_COLUMNS, site.state.snapshot_index(stream).count())
            case Stage.NODE_ADVISORIES:
                return Page(TABLES["node_advisories"].kinds, site.state.outbox(stream).count())
        sums = {"copied": report.copied, "skipped": report.reasons.get("sampled", 0)}
        rows = report.copying.copied_messages if report.copying else 0
        return Page(MESSAGE_COLUMNS, rows, sums, {"lag": report.lag_messages})

    def verdicts(self, site: Site, report: StreamReport, *, ask: bool = True) -> Iterator[dg.AssetCheckResult]:
        """Yield the verdicts on replica and outbox; of a run that failed whether it still moves, and the outbox."""
        if Stage.REPLICA not in report.failed:
            yield from check_replica(site, self._stream, report, ask=ask)
        else:
            yield check_progress(site, self._stream, report)
        if self._stream.tracked:
            yield check_advisories(self._stream, report)


class FeedAssets(EntryAssets):
    """The assets of a feed: `advisory_feed` alone."""

    stages = (Stage.ADVISORY_FEED,)

    def __init__(self, feed: FeedSettings) -> None:
        """Name the feed."""
        self.entry = self._feed = feed

    def source_specs(self, settings: Settings) -> list[dg.AssetSpec]:
        """Describe the stream that is read, unless a replica of ours fills it."""
        return feed_source_specs(settings, self._feed, settings.copied_into(self._feed))

    def specs(self, settings: Settings) -> list[dg.AssetSpec]:
        """Describe the fold."""
        return [feed_spec(self._feed, settings.copied_into(self._feed))]

    def check_specs(self) -> list[dg.AssetCheckSpec]:
        """Describe the checks of the fold."""
        return feed_check_specs(self._feed)

    def recorded(self, site: Site, report: StreamReport) -> Recorded:  # noqa: ARG002  a stream asks its state
        """Yield what was folded."""
        yield Stage.ADVISORY_FEED, feed_metadata(report)

    def page(self, stage: Stage, site: Site, report: StreamReport) -> Page:  # noqa: ARG002  it has one stage
        """Return the nodes that were reported, and how many advisories came."""
        rows = site.state.global_tables.count_nodes(self._feed.stream)
        sums = {"advisories": report.copied, "rejected": report.parked}
        return Page(TABLES["global_availability"].kinds, rows, sums, {"lag": report.lag_messages})

    def verdicts(self, site: Site, report: StreamReport, *, ask: bool = True) -> Iterator[dg.AssetCheckResult]:  # noqa: ARG002  it asks none
        """Yield the verdicts on the fold; none when it failed."""
        if report.failure is None:
            yield from check_feed(site, report)


_KINDS: Final[Mapping[type[Entry], Callable[[Any], EntryAssets]]] = {
    StreamSettings: StreamAssets,
    FeedSettings: FeedAssets,
}


def entry_assets(entry: Entry) -> EntryAssets:
    """Return the assets of an entry."""
    return _KINDS[type(entry)](entry)
