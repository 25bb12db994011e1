"""The assets of one entry, stream or feed: definitions before a run, materialisations and check results after it.

Add a kind of entry here, and its checks in `checks`. Dagster plots the numbers over the materialisations of an asset.
"""

from __future__ import annotations

import zlib
from collections import Counter as Counts
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from sr_assets.adapters.state.operator_settings import added_windows
from sr_assets.adapters.state.store import SiteState
from sr_assets.adapters.state.stream_tables import Counter
from sr_assets.assets.checks import (
    check_advisories,
    check_feed,
    check_progress,
    check_replica,
    feed_check_specs,
    stream_check_specs,
)
from sr_assets.assets.freshness import entry_freshness
from sr_assets.assets.specs import entry_spec, has_source, markdown_table, source_spec, stream_key
from sr_assets.domain.positions import format_rfc3339_ns
from sr_assets.settings import Entry, FeedSettings, Settings, StreamSettings
from sr_assets.stages.clock import Clock
from sr_assets.stages.report import Stage, StreamReport, stages_of

if TYPE_CHECKING:
    from sr_assets.stages.site import Site

#: How many events or transitions an asset's page shows.
_NEWEST: Final = 10
_LONGEST_NAME: Final = 80
#: The value of `outage_level`, so that Dagster plots it.
_LEVELS: Final = {"none": 0, "partial": 1, "dark": 2}
_EVENTS: Final = ("new", "timeout", "recover", "expire")


def rules_metadata(state: SiteState, stream: StreamSettings) -> dict[str, Any]:
    """Return the state of a stream's rules after a run: the running outage, held transitions, active windows, flapping."""
    held, suppressed, flapping = state.undecided(stream.stream).counts()
    outage, since_ns = _running_outage(state, stream)
    windows = _active_windows(state, stream)
    metadata: dict[str, Any] = {
        "outage": f"{outage} since {format_rfc3339_ns(since_ns)}" if since_ns is not None else outage,
        "outage_level": _LEVELS[outage],
        "held_transitions": held,
        "suppressed_transitions": suppressed,
        "flapping_nodes": flapping,
        "maintenance_windows": len(windows),
    }
    if windows:
        metadata["maintenance"] = markdown_table(("window", "nodes", "until", "reason"), windows)
    return metadata


def withheld_metadata(state: SiteState, stream: StreamSettings) -> dict[str, Any]:
    """Return the transitions that wait for a rule, and the newest events that replaced transitions."""
    held, suppressed, _ = state.undecided(stream.stream).counts()
    of_site, of_nodes = (
        events.newest(_NEWEST) for events in (state.guard(stream.stream), state.undecided(stream.stream))
    )
    metadata: dict[str, Any] = {"held_transitions": held, "suppressed_transitions": suppressed}
    if of_site:
        rows = [
            (row["event"], format_rfc3339_ns(row["event_ns"]), f"{row['silent']} of {row['nodes']}") for row in of_site
        ]
        metadata["site_events"] = markdown_table(("event", "at", "silent"), rows)
    if of_nodes:
        flaps = [
            (row["event"], row["node"][:_LONGEST_NAME], format_rfc3339_ns(row["event_ns"]), str(row["transitions"]))
            for row in of_nodes
        ]
        metadata["node_events"] = markdown_table(("event", "node", "at", "transitions"), flaps)
    return metadata


def transition_table(newest: Sequence[tuple[str, str, int, bool, str | None]]) -> dg.MarkdownMetadataValue:
    """Return transitions as a Markdown table.

    Each has its event, node, event time in unix ns, whether it is late, and why it is not announced.
    """
    rows = [
        (event, node[:_LONGEST_NAME], format_rfc3339_ns(event_ns), "late" if late else "", withheld or "")
        for event, node, event_ns, late, withheld in newest
    ]
    return markdown_table(("event", "node", "at", "late", "not announced"), rows)


