"""The asset `advisory_feed`: what the advisory streams of other sites told, folded into the global view.

Here: its spec, its checks and what is recorded of it. Not here: the fold (`stages.feeds.advisory_feed`), the global tables as
assets (`fleet`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg

from sr_assets.assets.streams import OWNERS, group_name, stream_key
from sr_assets.domain.positions import format_rfc3339_ns

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sr_assets.settings import FeedSettings, StreamSettings
    from sr_assets.stages.report import StreamReport
    from sr_assets.stages.site import Site

_DAY_NS = 86_400_000_000_000
_MOST_NAMED = 10


def feed_sources(feed: FeedSettings, streams: Sequence[StreamSettings]) -> list[dg.AssetKey]:
    """Return what fills a feed's stream, as far as the configuration tells: the replicas that are copied into it."""
    return [
        stream_key(stream, "replica")
        for stream in streams
        if stream.target_stream == feed.stream and stream.target.same_as(feed.source)
    ]


def feed_source_specs(feed: FeedSettings, streams: Sequence[StreamSettings]) -> list[dg.AssetSpec]:
    """Describe the stream that a feed reads, unless it is a replica of ours."""
    if feed_sources(feed, streams):
        return []
    spec = dg.AssetSpec(
        stream_key(feed, "source"),
        description=f"JetStream stream {feed.stream} on {feed.source.label}: advisories, written by the sites.",
        group_name=group_name(feed),
        kinds={"nats"},
        owners=OWNERS,
    )
    return [spec]


def feed_spec(feed: FeedSettings, streams: Sequence[StreamSettings]) -> dg.AssetSpec:
    """Describe the fold of a feed."""
    return dg.AssetSpec(
        stream_key(feed, "advisory_feed"),
        deps=feed_sources(feed, streams) or [stream_key(feed, "source")],
        description=(
            f"Who is up, silent or gone at every site, by the advisories in {feed.stream} on {feed.source.label} alone."
        ),
        group_name=group_name(feed),
        kinds={"nats", "spark", "duckdb"},
        owners=OWNERS,
    )


def feed_check_specs(feed: FeedSettings) -> list[dg.AssetCheckSpec]:
    """Describe the checks of a feed."""
    key = stream_key(feed, "advisory_feed")
    return [
        dg.AssetCheckSpec(
            "no_gap", asset=key, description="The stream held every sequence between where this run began and ended."
        ),
        dg.AssetCheckSpec(
            "advisories_understood", asset=key, description="Nothing was kept apart in global_rejects for a day."
        ),
        dg.AssetCheckSpec(
            "sites_watched",
            asset=key,
            description="No site is blind: each that said when it would speak again has spoken by then.",
        ),
    ]


def feed_metadata(report: StreamReport) -> Mapping[str, dg.MetadataValue]:
    """Return what a run folded, as numbers that plot."""
    counts = {
        event: dg.MetadataValue.int(report.events.get(event, 0)) for event in ("new", "timeout", "recover", "expire")
    }
    return {
        "advisories": dg.MetadataValue.int(report.copied),
        "kept_apart": dg.MetadataValue.int(report.parked),
        "batches": dg.MetadataValue.int(report.batches),
        "lag_messages": dg.MetadataValue.int(report.lag_messages),
        **counts,
    }


def check_feed(site: Site, report: StreamReport) -> Iterator[dg.AssetCheckResult]:
    """Yield the verdicts on a feed after a run."""
    key, state = stream_key(report.stream, "advisory_feed"), report.state
    yield dg.AssetCheckResult(
        asset_key=key,
        check_name="no_gap",
        passed=report.gap_messages == 0,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={"messages": report.gap_messages},
    )
    since_ns = (state.watermark_ns if state else None) or site.clock.now_ns()
    apart = site.state.global_tables.rejects_since(report.stream.stream, since_ns - _DAY_NS)
    yield dg.AssetCheckResult(
        asset_key=key,
        check_name="advisories_understood",
        passed=apart == 0,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={
            "last_day": apart,
            "this_run": report.parked,
            "ever": report.copying.parked_messages if report.copying else 0,
        },
    )
    blind = site.state.global_tables.blind_sites(report.stream.stream, state.watermark_ns if state else None)
    named = [f"{label} (last heard {format_rfc3339_ns(heard_ns)[:19]}Z)" for label, heard_ns in blind[:_MOST_NAMED]]
    named += [f"{len(blind) - _MOST_NAMED} more"] if len(blind) > _MOST_NAMED else []
    yield dg.AssetCheckResult(
        asset_key=key,
        check_name="sites_watched",
        passed=not blind,
        severity=dg.AssetCheckSeverity.WARN,
        description=f"blind: {', '.join(named)}" if blind else None,
        metadata={"blind": len(blind)},
    )
