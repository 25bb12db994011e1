"""One batch of copies, after its intent: writers make the copies, and one transaction commits their receipt."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from sr_assets.adapters import times, wire
from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.copying.receipt import Parked, Receipt
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.published.history import source_mark
from sr_assets.adapters.state.counters import COPYING, Counter
from sr_assets.adapters.state.gaps import Gap, gap_row
from sr_assets.adapters.state.records import CopyState, Intent, StreamState
from sr_assets.domain.errors import RunError
from sr_assets.domain.positions import SequenceRange, merge_ranges
from sr_assets.domain.subjects import matcher, printable
from sr_assets.stages.replication.writers import Writers
from sr_assets.stages.source.holes import find_holes, gap_rows
from sr_assets.stages.source.position import advance, note_read
from sr_assets.stages.source.reading import save_gaps

if TYPE_CHECKING:
    from sr_assets.adapters.state.store import SiteState
    from sr_assets.stages.replication.context import CopyContext


logger = logging.getLogger(__name__)

#: A batch that ended this often with its process is made in parts, each an eighth of the one that ended so.
_WHOLE_ATTEMPTS: Final = 2
_PARTS: Final = 8
#: A single message with which the process ended this often is set aside.
_ALONE_ATTEMPTS: Final = 5
#: More parked messages of one batch are worth a line of the log: the target may be configured wrongly.
_MANY_PARKED: Final = 1000


def is_suspect(intent: Intent) -> bool:
    """Return whether an open intent may have ended its process."""
    return bool(intent.part) or intent.begun >= _WHOLE_ATTEMPTS


def begin_again(store: SiteState, intent: Intent) -> Intent:
    """Commit another attempt at an open intent and return it: smaller, if the last one ended with its process.

    A resend is not divided: its messages have been copied before.
    """
    with store.transaction():
        begun, part = intent.begun, intent.part
        if store.take_attempt_ended(intent.stream):
            begun = 0
        if part != 1 and begun >= (1 if part else _WHOLE_ATTEMPTS) and not intent.resend:
            begun, part = 0, max(1, _count(store, intent) // _PARTS)
            logger.warning(
                "%s: the process ended while it copied %d to %d; copying %d messages at a time",
                intent.stream,
                intent.first,
                _end_of_part(store, intent) - 1,
                part,
            )
        again = replace(intent, begun=begun + 1, part=part, whole_first=intent.whole[0] if part else 0)
        store.save_intent(again)
    return again


def _count(store: SiteState, intent: Intent) -> int:
    """Return the number of messages of the intent's next part."""
    if intent.part:
        return intent.part
    if intent.folded:
        return len(store.copy_queue(intent.stream).in_range(SequenceRange(intent.first, intent.next), intent.starts))
    return intent.next - max(intent.first, intent.available)


def _end_of_part(store: SiteState, intent: Intent) -> int:
    """Return the source sequence after the next part of an intent."""
    if not intent.part:
        return intent.next
    if not intent.folded:
        return min(intent.next, max(intent.first, intent.available) + intent.part)
    whole = SequenceRange(intent.first, intent.next)
    due = store.copy_queue(intent.stream).in_range(whole, intent.starts)["sequence"]
    return int(due[intent.part - 1].as_py()) + 1 if intent.part < len(due) else intent.next


