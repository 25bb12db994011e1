"""The work on one entry during a run: a stream's work loops, which copy it and follow its senders; and all work on a feed.

Reading, folding and sweeping form the watch loop; copying is the copy loop in another thread. An unreachable, slow or
full target therefore delays only copies. Advisories belong to the loop whose cluster takes them.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.state.pausing import paused_entries
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.adapters.state.stream_tables import COPYING
from sr_assets.domain.errors import LeadershipLostError, SrAssetsError
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
from sr_assets.stages.source.ranges import Ends
from sr_assets.stages.tracking.node_advisories import AdvisoryStage, EventStage, HeartbeatStage, heartbeat_grace_ns
from sr_assets.stages.tracking.node_snapshots import SnapshotStage, remove_replaced
from sr_assets.stages.tracking.node_state import NodeStage, forget_old_nodes
from sr_assets.stages.work_loop import BackgroundSteps, WorkLoop


class EntryWork(ABC):
    """The work on one entry; `final` decides whether a work loop's error is final or retried."""

    def __init__(self, site: Site, entry: Entry, stages: frozenset[Stage], final: Callable[[WorkLoop], bool]) -> None:
        self.report = StreamReport(entry)
        self._site, self._entry, self._stages, self._final = site, entry, stages, final
        self.watching = WorkLoop(
            self.report,
            site.folder,
            self._watched_stages(),
            on_error=self._note_error,
            on_lost=site.clusters.close,
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
        state.advisories_stored |= report.advisories_stored
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
        busy = self.watching.attempt(lambda: self._feed.fold_next(ends), final=lambda: self._final(self.watching))
        if not busy or (ends is None and self._feed.caught_up):
            self.watching.rest(self._site.pace.next_poll_at)
        return busy

    def _forget_old(self, state: StreamState) -> None:
        self._feed.forget_old(state, self._site.settings.advisories.retention_ns)


_INTERRUPTED_SECONDS: Final = 5.0


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
            guard=site.leadership.ensure,
        )
        self._background = BackgroundSteps(f"copying {stream.label}", site.woken)
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
        self._has_position = self._abandoned = False

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
        return self._copies and self.copying.failure is None and (self._background.has_result or self._may_have_work)

    @property
    def due_at(self) -> float:
        """When the watch loop, or a poll for copies, is due."""
        watching_at = self.watching.due_at if self._stream.tracked and self.watching.failure is None else math.inf
        return min(watching_at, self._copying_due_at)

    @property
    def _copying_due_at(self) -> float:
        """When the next copy step is due; infinite while one is active, and without a sign of work in a draining run."""
        if not self._copies or self.copying.failure is not None or self._background.has_result:
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
        return self._background.has_result

    @property
    def _copies(self) -> bool:
        return bool({Stage.REPLICA, Stage.NODE_SNAPSHOTS} & self._stages) or self._announced_with_copies

    def step(self, ends: Ends) -> bool:
        """Do one watch step, and start the next copies after the previous ones."""
        busy = False
        if self._stream.tracked and self.watching.due:
            busy = self.watching.attempt(lambda: self._watch(ends), final=lambda: self._final(self.watching))
            if not busy or (ends is None and self._caught_up):
                self.watching.rest(self._site.pace.next_poll_at)
            self._may_have_work |= busy
        return busy | (self._copies and self._continue_copying(ends))

    @property
    def _caught_up(self) -> bool:
        return self._watcher is None or self._watcher.caught_up

    def _continue_copying(self, ends: Ends) -> bool:
        """Start the next copy step if one is due; return whether the previous one made copies."""
        busy = self._background.take() or False
        self._may_have_work |= busy and not (ends is None and self._replica.caught_up)
        if times.monotonic() >= self._copying_due_at:
            # Only a lingering run also polls without a sign of new work.
            self._may_have_work, self._poll_at = False, self._site.pace.next_poll_at if ends is None else math.inf
            self._background.start(lambda: self._copy(ends))
        return busy

    def _watch(self, ends: Ends) -> bool:
        busy = False
        if self._watcher is not None:
            self._refuse_lost_state()
            self._lanes.update(self._site.state, self._site.clusters)
            busy = self._watcher.fold_next(ends)
            busy |= self._watcher.sweep_due()
            busy |= self._watcher.apply_requests()
        if not self._announced_with_copies:
            busy |= self._announce(self._site.clusters, self._stream.source, busy=busy)
        return busy

    def _refuse_lost_state(self) -> None:
        """Raise RunError before the first message of a stream whose state was lost: nothing is folded or announced."""
        if self._has_position:
            return
        store = self._site.state
        state = store.load_stream(self._stream.stream)
        if state is None or not state.has_position:
            refuse_lost_state(self._stream, store, self._site.clusters)
        self._has_position = True

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
        return self.copying.attempt(lambda: self._copy_step(ends), final=lambda: self._final(self.copying))

    def _copy_step(self, ends: Ends) -> bool:
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
        if stage in self._stages and self._snapshots.has_history and not self._background.running:
            state = self._site.state.load_stream(self._stream.stream)
            now_ns = self._retention_clock_ns(state) if state else None
            if now_ns is not None:
                self._snapshots.compact(now_ns)

    def join(self, deadline: float) -> None:
        """Wait for active copies, then interrupt them and log a line."""
        if self._abandoned:
            return
        if self._background.running:
            # A kill while the run ends tells nothing about the messages.
            with contextlib.suppress(SrAssetsError):
                self._site.state.note_attempt_ended(self._stream.stream)
        if not self._background.join(max(0.0, deadline - times.monotonic())):
            self._site.spark.interrupt()
            if not self._background.join(_INTERRUPTED_SECONDS):
                self._abandoned = True
                self.report.failures.append(
                    f"{self._stream.label}: copying did not end in time; the next run continues it"
                )
                self.report.failed.add(Stage.REPLICA)
                return
        self._background.take()

    def tidy(self) -> None:
        """Delete history files that the last publication no longer names."""
        if not self._background.running:
            with contextlib.suppress(LeadershipLostError):
                remove_replaced(self._site, self._site.state, self._stream.stream)

    def close(self) -> None:
        """Close the connections of copying."""
        if not self._background.running:
            self._stack.close()

    def note_end(self) -> None:
        """Save the result of the run for reading and copying."""
        if self._copies and not self._background.running:
            with contextlib.suppress(LeadershipLostError):
                before = self._site.state.load_copying(self._stream.stream).error
                self._note_copy_error(self.copying.outcome(before), self._site.state)
        super().note_end()
        if not self._background.running:
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
