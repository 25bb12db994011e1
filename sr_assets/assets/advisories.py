"""The asset `node_advisories`: the transitions of a stream's nodes, and their publication.

Here: its spec and what is recorded of it. Not here: the outbox (`stages.tracking.node_advisories`), the message
(`domain.advisories`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import dagster as dg

from sr_assets.assets.streams import made_spec, stream_key
from sr_assets.domain.positions import format_rfc3339_ns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sr_assets.settings import StreamSettings
    from sr_assets.stages.report import StreamReport

#: How many transitions an asset's page shows.
NEWEST: Final = 10
_LONGEST_NAME: Final = 80


def node_advisories_spec(stream: StreamSettings) -> dg.AssetSpec:
    """Describe the feed of transitions."""
    published = (
        f"published to {stream.advisory.subject}"
        if stream.advisory
        else "recorded, not published (no `advisory` block)"
    )
    return made_spec(
        stream,
        "node_advisories",
        [stream_key(stream, "node_state")],
        (f"Which node is new, silent, back or gone: {published}.", "rules.md#an-advisory"),
        {"nats", "duckdb"},
    )


def node_advisories_metadata(
    report: StreamReport, newest: Sequence[tuple[str, str, int, bool]]
) -> Mapping[str, dg.MetadataValue]:
    """Return what was published and what waits, with the newest transitions as a small table.

    `newest`: event, node, event time in unix ns, late.
    """
    lines = ["| event | node | at | late |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {event} | {_cell(node)} | {format_rfc3339_ns(event_ns)} | {'late' if late else ''} |"
        for event, node, event_ns, late in newest
    ]
    return {
        "published": dg.MetadataValue.int(report.published),
        "waiting": dg.MetadataValue.int(report.waiting),
        "newest": dg.MetadataValue.md("\n".join(lines)),
    }


def _cell(name: str) -> str:
    """Return a node's name as it may stand in a Markdown table."""
    printable = "".join(character if character.isprintable() else "\ufffd" for character in name)
    return printable.replace("|", "\\|").replace("`", "'")[:_LONGEST_NAME]
