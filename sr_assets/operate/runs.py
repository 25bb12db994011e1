"""The runs of `sr-assets run`: one child process per site, and one for other due work.

A run that finds no work imports only what finding it needs.
"""

import contextlib
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.logs import configure_logging, print_error, print_warning
from sr_assets.automation.observing import is_idle
from sr_assets.operate.due_work import due_work_process, is_due
from sr_assets.operate.forking import Copies
from sr_assets.operate.instance import mark_start, prepare_instance
from sr_assets.operate.log_lines import ChildLogs
from sr_assets.operate.processes import (
    INTERRUPTED,
    Child,
    Restarts,
    await_result,
    end_of,
    signal_group,
    signals_as_interrupt,
    stop_groups,
)
from sr_assets.operate.run_output import print_line, report_idle
from sr_assets.settings import Entry, Settings
from sr_assets.stages.connection_users import reporting_missing

#: What the work of a site imports; pyarrow imports pandas for its first array of Python objects.
_WORK: Final = ("sr_assets.operate.site_job", "sr_assets.stages.site_work", "pandas", "pyarrow.dataset")
_ALL: Final = (*_WORK, "sr_assets.operate.job_execution")
#: The exit code of a wrong configuration: another process would end likewise.
_MISCONFIGURED: Final = 2


def run_sites(
    settings: Settings, streams: Sequence[Entry], *, once: bool, begin: Callable[[], None] = lambda: None
) -> int:
    """Run each site that has one of the streams, in parallel processes; returns the exit code.

    With `once`, at most `concurrency` sites run at a time; otherwise all of them run, and heartbeats are published. A run
    of all streams also does the work of Dagster's daemon: `once`, the work that is due; otherwise all of it, in another
    process. The exit code is 0, 1 if a stream or a job failed (the others still run) or 2 if a site's configuration is
    wrong. Without `once`, a process that ends is started again, unless its configuration is wrong; the command ends when no
    site is left. After Ctrl-C or SIGTERM the next run repeats open batches.

    `begin` is called once the first child has started; a run without work does not call it.
    """
    try:
        with Copies() as copies, reporting_missing(settings, print_warning):
            return _run_sites(settings, streams, copies, once=once, begin=begin)
    except KeyboardInterrupt:
        return INTERRUPTED if once else 0


def _run_sites(
    settings: Settings, streams: Sequence[Entry], copies: Copies, *, once: bool, begin: Callable[[], None]
) -> int:
    prepare_instance(settings)
    mark_start(settings)
    is_whole = len(streams) == len(settings.entries)
    has_due_work = is_whole and (not once or is_due(settings))
    chosen: dict[str, list[str]] = defaultdict(list)
    for stream in streams:
        chosen[stream.name].append(stream.label)
    if once:
        _begin_reports(settings)
    else:
        configure_logging(settings)
    with (
        contextlib.closing(_Children(settings, copies, begin, alone=len(chosen) == 1, due=has_due_work)) as children,
        signals_as_interrupt() as ignore_signals,
        contextlib.nullcontext() if once else _services_beside(settings, list(chosen)),
        ThreadPoolExecutor(max(1, min(len(chosen), settings.concurrency) if once else len(chosen) + 1)) as pool,
    ):
        try:
            work = children.run_once if once else children.follow
            working = [pool.submit(work, *site) for site in chosen.items()]
            # The due work ends with the last site; a platform of native streams has none.
            keeping = [pool.submit(children.keep_due_work)] if is_whole and not once else []
            codes = [await_result(future) for future in working or keeping]
            if once and (has_due_work or (is_whole and any(codes))):
                codes.append(children.run_due_work(once=True))
        finally:
            # A signal must not leave children behind, for which the pool would wait; `ignore_signals` may be interrupted.
            try:
                ignore_signals()
            finally:
                children.stop()
    if once:
        _report(settings)
    return 2 if 2 in codes else int(any(codes))


def _begin_reports(settings: Settings) -> None:
    if settings.notify:
        from sr_assets.operate.notify import begin_notifying

        begin_notifying(settings)


def _report(settings: Settings) -> None:
    """Write the metrics' file and deliver the notifications, as configured, after a single run."""
    if settings.metrics.textfile is not None:
        from sr_assets.operate.metrics import write_textfile_once

        write_textfile_once(settings)
    if settings.notify:
        from sr_assets.operate.notify import notify_once

        notify_once(settings)


