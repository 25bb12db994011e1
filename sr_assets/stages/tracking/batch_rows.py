"""A batch's results as rows: decisions, due copies, reasons, counters, and transitions with their ids."""

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.adapters.state.stream_tables import Counter, Gap
from sr_assets.domain.advisories import EventIds, is_late
from sr_assets.domain.tracking.rules import HEARTBEAT, NO_SENDER, SAMPLED, TOO_OLD, Reason, untracked
from sr_assets.settings import StreamSettings
from sr_assets.stages.report import StreamReport
from sr_assets.stages.tracking.announcing import operator_rules

_NOT_COPIED: Final = pa.array([decision.reason.value for decision in (SAMPLED, TOO_OLD)])
_TRANSITIONS: Final = pa.schema(
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
        ("class", pa.string()),
        ("withheld", pa.bool_()),
        ("due_ns", pa.int64()),
    ]
)


def due_copies(decisions: pa.Table) -> pa.Table:
    """Return the due copies, from rows of `batch_decisions`: sequence, node, payload_bytes."""
    skipped = pc.is_in(decisions["reason"], _NOT_COPIED)
    return decisions.filter(pc.invert(skipped)).select(["sequence", "node", "payload_bytes"])


def batch_decisions(sightings: pa.Table, folded: pa.Table, cutoff_ns: int | None) -> pa.Table:
    """Return one row per message: sequence, node (null without a sender), reason, payload_bytes.

    `folded` has the decisions on messages with a sender; this function decides the others.
    """
    decided = folded.filter(pc.is_valid(folded["reason"]))
    tracked = pa.table({"sequence": decided["decided"], "node": decided["sender"], "reason": decided["reason"]})
    strangers = sightings.filter(pc.is_null(sightings["sender"]))
    # `inspect` marks a heartbeat as forced without a sender.
    reasons = [
        untracked(stored_ns, cutoff_ns, HEARTBEAT if forced else NO_SENDER).reason.value
        for stored_ns, forced in zip(strangers["stored_ns"].to_pylist(), strangers["forced"].to_pylist(), strict=True)
    ]
    others = pa.table({"sequence": strangers["sequence"], "reason": pa.array(reasons, pa.string())})
    both = pa.concat_tables([tracked, others], promote_options="default")
    rows = pc.index_in(both["sequence"], sightings["sequence"].combine_chunks())
    return both.append_column("payload_bytes", sightings["payload_bytes"].take(rows))


def reasons_of(decisions: pa.Table) -> dict[str, int]:
    """Return the number of messages per reason, from rows of `batch_decisions`."""
    return {row["values"]: row["counts"] for row in pc.value_counts(decisions["reason"]).to_pylist()}


def count_decisions(state: StreamState, reasons: dict[str, int], gaps: list[Gap], sightings: pa.Table) -> None:
    """Add a batch to the counters of a stream: its decisions by reason, its gaps, its late sightings."""
    if state.watermark_ns is not None and sightings.num_rows:
        state.late_sightings += pc.sum(pc.less(sightings["stored_ns"], state.watermark_ns)).as_py() or 0
    state.seen_messages += sum(reasons.values())
    state.skipped_messages += reasons.get(Reason.SAMPLED.value, 0)
    state.too_old_messages += reasons.get(Reason.TOO_OLD.value, 0)
    state.no_sender_messages += reasons.get(Reason.NO_SENDER.value, 0)
    state.gap_messages += sum(gap["messages"] for gap in gaps)


def amounts_of(decisions: pa.Table, seconds: float) -> dict[Counter, float]:
    """Return the metric counters of a batch that took `seconds`, from rows of `batch_decisions`."""
    sampled = decisions.filter(pc.equal(decisions["reason"], Reason.SAMPLED.value))
    forced = pc.sum(pc.equal(decisions["reason"], Reason.FORCED.value)).as_py()
    return {
        Counter.SEEN_BYTES: pc.sum(decisions["payload_bytes"]).as_py() or 0,
        Counter.SKIPPED_BYTES: pc.sum(sampled["payload_bytes"]).as_py() or 0,
        Counter.FORCED_MESSAGES: forced or 0,
        Counter.PROCESSED_MESSAGES: decisions.num_rows,
        Counter.PROCESSING_SECONDS: seconds,
    }


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

    If the stream has rules of operators, they decide later on the announcement. `history` transitions are only recorded:
    they are late and never published. Recorded transitions are not repeated: a recovered stream folds some messages a
    second time.
    """
    events = folded.filter(pc.is_valid(folded["event"]))
    if not events.num_rows:
        return
    undecided = not history and operator_rules(store, stream).active
    rows = _transition_rows(stream, state, events, history=history, undecided=undecided)
    recorded = store.outbox(stream.stream).recorded(rows)
    if recorded.num_rows:
        rows = rows.filter(pc.invert(pc.is_in(rows["event_id"], recorded["event_id"].combine_chunks())))
    report.events.update({row["values"]: row["counts"] for row in pc.value_counts(rows["event"]).to_pylist()})
    if rows.num_rows:
        store.add_rows("transitions", rows)


def _transition_rows(
    stream: StreamSettings, state: StreamState, events: pa.Table, *, history: bool, undecided: bool
) -> pa.Table:
    count = events.num_rows
    nodes, names, times, kinds = (events[column].to_pylist() for column in ("sender", "event", "event_ns", "class"))
    intervals_ns = {kind: stream.policy_of(kind).interval_ns for kind in set(kinds)}
    announced = {kind: stream.announces(kind) for kind in intervals_ns}
    published = stream.advisory is not None and not history and not undecided
    columns = {
        "event_id": list(map(EventIds(stream.replicator, stream.name, stream.stream), nodes, names, times)),
        "node": events["sender"],
        "late": [
            history or is_late(state.planned_ns, event_ns, intervals_ns[kind])
            for event_ns, kind in zip(times, kinds, strict=True)
        ],
        "outbox": [published and announced[kind] for kind in kinds],
        "withheld": [undecided or not announced[kind] for kind in kinds],
        "due_ns": times if undecided else [None] * count,
        "class": events["class"],
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
    }
    constant = {
        name: pa.repeat(pa.scalar(value, _TRANSITIONS.field(name).type), count) for name, value in common.items()
    }
    return pa.table({**columns, **constant}, schema=_TRANSITIONS)
