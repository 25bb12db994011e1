"""Stage `replica`: copying to the target in batches, each exactly once.

A tracked stream copies the due messages of its copy queue. A plain stream copies range by range, after the queue of an
earlier tracked period is empty.

An intent is committed before each batch. After a crash the same batch is repeated: the writers find the existing copies
in the target and send only the missing ones.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Final, NamedTuple

from sr_assets.adapters import times
from sr_assets.adapters.crash_points import Point, reach
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.progress_lines import Progress
from sr_assets.adapters.state.records import CopyState, Intent, StreamState
from sr_assets.domain.errors import EngineLostError, ExecutorLostError, SrAssetsError, TransientError
from sr_assets.domain.positions import SequenceRange
from sr_assets.stages.replication.batch import CopyBatch, begin_again, is_suspect
from sr_assets.stages.replication.context import CopyContext
from sr_assets.stages.replication.found_copies import FoundCopies
from sr_assets.stages.replication.lost import (
    refuse_lost_copies,
    refuse_lost_state,
    settle_abandoned_batch,
    settle_lost_source,
)
from sr_assets.stages.replication.target_review import TargetReview, adopt_copies
from sr_assets.stages.replication.target_setup import prepare_target, target_drift
from sr_assets.stages.source.holes import without_hole
from sr_assets.stages.source.position import (
    advance,
    another_source,
    changed_since,
    load_position,
    note_source,
    source_reset_error,
)
from sr_assets.stages.source.source_reading import Ends, first_available, next_range, reading_end, too_old_before
from sr_assets.stages.source.suitability import check_source

#: The window bounds the memory of a batch's copies; this factor bounds the repeated work after a crash.
_BYTES_FACTOR: Final = 10
#: An idle stream compares its target with the state at least this often.
_COMPARE_SECONDS: Final = 30.0
#: One batch at a time that may end the process, so that the others are not counted with it.
_SUSPECTS: Final = threading.Lock()


def note_waiting(context: CopyContext) -> None:
    """Count the waiting messages of a paused plain stream, and commit a changed count."""
    stream, store = context.stream, context.store
    state = None if stream.tracked else store.load_stream(stream.stream)
    if state is None or not state.has_position:
        return
    source = context.clusters.connect(stream.source).stream_info(stream.stream)
    if source.created_ns != state.created_ns:
        return
    context.clock.set(source.ts_ns)
    before = state.lag_messages, state.source_last_sequence
    note_source(state, source)
    context.report.state = state
    if before != (state.lag_messages, state.source_last_sequence):
        with store.transaction():
            store.save_stream(state)


class _Due(NamedTuple):
    """The next copies; `available` is the intent's, `queued` means that the copy queue names the messages."""

    covered: SequenceRange
    available: int
    resend: bool
    queued: bool


