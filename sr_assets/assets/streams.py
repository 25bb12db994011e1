"""Assets of a stream as such: `source`, which others write, and `replica`, what a target holds of it.

Here: their specs and what is recorded of them, and what every asset of an entry has in common. Not here: how they are
made (`stages.replication`), when (`automation`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import dagster as dg

from sr_assets.assets.described import documented
from sr_assets.settings import asset_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from sr_assets.settings import Entry, Settings, StreamSettings
    from sr_assets.stages.report import StreamReport

OWNERS: Final = ["team:fleet-platform"]


def site_job_name(site: str) -> str:
    """Return the name of a site's job."""
    return f"{asset_name(site)}_replication"


def stream_key(entry: Entry, noun: str) -> dg.AssetKey:
    """Return the key `[name, stream, noun]`."""
    return dg.AssetKey([*entry.asset_prefix, noun])


def topology_key(cluster: str, stream: str) -> dg.AssetKey:
    """Return the key of a native stream, on a cluster of `topology`."""
    return dg.AssetKey(["topology", asset_name(cluster), asset_name(stream)])


def native_keys(settings: Settings, entry: Entry | None = None) -> list[dg.AssetKey]:
    """Return the keys of all native streams, or of the one that an entry reads."""
    if settings.topology is None:
        return []
    at = settings.topology.cluster_of(entry.source) if entry is not None else None
    return [
        topology_key(wanted.cluster, wanted.stream)
        for wanted in settings.topology.streams
        if entry is None or (at is not None and (wanted.cluster, wanted.stream) == (at.name, entry.stream))
    ]


def group_name(entry: Entry) -> str:
    """Return the group of an entry's assets: its site."""
    return entry.asset_prefix[0]


def external_spec(settings: Settings, entry: Entry, description: str) -> dg.AssetSpec:
    """Describe the stream that an entry reads and that others write; it may be a native stream."""
    return dg.AssetSpec(
        stream_key(entry, "source"),
        deps=native_keys(settings, entry),
        description=documented(description, "architecture.md#the-path-of-a-message"),
        group_name=group_name(entry),
        kinds={"nats"},
        owners=OWNERS,
    )


def made_spec(
    entry: Entry,
    noun: str,
    deps: Sequence[dg.AssetKey],
    description: tuple[str, str],
    kinds: set[str],
    overdue: tuple[timedelta, timedelta] | None = None,
) -> dg.AssetSpec:
    """Describe an asset that a site's run makes; it may be left out of a run: of a stream that failed nothing is.

    `description`: what it is, and where in `docs/` that is explained. `overdue`: how old it may be before Dagster warns, and
    before it fails.
    """
    return dg.AssetSpec(
        stream_key(entry, noun),
        deps=deps,
        description=documented(*description),
        group_name=group_name(entry),
        kinds=kinds,
        owners=OWNERS,
        skippable=True,
        freshness_policy=(
            dg.FreshnessPolicy.time_window(warn_window=overdue[0], fail_window=overdue[1]) if overdue else None
        ),
    )


def source_spec(settings: Settings, stream: StreamSettings) -> dg.AssetSpec:
    """Describe the stream that is read; the fleet writes it."""
    filtered = f", subjects {stream.filter_subject}" if stream.filter_subject else ""
    return external_spec(
        settings, stream, f"JetStream stream {stream.stream} on {stream.source.label}{filtered}, written by the fleet."
    )


def replica_spec(stream: StreamSettings) -> dg.AssetSpec:
    """Describe the copies in the target; of a tracked stream `node_state` decides which messages are copied."""
    copied, deciding = ("each sender's messages sampled", ["node_state"]) if stream.tracked else ("every message", [])
    return made_spec(
        stream,
        "replica",
        [stream_key(stream, noun) for noun in ("source", *deciding)],
        (
            f"Stream {stream.target_stream} on {stream.target.label}: {copied}, exactly once, {stream.order} order.",
            "rules.md#copied-or-skipped",
        ),
        {"nats", "spark"},
    )


def seconds_left(report: StreamReport, left: int, done: int) -> float:
    """Return how long what is left takes at the rate of the run so far; 0 when nothing is left, or no rate is known."""
    return round(report.seconds * left / done, 1) if done else 0.0


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
        "lag_messages": dg.MetadataValue.int(report.lag_messages),
        "seconds_left": dg.MetadataValue.float(
            seconds_left(report, report.queued or report.lag_messages, report.copied)
        ),
    }
    if state is not None:
        metadata["next_sequence"] = dg.MetadataValue.int(state.next_sequence)
        metadata["first_sequence"] = dg.MetadataValue.int(
            report.first if report.first is not None else state.next_sequence
        )
        metadata["source_created"] = dg.MetadataValue.timestamp(state.created_ns / 1e9)
    return metadata
