"""How many sites' runs are under way on this host, and whether one more may begin, longest waiting first.

A site that gets no place waits in line, where a run under way takes it in (`hosting`).
"""

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

UNDER_WAY: Final = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
]
#: A run that Dagster calls started but that does not hold its site's lock for so long has no process any more.
WITHOUT_LOCK_SECONDS: Final = 60.0
#: How long after a request its run may not be in Dagster's storage yet.
_REQUESTED_SECONDS: Final = 10.0


class RunSlots:
    """The places for runs that the sensors of all sites share; threads may ask at once."""

    def __init__(self, settings: Settings) -> None:
        """Take the settings."""
        self._settings = settings
        self._guard = threading.Lock()
        self._requested: dict[str, float] = {}
        self._without_lock: dict[str, float] = {}

    def acquire(self, site: str, instance: dg.DagsterInstance) -> bool:
        """Take a place for a run of a site that is about to be requested; without one the site is in line afterwards.

        False, and not in line, when a run of the site has begun since the sensor looked, or has just taken the site in.
        """
        settings, job = self._settings, site_job_name(site)
        slots, _ = run_limit(settings, instance)
        if len(settings.sites) <= slots:
            return True
        with self._guard:
            now = time.monotonic()
            if lock_owner(settings.home / "sites" / site) or instance.get_runs(
                dg.RunsFilter(job_name=job, statuses=UNDER_WAY), limit=1
            ):
                return False
            under_way = self._under_way(instance)
            self._requested = {
                other: at
                for other, at in self._requested.items()
                if other not in under_way and now - at < _REQUESTED_SECONDS
            }
            queue = queued_sites(settings.home, queue_ttl_seconds(settings))
            before = queue.index(site) if site in queue else len(queue)
            if len(under_way | self._requested.keys()) + before >= slots:
                enqueue_site(settings.home, site, queue_ttl_seconds(settings))
                return False
            if site in queue and not dequeue_site(settings.home, site):
                return False
            self._requested[job] = now
        return True

    def _under_way(self, instance: dg.DagsterInstance) -> set[str]:
        """Return the jobs that have a place: not those of sites that left the configuration, nor of processes that are gone."""
        sites = {site_job_name(site): site for site in self._settings.sites}
        now, jobs, without_lock = time.monotonic(), set(), {}
        for run in instance.get_runs(filters=dg.RunsFilter(tags={MODE_TAG: LINGER}, statuses=UNDER_WAY)):
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
