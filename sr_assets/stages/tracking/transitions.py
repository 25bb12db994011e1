"""Transitions as rows of the state, with their ids; `late` and `detected_ns` are set here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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
    """Write the transitions among folded rows, inside the caller's transaction.

    `history` transitions are only recorded: they are late and never published. Recorded transitions are not repeated: a
    recovered stream folds some messages a second time.
    """
    events = folded.filter(pc.is_valid(folded["event"]))
    if not events.num_rows:
        return
    rows = _rows(stream, state, events, history=history)
    recorded = store.outbox(stream.stream).recorded(rows)
    if recorded.num_rows:
        rows = rows.filter(pc.invert(pc.is_in(rows["event_id"], recorded["event_id"].combine_chunks())))
    report.events.update({row["values"]: row["counts"] for row in pc.value_counts(rows["event"]).to_pylist()})
    if rows.num_rows:
        store.add_rows("transitions", rows)


def _rows(stream: StreamSettings, state: StreamState, events: pa.Table, *, history: bool) -> pa.Table:
    policy, count = stream.policy, events.num_rows
    assert policy is not None  # settings require one of a tracked stream
    nodes, names, times = (events[column].to_pylist() for column in ("sender", "event", "event_ns"))
    identity = (stream.replicator, stream.name, stream.stream)
    columns = {
        "event_id": [event_id(*identity, *event) for event in zip(nodes, names, times, strict=True)],
        "node": events["sender"],
        "late": [history or is_late(state.planned_ns, event_ns, policy.interval_ns) for event_ns in times],
        **{name: events[name] for name in ("event", "event_ns")},
        **{
            name: events[f"event_{name}"]
            for name in ("seen_ns", "age_ns", "sequence", "previous", "transition", "returned", "outage_ns")
        },
    }
    common = {
        "stream": stream.stream,
        "detected_ns": state.watermark_ns,
        "epoch": state.epoch_ns,
        "published_ns": None,
        "outbox": stream.advisory is not None and not history,
    }
    constant = {name: pa.repeat(pa.scalar(value, _SCHEMA.field(name).type), count) for name, value in common.items()}
    return pa.table({**columns, **constant}, schema=_SCHEMA)
