"""The work on one entry of a site during a run: its work loops and its saved state; and all work on a feed."""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

from sr_assets.adapters.state.records import StreamState
from sr_assets.domain.errors import LeadershipLostError, SrAssetsError
from sr_assets.domain.positions import retention_begins_ns, retention_clock_ns
from sr_assets.settings import Entry, FeedSettings
from sr_assets.stages.feeds.advisory_feed import FeedStage
from sr_assets.stages.report import Stage, StreamReport
from sr_assets.stages.site import Site
from sr_assets.stages.source.position import note_source
from sr_assets.stages.source.reading import Ends
from sr_assets.stages.work_loop import WorkLoop


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
