"""The jobs: a site's work, and the nightly removal of old runs with its schedule.

Not here: when a site's job runs (`sensors`), what it does (`assets`).
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import dagster as dg

from sr_assets.settings import asset_name

#: The event log has all that happens; the console is for our own lines: Dagster would add a trace to every failure.
_RUN_CONFIG: Final = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
_KEEP_RUNS: Final = timedelta(days=7)
_KEEP_FAILED_RUNS: Final = timedelta(days=30)
_DELETED_A_NIGHT: Final = 5_000


def site_job_name(site: str) -> str:
    """Return the name of a site's job."""
    return f"{asset_name(site)}_replication"


def build_site_job(
    site: str, assets: Sequence[dg.AssetsDefinition | dg.AssetSpec], resources: Mapping[str, Any]
) -> dg.JobDefinition:
    """Return the job that brings all of a site's assets up to date in one process; `assets` are the site's alone.

    It is resolved here, among them: resolved by Dagster among the assets of all sites each job would look through all of
    them. It takes no configuration, the description of which would be most of its snapshot.
    """
    job = dg.define_asset_job(
        site_job_name(site),
        selection=dg.AssetSelection.all(),
        description=f"Replicate, track and advise for every stream of site {site}.",
        executor_def=dg.in_process_executor,
        config=dg.ConfigMapping(config_fn=lambda _: _RUN_CONFIG, config_schema={}),
    )
    return dg.Definitions(assets=assets, jobs=[job], resources=resources).resolve_job_def(job.name)


@dg.op(description="Deletes runs that ended a week ago (failed ones: a month ago), oldest first.")
def delete_old_runs(context: dg.OpExecutionContext) -> None:
    """Delete old runs with their events; no data of ours is in them."""
    deleted = 0
    for statuses, keep in (
        ([dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.CANCELED], _KEEP_RUNS),
        ([dg.DagsterRunStatus.FAILURE], _KEEP_FAILED_RUNS),
    ):
        filters = dg.RunsFilter(statuses=statuses, created_before=datetime.now(UTC) - keep)
        for record in context.instance.get_run_records(filters=filters, limit=_DELETED_A_NIGHT, ascending=True):
            context.instance.delete_run(record.dagster_run.run_id)
            deleted += 1
    context.log.info("deleted %d runs", deleted)


@dg.job(description="Keeps Dagster's own storage small.", executor_def=dg.in_process_executor)
def retention() -> None:
    """Delete old runs; ticks have their own retention in dagster.yaml."""
    delete_old_runs()


def build_retention_schedule() -> dg.ScheduleDefinition:
    """Return the nightly schedule of the retention job."""
    return dg.ScheduleDefinition(
        name="nightly_retention",
        job=retention,
        cron_schedule="17 3 * * *",
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.RUNNING,
    )
