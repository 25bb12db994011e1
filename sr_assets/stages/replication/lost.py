"""Copies of a source that no longer exists: those in the target count as copied, the others in the queue are lost.

Queue and intent outlive their source only where `on_source_reset` lets the stream continue. Not here: single messages that the
source lost before they were copied (`batch`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pyarrow as pa

from sr_assets.adapters.state.store import gap_row
from sr_assets.domain.positions import SequenceRange
from sr_assets.stages.replication.target_history import TargetReview

if TYPE_CHECKING:
    from sr_assets.adapters.nats.stream_info import StreamInfo
    from sr_assets.adapters.state.records import CopyState, Intent, StreamState
    from sr_assets.stages.replication.context import CopyContext

logger = logging.getLogger(__name__)
_ALL = 1 << 62


def settle_lost(context: CopyContext, source: StreamInfo, copying: CopyState) -> bool:
    """Remove the queued copies of an earlier source; returns whether there were any.

    Those that an open batch has made are counted as copied, the others are a gap with reason `lost`.
    """
    stream, store = context.stream, context.store
    queue = store.copy_queue(stream.stream)
    front = queue.front(1, 1)
    state = store.load_stream(stream.stream)
    if front is None or state is None or front.starts >= state.reset_starts:
        return False
    whole = SequenceRange(0, _ALL)
    due = set(queue.inside(whole, front.starts)["sequence"].to_pylist())
    made = _made(context, source, copying, store.open_intent(stream.stream)) & due
    lost = due - made
    copying.copied_messages += len(made)
    copying.lost_messages += len(lost)
    logger.warning("%s: %d queued copies are lost with their source", stream.label, len(lost))
    with store.transaction():
        if lost:
            hole = SequenceRange(min(lost), max(lost) + 1)
            gap = gap_row(stream.stream, hole, len(lost), "lost", context.clock.now_ns())
            store.add_rows("gaps", pa.Table.from_pylist([gap]))
        queue.strike(whole, front.starts)
        store.clear_intent(stream.stream)
        store.save_copying(copying)
    context.report.gap_messages += len(lost)
    return True


def settle_abandoned(context: CopyContext, source: StreamInfo, state: StreamState, copying: CopyState) -> None:
    """Count the copies that an open batch, which read its range itself, has made of an earlier source.

    What it has not made was never read. The caller commits `state` and `copying`, and clears the intent.
    """
    intent = context.store.open_intent(context.stream.stream)
    if intent is not None and not intent.folded:
        made = len(_made(context, source, copying, intent))
        state.seen_messages += made
        copying.copied_messages += made


def _made(context: CopyContext, source: StreamInfo, copying: CopyState, intent: Intent | None) -> set[int]:
    """Return the source sequences that an open batch has left in the target."""
    if intent is None:
        return set()
    target = context.clusters.connect(context.stream.target).find_stream(context.stream.target_stream)
    if target is None or target.created_ns != intent.target_created_ns:
        return set()
    behind = SequenceRange(intent.target_sequence + 1, max(intent.target_sequence, target.last_sequence) + 1)
    if not len(behind):
        return set()
    state = context.store.load_stream(context.stream.stream)
    assert state is not None
    review = TargetReview(context, source, state, copying, target)
    return set(review.read_copies(behind).values())
