"""A batch's decisions as rows: due copies, reasons and counters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from sr_assets.adapters.state.counters import Counter
from sr_assets.domain.tracking.rules import HEARTBEAT, NO_SENDER, SAMPLED, TOO_OLD, Reason, untracked

if TYPE_CHECKING:
    from sr_assets.adapters.state.gaps import Gap
    from sr_assets.adapters.state.records import StreamState

_NOT_COPIED: Final = pa.array([decision.reason.value for decision in (SAMPLED, TOO_OLD)])


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
    nodes = pa.nulls(strangers.num_rows, pa.string())
    others = pa.table({"sequence": strangers["sequence"], "node": nodes, "reason": pa.array(reasons, pa.string())})
    both = pa.concat_tables([tracked, others.cast(tracked.schema)])
    return both.join(sightings.select(["sequence", "payload_bytes"]), "sequence")


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
