"""Copies of a source that no longer exists: existing ones count as copied, the remaining queue is lost.

Queue and intent outlive their source only if `on_source_reset` lets the stream continue.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pyarrow as pa

from sr_assets.adapters.copying.receipt import Receipt
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.published.history import source_mark
from sr_assets.adapters.state.gaps import gap_row
from sr_assets.adapters.state.records import CopyState, Intent, StreamState
from sr_assets.domain.positions import SequenceRange
from sr_assets.stages.replication.writers import Writers
from sr_assets.stages.source.reading import save_gaps

if TYPE_CHECKING:
    from sr_assets.stages.replication.context import CopyContext

logger = logging.getLogger(__name__)
_ALL = 1 << 62


def settle_lost_source(context: CopyContext, source: StreamInfo, copying: CopyState) -> bool:
    """Remove the queued copies of an earlier source, and return whether there were any.

    Copies that an open batch has made count as copied and join the history; the others are a gap with reason `lost`.
    """
    stream, store = context.stream, context.store
    queue = store.copy_queue(stream.stream)
    front = queue.front(1, 1)
    state = store.load_stream(stream.stream)
    if front is None or state is None or front.starts >= state.reset_starts:
        return False
    intent, batch_end, receipt = store.open_intent(stream.stream), 0, Receipt()
    if intent is not None:
        # The batch covers the front of the queue.
        batch_end = intent.next
        receipt = _settle(context, source, state, intent, queue.in_range(_covered(intent), front.starts))
    never_started = queue.in_range(SequenceRange(batch_end, _ALL), front.starts)["sequence"]
    holes = [SequenceRange(first, after) for first, after in receipt.missing]
    lost = sum(map(len, holes)) + len(never_started)
    if len(never_started):
        holes.append(SequenceRange(never_started[0].as_py(), never_started[-1].as_py() + 1))
    copying.copied_messages += receipt.copied
    copying.copied_bytes += receipt.copied_bytes
    copying.lost_messages += lost
    logger.warning("%s: lost %d queued copies with their source", stream.label, lost)
    with store.transaction():
        if holes:
            hole = SequenceRange(min(part.first for part in holes), max(part.next for part in holes))
            gap = gap_row(stream.stream, hole, lost, "lost", context.clock.now_ns())
            save_gaps(store, stream, [gap], context.report)
        queue.remove(SequenceRange(0, _ALL), front.starts)
        if intent is not None and stream.tracked:
            store.snapshot_index(stream.stream).stage(intent.first, intent.next, _mark(intent))
        store.clear_intent(stream.stream)
        store.save_copying(copying)
    context.report.gap_messages += lost
    return True


def settle_abandoned_batch(context: CopyContext, source: StreamInfo, state: StreamState, copying: CopyState) -> None:
    """Count the copies that an open batch of a plain range has made of an earlier source.

    The remaining messages were never read. The caller commits `state` and `copying`, and clears the intent.
    """
    intent = context.store.open_intent(context.stream.stream)
    if intent is not None and not intent.folded:
        receipt = _settle(context, source, state, intent, _covered(intent))
        state.seen_messages += receipt.copied
        copying.copied_messages += receipt.copied
        copying.copied_bytes += receipt.copied_bytes


def stage_open_batch(context: CopyContext, source: StreamInfo) -> None:
    """Add the copies of an open batch to the history, because no run repeats that batch after a recovery."""
    stream, store = context.stream, context.store
    state, intent = store.load_stream(stream.stream), store.open_intent(stream.stream)
    if state is None or intent is None or not intent.folded or not stream.tracked:
        return
    _settle(context, source, state, intent, store.copy_queue(stream.stream).in_range(_covered(intent), intent.starts))
    with store.transaction():
        store.snapshot_index(stream.stream).stage(intent.first, intent.next, _mark(intent))


def _settle(
    context: CopyContext, source: StreamInfo, state: StreamState, intent: Intent, rows: pa.Table | SequenceRange
) -> Receipt:
    """Return the copies that an open batch has made of `rows`; the others are missing."""
    target_stream = intent.target_stream or context.stream.target_stream
    target = context.clusters.connect(context.stream.target).find_stream(target_stream)
    if target is None or target.created_ns != intent.target_created_ns:
        sequences = range(rows.first, rows.next) if isinstance(rows, SequenceRange) else rows["sequence"].to_pylist()
        return Receipt(missing=[(sequence, sequence + 1) for sequence in sequences])
    writers = Writers(context, source, state, intent, target, _mark(intent))
    writers.take_over()
    return writers.settle(rows)


def _mark(intent: Intent) -> str:
    """Return the `source_mark` of the intent's source."""
    return source_mark(intent.created_ns, intent.starts)


def _covered(intent: Intent) -> SequenceRange:
    return SequenceRange(intent.first, intent.next)