def _running_outage(state: SiteState, stream: StreamSettings) -> tuple[str, int | None]:
    outages = state.guard(stream.stream).outages()
    if not outages or outages[-1].ended_ns is not None:
        return "none", None
    return "dark" if outages[-1].dark else "partial", outages[-1].since_ns


def _active_windows(state: SiteState, stream: StreamSettings) -> list[tuple[str, str, str, str]]:
    """Return the id, nodes, end and reason of each active window."""
    now_ns = Clock.own_ns()
    windows = [(each, each.end_ns(now_ns)) for each in (*stream.windows, *added_windows(state.folder))]
    return [
        (each.id, ", ".join(each.globs)[:_LONGEST_NAME] or "all nodes", format_rfc3339_ns(end_ns), each.reason)
        for each, end_ns in windows
        if end_ns is not None
    ]


class StreamAssets:
    """The assets of a stream: `replica`, and if it is tracked, the three about its nodes.

    `stages` produce them, in the order of the flow.
    """

    def __init__(self, stream: StreamSettings) -> None:
        self.entry = stream
        self.stages = stages_of(stream)

    def source_specs(self, settings: Settings) -> list[dg.AssetSpec]:
        """Describe the source stream, which the fleet writes."""
        stream = self.entry
        filtered = f", subjects {stream.filter_subject}" if stream.filter_subject else ""
        written = f"{stream.stream} on {stream.source.label}{filtered}: a JetStream stream, written by the fleet."
        return [source_spec(settings, stream, written)]

    def specs(self, settings: Settings) -> list[dg.AssetSpec]:
        """Describe the assets that a run materialises, in the order of the flow."""
        return [self._spec(settings, stage) for stage in self.stages]

    def _spec(self, settings: Settings, stage: Stage) -> dg.AssetSpec:
        """Describe a stage's asset; `node_state` depends on the source alone, and decides which messages are copied."""
        stream, name = self.entry, self.entry.stream
        match stage:
            case Stage.NODE_STATE:
                deps = ["source"]
                text = f"{name}: first and last sighting and status (up, silent, retired) of each node, by the source's clock."
                section, kinds = "rules.md#up-silent-retired", {"spark", "duckdb"}
            case Stage.NODE_SNAPSHOTS:
                deps = ["replica"]
                text = f"{name}: newest copied message of each node, and the history of all copies as Parquet files by day."
                section, kinds = "columns.md#parquet-history", {"parquet", "duckdb"}
            case Stage.NODE_ADVISORIES:
                deps, subject = ["node_state"], stream.advisory.subject if stream.advisory else None
                published = f"published to {subject}" if subject else "recorded, not published (no `advisory` block)"
                text = f"{name}: transitions of nodes (new, timeout, recover, expire), {published}."
                section, kinds = "advisories.md#an-advisory", {"nats", "duckdb"}
            case _:
                deps = ["source", "node_state"] if stream.tracked else ["source"]
                copied = "each sender's messages sampled" if stream.tracked else "every message"
                target = f"{stream.target_stream} on {stream.target.label}"
                text = f"{name}, to {target}: {copied}, exactly once, {stream.order} order."
                section, kinds = "rules.md#copied-or-skipped", {"nats", "spark"}
        freshness = entry_freshness(settings, stream) if stage in (Stage.NODE_STATE, Stage.REPLICA) else None
        return entry_spec(settings, stream, stage.value, deps, text, section, kinds=kinds, freshness=freshness)

    def check_specs(self, settings: Settings) -> list[dg.AssetCheckSpec]:
        """Describe the checks of the replica and of a tracked stream's outbox."""
        return stream_check_specs(settings, self.entry)

    def metadata(self, stage: Stage, site: Site, report: StreamReport) -> Mapping[str, Any]:
        """Return the metadata of a stage's asset after a run."""
        match stage:
            case Stage.NODE_STATE:
                nodes, classes = site.state.nodes(self.entry.stream).counts(), self.entry.node_classes
                by_class = site.state.nodes(self.entry.stream).class_counts() if classes else {}
                return {
                    **{f"{status}_nodes": nodes.get(status, 0) for status in ("up", "timeout", "retired")},
                    **{
                        f"class_{block.name}_nodes": by_class.get(block.name, 0)
                        for block in (classes.blocks if classes else ())
                    },
                    "swept_nodes": report.swept,
                    **_engine_counts(report.read_by),
                    "lag_messages": report.lag_messages,
                    "seconds_left": _seconds_left(report, report.lag_messages, report.messages),
                    **_event_counts(report),
                    **rules_metadata(site.state, self.entry),
                }
            case Stage.NODE_SNAPSHOTS:
                return {"batches": report.snapshots}
            case Stage.NODE_ADVISORIES:
                newest = site.state.outbox(self.entry.stream).newest(_NEWEST)
                return {
                    "published": report.published,
                    "waiting": report.waiting,
                    **withheld_metadata(site.state, self.entry),
                    "newest": transition_table(newest),
                }
        return _replica_metadata(report)

    def row_count(self, stage: Stage, site: Site, report: StreamReport) -> int:
        """Return the number of nodes, snapshots or transitions; of a replica, the messages copied since the state began."""
        stream = self.entry.stream
        match stage:
            case Stage.NODE_STATE:
                return sum(site.state.nodes(stream).counts().values())
            case Stage.NODE_SNAPSHOTS:
                return site.state.snapshot_index(stream).count()
            case Stage.NODE_ADVISORIES:
                return site.state.outbox(stream).count()
        return report.copying.copied_messages if report.copying else 0

    def data_version(self, stage: Stage, report: StreamReport, metadata: Mapping[str, Any], rows: int) -> str:
        """Return the version of a stage's data: the position in the source, and what else changes it."""
        match stage:
            case Stage.NODE_STATE:
                return _version(report, *(metadata[f"{status}_nodes"] for status in ("up", "timeout", "retired")))
            case Stage.NODE_ADVISORIES:
                newest = zlib.crc32(metadata["newest"].md_str.encode())
                return f"{rows}/{metadata['waiting']}/{newest:08x}"
        return _version(report, report.copying.copied_messages if report.copying else 0)

    def check_results(self, site: Site, report: StreamReport, *, query_target: bool) -> Iterator[dg.AssetCheckResult]:
        """Yield the check results of replica and outbox; of a failed replica, only whether it makes progress.

        A lingering run sets `query_target` to false, so that it does not wait for a server.
        """
        if Stage.REPLICA not in report.failed:
            yield from check_replica(site, self.entry, report, query_target=query_target)
        else:
            yield check_progress(site, self.entry, report)
        if self.entry.tracked:
            yield check_advisories(site, self.entry, report)


