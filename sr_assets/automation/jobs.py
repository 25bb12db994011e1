"""The job of each site, and the sites whose definitions a process loads."""

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import dagster as dg

from sr_assets.assets.specs import site_job_name
from sr_assets.settings import Settings

#: The event log has every event. The console is for our own log lines; Dagster would add a traceback to every failure.
_RUN_CONFIG: Final = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}

#: The statuses of a run that has a process.
_PROCESS_STATUSES: Final = [
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def build_site_job(
    site: str, assets: Sequence[dg.AssetsDefinition | dg.AssetSpec], resources: Mapping[str, Any]
) -> dg.JobDefinition:
    """Return the job that materialises all assets of a site in one process; `assets` are the site's own."""
    return resolve_job(
        site_job_name(site), f"Replicate, track and advise for every stream of site {site}.", assets, resources
    )


def resolve_job(
    name: str, description: str, assets: Sequence[dg.AssetsDefinition | dg.AssetSpec], resources: Mapping[str, Any]
) -> dg.JobDefinition:
    """Return the job that materialises these assets in one process.

    The job is resolved among its own assets: Dagster would resolve each job among the assets of all sites. It accepts no
    configuration, whose schema would be most of its snapshot.
    """
    job = dg.define_asset_job(
        name,
        selection=dg.AssetSelection.all(),
        description=description,
        executor_def=dg.in_process_executor,
        config=dg.ConfigMapping(config_fn=lambda _: _RUN_CONFIG, config_schema={}),
    )
    return dg.Definitions(assets=assets, jobs=[job], resources=resources).resolve_job_def(job.name)


def sites_to_load(settings: Settings) -> list[str]:
    """Return the sites whose definitions this process needs.

    Dagster loads the definitions in every run's process, which needs only its own site. The process cannot tell which run it
    executes, so it loads all sites with an active run, or all sites if any other job is active. Other processes load all sites.
    """
    # The code server starts a run's process by multiprocessing, and does not pass the run's id.
    if multiprocessing.parent_process() is None or not os.environ.get("DAGSTER_HOME"):
        return list(settings.sites)
    with dg.DagsterInstance.get() as instance:
        jobs = {run.job_name for run in instance.get_runs(dg.RunsFilter(statuses=_PROCESS_STATUSES))}
    sites = {site_job_name(site): site for site in settings.sites}
    return [sites[job] for job in sorted(jobs)] if jobs and jobs <= sites.keys() else list(settings.sites)
