"""Assets about nodes: `node_snapshots`, their newest copied message, and `node_state`, who is up, silent or retired.

Here: their specs and what is recorded of them. Not here: how they are made (`stages.tracking.node_snapshots`,
`stages.tracking.node_state`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg

from sr_assets.assets.streams import OWNERS, group_name, stream_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sr_assets.settings import StreamSettings
    from sr_assets.stages.report import StreamReport


def node_snapshots_spec(stream: StreamSettings) -> dg.AssetSpec:
    """Describe the Parquet history of copied messages and the newest per node."""
    return dg.AssetSpec(
        stream_key(stream, "node_snapshots"),
        deps=[stream_key(stream, "replica")],
        description="Each node's newest copied message, and the history of all as Parquet by day.",
        group_name=group_name(stream),
        kinds={"parquet", "duckdb"},
        owners=OWNERS,
    )


def node_state_spec(stream: StreamSettings) -> dg.AssetSpec:
    """Describe the state of every sender."""
    return dg.AssetSpec(
        stream_key(stream, "node_state"),
        deps=[stream_key(stream, "replica")],
        description=(
            "When each node was seen first and last, and whether it is up, silent or retired, by the source's own"
            " clock."
        ),
        group_name=group_name(stream),
        kinds={"duckdb"},
        owners=OWNERS,
    )


def node_snapshots_metadata(report: StreamReport) -> Mapping[str, dg.MetadataValue]:
    """Return how many batches' files were taken up."""
    return {"batches": dg.MetadataValue.int(report.snapshots)}


def node_state_metadata(report: StreamReport) -> Mapping[str, dg.MetadataValue]:
    """Return how many nodes were swept, and each event's count."""
    counts = {
        event: dg.MetadataValue.int(report.events.get(event, 0)) for event in ("new", "timeout", "recover", "expire")
    }
    return {"swept_nodes": dg.MetadataValue.int(report.swept), **counts}