class FeedAssets:
    """The assets of a feed: `advisory_feed`."""

    def __init__(self, feed: FeedSettings) -> None:
        self.entry = feed
        self.stages = stages_of(feed)

    def source_specs(self, settings: Settings) -> list[dg.AssetSpec]:
        """Describe the stream that the feed reads, unless replicas of this platform fill it."""
        feed = self.entry
        written = f"{feed.stream} on {feed.source.label}: a JetStream stream of advisories, written by the sites."
        return [source_spec(settings, feed, written)] if has_source(settings, feed) else []

    def specs(self, settings: Settings) -> list[dg.AssetSpec]:
        """Describe the fold."""
        feed = self.entry
        copied = [stream_key(settings, stream, "replica") for stream in settings.copied_into(feed)]
        deps = copied or [stream_key(settings, feed, "source")]
        text = f"{feed.stream} on {feed.source.label}: status of every node at every site, folded from the advisories."
        kinds = {"nats", "spark", "duckdb"}
        freshness = entry_freshness(settings, feed)
        return [
            entry_spec(
                settings,
                feed,
                "advisory_feed",
                deps,
                text,
                "advisories.md#at-the-centre",
                kinds=kinds,
                freshness=freshness,
            )
        ]

    def check_specs(self, settings: Settings) -> list[dg.AssetCheckSpec]:
        """Describe the checks of the fold."""
        return feed_check_specs(settings, self.entry)

    def metadata(self, stage: Stage, site: Site, report: StreamReport) -> Mapping[str, Any]:  # noqa: ARG002  one stage
        """Return the counts of the fold."""
        return {
            "advisories": report.copied,
            "rejected": report.parked,
            "batches": report.batches,
            **_engine_counts(report.read_by),
            "lag_messages": report.lag_messages,
            **_event_counts(report),
        }

    def row_count(self, stage: Stage, site: Site, report: StreamReport) -> int:  # noqa: ARG002  one stage
        """Return the number of nodes that sites have reported."""
        return site.state.global_tables.count_nodes(self.entry.stream)

    def data_version(self, stage: Stage, report: StreamReport, metadata: Mapping[str, Any], rows: int) -> str:  # noqa: ARG002
        """Return the version of the fold: the position in the stream, and the number of nodes."""
        return _version(report, rows)

    def check_results(
        self,
        site: Site,
        report: StreamReport,
        *,
        query_target: bool,  # noqa: ARG002  a feed has no target
    ) -> Iterator[dg.AssetCheckResult]:
        """Yield the check results of the fold; none after a failure."""
        if report.failure is None:
            yield from check_feed(site, report)


