"""Assets of a stream as such: `source`, which others write, and `replica`, what a target holds of it.

Here: their specs and what is recorded of them. Not here: how they are made (`stages.replication.replica`), when (`automation`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import dagster as dg

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sr_assets.settings import Entry, StreamSettings
    from sr_assets.stages.report import StreamReport

OWNERS = ["team:fleet-platform"]


def stream_key(stream: Entry, noun: str) -> dg.AssetKey:
    """Return the key `[name, stream, noun]`."""
    return dg.AssetKey([*stream.asset_prefix, noun])


def group_name(stream: Entry) -> str:
    """Return the group of a stream's assets: its site."""
    return stream.asset_prefix[0]


def source_spec(stream: StreamSettings) -> dg.AssetSpec:
    """Describe the stream that is read; nobody here makes it."""
    filtered = f", subjects {stream.filter_subject}" if stream.filter_subject else ""
    return dg.AssetSpec(
        stream_key(stream, "source"),
        description=f"JetStream stream {stream.stream} on {stream.source.label}{filtered}, written by the fleet.",
        group_name=group_name(stream),
        kinds={"nats"},
        owners=OWNERS,
    )


def replica_spec(stream: StreamSettings) -> dg.AssetSpec:
    """Describe what the target holds of the source."""
    how = "each sender's messages sampled" if stream.tracked else "every message"
    return dg.AssetSpec(
        stream_key(stream, "replica"),
        deps=[stream_key(stream, "source")],
        description=(
            f"Stream {stream.target_stream} on {stream.target.label}: {how}, exactly once, {stream.order} order."
        ),
        group_name=group_name(stream),
        kinds={"nats", "spark"},
        owners=OWNERS,
        # A fleet that reports is never quiet for an hour: overdue means that nothing arrived or nothing ran.
        freshness_policy=(
            dg.FreshnessPolicy.time_window(fail_window=timedelta(days=1), warn_window=timedelta(hours=1))
            if stream.tracked
            else None
        ),
    )


def replica_metadata(report: StreamReport) -> Mapping[str, dg.MetadataValue]:
    """Return what a run did, as numbers that plot."""
    state = report.state
    metadata: dict[str, dg.MetadataValue] = {
        "messages": dg.MetadataValue.int(report.messages),
        "copied_messages": dg.MetadataValue.int(report.copied),
        "copied_bytes": dg.MetadataValue.int(report.copied_bytes),
        "skipped_messages": dg.MetadataValue.int(report.reasons.get("sampled", 0)),
        "parked_messages": dg.MetadataValue.int(report.parked),
        "gap_messages": dg.MetadataValue.int(report.gap_messages),
        "batches": dg.MetadataValue.int(report.batches),
        "messages_per_second": dg.MetadataValue.float(
            round(report.messages / report.seconds, 1) if report.seconds else 0.0
        ),
        "lag_messages": dg.MetadataValue.int(report.lag_messages),
    }
    if state is not None:
        metadata["next_sequence"] = dg.MetadataValue.int(state.next_sequence)
        metadata["first_sequence"] = dg.MetadataValue.int(
            report.first if report.first is not None else state.next_sequence
        )
        metadata["source_created"] = dg.MetadataValue.timestamp(state.created_ns / 1e9)
    return metadata
