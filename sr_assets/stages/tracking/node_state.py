"""Stage `node_state`: let time pass. Nodes whose deadline lies before the committed watermark time out and expire.

It asks nobody: the watermark was committed by `replica`. Not here: what a sighting does (`fold`), who is told
(`node_advisories`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sr_assets.domain.advisories import event_id, is_late
from sr_assets.domain.blindness import NO_BLIND_SPANS
from sr_assets.domain.tracking import NODE_COLUMNS, deadline_ns, sweep
from sr_assets.stages.tracking.columns import state_of, state_values
from sr_assets.stages.tracking.fold import folded_table, transition_row

if TYPE_CHECKING:
    from sr_assets.adapters.state.store import StreamState
    from sr_assets.settings import StreamSettings
    from sr_assets.stages.site import Site, StreamReport

NODE_SCHEMA = pa.schema(
    [
        ("node", pa.string()),
        *((name, pa.string() if name == "status" else pa.int64()) for name in NODE_COLUMNS),
        ("deadline_ns", pa.int64()),
    ]
)


def sweep_due(site: Site, stream: StreamSettings, report: StreamReport) -> bool:
    """Sweep the nodes that are due, commit their states and transitions in one transaction.

    Returns whether there were any.
    """
    state, policy = site.state.load_stream(stream.stream), stream.policy
    if state is None or state.watermark_ns is None or policy is None:
        return False
    due = site.state.due_nodes(stream.stream, state.watermark_ns)
    if not due:
        return False
    nodes, rows = [], []
    for node, *values in due:
        swept, transitions = sweep(policy, state_of(values), state.watermark_ns, NO_BLIND_SPANS)
        nodes.append((node, *state_values(swept), deadline_ns(policy, swept, NO_BLIND_SPANS)))
        rows += [transition_row(node, transition) for transition in transitions]
    arrays = [pa.array(column, kind.type) for column, kind in zip(zip(*nodes, strict=True), NODE_SCHEMA, strict=True)]
    with site.state.transaction():
        site.state.merge_nodes(stream.stream, pa.Table.from_arrays(arrays, schema=NODE_SCHEMA))
        add_transitions(site, stream, state, folded_table(rows), report)
    report.swept += len(due)
    site.changed()
    return True


def add_transitions(
    site: Site,
    stream: StreamSettings,
    state: StreamState,
    folded: pa.Table,
    report: StreamReport,
    *,
    history: bool = False,
) -> None:
    """Write the transitions among folded rows, with their ids; `late` and `detected_at` are fixed here. Inside a
    transaction.

    `history` is for what is only recorded: it is late and never published.
    """
    policy = stream.policy
    rows: list[dict[str, Any]] = []
    for row in folded.filter(pa.compute.is_valid(folded["event"])).to_pylist():
        report.events[row["event"]] += 1
        rows.append(
            {
                "event_id": event_id(
                    stream.replicator, stream.name, stream.stream, row["sender"], row["event"], row["event_ns"]
                ),
                "stream": stream.stream,
                "node": row["sender"],
                "event": row["event"],
                "event_ns": row["event_ns"],
                "detected_ns": state.watermark_ns,
                "seen_ns": row["event_seen_ns"],
                "age_ns": row["event_age_ns"],
                "sequence": row["event_sequence"],
                "previous": row["event_previous"],
                "transition": row["event_transition"],
                "late": (
                    history or (policy is not None and is_late(state.planned_ns, row["event_ns"], policy.interval_ns))
                ),
                "returned": row["event_returned"],
                "outage_ns": row["event_outage_ns"],
                "published_ns": None,
                "outbox": stream.advisory is not None and not history,
            }
        )
    if rows:
        site.state.add_rows("transitions", pa.Table.from_pylist(rows, schema=_TRANSITION_SCHEMA))


_TRANSITION_SCHEMA = pa.schema(
    [
        ("event_id", pa.string()),
        ("stream", pa.string()),
        ("node", pa.string()),
        ("event", pa.string()),
        ("event_ns", pa.int64()),
        ("detected_ns", pa.int64()),
        ("seen_ns", pa.int64()),
        ("age_ns", pa.int64()),
        ("sequence", pa.int64()),
        ("previous", pa.string()),
        ("transition", pa.int64()),
        ("late", pa.bool_()),
        ("returned", pa.bool_()),
        ("outage_ns", pa.int64()),
        ("published_ns", pa.int64()),
        ("outbox", pa.bool_()),
    ]
)
