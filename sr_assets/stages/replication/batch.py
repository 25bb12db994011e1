"""One batch of copies, after its intent: writers make the copies, and one transaction commits their receipt."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.copying.receipt import Parked, Receipt
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.published.history import source_mark
from sr_assets.adapters.state.counters import COPYING, Counter
from sr_assets.adapters.state.gaps import Gap, gap_row
from sr_assets.adapters.state.records import CopyState, Intent, StreamState
from sr_assets.domain.positions import SequenceRange, merge_ranges
from sr_assets.stages.replication.writers import Writers
from sr_assets.stages.source.holes import find_holes, gap_rows
from sr_assets.stages.source.position import advance, note_read
from sr_assets.stages.source.reading import save_gaps

if TYPE_CHECKING:
    from sr_assets.stages.replication.context import CopyContext


class Batch:
    """One batch, from its intent to its commit. After a crash it is repeated with the same intent."""

    def __init__(
        self,
        context: CopyContext,
        source: StreamInfo,
        state: StreamState,
        copying: CopyState,
        intent: Intent,
        target: StreamInfo,
    ) -> None:
        """Store the intent and the state that it was planned for; the `state` of a tracked stream is only read."""
        self._context, self._source, self._target = context, source, target
        self._state, self._copying, self._intent = state, copying, intent
        self._stream, self._store, self._report = context.stream, context.store, context.report
        self._covered = SequenceRange(intent.first, intent.next)
        self._present = SequenceRange(intent.available, intent.next)
        self._mark = source_mark(state.created_ns, state.reset_starts)
        self._began = 0.0
        self._writers = Writers(context, source, state, intent, target, self._mark)

    def run(self) -> None:
        """Make the copies and commit their receipt. Raises RunError if the target refuses; the intent then stays open."""
        self._began = time.monotonic()
        self._writers.take_over()
        if self._intent.resend:
            self._run_resend()
        elif self._intent.folded:
            self._run_queued()
        else:
            self._run_range()

    # ------------------------------------------------------------------------------------------- kinds of batch

    def _run_queued(self) -> None:
        """Make the due copies; messages that the source lost since the decision become a gap."""
        queue, intent = self._store.copy_queue(self._stream.stream), self._intent
        due = queue.in_range(self._covered, intent.starts)
        receipt = self._writers.write(due) if due.num_rows else Receipt()
        lost = [SequenceRange(first, after) for first, after in receipt.missing]
        now_ns = self._context.clock.now_ns()
        gaps = [gap_row(self._stream.stream, hole, len(hole), "lost", now_ns) for hole in lost]
        self._copying.lost_messages += sum(map(len, lost))
        self._note_copies(receipt)
        with self._store.transaction():
            self._save_receipt(receipt, gaps)
            queue.remove(self._covered, intent.starts)
            if self._stream.tracked:
                self._store.snapshot_index(self._stream.stream).stage(intent.first, intent.next, self._mark)
            self._store.clear_intent(self._stream.stream)
            reach(Point.COMMITTING)
        reach(Point.COMMITTED)
        self._count(receipt, gaps)

    def _run_range(self) -> None:
        """Copy the whole range. There is no decision, so only the writers read it."""
        stream, state, intent = self._stream, self._state, self._intent
        receipt = Receipt()
        if len(self._present):
            receipt = self._writers.write(self._present)
        absent = [SequenceRange(first, after) for first, after in receipt.missing]
        seen = len(self._present) - sum(map(len, absent))
        now_ns = self._context.clock.now_ns()
        # The range that the plan skipped is a hole, unless the source starts after it.
        held = min(max(self._covered.first, self._source.first_sequence), self._present.first)
        absent = merge_ranges([SequenceRange(held, self._present.first), *absent])
        holes = find_holes(stream, self._context.clusters.connect(stream.source), self._source, absent)
        gaps = gap_rows(stream, self._covered, held, holes, now_ns)
        state.next_sequence = intent.next
        state.seen_messages += seen
        state.too_old_messages += receipt.too_old
        state.gap_messages += sum(gap["messages"] for gap in gaps)
        if receipt.last_stored_ns is not None:
            note_read(state, receipt.last_sequence, receipt.last_stored_ns)
        caught_up = intent.next > self._source.last_sequence
        advance(state, self._source, warning_ns=None, caught_up=caught_up)
        state.planned_ns, state.as_of_ns = intent.planned_ns, now_ns
        self._note_copies(receipt)
        with self._store.transaction():
            self._store.save_stream(state)
            self._store.counters(stream.stream).add(_amounts(receipt, seen))
            self._save_receipt(receipt, gaps)
            self._store.clear_intent(stream.stream)
            reach(Point.COMMITTING)
        reach(Point.COMMITTED)
        self._report.first = intent.first if self._report.first is None else self._report.first
        self._report.next = intent.next
        self._report.batches += 1
        self._report.reasons.update({"all": seen - receipt.too_old, "too_old": receipt.too_old})
        self._report.lag_messages = state.lag_messages
        self._count(receipt, gaps)

    def _run_resend(self) -> None:
        """Send the copies again that the target lost; copies that the source lost too become a gap.

        No position moves, and no message is counted twice.
        """
        store, name = self._store, self._stream.stream
        log = store.copy_log(name)
        resends = log.resends(until=self._intent.next)
        sequences = [sequence for resend in resends for sequence in range(resend.covered.first, resend.covered.next)]
        receipt = self._writers.write(pa.table({"sequence": sequences}))
        was_stored = {
            sequence
            for resend in resends
            if resend.was_copied
            for sequence in range(resend.covered.first, resend.covered.next)
        }
        lost = [
            sequence for first, after in receipt.missing for sequence in range(first, after) if sequence in was_stored
        ]
        now_ns = self._context.clock.now_ns()
        merged = merge_ranges(SequenceRange(sequence, sequence + 1) for sequence in lost)
        gaps = [gap_row(name, hole, len(hole), "lost", now_ns) for hole in merged]
        parked = [message for message in receipt.parked if message.sequence in was_stored]
        self._note_last_copy(receipt)
        # They were counted as copied the first time.
        recalled = len(lost) + len(parked)
        self._copying.copied_messages -= recalled
        self._copying.lost_messages += len(lost)
        self._copying.parked_messages += len(parked)
        with store.transaction():
            store.save_copying(self._copying)
            store.counters(name).add({Counter.RECALLED_MESSAGES: recalled})
            log.add(receipt.copied_ranges, now_ns)
            log.settle_resends(self._intent.next)
            save_gaps(store, self._stream, gaps, self._report)
            self._add_parked(parked)
            store.clear_intent(name, resend=True)
            waiting = store.open_intent(name)
            if waiting is not None and waiting.waits:
                since = max(waiting.target_sequence, receipt.target_sequence)
                store.save_intent(replace(waiting, target_sequence=since, waits=bool(log.resends(1))))
        self._report.resent += receipt.copied - receipt.found
        self._report.gap_messages += len(lost)

    # ------------------------------------------------------------------------------------------------------- the commit

    def _note_copies(self, receipt: Receipt) -> None:
        copying = self._copying
        copying.copied_messages += receipt.copied
        copying.copied_bytes += receipt.copied_bytes
        copying.parked_messages += len(receipt.parked)
        self._note_last_copy(receipt)

    def _note_last_copy(self, receipt: Receipt) -> None:
        """Record the last copy and its target sequence."""
        if receipt.target_sequence:
            self._copying.target_sequence, self._copying.target_holds = receipt.target_sequence, receipt.target_holds
            self._copying.target_created_ns = self._intent.target_created_ns
            self._copying.target_stream = self._stream.target_stream

    def _save_receipt(self, receipt: Receipt, gaps: list[Gap]) -> None:
        """Write the receipt's rows and counters, inside the caller's transaction."""
        self._store.save_copying(self._copying)
        processing = {
            Counter.PROCESSING_SECONDS: time.monotonic() - self._began,
            Counter.IMPOSSIBLE_HOPS: receipt.impossible_hops,
            Counter.REFUSED_METADATA: receipt.refused_metadata,
        }
        now_ns = self._context.clock.now_ns()
        self._store.counters(self._stream.stream).add(processing, COPYING)
        self._store.copy_log(self._stream.stream).add(receipt.copied_ranges, now_ns)
        self._store.heartbeats(self._stream.stream).add([hop for hop in receipt.hops if hop.subject], now_ns)
        self._store.latencies(self._stream.stream).add(receipt.hops, now_ns)
        save_gaps(self._store, self._stream, gaps, self._report)
        self._add_parked(receipt.parked)

    def _add_parked(self, parked: list[Parked]) -> None:
        if parked:
            self._store.add_rows("parked", pa.Table.from_pylist([self._parked_row(message) for message in parked]))

    def _parked_row(self, parked: Parked) -> dict[str, Any]:
        columns = ("sequence", "stored_ns", "subject", "payload_bytes", "reason")
        row = {column: getattr(parked, column) for column in columns}
        return {"stream": self._stream.stream, **row, "parked_ns": self._context.clock.now_ns()}

    def _count(self, receipt: Receipt, gaps: list[Gap]) -> None:
        report = self._report
        report.copying = self._copying
        report.copied += receipt.copied
        report.copied_bytes += receipt.copied_bytes
        report.found += receipt.found
        report.batched += receipt.batched
        report.parked += len(receipt.parked)
        report.disordered += receipt.disordered
        report.gap_messages += sum(gap["messages"] for gap in gaps if gap["reason"] != "filtered")


def _amounts(receipt: Receipt, seen: int) -> dict[Counter, float]:
    """Return the metric counters of a batch that read `seen` messages."""
    parked_bytes = sum(message.payload_bytes for message in receipt.parked)
    seen_bytes = receipt.copied_bytes + receipt.too_old_bytes + parked_bytes
    return {Counter.SEEN_BYTES: seen_bytes, Counter.PROCESSED_MESSAGES: seen}