class ReplicaStage:
    """The copying stage of one stream in one run; used by one thread."""

    def __init__(self, context: CopyContext) -> None:
        self._context = context
        self._stream, self._store, self._report = context.stream, context.store, context.report
        self._compared, self._compare_at = False, 0.0
        #: Copies that a later state has made, if this one is older.
        self._adopted: FoundCopies | None = None
        self._progress = Progress(self._stream.label, "copied")
        #: The messages that the last range took per second, 0 if unknown: copies of an earlier attempt do not tell.
        self._copied_per_second = 0.0
        #: Whether a batch is being made, as opposed to a check for work.
        self.batch_active = False
        #: Whether the last step left nothing to copy.
        self.caught_up = False

    def compare_again(self) -> None:
        """Let the next step compare the target with the state again, after an error."""
        self._compared = False

    def copy_next(self, ends: Ends) -> bool:
        """Make the next copies, or finish the ones of an interrupted batch; return whether there was work.

        Raises RunError or ConfigurationError with one line.
        """
        stream, store = self._stream, self._store
        if times.monotonic() >= self._compare_at or self._context.clusters.connect(stream.target).is_lost:
            # The target may have been restored to an earlier state, and other writers may have filled it since.
            self._compared = False
        tracked = store.load_stream(stream.stream) if stream.tracked else None
        intent = store.open_intent(stream.stream)
        # A queued batch contains messages that were read; any other batch follows them, and is folded before a queued one.
        reading = intent if intent is not None and not intent.folded else None
        if stream.tracked and (tracked is None or not tracked.has_position or reading or self._nothing_due()):
            return False
        source_cluster = self._context.clusters.connect(stream.source)
        source = source_cluster.stream_info(stream.stream)
        self._context.clock.set(source.ts_ns)
        if not self._compared and not stream.tracked:
            check_source(stream, source)
            refuse_lost_state(stream, store, self._context.clusters)
        if tracked and (problem := another_source(source_cluster, stream, source, tracked)):
            # It holds other messages at the queued sequences: reading must follow it first.
            if stream.on_source_reset == "stop":
                raise source_reset_error(problem)
            return False
        state = tracked or load_position(store, source_cluster, stream, source, reading)
        copying = self._report.copying = store.load_copying(stream.stream)
        if not stream.tracked:
            self._report.state = state
        if settle_lost_source(self._context, source, copying):
            return True
        return self._continue(source, state, copying, ends)

    def _continue(self, source: StreamInfo, state: StreamState, copying: CopyState, ends: Ends) -> bool:
        stream, report = self._stream, self._report
        target = prepare_target(stream, source, self._context.clusters.connect(stream.target))
        if target is not None:
            report.target_drift = target_drift(stream, target)
        review = TargetReview(self._context, source, state, copying, target)
        self._follow_restart(review, source, state, copying, target)
        if target is None or not self._compared or review.changed():
            target = review.run()
            self._compared, self._compare_at = True, times.monotonic() + _COMPARE_SECONDS
        if self._adopted is None:
            self._adopted = adopt_copies(self._context, state, copying, target)
        intent = self._open_intent()
        if intent is not None:
            with _SUSPECTS if is_suspect(intent) else contextlib.nullcontext():
                return self._make(source, state, copying, begin_again(self._store, intent), target)
        intent = self._plan(source, state, copying, target, ends)
        if intent is None:
            if not stream.tracked:
                # Watermark and lag advance without a copy; the end of the run commits them.
                advance(state, source, warning_ns=None, caught_up=source.last_sequence < state.next_sequence)
                report.state = state
            return False
        return self._make(source, state, copying, intent, target)

    def _make(
        self, source: StreamInfo, state: StreamState, copying: CopyState, intent: Intent, target: StreamInfo
    ) -> bool:
        """Make the copies of an intent, or of the next part of it; return whether there was work."""
        stream, report = self._stream, self._report
        started = times.monotonic()
        before = report.copied, report.batched, report.found
        self.batch_active = True
        try:
            batch = CopyBatch(self._context, source, state, copying, intent, target)
            batch.run()
        except Exception as error:
            self._note_end(intent, error)
            if not isinstance(error, TransientError):
                raise
            # No message was copied from another source; the next poll finds out what happened to this one.
            self._compared = False
            if not changed_since(self._context.clusters.connect(stream.source), source):
                raise
            return True
        finally:
            self.batch_active = False
        self._note_batch(
            intent, batch.covered, before, times.monotonic() - started, source.last_sequence + 1 - state.next_sequence
        )
        return True

    def _note_end(self, intent: Intent, error: Exception) -> None:
        """Record that an attempt ended with an error, unless the error is a lack of memory or a killed process of Spark."""
        killed = isinstance(error, (EngineLostError, ExecutorLostError)) and intent.part != 1
        if not (killed or isinstance(error, MemoryError)):
            # What cannot be recorded now counts as a killed process.
            with contextlib.suppress(SrAssetsError):
                self._store.note_attempt_ended(self._stream.stream)

    def _note_batch(
        self, intent: Intent, covered: SequenceRange, before: tuple[int, int, int], seconds: float, behind: int
    ) -> None:
        """Note the end of a batch; `before` are the report's copied, batched and found messages at its beginning."""
        report, tracked, behind = self._report, self._stream.tracked, max(0, behind)
        copied, batched, earlier = report.copied - before[0], report.batched - before[1], report.found - before[2]
        report.seconds += seconds
        if not (intent.resend or intent.folded or earlier):
            self._copied_per_second = copied / max(seconds, 0.001)
        queued = self._store.copy_queue(self._stream.stream).size()
        self.caught_up = not queued and (tracked or not behind)
        text = f"{queued} queued, {behind} behind" + (f", {batched} in fast-ingest batches" if batched else "")
        done, left = (copied, queued) if tracked else (len(covered), behind)
        self._progress.note(covered, copied, seconds, text, caught_up=self.caught_up, done=done, left=left)

    def _nothing_due(self) -> bool:
        """Return whether no copy is due for a target that was checked in this run, so that no server need be queried."""
        store, name = self._store, self._stream.stream
        return (
            self._compared
            and store.copy_queue(name).size() == 0
            and self._open_intent() is None
            and not store.copy_log(name).resends(1)
        )

    def _follow_restart(
        self,
        review: TargetReview,
        source: StreamInfo,
        state: StreamState,
        copying: CopyState,
        target: StreamInfo | None,
    ) -> None:
        """Start the target's bookkeeping for the first copies, and for copies of another source or restart."""
        first = self._store.copy_queue(self._stream.stream).first()
        created_ns, starts = (first.created_ns, first.starts) if first else (state.created_ns, state.starts)
        same = (copying.created_ns, copying.starts) == (created_ns, starts)
        if same and copying.target_stream is not None:
            return
        is_first = not copying.created_ns and not copying.copied_messages and self._open_intent() is None
        if is_first and copying.target_stream != self._stream.target_stream:
            refuse_lost_copies(self._stream, self._store, copying, source, target)
        restarts, lost = not is_first and not same, list[SequenceRange]()
        if restarts:
            settle_abandoned_batch(self._context, source, state, copying)
            lost = review.lost_copies()
            # The target may hold copies of an abandoned attempt, and those of a later state that restarted as well.
            checked = max(copying.target_checked, copying.target_sequence)
            copying.target_adopted, self._adopted = copying.target_adopted or checked + 1, None
            copying.target_sequence, copying.target_holds = 0, 0
        copying.created_ns, copying.starts = created_ns, starts
        copying.target_stream = copying.target_stream or self._stream.target_stream
        with self._store.transaction():
            if restarts:
                review.restart(lost)
            self._store.save_copying(copying)
            if not self._stream.tracked:
                self._store.save_stream(state)

    def _open_intent(self) -> Intent | None:
        """Return the open intent; a resend comes first, unless a batch had started before it."""
        resending, batch = (self._store.open_intent(self._stream.stream, resend=resend) for resend in (True, False))
        return resending or (None if batch is not None and batch.waits else batch)

    def _plan(
        self, source: StreamInfo, state: StreamState, copying: CopyState, target: StreamInfo, ends: Ends
    ) -> Intent | None:
        """Plan the next copies and commit their intent, or return None if no copy is due."""
        stream, store = self._stream, self._store
        due = self._next_due(source, state, ends)
        if due is None:
            return None
        covered, available = due.covered, due.available
        assert self._adopted is not None
        adopted = self._adopted.of_range(covered)
        if adopted and not due.queued:
            # The source may have lost the originals since.
            available = min(available, adopted[0].sequence)
        TargetReview(self._context, source, state, copying, target).refuse_other_writer()
        intent = Intent(
            stream.stream,
            covered.first,
            available,
            covered.next,
            source.ts_ns,
            too_old_before(stream.max_age_ns, source),
            copying.created_ns,
            target.created_ns,
            # A server that fell behind must not make the previous batch's copies look like another writer's.
            max(target.last_sequence, copying.target_sequence),
            resend=due.resend,
            folded=stream.tracked or due.queued,
            target_stream=stream.target_stream,
            starts=copying.starts,
            source_sequence=source.last_sequence,
            source_ns=source.last_stored_ns,
            adopted_first=adopted.location.first,
            adopted_next=adopted.location.next,
        )
        with store.transaction():
            store.save_copying(copying)
            store.save_intent(intent)
        reach(Point.PLANNED)
        return intent

    def _next_due(self, source: StreamInfo, state: StreamState, ends: Ends) -> _Due | None:
        """Return the next copies: the target's lost ones, then queued ones, then the source's."""
        stream, store = self._stream, self._store
        resends = store.copy_log(stream.stream).resends(stream.batch_messages)
        # A stream that is no longer tracked may still have due copies.
        queued = store.copy_queue(stream.stream).front(stream.batch_messages, _BYTES_FACTOR * stream.batch_bytes)
        if resends:
            # Resends lie within a range without filling it.
            covered: SequenceRange | None = SequenceRange(resends[0].covered.first, resends[-1].covered.next)
        elif queued:
            covered = queued.covered
        else:
            covered = None if stream.tracked else self._next_range(source, state, ends)
        if covered is None:
            return None
        available = first_available(source, covered)
        if not resends and not queued:
            covered, available = without_hole(stream, self._context.clusters.connect(stream.source), covered, available)
        return _Due(covered, available, bool(resends), queued is not None)

    def _next_range(self, source: StreamInfo, state: StreamState, ends: Ends) -> SequenceRange | None:
        stream, rate = self._stream, self._copied_per_second
        cluster = self._context.clusters.connect(stream.source)
        end = reading_end(ends, state, source, self._store.partitions(state.stream).begins())
        return next_range(stream, state.next_sequence, source, end, cluster, copied_per_second=rate)
