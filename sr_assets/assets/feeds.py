"""The asset `advisory_feed`: the advisories of other sites, folded into the global view.

Here: its spec, its checks and what is recorded of it. Not here: the fold (`stages.feeds.advisory_feed`), the global
tables as assets (`fleet`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import dagster as dg

from sr_assets.assets.checks import warning
from sr_assets.assets.nodes import event_counts
from sr_assets.assets.streams import external_spec, made_spec, stream_key
from sr_assets.domain.positions import DAY_NS, format_rfc3339_ns

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sr_assets.settings import FeedSettings, Settings, StreamSettings
    from sr_assets.stages.report import StreamReport
    from sr_assets.stages.site import Site

_MOST_NAMED: Final = 10
_CHECKS: Final = {
    "no_gap": "The stream held every sequence between where this run began and ended.",
    "advisories_understood": "Nothing was rejected (table global_rejects) for a day.",
    "sites_watched": "No site is blind: no heartbeat is overdue.",
}


def feed_source_specs(
    settings: Settings, feed: FeedSettings, filled_by: Sequence[StreamSettings]
) -> list[dg.AssetSpec]:
    """Describe the stream that a feed reads, unless it is filled by replicas of ours."""
    if filled_by:
        return []
    description = f"JetStream stream {feed.stream} on {feed.source.label}: advisories, written by the sites."
    return [external_spec(settings, feed, description)]


def feed_spec(feed: FeedSettings, filled_by: Sequence[StreamSettings]) -> dg.AssetSpec:
    """Describe the fold of a feed."""
    return made_spec(
        feed,
        "advisory_feed",
        [stream_key(stream, "replica") for stream in filled_by] or [stream_key(feed, "source")],
        (
            f"Who is up, silent or gone at every site, by the advisories in {feed.stream} on {feed.source.label} alone.",
            "rules.md#at-the-centre",
        ),
        {"nats", "spark", "duckdb"},
    )


def feed_check_specs(feed: FeedSettings) -> list[dg.AssetCheckSpec]:
    """Describe the checks of a feed."""
    key = stream_key(feed, "advisory_feed")
    return [dg.AssetCheckSpec(name, asset=key, description=description) for name, description in _CHECKS.items()]


def feed_metadata(report: StreamReport) -> Mapping[str, dg.MetadataValue]:
    """Return what a run folded, as numbers that plot."""
    return {
        "advisories": dg.MetadataValue.int(report.copied),
        "rejected": dg.MetadataValue.int(report.parked),
        "batches": dg.MetadataValue.int(report.batches),
        "lag_messages": dg.MetadataValue.int(report.lag_messages),
        **event_counts(report),
    }


def check_feed(site: Site, report: StreamReport) -> Iterator[dg.AssetCheckResult]:
    """Yield the verdicts on a feed after a run."""
    key, state, stream = stream_key(report.stream, "advisory_feed"), report.state, report.stream.stream
    yield warning(key, "no_gap", report.gap_messages == 0, {"messages": report.gap_messages})
    since_ns = (state.watermark_ns if state else None) or site.clock.now_ns()
    rejected = site.state.global_tables.rejects_since(stream, since_ns - DAY_NS)
    counted = {
        "last_day": rejected,
        "this_run": report.parked,
        "ever": report.copying.parked_messages if report.copying else 0,
    }
    yield warning(key, "advisories_understood", rejected == 0, counted)
    blind = site.state.global_tables.blind_sites(stream, state.watermark_ns if state else None)
    yield warning(key, "sites_watched", not blind, {"blind": len(blind)}, _named(blind))


def _named(blind: Sequence[tuple[str, int]]) -> str | None:
    """Return which sites are blind, the first of many: (site and stream, time of the last heartbeat in unix ns)."""
    if not blind:
        return None
    named = [f"{label} (last heartbeat {format_rfc3339_ns(alive_ns)[:19]}Z)" for label, alive_ns in blind[:_MOST_NAMED]]
    named += [f"{len(blind) - _MOST_NAMED} more"] if len(blind) > _MOST_NAMED else []
    return f"blind: {', '.join(named)}"
