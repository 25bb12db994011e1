"""Which sites a process that executes a run has to know: Dagster loads the definitions anew in each.

Not here: the definitions (`definitions`), when a run is requested (`sensors`).
"""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING, Final

import dagster as dg

from sr_assets.automation.jobs import site_job_name
from sr_assets.resources import HOSTED, MODE_TAG

if TYPE_CHECKING:
    from sr_assets.settings import Settings

#: What the run of a process that has just been started may be, until it ends.
_STARTED: Final = [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING]


def sites_to_load(settings: Settings) -> list[str]:
    """Return the sites that this process needs: all, but in a run's process those that have a run under way.

    Its own is one of them. All when any other job is under way, which may be this process's.
    """
    everything = list(settings.sites)
    # The code server starts a run's process by multiprocessing, and does not say which run it is of.
    if multiprocessing.parent_process() is None or not os.environ.get("DAGSTER_HOME"):
        return everything
    with dg.DagsterInstance.get() as instance:
        runs = [record.dagster_run for record in instance.get_run_records(dg.RunsFilter(statuses=_STARTED))]
    # A guest is in the process of another site's run.
    jobs = {run.job_name for run in runs if run.tags.get(MODE_TAG) != HOSTED}
    sites = {site_job_name(site): site for site in settings.sites}
    return [sites[job] for job in sorted(jobs)] if jobs and jobs <= sites.keys() else everything
