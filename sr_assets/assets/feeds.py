"""The assets of a feed: their specs, checks, and the metadata that a run records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from sr_assets.assets.checks import check_specs, warning
from sr_assets.assets.specs import documented, entry_spec, source_spec, stream_key
from sr_assets.assets.streams import event_counts
from sr_assets.domain.positions import DAY_NS, format_rfc3339_ns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sr_assets.settings import FeedSettings, Settings, StreamSettings
    from sr_assets.stages.report import StreamReport
    from sr_assets.stages.site import Site

_MOST_NAMED: Final = 10
_CHECKS: Final = {
    "no_gap": "No message was missing from the stream in this run.",
    "advisories_understood": "No message was rejected (table `global_rejects`) within the last day.",
    "sites_watched": "No site is blind: no heartbeat is overdue.",
}


def feed_source_specs(
    settings: Settings, feed: FeedSettings, filled_by: Sequence[StreamSettings]
) -> list[dg.AssetSpec]:
    """Describe the stream that a feed reads, unless replicas of this platform fill it."""
    if filled_by:
        return []
    description = f"JetStream stream {feed.stream} on {feed.source.label}: advisories, written by the sites."
    return [source_spec(settings, feed, description)]


def feed_spec(feed: FeedSettings, filled_by: Sequence[StreamSettings]) -> dg.AssetSpec:
    """Describe the fold of a feed."""
    return entry_spec(
        feed,
        "advisory_feed",
        [stream_key(stream, "replica") for stream in filled_by] or ["source"],
        documented(
            f"Status of every node at every site, folded from the advisories in {feed.stream} on {feed.source.label}.",
            "rules.md#at-the-centre",
        ),
        kinds={"nats", "spark", "duckdb"},
    )


def feed_check_specs(feed: FeedSettings) -> list[dg.AssetCheckSpec]:
    """Describe the checks of a feed."""
    return check_specs(stream_key(feed, "advisory_feed"), _CHECKS)


def feed_metadata(report: StreamReport) -> dict[str, Any]:
    """Return the counts of a run."""
    return {
        "advisories": report.copied,
        "rejected": report.parked,
        "batches": report.batches,
        "lag_messages": report.lag_messages,
        **event_counts(report),
    }


def check_feed(site: Site, report: StreamReport) -> Iterator[dg.AssetCheckResult]:
    """Yield the check results of a feed after a run."""
    key, state, stream = stream_key(report.stream, "advisory_feed"), report.state, report.stream.stream
    yield warning(key, "no_gap", report.gap_messages == 0, {"messages": report.gap_messages})
    since_ns = (state.watermark_ns if state else None) or site.clock.now_ns()
    rejected = site.state.global_tables.rejects_since(stream, since_ns - DAY_NS)
    counts = {
        "last_day": rejected,
        "this_run": report.parked,
        "ever": report.copying.parked_messages if report.copying else 0,
    }
    yield warning(key, "advisories_understood", rejected == 0, counts)
    blind = site.state.global_tables.blind_sites(stream, state.watermark_ns if state else None)
    yield warning(key, "sites_watched", not blind, {"blind": len(blind)}, _blind_sites(blind))


def _blind_sites(blind: Sequence[tuple[str, int]]) -> str | None:
    """Return the first blind sites as text, from pairs of site and stream, and last heartbeat in unix ns."""
    if not blind:
        return None
    named = [f"{label} (last heartbeat {format_rfc3339_ns(alive_ns)[:19]}Z)" for label, alive_ns in blind[:_MOST_NAMED]]
    named += [f"{len(blind) - _MOST_NAMED} more"] if len(blind) > _MOST_NAMED else []
    return f"blind: {', '.join(named)}"
