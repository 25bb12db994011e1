"""The effect of the rules of operators in the metadata of a stream's assets: outages, windows, flapping, held transitions.

Dagster plots the numbers over the materialisations of an asset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import dagster as dg

from sr_assets.adapters.state.maintenance import added_windows
from sr_assets.adapters.state.store import SiteState
from sr_assets.assets.specs import markdown_table
from sr_assets.domain.positions import format_rfc3339_ns
from sr_assets.settings import StreamSettings
from sr_assets.stages.clock import Clock

#: How many events an asset's page shows.
_NEWEST: Final = 10
_LONGEST_NAME: Final = 80
#: The value of `outage_level`, so that Dagster plots it.
_LEVELS: Final = {"none": 0, "partial": 1, "dark": 2}


def rules_metadata(state: SiteState, stream: StreamSettings) -> dict[str, Any]:
    """Return the state of a stream's rules after a run: the running outage, held transitions, active windows, flapping."""
    held, suppressed, flapping = state.undecided(stream.stream).counts()
    outage, since_ns = _running_outage(state, stream)
    windows = _active_windows(state, stream)
    metadata: dict[str, Any] = {
        "outage": f"{outage} since {format_rfc3339_ns(since_ns)}" if since_ns is not None else outage,
        "outage_level": _LEVELS[outage],
        "held_transitions": held,
        "suppressed_transitions": suppressed,
        "flapping_nodes": flapping,
        "maintenance_windows": len(windows),
    }
    if windows:
        metadata["maintenance"] = markdown_table(("window", "nodes", "until", "reason"), windows)
    return metadata


def withheld_metadata(state: SiteState, stream: StreamSettings) -> dict[str, Any]:
    """Return the transitions that wait for a rule, and the newest events that replaced transitions."""
    held, suppressed, _ = state.undecided(stream.stream).counts()
    of_site, of_nodes = (
        events.newest(_NEWEST) for events in (state.guard(stream.stream), state.undecided(stream.stream))
    )
    metadata: dict[str, Any] = {"held_transitions": held, "suppressed_transitions": suppressed}
    if of_site:
        rows = [
            (row["event"], format_rfc3339_ns(row["event_ns"]), f"{row['silent']} of {row['nodes']}") for row in of_site
        ]
        metadata["site_events"] = markdown_table(("event", "at", "silent"), rows)
    if of_nodes:
        flaps = [
            (row["event"], row["node"][:_LONGEST_NAME], format_rfc3339_ns(row["event_ns"]), str(row["transitions"]))
            for row in of_nodes
        ]
        metadata["node_events"] = markdown_table(("event", "node", "at", "transitions"), flaps)
    return metadata


def transition_table(newest: Sequence[tuple[str, str, int, bool, str | None]]) -> dg.MarkdownMetadataValue:
    """Return transitions as a Markdown table.

    Each has its event, node, event time in unix ns, whether it is late, and why it is not announced.
    """
    rows = [
        (event, node[:_LONGEST_NAME], format_rfc3339_ns(event_ns), "late" if late else "", withheld or "")
        for event, node, event_ns, late, withheld in newest
    ]
    return markdown_table(("event", "node", "at", "late", "not announced"), rows)


def _running_outage(state: SiteState, stream: StreamSettings) -> tuple[str, int | None]:
    outages = state.guard(stream.stream).outages()
    if not outages or outages[-1].ended_ns is not None:
        return "none", None
    return "dark" if outages[-1].dark else "partial", outages[-1].since_ns


def _active_windows(state: SiteState, stream: StreamSettings) -> list[tuple[str, str, str, str]]:
    """Return the id, nodes, end and reason of each active window."""
    now_ns = Clock.own_ns()
    windows = [(each, each.end_ns(now_ns)) for each in (*stream.windows, *added_windows(state.folder))]
    return [
        (each.id, ", ".join(each.globs)[:_LONGEST_NAME] or "all nodes", format_rfc3339_ns(end_ns), each.reason)
        for each, end_ns in windows
        if end_ns is not None
    ]
