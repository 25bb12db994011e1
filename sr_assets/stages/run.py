"""One run of a site: the rounds of its entries, the work on each entry in loops, their end, and the saved results.

Reading, folding and sweeping form the watch loop; copying is the copy loop in another thread. An unreachable, slow or
full target therefore delays only copies. Advisories belong to the loop whose cluster takes them.
"""

import contextlib
import logging
import math
import random
from abc import ABC, abstractmethod
from collections import Counter as Counts
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.state.operator_settings import paused_entries
from sr_assets.adapters.state.orders import give_order, withdraw_order
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.status_file import record_alive
from sr_assets.adapters.state.store import SiteState
from sr_assets.adapters.state.stream_tables import COPYING, Counter
from sr_assets.adapters.threads import in_background
from sr_assets.domain.backoff import backoff_seconds
from sr_assets.domain.errors import (
    ConfigurationError,
    EngineLostError,
    ExecutorLostError,
    LeadershipLostError,
    LostStateError,
    SrAssetsError,
    TransientError,
    cannot_write,
)
from sr_assets.domain.positions import retention_begins_ns, retention_clock_ns
from sr_assets.settings import ClusterSettings, Entry, FeedSettings, StreamSettings
from sr_assets.stages.connections import Clusters
from sr_assets.stages.feeds import FeedStage
from sr_assets.stages.replication.context import CopyContext
from sr_assets.stages.replication.lost import refuse_lost_state
from sr_assets.stages.replication.refill import HistoryRefill
from sr_assets.stages.replication.replica import ReplicaStage, note_waiting
from sr_assets.stages.report import Stage, StreamReport
from sr_assets.stages.site import Site
from sr_assets.stages.source.lanes import LaneRows
from sr_assets.stages.source.position import note_source
from sr_assets.stages.source.source_reading import Ends
from sr_assets.stages.tracking.node_advisories import AdvisoryStage, EventStage, HeartbeatStage, heartbeat_grace_ns
from sr_assets.stages.tracking.node_snapshots import SnapshotStage, remove_replaced
from sr_assets.stages.tracking.node_state import NodeStage, forget_old_nodes

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 30.0
_INTERRUPTED_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 1.0
#: How long the end of a run waits for active copies: longer than a writer waits for an acknowledgement.
_COPY_SECONDS: Final = 40.0


