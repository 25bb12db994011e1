"""Transitions as rows of the state, with their ids; `late` and `detected_ns` are fixed here.

Not here: which transitions there are (`fold`, `node_state`), the outbox (`node_advisories`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from sr_assets.domain.advisories import event_id, is_late

if TYPE_CHECKING:
    from sr_assets.adapters.state.records import StreamState
    from sr_assets.adapters.state.store import SiteState
    from sr_assets.settings import StreamSettings
    from sr_assets.stages.report import StreamReport

_SCHEMA: Final = pa.schema(
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
        ("epoch", pa.int64()),
        ("late", pa.bool_()),
        ("returned", pa.bool_()),
        ("outage_ns", pa.int64()),
        ("published_ns", pa.int64()),
        ("outbox", pa.bool_()),
    ]
)


def add_transitions(
    store: SiteState,
    stream: StreamSettings,
    state: StreamState,
    folded: pa.Table,
    report: StreamReport,
    *,
    history: bool = False,
) -> None:
    """Write the transitions among folded rows; called inside a transaction.

    With `history` the transitions are only recorded: they are late and never published.
    """
    rows = [
        _row(stream, state, event, history=history) for event in folded.filter(pc.is_valid(folded["event"])).to_pylist()
    ]
    report.events.update(row["event"] for row in rows)
    if rows:
        store.add_rows("transitions", pa.Table.from_pylist(rows, schema=_SCHEMA))


def _row(stream: StreamSettings, state: StreamState, event: dict[str, Any], *, history: bool) -> dict[str, Any]:
    policy, node, event_ns = stream.policy, event["sender"], event["event_ns"]
    assert policy is not None  # a tracked stream has one: settings see to it
    return {
        "event_id": event_id(stream.replicator, stream.name, stream.stream, node, event["event"], event_ns),
        "stream": stream.stream,
        "node": node,
        "event": event["event"],
        "event_ns": event_ns,
        "detected_ns": state.watermark_ns,
        "seen_ns": event["event_seen_ns"],
        "age_ns": event["event_age_ns"],
        "sequence": event["event_sequence"],
        "previous": event["event_previous"],
        "transition": event["event_transition"],
        "epoch": state.epoch_ns,
        "late": history or is_late(state.planned_ns, event_ns, policy.interval_ns),
        "returned": event["event_returned"],
        "outage_ns": event["event_outage_ns"],
        "published_ns": None,
        "outbox": stream.advisory is not None and not history,
    }
