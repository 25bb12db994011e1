"""Host runs: a lingering run that also serves queued sites, each in a thread, and records their assets as its own events.

A run's process needs half a second of CPU and 120 MB before it does any work, so many busy sites with a process each would starve
each other. `docs/decisions/0019-many-sites-in-a-run.md` explains the run model.
"""

import logging
import math
import resource
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from queue import SimpleQueue
from typing import Final

import dagster as dg

from sr_assets.adapters import times
from sr_assets.adapters.run_failures import RunFailure, forget_run_failure, note_run_failure, read_run_failures
from sr_assets.adapters.state.lock import lock_owner
from sr_assets.adapters.state.site_queue import dequeue_site, queue_ttl_seconds, queued_sites
from sr_assets.adapters.state.status_file import streams_without_error
from sr_assets.adapters.threads import BackgroundThread
from sr_assets.assets.specs import site_job_name
from sr_assets.dagster_internals import concurrent_runs
from sr_assets.resources import NOTED
from sr_assets.settings import Settings

Result = dg.MaterializeResult[None] | dg.AssetCheckResult | dg.AssetMaterialization | dg.AssetCheckEvaluation
#: Run a queued site; yields the events to record, raises dg.Failure.
Serve = Callable[[str, "HostedRun"], Iterator[Result]]
logger = logging.getLogger(__name__)

_PICK_UP_SECONDS: Final = 1.0
#: A host run accepts more than its share of the sites, so that the sites of a host that ends move to another host.
_SHARE: Final = 1.5
#: The run budgets that a host run lasts; a hosted run lasts one. When a host ends, all its sites wait for the next run.
_BUDGETS: Final = 6
#: Dagster ends a run after two hours (`max_runtime_seconds`).
_LONGEST_SECONDS: Final = 5_400.0
#: A hosted site has its state and its connections open.
_OPEN_FILES: Final = 65_536
#: A hosted run that could not last this long is not worth its start.
_SHORTEST_SECONDS: Final = 15.0
#: Dagster records tens of events a second at best, and 25 busy sites may have more: the host's own site must not wait.
_RECORD_SECONDS: Final = 0.25
#: A hosted run stops after its current round. A round that takes longer is killed with the process.
_STOP_SECONDS: Final = 60.0


def run_limit(settings: Settings, instance: dg.DagsterInstance) -> tuple[int, str]:
    """Return how many sites may have a run at a time, and the setting that limits it.

    A run beyond the instance's limit would wait in Dagster's queue and serve no site; a queued site is served by a host.
    """
    instance_limit = concurrent_runs(instance)
    if 0 <= instance_limit < settings.concurrency:
        return max(1, instance_limit), "`max_concurrent_runs` of the Dagster instance"
    return settings.concurrency, "`concurrency`"


