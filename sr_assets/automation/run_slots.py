"""Run slots: at most `concurrency` site runs on this host, longest-waiting site first."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

import dagster as dg

from sr_assets.adapters.state.lock import lock_owner
from sr_assets.adapters.state.site_queue import dequeue_site, enqueue_site, queue_ttl_seconds, queued_sites
from sr_assets.assets.host_run import run_limit
from sr_assets.assets.specs import site_job_name
from sr_assets.resources import LINGER, MODE_TAG

if TYPE_CHECKING:
    from sr_assets.settings import Settings

ACTIVE_STATUSES: Final = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
]
#: A started run that does not hold its site's lock for this long has lost its process.
WITHOUT_LOCK_SECONDS: Final = 60.0
#: A requested run appears in Dagster's storage within this time.
_REQUESTED_SECONDS: Final = 10.0


class RunSlots:
    """The run slots that the sensors of all sites share; thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._guard = threading.Lock()
        self._requested: dict[str, float] = {}
        self._without_lock: dict[str, float] = {}

    def acquire(self, site: str, instance: dg.DagsterInstance) -> bool:
        """Return whether the sensor may request a run of a site; queue the site if no slot is free.

        Also return False, without queueing the site, if a run of it has started or a host has just dequeued it.
        """
        settings, job = self._settings, site_job_name(site)
        slots, _ = run_limit(settings, instance)
        if len(settings.sites) <= slots:
            return True
        with self._guard:
            now = time.monotonic()
            if lock_owner(settings.home / "sites" / site) or instance.get_runs(
                dg.RunsFilter(job_name=job, statuses=ACTIVE_STATUSES), limit=1
            ):
                return False
            active = self._active_jobs(instance)
            self._requested = {
                other: at
                for other, at in self._requested.items()
                if other not in active and now - at < _REQUESTED_SECONDS
            }
            queue = queued_sites(settings.home, queue_ttl_seconds(settings))
            before = queue.index(site) if site in queue else len(queue)
            if len(active | self._requested.keys()) + before >= slots:
                enqueue_site(settings.home, site, queue_ttl_seconds(settings))
                return False
            if site in queue and not dequeue_site(settings.home, site):
                return False
            self._requested[job] = now
        return True

    def _active_jobs(self, instance: dg.DagsterInstance) -> set[str]:
        """Return the jobs that hold a slot, without jobs of removed sites and runs that lost their process."""
        sites = {site_job_name(site): site for site in self._settings.sites}
        now, jobs, without_lock = time.monotonic(), set(), {}
        for run in instance.get_runs(filters=dg.RunsFilter(tags={MODE_TAG: LINGER}, statuses=ACTIVE_STATUSES)):
            if run.job_name not in sites:
                continue
            folder = self._settings.home / "sites" / sites[run.job_name]
            if run.status is dg.DagsterRunStatus.STARTED and lock_owner(folder) is None:
                without_lock[run.run_id] = self._without_lock.get(run.run_id, now)
                if now - without_lock[run.run_id] > WITHOUT_LOCK_SECONDS:
                    continue
            jobs.add(run.job_name)
        self._without_lock = without_lock
        return jobs