class Batch:
    """One batch, or a part of it, from its intent to its commit. After a crash it is repeated with the same intent."""

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
        end = _end_of_part(self._store, intent)
        #: The source sequences of the batch, or of its part.
        self.covered = SequenceRange(intent.first, end)
        self._present = SequenceRange(min(max(intent.first, intent.available), end), end)
        self._mark = source_mark(state.created_ns, state.reset_starts)
        self._began = 0.0
        self._writers = Writers(context, source, state, intent, target, self._mark, self.covered)

    def run(self) -> None:
        """Make the copies and commit their receipt. Raises RunError if the target refuses; the intent then stays open."""
        self._began = times.monotonic()
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
        due = queue.in_range(self.covered, intent.starts)
        receipt = self._copy(due) if due.num_rows else Receipt()
        lost = [SequenceRange(first, after) for first, after in receipt.missing]
        now_ns = self._context.clock.now_ns()
        gaps = [gap_row(self._stream.stream, hole, len(hole), "lost", now_ns) for hole in lost]
        self._copying.lost_messages += sum(map(len, lost))
        self._note_copies(receipt)
        with self._store.transaction():
            self._save_receipt(receipt, gaps)
            queue.remove(self.covered, intent.starts)
            if self._stream.tracked:
                self._store.snapshot_index(self._stream.stream).stage(intent.first, self.covered.next, self._mark)
            self._end_intent()
            reach(Point.COMMITTING)
        reach(Point.COMMITTED)
        self._count(receipt, gaps)

    def _run_range(self) -> None:
        """Copy the whole range. There is no decision, so only the writers read it."""
        stream, state, intent = self._stream, self._state, self._intent
        receipt = Receipt()
        if len(self._present):
            receipt = self._copy(self._present)
        absent = [SequenceRange(first, after) for first, after in receipt.missing]
        seen = len(self._present) - sum(map(len, absent))
        now_ns = self._context.clock.now_ns()
        # The range that the plan skipped is a hole, unless the source starts after it.
        held = min(max(self.covered.first, self._source.first_sequence), self._present.first)
        absent = merge_ranges([SequenceRange(held, self._present.first), *absent])
        holes = find_holes(stream, self._context.clusters.connect(stream.source), self._source, absent)
        gaps = gap_rows(stream, self.covered, held, holes, now_ns)
        state.next_sequence = self.covered.next
        state.seen_messages += seen
        state.too_old_messages += receipt.too_old
        state.gap_messages += sum(gap["messages"] for gap in gaps)
        if receipt.last_stored_ns is not None:
            note_read(state, receipt.last_sequence, receipt.last_stored_ns)
        caught_up = self.covered.next > self._source.last_sequence
        advance(state, self._source, warning_ns=None, caught_up=caught_up)
        state.planned_ns, state.as_of_ns = intent.planned_ns, now_ns
        self._note_copies(receipt)
        with self._store.transaction():
            self._store.save_stream(state)
            self._store.counters(stream.stream).add(_amounts(receipt, seen))
            self._save_receipt(receipt, gaps)
            self._end_intent()
            reach(Point.COMMITTING)
        reach(Point.COMMITTED)
        self._report.first = intent.first if self._report.first is None else self._report.first
        self._report.next = self.covered.next
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

    # ------------------------------------------------------------------------------- messages that end their process

    def _copy(self, rows: pa.Table | SequenceRange) -> Receipt:
        alone = self._intent.part == 1 and self._intent.begun > _ALONE_ATTEMPTS
        return self._set_aside(rows) if alone else self._writers.write(rows)

    def _set_aside(self, rows: pa.Table | SequenceRange) -> Receipt:
        """Park a message with which the process has ended again and again; if its copy exists, only its row is left out."""
        stream = self._stream
        first = rows.first if isinstance(rows, SequenceRange) else rows["sequence"][0].as_py()
        reason = f"the process ended {_ALONE_ATTEMPTS} times while it copied this message alone"
        receipt = self._writers.settle(rows, staged=False)
        if receipt.copied:
            logger.error("%s: message %d: %s; its copy has no row in the history", stream.label, first, reason)
            return receipt
        with wire.Connection(stream.source, "sr-assets batch") as source:
            message = wire.stored_headers(source, stream.stream, first)
        takes = matcher((stream.filter_subject,)) if stream.filter_subject and not self._intent.folded else None
        if message is None or (takes and not takes(message.subject)):
            return receipt
        if stream.on_poison == "stop":
            raise RunError(f"message {first} cannot be copied: {reason}; set on_poison: park to continue without it")
        logger.error("%s: message %d is parked: %s", stream.label, first, reason)
        receipt.missing = []
        receipt.last_sequence, receipt.last_stored_ns = first, message.stored_ns
        receipt.parked.append(
            Parked(first, message.stored_ns, printable(message.subject), message.payload_bytes, reason)
        )
        return receipt

    # ------------------------------------------------------------------------------------------------------- the commit

    def _end_intent(self) -> None:
        """Clear the intent, or let the rest of it be the next, larger part, inside the caller's transaction."""
        store, intent, after = self._store, self._intent, self.covered.next
        if after == intent.next:
            store.clear_intent(intent.stream)
            store.take_attempt_ended(intent.stream)
            return
        available = max(after, intent.available)
        store.save_intent(replace(intent, first=after, available=available, part=2 * intent.part, begun=0))

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
            # An earlier attempt may have made the copies of a later part before this one's.
            checked = receipt.target_sequence if self._intent.part else 0
            self._copying.target_checked = max(self._copying.target_checked, checked)

    def _save_receipt(self, receipt: Receipt, gaps: list[Gap]) -> None:
        """Write the receipt's rows and counters, inside the caller's transaction."""
        self._store.save_copying(self._copying)
        name, now_ns = self._stream.name, self._context.clock.now_ns()
        beats = self._store.heartbeats(self._stream.stream)
        ignored = beats.add([hop for hop in receipt.hops if hop.subject], now_ns, name)
        ignored += self._store.latencies(self._stream.stream).add(receipt.hops, now_ns, name)
        processing = {
            Counter.PROCESSING_SECONDS: times.monotonic() - self._began,
            Counter.IMPOSSIBLE_HOPS: receipt.impossible_hops + ignored,
            Counter.FORGED_COPIES: receipt.forged,
            Counter.REFUSED_METADATA: receipt.refused_metadata,
        }
        self._store.counters(self._stream.stream).add(processing, COPYING)
        self._store.copy_log(self._stream.stream).add(receipt.copied_ranges, now_ns)
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
        if receipt.forged:
            text = (
                "%s: target stream %s holds %d messages that claim to be copies and differ from their originals, or have none;"
                " they are ignored; let only the replicator publish on its subjects"
            )
            logger.error(text, self._stream.label, self._stream.target_stream, receipt.forged)
        if len(receipt.parked) > _MANY_PARKED:
            text = (
                "%s: the target cannot store %d of %d messages of one batch; check it, then run retry-parked (last: %s)"
            )
            last, count = receipt.parked[-1].reason, receipt.outcomes
            logger.error(text, self._stream.label, len(receipt.parked), count, last)
        report.disordered += receipt.disordered
        report.gap_messages += sum(gap["messages"] for gap in gaps if gap["reason"] != "filtered")


def _amounts(receipt: Receipt, seen: int) -> dict[Counter, float]:
    """Return the metric counters of a batch that read `seen` messages."""
    parked_bytes = sum(message.payload_bytes for message in receipt.parked)
    seen_bytes = receipt.copied_bytes + receipt.too_old_bytes + parked_bytes
    return {Counter.SEEN_BYTES: seen_bytes, Counter.PROCESSED_MESSAGES: seen}