EntryAssets = StreamAssets | FeedAssets


def entry_assets(entry: Entry) -> EntryAssets:
    return FeedAssets(entry) if isinstance(entry, FeedSettings) else StreamAssets(entry)


def selected_stages(settings: Settings, assets: EntryAssets, keys: Collection[dg.AssetKey]) -> frozenset[Stage]:
    """Return the stages that produce the selected assets."""
    return frozenset(stage for stage in assets.stages if stream_key(settings, assets.entry, stage.value) in keys)


def _replica_metadata(report: StreamReport) -> dict[str, Any]:
    """Return the counts of a run and how much remains to be copied."""
    metadata: dict[str, Any] = {
        "messages": report.messages,
        "copied_messages": report.copied,
        "copied_bytes": report.copied_bytes,
        "skipped_messages": report.reasons.get("sampled", 0),
        "parked_messages": report.parked,
        "gap_messages": report.gap_messages,
        **_engine_counts(report.copied_by),
        "batches": report.batches,
        "lag_messages": report.lag_messages,
        "seconds_left": _seconds_left(report, report.queued or report.lag_messages, report.copied),
    }
    if (state := report.state) is not None:
        metadata["next_sequence"] = state.next_sequence
        metadata["first_sequence"] = report.first if report.first is not None else state.next_sequence
        metadata["source_created"] = dg.MetadataValue.timestamp(state.created_ns / 1e9)
    return metadata


def _version(report: StreamReport, *numbers: int) -> str:
    """Return a data version: when the source was created (unix ns), the next sequence, and numbers that change the data too."""
    state = report.state
    return "/".join(map(str, [state.created_ns if state else 0, state.next_sequence if state else 0, *numbers]))


def _engine_counts(messages: Counts[str]) -> dict[str, int]:
    """Return how many messages of a run Spark's tasks have processed, and how many the run's own process."""
    return {counter.value: messages[counter] for counter in (Counter.SPARK_MESSAGES, Counter.LOCAL_MESSAGES)}


def _event_counts(report: StreamReport) -> dict[str, int]:
    """Return the number of transitions that a run found or folded, by event."""
    return {event: report.events.get(event, 0) for event in _EVENTS}


def _seconds_left(report: StreamReport, left: int, done: int) -> float:
    """Return how long the remaining messages take at the rate of this run; 0 if the rate is unknown."""
    return round(report.seconds * left / done, 1) if done else 0.0
