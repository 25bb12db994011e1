"""The asset `node_advisories`: what the world was told about nodes.

Here: its spec and what is recorded of it. Not here: the outbox (`stages.tracking.node_advisories`), the message
(`domain.advisories`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import dagster as dg

from sr_assets.assets.streams import OWNERS, group_name, stream_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sr_assets.settings import StreamSettings
    from sr_assets.stages.report import StreamReport


def node_advisories_spec(stream: StreamSettings) -> dg.AssetSpec:
    """Describe the feed of transitions."""
    where = (
        f"published to {stream.advisory.subject}"
        if stream.advisory
        else "recorded, not published (no `advisory` block)"
    )
    return dg.AssetSpec(
        stream_key(stream, "node_advisories"),
        deps=[stream_key(stream, "node_state")],
        description=f"Which node is new, silent, back or gone: {where}.",
        group_name=group_name(stream),
        kinds={"nats", "duckdb"},
        owners=OWNERS,
    )


def node_advisories_metadata(
    report: StreamReport, newest: Sequence[Mapping[str, object]]
) -> Mapping[str, dg.MetadataValue]:
    """Return what went out and what waits, with the newest transitions as a small table."""
    lines = ["| event | node | at | late |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {row['event']} | {_cell(row['node'])} | {row['event_time']} | {'late' if row['late'] else ''} |"
        for row in newest
    ]
    return {
        "published": dg.MetadataValue.int(report.published),
        "waiting": dg.MetadataValue.int(report.waiting),
        "newest": dg.MetadataValue.md("\n".join(lines)),
    }


def _cell(value: object) -> str:
    """Return a node's name as it may stand in a Markdown table."""
    return (
        "".join(character if character.isprintable() else "\ufffd" for character in str(value))
        .replace("|", "\\|")
        .replace("`", "'")[:80]
    )