class WorkLoop:
    """Runs the steps of one kind of work and handles their errors.

    `stages` are the loop's, `folder` is the site's. `on_error` records an error, or None after recovery; `on_lost` drops
    the loop's connections. `final` decides whether a TransientError is a failure instead of retried. `guard` raises
    LeadershipLostError if another member may lead: the loop then ends without a failure.

    `reached`: a step has succeeded in this run, so a later error may be temporary. `failure` is one line after the loop
    gave up, `error` one line while it retries. `due_at` (monotonic seconds) is the time of the next step: later after
    an error, or when the loop has caught up.
    """

    def __init__(
        self,
        report: StreamReport,
        folder: Path,
        stages: frozenset[Stage],
        *,
        on_error: Callable[[str | None], None],
        on_lost: Callable[[], None],
        final: Callable[["WorkLoop"], bool] = lambda _: False,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self._report, self._folder, self._stages = report, folder, stages
        self._on_error, self._on_lost, self._final, self._guard = on_error, on_lost, final, guard
        self.reached = False
        self.error: str | None = None
        self.failure: str | None = None
        self.retries = 0
        self._counts: Counts[Counter] = Counts()
        # Whether a connection was lost, and no step has succeeded since.
        self._disconnected = False
        self.due_at = 0.0

    @property
    def due(self) -> bool:
        """Whether the next step is due."""
        return self.failure is None and times.monotonic() >= self.due_at

    def rest(self, until: float) -> None:
        """Delay the next step until a time (monotonic seconds), so that messages form one batch. An error has its own pause."""
        if self.error is None:
            self.due_at = until

    def take_counts(self) -> Mapping[Counter, float]:
        """Return the failed steps, and the lost and reopened connections, since the last call."""
        counts, self._counts = self._counts, Counts()
        return counts

    def attempt(self, step: Callable[[], bool]) -> bool:
        """Do one step; return whether there was work."""
        try:
            try:
                busy = step()
            except (LeadershipLostError, MemoryError):
                raise
            except Exception as error:  # noqa: BLE001  a defect that one stream's data reveals must not fail other streams
                self._retry_or_fail(error)
                return False
            self._note_success()
            return busy
        except LeadershipLostError as error:
            self.failure, self.error = str(error), None
            logger.warning("%s", error)
            return False

    def finish(self, step: Callable[[], None]) -> None:
        """Do the final work of a run, the compaction of the history; an error is a failure."""
        try:
            step()
        except (LeadershipLostError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001  as above
            self._fail_by(error, frozenset({Stage.NODE_SNAPSHOTS}))

    def outcome(self, before: str | None) -> str | None:
        """Return the error to record at the end of a run; the recorded one, `before`, holds until a step succeeds."""
        return self.failure or self.error or (None if self.reached else before)

    def _note_success(self) -> None:
        if self.retries:
            logger.info("%s: recovered after %d failed attempts", self._report.stream.label, self.retries)
        self._counts[Counter.RECONNECTIONS] += self._disconnected
        self._disconnected = False
        if self.retries or not self.reached:
            # Clear the previous run's error now, not when this run ends.
            self._on_error(None)
        self.reached = True
        self.retries, self.error = 0, None

    def _retry_or_fail(self, error: Exception) -> None:
        if isinstance(error, SrAssetsError):
            self._guard()  # Spark hides that a task was not allowed to write
        if not isinstance(error, TransientError):
            self._fail_by(error)
            return
        # A lost engine is restarted and a lost executor replaced, regardless of the servers' responses.
        if isinstance(error, (EngineLostError, ExecutorLostError)):
            self.reached = True
        else:
            self._counts[Counter.CONNECTION_ERRORS] += 1
            # An earlier error has closed the connections.
            self._counts[Counter.CONNECTIONS_CLOSED] += not self._disconnected
            self._disconnected = True
        # A connection that a server has dropped may look alive, so all are reopened.
        self._on_lost()
        line = _line(self._report.stream.label, error)
        if self._final(self):
            self._fail(line)
        else:
            self._retry_later(line)

    def _retry_later(self, line: str) -> None:
        self._counts[Counter.ERRORS] += 1
        self.error = line
        self.retries += 1
        pause_seconds = backoff_seconds(
            self.retries, first_seconds=_FIRST_PAUSE_SECONDS, longest_seconds=_LONGEST_PAUSE_SECONDS
        )
        self.due_at = times.monotonic() + pause_seconds * random.uniform(0.5, 1.0)  # noqa: S311  jitter, not a secret
        logger.warning("%s; attempt %d in %.1f s", line, self.retries + 1, self.due_at - times.monotonic())
        if self.retries == 1:
            self._on_error(line)

    def _fail_by(self, error: Exception, stages: frozenset[Stage] | None = None) -> None:
        """Fail with one line about an error in these stages, by default the loop's."""
        label = self._report.stream.label
        self._report.misconfigured |= isinstance(error, ConfigurationError)
        self._report.lost |= isinstance(error, LostStateError)
        if isinstance(error, SrAssetsError):
            self._fail(_line(label, error), stages)
        elif isinstance(error, OSError):
            self._fail(f"{label}: {cannot_write(error.filename or self._folder, error)}", stages)
        else:
            logger.error("%s: unexpected error", label, exc_info=error)
            self._fail(f"{label}: {type(error).__name__}: {str(error).partition(chr(10))[0]}", stages)

    def _fail(self, failure: str, stages: frozenset[Stage] | None = None) -> None:
        self._counts[Counter.ERRORS] += 1
        # The first one says why the loop ended.
        self.failure, self.error = self.failure or failure, None
        self._report.failures.append(failure)
        self._report.failed |= self._stages if stages is None else stages
        logger.error("%s", failure)


def _line(label: str, error: SrAssetsError) -> str:
    return str(error) if label in str(error) else f"{label}: {error}"


class EntryWork(ABC):
    """The work on one entry."""

    def __init__(self, site: Site, entry: Entry, stages: frozenset[Stage], final: Callable[[WorkLoop], bool]) -> None:
        self.report = StreamReport(entry)
        self._site, self._entry, self._stages = site, entry, stages
        self.watching = WorkLoop(
            self.report,
            site.folder,
            self._watched_stages(),
            on_error=self._note_error,
            on_lost=site.clusters.close,
            final=final,
            guard=site.leadership.ensure,
        )

    @abstractmethod
    def _watched_stages(self) -> frozenset[Stage]:
        """Return the stages that read, in contrast to copying ones."""

    @abstractmethod
    def step(self, ends: Ends) -> bool:
        """Do the due work, and collect or start background work; return whether any work was done."""

    @property
    def loops(self) -> tuple[WorkLoop, ...]:
        """The active work loops of the entry."""
        return (self.watching,)

    @property
    def pending(self) -> bool:
        """Whether background work is active or pending."""
        return False

    @property
    def batch_active(self) -> bool:
        """Whether a batch is active in the background, however long it takes."""
        return False

    @property
    def copying_active(self) -> bool:
        """Whether a copy step is active, or its result has not been taken yet."""
        return False

    @property
    def retrying(self) -> bool:
        """Whether a work loop will retry after an error."""
        return any(loop.error for loop in self.loops)

    @property
    def failed(self) -> bool:
        """Whether every work loop has failed."""
        return all(loop.failure for loop in self.loops)

    @property
    def due_at(self) -> float:
        """When the next step is due (monotonic seconds), unless background work ends earlier."""
        return min((loop.due_at for loop in self.loops if loop.failure is None), default=math.inf)

    def finish(self) -> None:  # noqa: B027  most entries have no work here
        """Do the final work of a run, after its last round."""

    def join(self, deadline: float) -> None:  # noqa: B027  most entries have no work here
        """Wait for the background work until a time (monotonic seconds), then interrupt it."""

    def tidy(self) -> None:  # noqa: B027  most entries have no work here
        """Do the work that follows the run's last publication."""

    def close(self) -> None:  # noqa: B027  most entries have no work here
        """Close the entry's resources."""

    def _note_error(self, error: str | None) -> None:
        """Publish the entry's error and its start while the run retries."""
        store, name = self._site.state, self._entry.stream
        state = store.load_stream(name) or StreamState.without_position(name)
        if error == state.last_error:
            return
        self._set_error(state, error)
        with store.transaction():
            store.save_stream(state)
            store.counters(name).add(self.watching.take_counts())

    def _set_error(self, state: StreamState, error: str | None) -> None:
        state.last_error_since_ns = (state.last_error_since_ns or self._site.clock.now_ns()) if error else None
        state.last_error = error

    def report_so_far(self) -> StreamReport:
        """Return the report on committed work during a run; the caller reads one snapshot."""
        store, name, report = self._site.state, self._entry.stream, self.report
        state = store.load_stream(name)
        return replace(
            report,
            reasons=report.reasons.copy(),
            events=report.events.copy(),
            failures=[*report.failures],
            failed={*report.failed},
            state=state if state is not None and state.has_position else None,
            copying=store.load_copying(name),
            waiting=store.count_unpublished(name),
            queued=store.copy_queue(name).size(),
        )

    def note_end(self) -> None:
        """Save the result of the run, unless another member leads now.

        An entry that never started gets a row with its error only.
        """
        site, report, name = self._site, self.report, self._entry.stream
        state = site.state.load_stream(name) or StreamState.without_position(name)
        self._set_error(state, self.watching.outcome(state.last_error if self.watching in self.loops else None))
        if report.alive_ns is not None:
            state.alive_ns, state.alive_due_ns = report.alive_ns, report.alive_due_ns
        if report.state is not None and report.state.starts == state.starts:
            state.watermark_ns, state.planned_ns = report.state.watermark_ns, report.state.planned_ns
            state.progress_ns = report.state.progress_ns
            state.ahead_clocks = max(state.ahead_clocks, report.state.ahead_clocks)
            state.source_last_sequence = report.state.source_last_sequence
            state.lag_messages = report.state.lag_messages
        report.take_published(state)
        if state.has_position:
            self._note_lag(state)
        state.as_of_ns = site.clock.now_ns()
        with contextlib.suppress(LeadershipLostError), site.state.transaction():
            self._forget_old(state)
            self._forget_history(state)
            site.state.save_stream(state)
            site.state.counters(name).add(self.watching.take_counts())
        if state.has_position:
            report.state = state
        report.copying = site.state.load_copying(name)
        report.waiting, report.queued = site.state.count_unpublished(name), site.state.copy_queue(name).size()

    def _forget_old(self, state: StreamState) -> None:  # noqa: B027  as above
        """Delete rows beyond the retention, inside the caller's transaction."""

    def _forget_history(self, state: StreamState) -> None:
        """Delete expired rows, also of an entry that is no longer tracked."""
        settings, now_ns = self._site.settings, retention_clock_ns(state.watermark_ns, self._site.clock.own_ns())
        if now_ns is not None:
            self._site.state.forget_history(
                self._entry.stream,
                gaps_ns=now_ns - settings.gaps.retention_ns,
                transitions_ns=retention_begins_ns(now_ns, settings.advisories.retention_ns),
            )

    def _note_lag(self, state: StreamState) -> None:
        """Save the entry's lag; measure a failed entry's lag again, unless the source does not respond."""
        entry = self._entry
        with contextlib.suppress(SrAssetsError):
            cluster = self._site.clusters.connect(entry.source)
            if self.report.failure is not None:
                source = cluster.stream_info(entry.stream)
                if source.created_ns != state.created_ns:
                    return
                note_source(state, source)
            state.lag_ns = 0
            if state.lag_messages:
                unread = cluster.next_message(entry.stream, state.next_sequence, entry.filter_subject or ">")
                state.lag_ns = max(0, self._site.clock.now_ns() - unread.stored_ns) if unread else 0


class FeedWork(EntryWork):
    """The work on a feed: folding its advisories, without copying."""

    def __init__(
        self, site: Site, feed: FeedSettings, stages: frozenset[Stage], final: Callable[[WorkLoop], bool]
    ) -> None:
        super().__init__(site, feed, stages, final)
        self._feed = FeedStage(feed, site, self.report)

    def _watched_stages(self) -> frozenset[Stage]:
        return frozenset({Stage.ADVISORY_FEED})

    def step(self, ends: Ends) -> bool:
        """Fold the next batch."""
        if Stage.ADVISORY_FEED not in self._stages or not self.watching.due:
            return False
        busy = self.watching.attempt(lambda: self._feed.fold_next(ends))
        if not busy or (ends is None and self._feed.caught_up):
            self.watching.rest(self._site.pace.next_poll_at)
        return busy

    def _forget_old(self, state: StreamState) -> None:
        self._feed.forget_old(state, self._site.settings.advisories.retention_ns)


class StreamWork(EntryWork):
    """The work on a stream: copying it and, if it is tracked, following its senders."""

    def __init__(
        self, site: Site, stream: StreamSettings, stages: frozenset[Stage], final: Callable[[WorkLoop], bool]
    ) -> None:
        self._stream = stream
        super().__init__(site, stream, stages, final)
        watched = stream.tracked and Stage.NODE_STATE in stages
        self._watcher = NodeStage(stream, site, self.report) if watched else None
        self._stack = contextlib.ExitStack()
        # Copying runs in another thread, so it has its own connections.
        self._context = CopyContext(
            stream,
            self._stack.enter_context(site.state.second_connection()),
            Clusters(site.name, site.leadership),
            site.spark,
            site.files,
            site.clock,
            site.settings.home,
            site.folder,
            self.report,
        )
        self._stack.callback(self._context.clusters.close)
        copied = frozenset(Stage) - self._watched_stages()
        self.copying = WorkLoop(
            self.report,
            site.folder,
            copied,
            on_error=self._note_copy_error,
            on_lost=self._context.clusters.close,
            final=final,
            guard=site.leadership.ensure,
        )
        # The last copy step, until its result is taken.
        self._copy_step: Future[bool] | None = None
        self._replica, self._lanes = ReplicaStage(self._context), LaneRows(stream)
        self._snapshots = SnapshotStage(stream, self._context.store, site, self.report)
        self._refill = HistoryRefill(self._context, self._snapshots, site.settings.run_budget_ns / 1e9)
        announces = stream.advisory is not None and Stage.NODE_ADVISORIES in stages
        self._announced_with_copies = announces and self._announced_at_target
        store = self._context.store if self._announced_with_copies else site.state
        self._events = EventStage(stream, store, site.clock, self.report) if announces else None
        self._advisories = AdvisoryStage(stream, store, site.clock, self.report) if announces else None
        grace_ns = heartbeat_grace_ns(site.settings)
        self._heartbeat = HeartbeatStage(stream, store, site.clock, grace_ns, self.report) if announces else None
        # Whether there may be work that copying has not seen yet.
        self._may_have_work = True
        self._poll_at = 0.0
        self._abandoned = False

    @property
    def _announced_at_target(self) -> bool:
        return self._stream.advisory_cluster not in (None, self._stream.source)

    def _watched_stages(self) -> frozenset[Stage]:
        return frozenset({Stage.NODE_STATE} if self._announced_at_target else {Stage.NODE_STATE, Stage.NODE_ADVISORIES})

    @property
    def loops(self) -> tuple[WorkLoop, ...]:
        """The watch loop, if the stream is tracked, and the copy loop, if selected."""
        return (*((self.watching,) if self._stream.tracked else ()), *((self.copying,) if self._copies else ()))

    @property
    def pending(self) -> bool:
        """Whether copying is active, or new copies have become due."""
        # A finished batch may leave copies in the queue; its result decides whether to poll again.
        return self._copies and self.copying.failure is None and (self.copying_active or self._may_have_work)

    @property
    def due_at(self) -> float:
        """When the watch loop, or a poll for copies, is due."""
        watching_at = self.watching.due_at if self._stream.tracked and self.watching.failure is None else math.inf
        return min(watching_at, self._copying_due_at)

    @property
    def _copying_due_at(self) -> float:
        """When the next copy step is due; infinite while one is active, and without a sign of work in a draining run."""
        if not self._copies or self.copying.failure is not None or self.copying_active:
            return math.inf
        soon = self._may_have_work or self.copying.error
        return self.copying.due_at if soon else max(self.copying.due_at, self._poll_at)

    @property
    def batch_active(self) -> bool:
        """Whether a batch of copies is active."""
        return self._replica.batch_active

    @property
    def copying_active(self) -> bool:
        """Whether a copy step is active, or its result has not been taken yet."""
        return self._copy_step is not None

    @property
    def _copying_runs(self) -> bool:
        return self._copy_step is not None and not self._copy_step.done()

    @property
    def _copies(self) -> bool:
        return bool({Stage.REPLICA, Stage.NODE_SNAPSHOTS} & self._stages) or self._announced_with_copies

    def step(self, ends: Ends) -> bool:
        """Do one watch step, and start the next copies after the previous ones."""
        busy = False
        if self._stream.tracked and self.watching.due:
            busy = self.watching.attempt(lambda: self._watch(ends))
            if not busy or (ends is None and (self._watcher is None or self._watcher.caught_up)):
                self.watching.rest(self._site.pace.next_poll_at)
            self._may_have_work |= busy
        return busy | (self._copies and self._continue_copying(ends))

    def _continue_copying(self, ends: Ends) -> bool:
        """Start the next copy step if one is due; return whether the previous one made copies."""
        busy = False
        if self._copy_step is not None and self._copy_step.done():
            step, self._copy_step = self._copy_step, None
            busy = step.result()
        self._may_have_work |= busy and not (ends is None and self._replica.caught_up)
        if times.monotonic() >= self._copying_due_at:
            # Only a lingering run also polls without a sign of new work.
            self._may_have_work, self._poll_at = False, self._site.pace.next_poll_at if ends is None else math.inf
            # Known before its start: a signal may interrupt that.
            step = self._copy_step = Future()
            step.add_done_callback(lambda _: self._site.woken.set())
            in_background(f"copying {self._stream.label}", lambda: self.copying.attempt(lambda: self._copy(ends)), step)
        return busy

    def _watch(self, ends: Ends) -> bool:
        busy = False
        if self._watcher is not None:
            refuse_lost_state(self._stream, self._site.state, self._site.clusters)
            self._lanes.update(self._site.state, self._site.clusters)
            busy = self._watcher.fold_next(ends)
            busy |= self._watcher.sweep_due()
            busy |= self._watcher.apply_requests()
        if not self._announced_with_copies:
            busy |= self._announce(self._site.clusters, self._stream.source, busy=busy)
        return busy

    def _announce(self, clusters: Clusters, where: ClusterSettings, *, busy: bool) -> bool:
        if self._events is None or self._advisories is None or self._heartbeat is None:
            return False
        cluster = clusters.connect(where)
        published = self._events.publish(cluster)
        published |= self._advisories.publish(cluster)
        self._site.note_refused(self._stream.stream, refused=self._advisories.refused)
        self._heartbeat.send(cluster, busy=busy or published)
        return published

    def _copy(self, ends: Ends) -> bool:
        """Do one copy step, in the copying thread."""
        busy = False
        keeps_history = Stage.NODE_SNAPSHOTS in self._stages and self._stream.tracked
        if keeps_history:
            self._refill.begin()
        if self.copying.retries:
            self._replica.compare_again()
        if self._announced_with_copies:
            busy = self._announce(self._context.clusters, self._stream.target, busy=False)
        self.report.paused = self._stream.stream in paused_entries(self._site.folder, [self._stream])
        if not self._stream.tracked:
            self._lanes.update(self._context.store, self._context.clusters)
        if Stage.REPLICA in self._stages:
            if self.report.paused:
                note_waiting(self._context)
            else:
                busy |= self._replica.copy_next(ends)
        if keeps_history:
            placed = self._snapshots.index_staged()
            busy |= placed
            if placed:
                self._snapshots.compaction.compact_small()
            busy |= self._refill.step(busy=busy)
        return busy

    def finish(self) -> None:
        """Send the last heartbeat of the run, and compact the history."""
        loop = self.copying if self._announced_with_copies else self.watching
        if self._heartbeat is not None and self.watching.failure is None and loop.failure is None:
            where = self._stream.target if self._announced_with_copies else self._stream.source
            with contextlib.suppress(SrAssetsError):
                self._heartbeat.send(self._site.clusters.connect(where))
        # A plain stream has no stage for a history from an earlier tracked period.
        stage = Stage.NODE_SNAPSHOTS if self._stream.tracked else Stage.REPLICA
        if stage in self._stages and self._snapshots.has_history and not self._copying_runs:
            state = self._site.state.load_stream(self._stream.stream)
            now_ns = self._retention_clock_ns(state) if state else None
            if now_ns is not None:
                self._snapshots.compact(now_ns)

    def join(self, deadline: float) -> None:
        """Wait for active copies, then interrupt them and log a line."""
        step = self._copy_step
        if step is None or step.cancelled() or self._abandoned:
            return
        if not step.done():
            # A kill while the run ends tells nothing about the messages.
            with contextlib.suppress(SrAssetsError):
                self._site.state.note_attempt_ended(self._stream.stream)
        wait([step], max(0.0, deadline - times.monotonic()))
        if not step.done():
            self._site.spark.interrupt()
            wait([step], _INTERRUPTED_SECONDS)
        if not step.done():
            self._abandoned = True
            self.report.failures.append(f"{self._stream.label}: copying did not end in time; the next run continues it")
            self.report.failed.add(Stage.REPLICA)
            return
        self._copy_step = None
        step.result()

    def tidy(self) -> None:
        """Delete history files that the last publication no longer names."""
        if not self._copying_runs:
            with contextlib.suppress(LeadershipLostError):
                remove_replaced(self._site, self._site.state, self._stream.stream)

    def close(self) -> None:
        """Close the connections of copying."""
        if not self._copying_runs:
            self._stack.close()

    def note_end(self) -> None:
        """Save the result of the run for reading and copying."""
        if self._copies and not self._copying_runs:
            with contextlib.suppress(LeadershipLostError):
                before = self._site.state.load_copying(self._stream.stream).error
                self._note_copy_error(self.copying.outcome(before), self._site.state)
        super().note_end()
        if not self._copying_runs:
            with contextlib.suppress(SrAssetsError):
                self._lanes.update(self._site.state, self._site.clusters, final=True)

    def _forget_old(self, state: StreamState) -> None:
        """Delete expired retired nodes, and all nodes of a stream that is no longer tracked."""
        nodes, now_ns = self._site.state.nodes(self._stream.stream), self._retention_clock_ns(state)
        highest = 0
        if not self._stream.tracked:
            highest = nodes.forget_all()
            state.hole_open = False
        elif now_ns is not None:
            highest = forget_old_nodes(nodes, self._stream, now_ns)
        state.forgotten_transition = max(state.forgotten_transition, highest)

    def _retention_clock_ns(self, state: StreamState) -> int | None:
        return retention_clock_ns(state.watermark_ns, self._site.clock.own_ns())

    def _note_copy_error(self, error: str | None, store: SiteState | None = None) -> None:
        """Publish the error that stops copying, and its start."""
        store = store or self._context.store
        copying = store.load_copying(self._stream.stream)
        counts = self.copying.take_counts()
        if error == copying.error and not any(counts.values()):
            return
        copying.error_since_ns = (copying.error_since_ns or self._site.clock.now_ns()) if error else None
        copying.error = error
        with store.transaction():
            store.save_copying(copying)
            store.counters(self._stream.stream).add(counts, COPYING)


class SiteRun:
    """One run of the selected stages of a site's entries, until they have caught up.

    It then lingers: it polls the sources every 1 to 2 s (`Pace`) and processes new messages, until none arrived for
    `linger` or `run_budget` is used, and as long as `wanted` returns true. With `drain_only` it stops at the
    sources' positions at its start.

    A TransientError, such as a lost connection, is retried within `run_budget` with growing pauses; with `drain_only`
    only after a step has succeeded in this run, so that a wrong address is reported immediately. A failed entry is
    skipped; the others continue. If another member may lead the site, the run ends without an error.

    Committed work is always published; the error of a failed entry is in its report and in `replication.last_error`.
    """

    def __init__(self, site: Site, selection: Mapping[str, frozenset[Stage]], *, drain_only: bool) -> None:
        self._site, self._drain_only = site, drain_only
        #: Whether to linger for longer than the settings say.
        self.wanted: Callable[[], bool] = lambda: False
        self._budget_ends = times.monotonic() + site.settings.run_budget_ns / 1e9
        #: Whether it is known if this home has or lacks the site's state.
        self._knows_state = False
        self._works = [
            self._work_on(entry, selection[entry.stream]) for entry in site.entries if entry.stream in selection
        ]

    def _work_on(self, entry: Entry, stages: frozenset[Stage]) -> EntryWork:
        if isinstance(entry, FeedSettings):
            return FeedWork(self._site, entry, stages, self._is_final)
        return StreamWork(self._site, entry, stages, self._is_final)

    def _is_final(self, loop: WorkLoop) -> bool:
        return self._over or (self._drain_only and not loop.reached)

    @property
    def _over(self) -> bool:
        return times.monotonic() > self._budget_ends and not self.wanted()

    @property
    def reports(self) -> dict[str, StreamReport]:
        """A report per stream, complete after the last round."""
        return {work.report.stream.stream: work.report for work in self._works}

    def reports_so_far(self) -> dict[str, StreamReport]:
        """Return a report per stream on committed work, during the rounds."""
        with self._site.state.read_snapshot():
            return {work.report.stream.stream: work.report_so_far() for work in self._works}

    def rounds(self) -> Generator[bool]:
        """Do the work; yield after each round whether every entry has caught up. The caller must exhaust or close it."""
        works = self._works
        try:
            yield from self._do_rounds()
            self._note_lost_state()
            copies_end = times.monotonic() + _COPY_SECONDS
            for work in works:
                work.join(copies_end)
            with contextlib.suppress(LeadershipLostError):
                for work in works:
                    work.watching.finish(work.finish)
        finally:
            with contextlib.ExitStack() as stack:
                for work in works:
                    stack.callback(work.tidy)
                stack.callback(self._site.publish)
                for work in works:
                    stack.callback(work.close)
                    stack.callback(work.note_end)
                    stack.callback(work.join, times.monotonic() + _COPY_SECONDS)
        # A run that lost its lock has no new leader to continue its work.
        if (locks := self._site.leadership.locks) is not None:
            locks.ensure()

    def _note_lost_state(self) -> None:
        """Order this member to yield the leadership if the state of all entries is lost, and no longer if it has one."""
        if not self._knows_state and self._site.leadership.elects:
            states = [self._site.state.load_stream(entry.stream) for entry in self._site.entries]
            has_state = any(state is not None and state.has_position for state in states)
            lost = all(work.report.lost for work in self._works)
            if has_state:
                withdraw_order(self._site.folder, "yield")
            elif lost:
                give_order(self._site.folder, "yield")
            self._knows_state = has_state or lost

    def _do_rounds(self) -> Iterator[bool]:
        """Let each entry take steps, in rounds, until no work or no time is left."""
        site, works, drain_only = self._site, self._works, self._drain_only
        linger_seconds = site.settings.linger_ns / 1e9
        ends: Ends = {} if drain_only else None
        active = times.monotonic()
        while site.leadership.leads:
            site.woken.clear()
            record_alive(site.folder)
            site.note_paused()
            site.pace.begin_round()
            busy = False
            for work in works:
                busy |= work.step(ends)
            self._note_lost_state()
            now = times.monotonic()
            if busy or any(work.batch_active for work in works):
                active = now
            retrying = any(work.retrying for work in works)
            if all(work.failed for work in works) or (not drain_only and not retrying and self._over):
                return
            if not busy and not retrying:
                if drain_only and not any(work.pending for work in works):
                    return
                if not drain_only and now - active > linger_seconds and not self.wanted():
                    return
            due_at = min(work.due_at for work in works)
            caught_up, copying = due_at > times.monotonic(), any(work.copying_active for work in works)
            # A run that drains ends soon after, and publishes then.
            lingers = caught_up and not drain_only
            site.publish(now=False, caught_up=lingers, copying=copying)
            drained = caught_up and not any(work.pending for work in works)
            if drained:
                site.spark.note_drained()
            yield drained
            publishing_due_at = site.publishing_due_at(caught_up=lingers, copying=copying)
            pause_seconds = min(due_at, publishing_due_at) - times.monotonic()
            if pause_seconds > 0:
                site.woken.wait(min(pause_seconds, _POLL_SECONDS))


def run_site(site: Site, selection: Mapping[str, frozenset[Stage]], *, drain_only: bool) -> dict[str, StreamReport]:
    """Run a `SiteRun` to its end; return a report per stream."""
    run = SiteRun(site, selection, drain_only=drain_only)
    for _ in run.rounds():
        pass
    return run.reports
