"""One run of a site: the rounds of its entries, their end, and the saved results."""

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.state.status_file import record_alive
from sr_assets.domain.errors import LeadershipLostError
from sr_assets.settings import Entry, FeedSettings
from sr_assets.stages.entry_work import EntryWork, FeedWork, StreamWork
from sr_assets.stages.report import Stage, StreamReport
from sr_assets.stages.site import Site
from sr_assets.stages.source.ranges import Ends
from sr_assets.stages.work_loop import WorkLoop

_POLL_SECONDS: Final = 1.0
#: How long the end of a run waits for active copies: longer than a writer waits for an acknowledgement.
_COPY_SECONDS: Final = 40.0


class SiteRun:
    """One run of the selected stages of a site's entries, until they have caught up.

    It then lingers: it polls the sources every 1 to 2 s (`Pace`) and processes new messages, until none arrived for
    `linger` or `run_budget` is used, and as long as `keep_running` returns true. With `drain_only` it stops at the
    sources' positions at its start.

    A TransientError, such as a lost connection, is retried within `run_budget` with growing pauses; with `drain_only`
    only after a step has succeeded in this run, so that a wrong address is reported immediately. A failed entry is
    skipped; the others continue. If another member may lead the site, the run ends without an error.

    Committed work is always published; the error of a failed entry is in its report and in `replication.last_error`.
    """

    def __init__(
        self,
        site: Site,
        selection: Mapping[str, frozenset[Stage]],
        *,
        drain_only: bool,
        wanted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._site, self._drain_only, self._wanted = site, drain_only, wanted
        self._budget_ends = times.monotonic() + site.settings.run_budget_ns / 1e9
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
        return times.monotonic() > self._budget_ends and not self._wanted()

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
            now = times.monotonic()
            if busy or any(work.batch_active for work in works):
                active = now
            retrying = any(work.retrying for work in works)
            if all(work.failed for work in works) or (not drain_only and not retrying and self._over):
                return
            if not busy and not retrying:
                if drain_only and not any(work.pending for work in works):
                    return
                if not drain_only and now - active > linger_seconds and not self._wanted():
                    return
            due_at = min(work.due_at for work in works)
            caught_up, copying = due_at > times.monotonic(), any(work.copying_active for work in works)
            # A run that drains ends soon after, and publishes then.
            lingers = caught_up and not drain_only
            site.publish(now=False, caught_up=lingers, copying=copying)
            yield caught_up and not any(work.pending for work in works)
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
