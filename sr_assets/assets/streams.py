"""The assets of a stream: their specs, and the metadata that a run records of each."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import dagster as dg

from sr_assets.assets.specs import documented, entry_spec, source_spec
from sr_assets.domain.positions import format_rfc3339_ns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sr_assets.settings import Settings, StreamSettings
    from sr_assets.stages.report import StreamReport

#: How many transitions an asset's page shows.
NEWEST: Final = 10
_LONGEST_NAME: Final = 80
_EVENTS: Final = ("new", "timeout", "recover", "expire")
#: A fleet reports more than once an hour, so an older state means that nothing arrived or nothing ran. A `replica` has no
#: policy: it also falls behind when the target is down or paused, which the check `progressing` reports.
_FRESHNESS: Final = dg.FreshnessPolicy.time_window(warn_window=timedelta(hours=1), fail_window=timedelta(days=1))


def stream_source_spec(settings: Settings, stream: StreamSettings) -> dg.AssetSpec:
    """Describe the source stream, which the fleet writes."""
    filtered = f", subjects {stream.filter_subject}" if stream.filter_subject else ""
    return source_spec(
        settings, stream, f"JetStream stream {stream.stream} on {stream.source.label}{filtered}, written by the fleet."
    )


def node_state_spec(stream: StreamSettings) -> dg.AssetSpec:
    """Describe the state of every sender, which depends on the source alone."""
    return entry_spec(
        stream,
        "node_state",
        ["source"],
        documented(
            "First and last sighting and status (up, silent, retired) of each node, by the source's clock.",
            "rules.md#up-silent-retired",
        ),
        kinds={"spark", "duckdb"},
        freshness=_FRESHNESS,
    )


def replica_spec(stream: StreamSettings) -> dg.AssetSpec:
    """Describe the copies in the target; `node_state` decides which messages of a tracked stream are copied."""
    copied, deciding = ("each sender's messages sampled", ["node_state"]) if stream.tracked else ("every message", [])
    return entry_spec(
        stream,
        "replica",
        ["source", *deciding],
        documented(
            f"Stream {stream.target_stream} on {stream.target.label}: {copied}, exactly once, {stream.order} order.",
            "rules.md#copied-or-skipped",
        ),
        kinds={"nats", "spark"},
    )


def node_snapshots_spec(stream: StreamSettings) -> dg.AssetSpec:
    """Describe the Parquet history of copied messages and the newest message of each node."""
    return entry_spec(
        stream,
        "node_snapshots",
        ["replica"],
        documented(
            "Newest copied message of each node, and the history of all copies as Parquet files by day.",
            "contract.md#parquet-history",
        ),
        kinds={"parquet", "duckdb"},
    )


def node_advisories_spec(stream: StreamSettings) -> dg.AssetSpec:
    """Describe the transitions of the nodes and their publication."""
    advisory = stream.advisory
    published = f"published to {advisory.subject}" if advisory else "recorded, not published (no `advisory` block)"
    return entry_spec(
        stream,
        "node_advisories",
        ["node_state"],
        documented(f"Transitions of nodes (new, timeout, recover, expire), {published}.", "rules.md#an-advisory"),
        kinds={"nats", "duckdb"},
    )


def node_state_metadata(report: StreamReport, nodes: Mapping[str, int]) -> dict[str, Any]:
    """Return the transitions that a run found, the nodes by status, and the remaining messages and seconds."""
    return {
        **{f"{status}_nodes": nodes.get(status, 0) for status in ("up", "timeout", "retired")},
        "swept_nodes": report.swept,
        "lag_messages": report.lag_messages,
        "seconds_left": _seconds_left(report, report.lag_messages, report.messages),
        **event_counts(report),
    }


def replica_metadata(report: StreamReport) -> dict[str, Any]:
    """Return the counts of a run and how much remains to be copied."""
    metadata: dict[str, Any] = {
        "messages": report.messages,
        "copied_messages": report.copied,
        "copied_bytes": report.copied_bytes,
        "skipped_messages": report.reasons.get("sampled", 0),
        "parked_messages": report.parked,
        "gap_messages": report.gap_messages,
        "batches": report.batches,
        "lag_messages": report.lag_messages,
        "seconds_left": _seconds_left(report, report.queued or report.lag_messages, report.copied),
    }
    if (state := report.state) is not None:
        metadata["next_sequence"] = state.next_sequence
        metadata["first_sequence"] = report.first if report.first is not None else state.next_sequence
        metadata["source_created"] = dg.MetadataValue.timestamp(state.created_ns / 1e9)
    return metadata


def node_advisories_metadata(report: StreamReport, newest: Sequence[tuple[str, str, int, bool]]) -> dict[str, Any]:
    """Return the published and waiting advisories, and the newest transitions as a Markdown table.

    `newest`: event, node, event time in unix ns, late.
    """
    rows = [
        (event, node[:_LONGEST_NAME], format_rfc3339_ns(event_ns), "late" if late else "")
        for event, node, event_ns, late in newest
    ]
    return {
        "published": report.published,
        "waiting": report.waiting,
        "newest": markdown_table(("event", "node", "at", "late"), rows),
    }


def event_counts(report: StreamReport) -> dict[str, int]:
    """Return the number of transitions that a run found or folded, by event."""
    return {event: report.events.get(event, 0) for event in _EVENTS}


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> dg.MarkdownMetadataValue:
    """Return a table for an asset's page; a cell may contain any text."""
    lines = [header, ["---"] * len(header), *([_cell(text) for text in row] for row in rows)]
    return dg.MetadataValue.md("\n".join(f"| {' | '.join(line)} |" for line in lines))


def _cell(text: str) -> str:
    printable = "".join(character if character.isprintable() else "\ufffd" for character in text)
    return printable.replace("|", "\\|").replace("`", "'").replace("<", "&lt;")


def _seconds_left(report: StreamReport, left: int, done: int) -> float:
    """Return how long the remaining messages take at the rate of this run; 0 if the rate is unknown."""
    return round(report.seconds * left / done, 1) if done else 0.0