class HostRun:
    """The process of a site's run; while the run lingers, it picks up queued sites if there are more sites than run slots."""

    stopping = False

    def __init__(self, settings: Settings, run_id: str, run_limit: int, serve: Serve, log: logging.Logger) -> None:
        self._settings, self._run_id, self._run_limit = settings, run_id, run_limit
        self._serve, self._log = serve, log
        self._stop = threading.Event()
        self._ends_at = self._served_at = -math.inf
        self._hosted: dict[str, threading.Thread] = {}
        self._results: SimpleQueue[Result] = SimpleQueue()
        self._failures: SimpleQueue[str] = SimpleQueue()

    @property
    def keep_running(self) -> bool:
        """Whether to continue for the hosted sites, which may be queued again within `linger`."""
        lingers_until = self._served_at + self._settings.linger_ns / 1e9
        return times.monotonic() < min(self._ends_at, lingers_until)

    @property
    def sites_served(self) -> int:
        """The number of sites that this process serves: its own and the hosted ones."""
        # A copy: another thread adds hosted runs.
        return 1 + sum(thread.is_alive() for thread in list(self._hosted.values()))

    @property
    def stop_requested(self) -> bool:
        """Whether the host run is about to end."""
        return self._stop.is_set()

    @contextmanager
    def open(self, *, lingers: bool) -> Iterator[None]:
        """Pick up queued sites within the block; its end stops the hosted runs."""
        if not lingers or len(self._settings.sites) <= self._run_limit:
            yield
            return
        budget_seconds = self._settings.run_budget_ns / 1e9
        self._ends_at = times.monotonic() + min(_BUDGETS * budget_seconds, max(_LONGEST_SECONDS, budget_seconds))
        _raise_open_file_limit()
        picking_up = BackgroundThread(f"host run {self._run_id}", self._pick_up)
        picking_up.start()
        try:
            yield
        finally:
            self._stop.set()
            deadline = times.monotonic() + _STOP_SECONDS
            picking_up.stop(_STOP_SECONDS)
            for thread in list(self._hosted.values()):
                thread.join(max(0.0, deadline - times.monotonic()))

    def results(self, *, ended: bool = False) -> Iterator[Result]:
        """Yield waiting events of the hosted sites, and log their failures in the run.

        Before the run has `ended`, stop after a quarter of a second: the work of the host's own site waits meanwhile.
        """
        until = math.inf if ended else times.monotonic() + _RECORD_SECONDS
        while not self._failures.empty():
            self._log.error(self._failures.get())
        while not self._results.empty() and times.monotonic() < until:
            yield self._results.get()

    def _pick_up(self) -> Generator[float]:
        while self._ends_at - times.monotonic() > _SHORTEST_SECONDS:
            yield _PICK_UP_SECONDS
            if self.sites_served > 1:
                self._served_at = times.monotonic()
            self._start_next_queued()

    def _start_next_queued(self) -> None:
        """Serve the longest-waiting site: one at a time, so that the hosts share the queue."""
        home, sites = self._settings.home, self._settings.sites
        if self.sites_served >= math.ceil(_SHARE * len(sites) / self._run_limit):
            return
        queued = (site for site in queued_sites(home, queue_ttl_seconds(self._settings)) if site in sites)
        idle = (site for site in queued if not self._is_hosted(site) and lock_owner(home / "sites" / site) is None)
        site = next(idle, None)
        if site is not None and dequeue_site(home, site):
            self._hosted[site] = threading.Thread(
                target=self._run_hosted, args=(site,), name=f"site {site}", daemon=True
            )
            # It may end before the next look at it.
            self._served_at = times.monotonic()
            self._hosted[site].start()

    def _is_hosted(self, site: str) -> bool:
        thread = self._hosted.get(site)
        return thread is not None and thread.is_alive()

    def _run_hosted(self, site: str) -> None:
        try:
            for result in self._serve(site, HostedRun(self)):
                self._results.put(result)
        except dg.Failure as failure:
            reason, noted = failure.description or "the run failed", bool(failure.metadata[NOTED].value)
            self._record_failure(site, reason, noted=noted)
        except Exception as error:
            # Dagster passes on every exception of its database.
            logger.exception("%s: hosted run in run %s failed", site, self._run_id)
            self._record_failure(site, str(error).partition("\n")[0] or type(error).__name__, noted=False)
        else:
            with suppress(OSError):  # a full disk: the next run of the site forgets it
                forget_run_failure(self._settings.home, site_job_name(self._settings, site))

    def _record_failure(self, site: str, reason: str, *, noted: bool) -> None:
        """Record why a site failed: in the host run's events, and for `notify` unless the site's state has the reason."""
        logger.error("%s: hosted run in run %s failed: %s", site, self._run_id, reason)
        self._failures.put(f"hosted site {site} failed: {reason}")
        home, job = self._settings.home, site_job_name(self._settings, site)
        streams = streams_without_error(home, self._settings.sites[site])
        if streams and not noted:
            earlier = read_run_failures(home).get(job)
            since_ns = earlier.since_ns if earlier else times.time_ns()
            with suppress(OSError):  # a full disk
                note_run_failure(home, RunFailure(job, self._run_id, site, streams, reason, since_ns))


class HostedRun:
    """A queued site's run in a thread of a host run: it hosts no site and stops with its host."""

    keep_running = False

    def __init__(self, host: HostRun) -> None:
        self._host = host

    @property
    def sites_served(self) -> int:
        """The number of sites that this process serves."""
        return self._host.sites_served

    @property
    def stopping(self) -> bool:
        """Whether the host run is about to end."""
        return self._host.stop_requested

    def open(self, *, lingers: bool) -> AbstractContextManager[None]:  # noqa: ARG002  as a host run
        """Do nothing."""
        return nullcontext()

    def results(self, *, ended: bool = False) -> Iterator[Result]:  # noqa: ARG002  as a host run
        """Return no events."""
        return iter(())


def _raise_open_file_limit() -> None:
    """Raise this process's limit of open files as far as the system allows, at most to `_OPEN_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
