"""Assets about nodes: `node_state`, who is up, silent or retired, and `node_snapshots`, their newest copied message.

Here: their specs and what is recorded of them. Not here: how they are made (`stages.tracking`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

import dagster as dg

from sr_assets.assets.streams import made_spec, seconds_left, stream_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sr_assets.settings import StreamSettings
    from sr_assets.stages.report import StreamReport

#: A fleet that reports is never quiet for an hour: overdue means that nothing arrived or nothing ran. Of a replica it
#: would also mean a target that is away or a pause, which the check `progressing` and the table `replication` show.
_OVERDUE: Final = (timedelta(hours=1), timedelta(days=1))
EVENTS: Final = ("new", "timeout", "recover", "expire")


def node_state_spec(stream: StreamSettings) -> dg.AssetSpec:
    """Describe the state of every sender; it needs the source alone."""
    return made_spec(
        stream,
        "node_state",
        [stream_key(stream, "source")],
        (
            "When each node was seen first and last, and whether it is up, silent or retired, by the source's own clock.",
            "rules.md#up-silent-retired",
        ),
        {"spark", "duckdb"},
        overdue=_OVERDUE,
    )


def node_snapshots_spec(stream: StreamSettings) -> dg.AssetSpec:
    """Describe the Parquet history of copied messages and the newest per node."""
    return made_spec(
        stream,
        "node_snapshots",
        [stream_key(stream, "replica")],
        ("Each node's newest copied message, and the history of all as Parquet by day.", "contract.md#parquet-history"),
        {"parquet", "duckdb"},
    )


def node_state_metadata(report: StreamReport) -> Mapping[str, dg.MetadataValue]:
    """Return how many nodes were swept, each event's count, what is not read yet and how long that takes."""
    return {
        "swept_nodes": dg.MetadataValue.int(report.swept),
        "lag_messages": dg.MetadataValue.int(report.lag_messages),
        "seconds_left": dg.MetadataValue.float(seconds_left(report, report.lag_messages, report.messages)),
        **event_counts(report),
    }


def node_snapshots_metadata(report: StreamReport) -> Mapping[str, dg.MetadataValue]:
    """Return how many batches' files were indexed."""
    return {"batches": dg.MetadataValue.int(report.snapshots)}


def event_counts(report: StreamReport) -> Mapping[str, dg.MetadataValue]:
    """Return how many transitions of each event a run found, or folded."""
    return {event: dg.MetadataValue.int(report.events.get(event, 0)) for event in EVENTS}