@contextlib.contextmanager
def _services_beside(settings: Settings, sites: Sequence[str]) -> Iterator[None]:
    """Run everything that `--follow` needs beside the sites inside the block, and print the URL of the metrics, if served."""
    from sr_assets.operate.health import Health, site_parts, watchdog_beside
    from sr_assets.operate.metrics import metrics_beside, page_url
    from sr_assets.operate.notify import notify_beside
    from sr_assets.operate.static_values import static_values_watched
    from sr_assets.stages.heartbeat_publisher import publisher_of

    health = Health(settings, site_parts(settings, sites))
    with (
        notify_beside(settings),
        metrics_beside(settings, health) as metrics,
        watchdog_beside(health),
        publisher_of(settings, print_error),
        static_values_watched(settings),
    ):
        if metrics:
            print_line(f"Metrics: {metrics}, status page: {page_url(metrics)}")
        yield


def _site_process(site: str, labels: Sequence[str], *, once: bool, bars: bool) -> int:
    """Do the work of a site's child process, which alone imports it."""
    from sr_assets.operate.site_job import site_process

    return site_process(site, labels, once=once, bars=bars)


class _Children:
    """The child processes of a `run`, one per site."""

    def __init__(
        self, settings: Settings, copies: Copies, begin: Callable[[], None], *, alone: bool, due: bool = False
    ) -> None:
        self._settings, self._copies = settings, copies
        self._begin: Callable[[], None] | None = begin
        # A site writes into `logfile` directly.
        self._logs = ChildLogs(settings, to_file=False)
        # Several children would overwrite each other's progress bars, and each import Dagster.
        self._alone = alone
        self._imports_next = _ALL if alone and due else ()
        self._begun = times.time()
        self._guard = threading.Lock()
        self._children: list[Child] = []
        self._stopped = threading.Event()

    def run_once(self, site: str, labels: Sequence[str]) -> int:
        """Run a site once and return its exit code; a site without work needs no child."""
        if is_idle(self._settings, site):
            report_idle([entry for entry in self._settings.sites[site] if entry.label in labels])
            return 0
        return self._run_site(site, labels, "once")

    def follow(self, site: str, labels: Sequence[str]) -> int:
        """Run a site in a child until `stop`, as `_keep` does."""
        return self._keep(f"site {site}", lambda: self._run_site(site, labels, "follow"))

    def run_due_work(self, *, once: bool) -> int:
        """Do the due work in a child and return its exit code; it reports runs that failed after the start of this command."""
        return self._run("due work", partial(due_work_process, once=once, since=self._begun))

    def keep_due_work(self) -> int:
        """Do the due work in a child until `stop`, as `_keep` does."""
        return self._keep("the due work", lambda: self.run_due_work(once=False))

    def _keep(self, name: str, run: Callable[[], int]) -> int:
        """Run a child until `stop`, and another whenever it ends; return 0, or 2 if the configuration is wrong."""
        restarts = Restarts()
        while True:
            restarts.note_start()
            try:
                code = run()
            except OSError as error:
                code, ended = 1, f"cannot be started: {error.strerror}"
            else:
                ended = end_of(code)
            if self._stopped.is_set():
                return 0
            if code == _MISCONFIGURED:
                print_error(f"the process of {name} {ended}; correct the configuration and restart this command")
                return code
            pause_seconds = restarts.pause_seconds()
            print_error(f"the process of {name} {ended}; restarting it in {pause_seconds:g} s")
            self._stopped.wait(pause_seconds)

    def _run_site(self, site: str, labels: Sequence[str], mode: str) -> int:
        """Run a site in a child and return its exit code; after `stop`, start none and return 0."""
        work = partial(_site_process, site, labels, once=mode == "once", bars=self._alone)
        return self._run(site, work, _WORK if self._alone else _ALL)

    def _run(self, name: str, work: Callable[[], int], imports: Sequence[str] = _ALL) -> int:
        with self._guard:
            if self._stopped.is_set():
                return 0
            with self._logs.output(name) as errors:
                child = self._copies.start(name, work, imports=imports, errors=errors)
            self._children.append(child)
            # The child of a single site works while it imports Dagster, and the original imports it for the due work.
            self._copies.prepare(self._imports_next)
            begin, self._begin = self._begin, None
        if begin:
            begin()
        with child:
            try:
                return child.wait()
            finally:
                with self._guard:
                    self._children.remove(child)
                # What is left of it must not work next to its successor. Later, the group's id may be another process's.
                signal_group(child, signal.SIGKILL)

    def close(self) -> None:
        """Wait until the children's output is written."""
        self._logs.close()

    def stop(self) -> None:
        """Stop all children and start no more."""
        with self._guard:
            self._stopped.set()
            children = list(self._children)
        stop_groups(children)
