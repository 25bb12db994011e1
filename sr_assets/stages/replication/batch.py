"""One batch of copies, after its intent: writers make the copies, and one transaction commits their receipt.

A file next to the writers' locks names the fence of a batch on other machines for the next run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from sr_assets.adapters import times, wire
from sr_assets.adapters.copying.copier import Rows, await_writers, write_copies, writers_at_work
from sr_assets.adapters.copying.copy_plan import CopyPlan
from sr_assets.adapters.copying.fence import LAST_WRITE_SECONDS, forget_claims, make_fence, take_away
from sr_assets.adapters.copying.receipt import Parked, Receipt
from sr_assets.adapters.crash_points import Point, reach
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.private import write_private
from sr_assets.adapters.published.history import held_sequences, source_mark, stream_folder
from sr_assets.adapters.state.orders import request_another_refill
from sr_assets.adapters.state.records import CopyState, Intent, StreamState
from sr_assets.adapters.state.stream_tables import COPYING, Counter, Gap, engine_counter, gap_row
from sr_assets.domain.errors import RunError, TransientError
from sr_assets.domain.positions import SequenceRange, merge_ranges, missing
from sr_assets.domain.subjects import matcher, omitted_error, printable
from sr_assets.settings import StreamSettings
from sr_assets.stages.source.holes import find_holes, gap_rows
from sr_assets.stages.source.position import advance, note_read
from sr_assets.stages.source.source_reading import average_bytes, save_gaps
from sr_assets.stages.tracking.node_snapshots import staging_folder

if TYPE_CHECKING:
    from sr_assets.adapters.state.store import SiteState
    from sr_assets.stages.replication.context import CopyContext

logger = logging.getLogger(__name__)
_FENCE_FILE: Final = "fence.json"
#: A batch that ended this often with its process is made in parts, each an eighth of the one that ended so.
_WHOLE_ATTEMPTS: Final = 2
_PARTS: Final = 8
#: A single message with which the process ended this often is set aside.
_ALONE_ATTEMPTS: Final = 5
#: More parked messages of one batch are worth a line of the log: the target may be configured wrongly.
_MANY_PARKED: Final = 1000


def refuse_omitted(
    stream: StreamSettings, source: Cluster, covered: SequenceRange, absent: Sequence[SequenceRange]
) -> None:
    """Raise RunError if the source holds a message of a range that no lane takes.

    `absent` are the range's sequences that no lane has read. Raises TransientError if a lane has missed its own message.
    """
    after = source.count_from(stream.stream, covered.next)
    if source.count_from(stream.stream, covered.first) - after <= len(covered) - sum(map(len, absent)):
        return
    accepts = matcher(stream.lanes)
    for hole in absent:
        message = source.next_message(stream.stream, hole.first)
        if message is None or message.sequence >= hole.next:
            continue
        if accepts(message.subject):
            raise TransientError(
                f"{stream.label}: a lane did not read message {message.sequence}; the batch is repeated"
            )
        raise omitted_error(stream.stream, message)


@contextlib.contextmanager
def fenced(plan: CopyPlan, folder: Path, target: Cluster, writers: int) -> Iterator[CopyPlan]:
    """Yield the plan with a fence for this many writers, and delete the fence after all of them succeeded.

    After a failure it stays, because some writers may be active; the next run settles it.
    """
    fence = {"stream": plan.stream, "fence": f"sr_assets_{plan.batch}", "writers": writers}
    # Write the name to disk before creating the fence: the next run must know the fence of a run that is killed in
    # between.
    write_private(folder / _FENCE_FILE, json.dumps(fence))
    make_fence(target, plan.stream, str(fence["fence"]), plan.subjects)
    yield replace(plan, fence=str(fence["fence"]))
    settle_fence(folder, target)


def settle_fence(folder: Path, target: Cluster) -> None:
    """Delete the last batch's fence, if any, and wait until none of its writers can write.

    Raises TransientError if the target does not respond: then its content proves nothing.
    """
    file = folder / _FENCE_FILE
    if not file.exists():
        return
    fence: dict[str, Any] = json.loads(file.read_text())
    if take_away(target, **fence):
        logger.warning(
            "%s: cluster writers were lost; waiting %g s until none of them can write",
            fence["stream"],
            LAST_WRITE_SECONDS,
        )
        times.sleep(LAST_WRITE_SECONDS)
        forget_claims(target, **fence)
    # Last: a run that is killed during the wait leaves the claims, so that the next run waits too.
    file.unlink()


class Writers:
    """The writers of one attempt at a batch, or at the part of it that `covered` names.

    `mark` is the `source_mark` of their staged files.
    """

    def __init__(
        self,
        context: CopyContext,
        source: StreamInfo,
        state: StreamState,
        intent: Intent,
        target: StreamInfo,
        mark: str,
        covered: SequenceRange | None = None,
    ) -> None:
        self._covered = covered or SequenceRange(intent.first, intent.next)
        self._context, self._source, self._state = context, source, state
        self._stream, self._intent, self._target, self._mark = context.stream, intent, target, mark
        decided = intent.folded or intent.resend
        self._lanes = () if decided else context.store.partitions(context.stream.stream).at(intent.first)
        # Without lanes, a plain range has one writer.
        alone = (context.stream.writers if decided else context.stream.workers) == 1
        self._batches = context.stream.allow_batched == "auto" and alone and not context.clusters.leadership.is_new
        # Not the intent's id: a writer that outlived the run of this batch must not continue next to ours.
        self._attempt = uuid.uuid4().hex

    def take_over(self) -> None:
        """End the writers of an earlier attempt: tasks of an earlier run may no longer write."""
        writers = self._context.writers
        writers.mkdir(parents=True, exist_ok=True)
        batch_file = writers / "batch"
        draft = batch_file.with_name(".batch")
        draft.write_text(self._attempt)
        draft.replace(batch_file)
        if writers_at_work(writers):
            # Joining the session interrupts them; an uninterruptible task notices that another batch has started.
            self._context.spark.session()
            await_writers(writers)
        settle_fence(writers, self._context.clusters.connect(self._stream.target))

    def write(self, rows: pa.Table | SequenceRange) -> Receipt:
        """Copy the messages in `rows` (sequence, for a tracked stream also node): many in Spark, a few in this process.

        Raises RunError if the target refuses, or a message belongs to no partition.
        """
        context, stream, target = self._context, self._stream, self._target
        if target.created_ns != self._intent.target_created_ns:
            raise TransientError(f"target stream {stream.target_stream} was recreated during a batch")
        # A message that ends its process must not end Spark's, which tells nothing about it.
        alone = self._intent.part == 1 and not context.spark.remote
        size = len(rows), len(rows) * average_bytes(self._source)
        in_spark = not alone and context.spark.takes(*size, f"{stream.label}: copying")
        by_lane = in_spark and len(self._lanes) > 1 and isinstance(rows, SequenceRange)
        plan = self._plan(by_lane=by_lane)
        if not in_spark:
            receipt = write_copies(plan, _rows_of_writer(rows))
        elif context.spark.remote:
            with fenced(plan, context.writers, context.clusters.connect(stream.target), stream.writers) as behind:
                receipt = self._write_in_tasks(behind, rows)
        else:
            receipt = self._write_in_tasks(plan, rows)
        reach(Point.PUBLISHED)
        if receipt.failure:
            raise RunError(receipt.failure)
        if plan.by_lane and isinstance(rows, SequenceRange):
            self._complete(receipt, rows)
        return receipt

    def _complete(self, receipt: Receipt, present: SequenceRange) -> None:
        """Fill in the range's messages that no lane has read: the source has lost them, or they belong to no lane.

        An earlier attempt may have copied some before they were lost.
        """
        held = sorted(sequence for first, after in receipt.held for sequence in range(first, after))
        absent = missing(present, held)
        receipt.held = []
        if not absent:
            return
        refuse_omitted(self._stream, self._context.clusters.connect(self._stream.source), present, absent)
        if self._target.last_sequence > self._intent.target_sequence or self._intent.adopted_next:
            sequences = [sequence for hole in absent for sequence in range(hole.first, hole.next)]
            made = self.settle(pa.table({"sequence": sequences}))
            receipt.copied, receipt.copied_bytes = (
                receipt.copied + made.copied,
                receipt.copied_bytes + made.copied_bytes,
            )
            receipt.found += made.found
            receipt.missing = made.missing
        else:
            receipt.missing = [(hole.first, hole.next) for hole in absent]

    def settle(self, rows: pa.Table | SequenceRange, *, staged: bool = True) -> Receipt:
        """Account for the copies of `rows` that an earlier attempt has made; make no others."""
        return write_copies(self._plan(staged=staged), _rows_of_writer(rows), made=True)

    def _write_in_tasks(self, plan: CopyPlan, rows: pa.Table | SequenceRange) -> Receipt:
        """Copy the messages by Spark's writers, which keep the configured `order`."""
        # With an engine, because it imports Spark.
        from sr_assets.adapters.spark.jobs import copy_in_tasks

        stream, spark, by = self._stream, self._context.spark, None
        if plan.by_lane:
            spread, writers = range(len(self._lanes)), min(len(self._lanes), spark.cores())
        elif isinstance(rows, SequenceRange):
            spread, writers = range(rows.first, rows.next), stream.workers
        else:
            spread, writers = rows, 1 if self._intent.resend else stream.writers
            by = "node" if stream.order == "sender" else None
        with spark.use() as session:
            receipt = copy_in_tasks(session, spread, plan, writers, by=by, remote=spark.remote)
        receipt.in_spark = True
        return receipt

    def _plan(self, *, by_lane: bool = False, staged: bool = True) -> CopyPlan:
        """Return the plan of the writers, and delete the staged files of an earlier attempt."""
        context, stream, intent, state = self._context, self._stream, self._intent, self._state
        # The message that proves the source unchanged: the last one read for decided messages, else the source's last
        # one when the batch was planned.
        decided = (intent.folded or intent.resend) and state.mark_sequence is not None
        covered = self._covered
        staging = staging_folder(context.folder, stream, covered, self._mark)
        if stream.tracked and not intent.resend:
            # It may have had more writers, each with its own file.
            shutil.rmtree(staging, ignore_errors=True)
        return CopyPlan(
            connection=context.files.path(stream.target),
            stream=self._target.stream,
            subjects=self._target.subjects,
            source_connection=context.files.path(stream.source),
            source_stream=stream.stream,
            direct=self._source.supports_batched_direct_get,
            filter=None if intent.folded else stream.filter_subject,
            replicator=stream.replicator,
            name=stream.name,
            created_ns=intent.created_ns,
            resend=intent.starts,
            source_sequence=state.mark_sequence if decided else intent.source_sequence,
            source_ns=state.mark_ns if decided else intent.source_ns,
            prefix=stream.prefix,
            remove=stream.remove,
            first=covered.first,
            next=covered.next,
            whole=intent.whole,
            since=intent.target_sequence,
            adopted=(intent.adopted_first, intent.adopted_next),
            # The fold has decided on a tracked stream's messages, so none of the rows is too old.
            cutoff_ns=None if intent.folded or intent.resend else intent.cutoff_ns,
            on_poison=stream.on_poison,
            # Several writers would find each other's messages between theirs.
            batched=self._batches and not by_lane,
            lanes=self._lanes,
            by_lane=by_lane,
            folder=str(context.writers),
            batch=self._attempt,
            staging=str(staging) if staged and stream.tracked and not intent.resend else None,
            metadata_bytes=stream.max_metadata,
            leases=tuple(map(str, context.clusters.leadership.lease_folders)),
            vanished_ms=context.clusters.leadership.vanished_ms,
        )


