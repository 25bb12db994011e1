"""The work on one entry of a site, for the time of a run: its lanes, and what is written down as the run ends.

Here: what a stream and a feed have in common. Not here: their stages (`stream_work`, `feed_work`), how long a run goes on
(`run`).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from sr_assets.adapters.state.records import StreamState
from sr_assets.domain.errors import SrAssetsError
from sr_assets.stages.lane import Lane
from sr_assets.stages.report import StreamReport
from sr_assets.stages.source.position import note_source

if TYPE_CHECKING:
    from collections.abc import Callable

    from sr_assets.settings import Entry
    from sr_assets.stages.report import Stage
    from sr_assets.stages.site import Site

#: When a run is to stop there: each source's last sequence as first seen by it; None for a run that lingers.
Ends = dict[str, int] | None


class EntryWork(ABC):
    """The work on one entry; `final` tells of a lane whether its trouble is a failure now."""

    def __init__(self, site: Site, entry: Entry, stages: frozenset[Stage], final: Callable[[Lane], bool]) -> None:
        """Take the site, the entry and the stages that were asked for."""
        self.report = StreamReport(entry)
        self._site, self._entry, self._stages, self._final = site, entry, stages, final
        self.watching = Lane(
            self.report, site.folder, self._watched_stages(), on_trouble=self._note_error, on_lost=site.clusters.close
        )

    @abstractmethod
    def _watched_stages(self) -> frozenset[Stage]:
        """Return the stages that read, as opposed to those that copy."""

    @abstractmethod
    def step(self, ends: Ends) -> bool:
        """Do what is due now, and see to what runs beside; returns whether anything was done."""

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes of the entry, those that have nothing to do left out."""
        return (self.watching,)

    @property
    def pending(self) -> bool:
        """Whether something is under way beside, or waits for that."""
        return False

    @property
    def under_way(self) -> bool:
        """Whether a batch is being made beside, however long that takes."""
        return False

    @property
    def trying(self) -> bool:
        """Whether some trouble is to be tried again."""
        return any(lane.trouble for lane in self.lanes)

    @property
    def given_up(self) -> bool:
        """Whether every lane has failed."""
        return all(lane.failure for lane in self.lanes)

    def finish(self) -> None:  # noqa: B027  most entries have nothing to do here
        """Do what is done once a run, after its last round."""

    def join(self, deadline: float) -> None:  # noqa: B027  most entries have nothing to do here
        """Wait for what runs beside, up to a time (monotonic seconds); what does not end by then is interrupted."""

    def close(self) -> None:  # noqa: B027  most entries have nothing to do here
        """Close what the entry opened."""

    def _note_error(self, error: str | None) -> None:
        """Show what keeps the entry from going on, and since when, while the run goes on trying."""
        store, name = self._site.state, self._entry.stream
        state = store.load_stream(name) or StreamState.not_begun(name)
        self._set_error(state, error)
        with store.transaction():
            store.save_stream(state)

    def _set_error(self, state: StreamState, error: str | None) -> None:
        state.last_error_since_ns = (state.last_error_since_ns or self._site.clock.now_ns()) if error else None
        state.last_error = error

    def note_end(self) -> None:
        """Write down how the run ended; also for an entry that never began, whose row then has no more than that."""
        site, report, name = self._site, self.report, self._entry.stream
        state = site.state.load_stream(name) or StreamState.not_begun(name)
        self._set_error(state, self.watching.failure)
        if report.alive_ns is not None:
            state.alive_ns, state.alive_due_ns = report.alive_ns, report.alive_due_ns
        if report.state is not None:
            state.watermark_ns, state.planned_ns = report.state.watermark_ns, report.state.planned_ns
            state.progress_ns = report.state.progress_ns
            state.ahead_clocks = max(state.ahead_clocks, report.state.ahead_clocks)
            state.source_last_sequence = report.state.source_last_sequence
            state.lag_messages = report.state.lag_messages
        state.advisories_stored |= report.advisories_stored
        if state.begun:
            self._note_lag(state)
        state.as_of_ns = site.clock.now_ns()
        with site.state.transaction():
            self._forget_old(state)
            site.state.save_stream(state)
        if state.begun:
            report.state = state
        report.copying = site.state.load_copying(name)
        report.waiting, report.queued = site.state.outbox(name).size(), site.state.copy_queue(name).size()

    def _forget_old(self, state: StreamState) -> None:  # noqa: B027  as above
        """Drop what the retention does not keep; called inside a transaction."""

    def _note_lag(self, state: StreamState) -> None:
        """Note how far the entry is behind; a failed one is asked about anew, and stays as it was when nobody answers."""
        entry = self._entry
        with contextlib.suppress(SrAssetsError):
            cluster = self._site.clusters.reach(entry.source)
            if self.report.failure is not None:
                source = cluster.stream_info(entry.stream)
                if source.created_ns != state.created_ns:
                    return
                note_source(state, source)
            state.lag_ns = 0
            if state.lag_messages:
                unread = cluster.next_message(entry.stream, state.next_sequence, entry.filter_subject or ">")
                state.lag_ns = max(0, self._site.clock.now_ns() - unread.stored_ns) if unread else 0
