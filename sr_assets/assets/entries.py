"""The assets of one entry, stream or feed: definitions before a run, materialisations and check results after it.

Add a kind of entry here, and its specs and metadata in a new module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sr_assets.assets.checks import (
    advisories_check_specs,
    check_advisories,
    check_progress,
    check_replica,
    replica_check_specs,
)
from sr_assets.assets.feeds import check_feed, feed_check_specs, feed_metadata, feed_source_specs, feed_spec
from sr_assets.assets.specs import stream_key
from sr_assets.assets.streams import (
    NEWEST,
    node_advisories_metadata,
    node_advisories_spec,
    node_snapshots_spec,
    node_state_metadata,
    node_state_spec,
    replica_metadata,
    replica_spec,
    stream_source_spec,
)
from sr_assets.settings import FeedSettings, StreamSettings
from sr_assets.stages.report import Stage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import dagster as dg

    from sr_assets.settings import Entry, Settings
    from sr_assets.stages.report import StreamReport
    from sr_assets.stages.site import Site


class StreamAssets:
    """The assets of a stream: `replica`, and if it is tracked, the three about its nodes.

    `stages` produce them, in the order of the flow.
    """

    def __init__(self, stream: StreamSettings) -> None:
        self.entry = self._stream = stream
        tracked = (Stage.NODE_STATE, Stage.REPLICA, Stage.NODE_SNAPSHOTS, Stage.NODE_ADVISORIES)
        self.stages = tracked if stream.tracked else (Stage.REPLICA,)

    def source_specs(self, settings: Settings) -> list[dg.AssetSpec]:
        """Describe the external assets that the entry reads: the source stream."""
        return [stream_source_spec(settings, self._stream)]

    def specs(self, settings: Settings) -> list[dg.AssetSpec]:  # noqa: ARG002  a feed needs them
        """Describe the assets that a run materialises, in the order of the flow."""
        describe = {
            Stage.NODE_STATE: node_state_spec,
            Stage.REPLICA: replica_spec,
            Stage.NODE_SNAPSHOTS: node_snapshots_spec,
            Stage.NODE_ADVISORIES: node_advisories_spec,
        }
        return [describe[stage](self._stream) for stage in self.stages]

    def check_specs(self) -> list[dg.AssetCheckSpec]:
        """Describe the checks of the replica and of a tracked stream's outbox."""
        outbox = advisories_check_specs(self._stream) if self._stream.tracked else []
        return [*replica_check_specs(self._stream), *outbox]

    def metadata(self, stage: Stage, site: Site, report: StreamReport) -> Mapping[str, Any]:
        """Return the metadata of a stage's asset after a run."""
        stream = self._stream.stream
        match stage:
            case Stage.NODE_STATE:
                return node_state_metadata(report, site.state.nodes(stream).counts())
            case Stage.NODE_SNAPSHOTS:
                return {"batches": report.snapshots}
            case Stage.NODE_ADVISORIES:
                return node_advisories_metadata(report, site.state.outbox(stream).newest(NEWEST))
        return replica_metadata(report)

    def row_count(self, stage: Stage, site: Site, report: StreamReport) -> int:
        """Return the number of nodes, snapshots or transitions; of a replica, the messages copied since the state began."""
        stream = self._stream.stream
        match stage:
            case Stage.NODE_STATE:
                return sum(site.state.nodes(stream).counts().values())
            case Stage.NODE_SNAPSHOTS:
                return site.state.snapshot_index(stream).count()
            case Stage.NODE_ADVISORIES:
                return site.state.outbox(stream).count()
        return report.copying.copied_messages if report.copying else 0

    def check_results(
        self, site: Site, report: StreamReport, *, query_target: bool = True
    ) -> Iterator[dg.AssetCheckResult]:
        """Yield the check results of replica and outbox; of a failed replica, only whether it makes progress.

        A lingering run sets `query_target` to false, so that it does not wait for a server.
        """
        if Stage.REPLICA not in report.failed:
            yield from check_replica(site, self._stream, report, query_target=query_target)
        else:
            yield check_progress(site, self._stream, report)
        if self._stream.tracked:
            yield check_advisories(self._stream, report)


class FeedAssets:
    """The assets of a feed: `advisory_feed`."""

    stages = (Stage.ADVISORY_FEED,)

    def __init__(self, feed: FeedSettings) -> None:
        self.entry = self._feed = feed

    def source_specs(self, settings: Settings) -> list[dg.AssetSpec]:
        """Describe the stream that the feed reads, unless replicas of this platform fill it."""
        return feed_source_specs(settings, self._feed, settings.copied_into(self._feed))

    def specs(self, settings: Settings) -> list[dg.AssetSpec]:
        """Describe the fold."""
        return [feed_spec(self._feed, settings.copied_into(self._feed))]

    def check_specs(self) -> list[dg.AssetCheckSpec]:
        """Describe the checks of the fold."""
        return feed_check_specs(self._feed)

    def metadata(self, stage: Stage, site: Site, report: StreamReport) -> Mapping[str, Any]:  # noqa: ARG002  one stage
        """Return the counts of the fold."""
        return feed_metadata(report)

    def row_count(self, stage: Stage, site: Site, report: StreamReport) -> int:  # noqa: ARG002  one stage
        """Return the number of nodes that sites have reported."""
        return site.state.global_tables.count_nodes(self._feed.stream)

    def check_results(
        self,
        site: Site,
        report: StreamReport,
        *,
        query_target: bool = True,  # noqa: ARG002  a feed has no target
    ) -> Iterator[dg.AssetCheckResult]:
        """Yield the check results of the fold; none after a failure."""
        if report.failure is None:
            yield from check_feed(site, report)


EntryAssets = StreamAssets | FeedAssets


def entry_assets(entry: Entry) -> EntryAssets:
    """Return the assets of an entry."""
    return FeedAssets(entry) if isinstance(entry, FeedSettings) else StreamAssets(entry)


def selected_stages(assets: EntryAssets, keys: Collection[dg.AssetKey]) -> frozenset[Stage]:
    """Return the stages that produce the selected assets."""
    return frozenset(stage for stage in assets.stages if stream_key(assets.entry, stage.value) in keys)