def _rows_of_writer(rows: pa.Table | SequenceRange) -> Rows:
    if isinstance(rows, SequenceRange):
        return range(rows.first, rows.next)
    nodes = rows["node"].to_pylist() if "node" in rows.column_names else [None] * len(rows)
    return dict(zip(rows["sequence"].to_pylist(), nodes, strict=True))


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


class CopyBatch:
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
        self._report.state = state
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
        self._request_missing_rows(receipt)
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

    def _request_missing_rows(self, receipt: Receipt) -> None:
        """Request the rows that the history lacks of copies of messages that had been parked: a resend knows no nodes."""
        stream, mark = self._stream, self._mark
        copied = {sequence for _, first, length in receipt.copied_ranges for sequence in range(first, first + length)}
        for first, after, staged_mark in self._store.snapshot_index(stream.stream).staged():
            if staged_mark == mark:
                copied.difference_update(range(first, after))
        if not (stream.tracked and copied):
            return
        folder = stream_folder(self._context.home.resolve(), stream.name, stream.stream)
        if not copied <= held_sequences(folder, mark, SequenceRange(min(copied), max(copied) + 1)):
            request_another_refill(self._context.folder, stream)

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
            engine_counter(in_spark=receipt.in_spark): receipt.copied,
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
        report.copied_by[engine_counter(in_spark=receipt.in_spark)] += receipt.copied
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
