"""A run that serves more sites than its own: those that wait in line for a run, each by its own job, in a thread.

A process of Dagster's costs seconds and 250 MB before its first line; many busy sites, each with a run of its own, would
starve each other. Here: taking sites in, and ending them with the host. Not here: how many hosts there are (`places`).
"""

from __future__ import annotations

import logging
import math
import resource
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import dagster as dg

from sr_assets.adapters.state.lock import lock_owner
from sr_assets.adapters.state.site_queue import dequeue_site, queued_sites
from sr_assets.automation.run_slots import queue_ttl_seconds, run_limit
from sr_assets.resources import HOSTED, LINGER, MODE_TAG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sr_assets.assets.sites import Hosting
    from sr_assets.settings import Settings

    #: Return the job of a site; its assets ask the hosting whether to end.
    MakeJob = Callable[[Settings, str, Hosting], dg.JobDefinition]

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 1.0
#: A host takes more than its share of the sites, so that those of a host that ends do not wait for the next.
_SHARE: Final = 1.5
#: A host goes on for so many run budgets, its guests for one each: whenever a host ends, all its sites have to wait for the
#: next. Its own site's assets are recorded as it ends, before they are overdue.
_BUDGETS: Final = 6
#: Dagster ends a run after two hours (`max_runtime_seconds`).
_LONGEST_SECONDS: Final = 5_400.0
#: What a guest has open: its state, its connections, Dagster's files of its run.
_OPEN_FILES: Final = 65_536
#: Shorter than this is not worth a run's beginning.
_SHORTEST_SECONDS: Final = 15.0
#: A guest ends after its round; one that takes longer is left to end with the process, as if it were killed.
_LEAVE_SECONDS: Final = 60.0


class HostRun:
    """What a run is given to take in waiting sites while it lingers; `with host.open(…)` begins and ends that."""

    stopping = False

    def __init__(self, settings: Settings, make_job: MakeJob) -> None:
        """Take the settings, and how a guest's job is made."""
        self._settings, self._make_job = settings, make_job
        self._ending = threading.Event()
        self._ends_at = self._served_at = -math.inf
        self._hosts = settings.concurrency
        self._guests: dict[str, threading.Thread] = {}

    @property
    def keep_running(self) -> bool:
        """Whether the run is to go on for its guests, the last of which may come again."""
        lingers_until = self._served_at + self._settings.linger_ns / 1e9
        return time.monotonic() < min(self._ends_at, lingers_until)

    @property
    def sites(self) -> int:
        """How many sites this process serves: its own, and its guests."""
        # A copy: another thread adds guests.
        return 1 + sum(guest.is_alive() for guest in list(self._guests.values()))

    @contextmanager
    def open(self, context: dg.AssetExecutionContext) -> Iterator[None]:
        """Take in sites until the end of `with`, and see them end; only a run that lingers does."""
        settings = self._settings
        self._hosts, _ = run_limit(settings, context.instance)
        if context.run.tags.get(MODE_TAG) != LINGER or len(settings.sites) <= self._hosts:
            yield
            return
        self._ending.clear()
        budget_seconds = settings.run_budget_ns / 1e9
        self._ends_at = time.monotonic() + min(_BUDGETS * budget_seconds, max(_LONGEST_SECONDS, budget_seconds))
        _allow_open_files()
        instance = _open_beside(context.instance)
        looking = threading.Thread(target=self._look, args=(context.run.run_id, instance), name="hosting", daemon=True)
        looking.start()
        try:
            yield
        finally:
            self._ending.set()
            deadline = time.monotonic() + _LEAVE_SECONDS
            looking.join(_LEAVE_SECONDS)
            for guest in list(self._guests.values()):
                guest.join(max(0.0, deadline - time.monotonic()))
            self._guests.clear()
            instance.dispose()

    def _look(self, run_id: str, instance: dg.DagsterInstance) -> None:
        while not self._ending.wait(_LOOK_SECONDS) and self._ends_at - time.monotonic() > _SHORTEST_SECONDS:
            if self.sites > 1:
                self._served_at = time.monotonic()
            try:
                self._start_next_queued(run_id, instance)
            except (OSError, RuntimeError) as error:  # too many open files or threads, which some guest's end frees
                logger.warning("run %s takes no other site in for now: %s", run_id, error)

    def _start_next_queued(self, run_id: str, instance: dg.DagsterInstance) -> None:
        """Take in the site that waits longest: one at a time, so that hosts which look at the same line share it."""
        settings = self._settings
        if self.sites >= math.ceil(_SHARE * len(settings.sites) / self._hosts):
            return
        line = queued_sites(settings.home, queue_ttl_seconds(settings))
        free = (site for site in line if site in settings.sites and not self._serves(site))
        site = next((site for site in free if lock_owner(settings.home / "sites" / site) is None), None)
        if site is not None and dequeue_site(settings.home, site):
            guest = threading.Thread(
                target=self._serve, args=(site, run_id, instance), name=f"guest {site}", daemon=True
            )
            guest.start()
            self._guests[site] = guest

    def _serves(self, site: str) -> bool:
        guest = self._guests.get(site)
        return guest is not None and guest.is_alive()

    def _serve(self, site: str, run_id: str, instance: dg.DagsterInstance) -> None:
        try:
            job = self._make_job(self._settings, site, _HostedRun(self))
            tags = {MODE_TAG: HOSTED, "sr_assets/host": run_id}
            job.execute_in_process(instance=instance, tags=tags, raise_on_error=False)
        except Exception as error:  # noqa: BLE001  Dagster passes on every exception of its database
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            logger.warning("site %s was not served by run %s: %s", site, run_id, reason)

    @property
    def ending(self) -> bool:
        """Whether the host's run is about to end, and its guests with it."""
        return self._ending.is_set()


class _HostedRun:
    """What a guest is given in a host's place: it takes nobody in, and ends when its host does."""

    keep_running = False

    def __init__(self, host: HostRun) -> None:
        self._host = host

    @property
    def sites(self) -> int:
        return self._host.sites

    @property
    def stopping(self) -> bool:
        return self._host.ending

    @contextmanager
    def open(self, _: dg.AssetExecutionContext) -> Iterator[None]:
        yield


def _allow_open_files() -> None:
    """Let this process have as many files open as the system allows it, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _open_beside(instance: dg.DagsterInstance) -> dg.DagsterInstance:
    """Open the instance once more for runs in threads, without the two things that are the process's and not a thread's.

    Dagster redirects the process's output into each run's compute log; the guests' lines are in their host's. And at each
    run's beginning it configures Python's logging anew, under locks that a run which logs takes in the other order: each
    waits for the other for ever. No public setting turns that off.
    """
    from dagster._core.instance.ref import InstanceRef

    nothing = {"module": "dagster._core.storage.noop_compute_log_manager", "class": "NoOpComputeLogManager"}
    reference = InstanceRef.from_dir(instance.root_directory, overrides={"compute_logs": nothing})
    beside = dg.DagsterInstance.from_ref(reference)
    beside.get_handlers = lambda: [beside.get_event_log_handler()]  # type: ignore[method-assign]
    return beside
