"""The jobs of the sites, the jobs and schedules of the daily tables and the lakes, and the sites that a process loads."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, Final

import dagster as dg

from sr_assets.adapters.published.queries import unfinished_dates
from sr_assets.assets.specs import site_job_name
from sr_assets.dagster_internals import job_of
from sr_assets.domain.days import date_at, day_of, due_dates
from sr_assets.domain.errors import RunError, SrAssetsError
from sr_assets.settings import Settings
from sr_assets.stages.daily_computation import DailyStage
from sr_assets.stages.lake_filling import is_filling

#: The event log has every event. The console is for our own log lines; Dagster would add a traceback to every failure.
RUN_CONFIG: Final = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}

#: Each run of the platform has one of these tags: the name of its site, or of its job if it is no site's.
SITE_TAG: Final = "sr_assets/site"
JOB_TAG: Final = "sr_assets/job"
#: The job of all lakes.
LAKES: Final = "lakes"

#: The statuses of a run that has a process.
_PROCESS_STATUSES: Final = [dg.DagsterRunStatus[name] for name in ("STARTING", "STARTED", "CANCELING")]

#: Dagster's documented tags of a backfill run over a range of partitions.
FIRST_TAG: Final = "dagster/asset_partition_range_start"
LAST_TAG: Final = "dagster/asset_partition_range_end"


def is_own_run(settings: Settings, run: dg.DagsterRun) -> bool:
    """Return whether this platform started a run; its instance may have other platforms, with other prefixes."""
    site, job = run.tags.get(SITE_TAG), run.tags.get(JOB_TAG)
    return (site is not None and run.job_name == site_job_name(settings, site)) or (
        job is not None and run.job_name == settings.dagster.name(job)
    )


def resolve_job(
    name: str,
    description: str,
    assets: Sequence[dg.AssetsDefinition | dg.AssetSpec],
    resources: Mapping[str, Any],
    tags: Mapping[str, str],
) -> dg.JobDefinition:
    """Return the job that materialises these assets in one process; its runs have these tags.

    The job is resolved among its own assets: Dagster would resolve each job among the assets of all sites. It accepts no
    configuration, whose schema would be most of its snapshot.
    """
    job = dg.define_asset_job(
        name,
        selection=dg.AssetSelection.all(),
        description=description,
        executor_def=dg.in_process_executor,
        config=dg.ConfigMapping(config_fn=lambda _: RUN_CONFIG, config_schema={}),
        tags=tags,
    )
    return job_of(dg.Definitions(assets=assets, jobs=[job], resources=resources), job.name)


def sites_to_load(settings: Settings) -> list[str]:
    """Return the sites whose definitions this process needs.

    Dagster loads the definitions in every run's process, which needs only its own site. The process cannot tell which run it
    executes, so it loads all sites with an active run, or all sites if any other job is active. Other processes load all sites.
    """
    # The code server starts a run's process by multiprocessing, and does not pass the run's id.
    if multiprocessing.parent_process() is None or not os.environ.get("DAGSTER_HOME"):
        return list(settings.sites)
    with dg.DagsterInstance.get() as instance:
        active = instance.get_run_records(dg.RunsFilter(statuses=_PROCESS_STATUSES))
    jobs = {record.dagster_run.job_name for record in active}
    sites = {site_job_name(settings, site): site for site in settings.sites}
    return [sites[job] for job in sorted(jobs)] if jobs and jobs <= sites.keys() else list(settings.sites)


def schedule_status(settings: Settings) -> dg.DefaultScheduleStatus:
    """Return whether a new schedule runs."""
    return dg.DefaultScheduleStatus.RUNNING if settings.dagster.schedules_run else dg.DefaultScheduleStatus.STOPPED


def build_daily_job(
    settings: Settings, stage: DailyStage, asset: dg.AssetsDefinition
) -> dg.UnresolvedAssetJobDefinition:
    """Return the job that computes one or more days of a table."""
    return dg.define_asset_job(
        settings.dagster.name(stage.table.computed),
        selection=[asset],
        description=f"Compute {stage.table.name} for one or more days.",
        executor_def=dg.in_process_executor,
        config=RUN_CONFIG,
        tags={JOB_TAG: stage.table.computed},
    )


def build_daily_schedule(
    settings: Settings, stage: DailyStage, job: dg.UnresolvedAssetJobDefinition, minute: int
) -> dg.ScheduleDefinition:
    """Return the hourly schedule of a table's job; one run computes all due days."""

    @dg.schedule(
        name=settings.dagster.name(f"hourly_{stage.table.computed}"),
        job=job,
        cron_schedule=f"{minute} * * * *",
        execution_timezone="UTC",
        default_status=schedule_status(settings),
    )
    def hourly(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        now_ns = int(context.scheduled_execution_time.timestamp()) * 10**9
        try:
            first, last = due_days(settings, stage, now_ns)
        except SrAssetsError as error:
            return dg.SkipReason(str(error))
        return dg.RunRequest(tags={FIRST_TAG: first.isoformat(), LAST_TAG: last.isoformat()})

    return hourly


def due_days(settings: Settings, stage: DailyStage, now_ns: int) -> tuple[date, date]:
    """Return the first and the last day to compute.

    Raises RunError if no tracked stream has been published yet, or the history is too short to compute a day.
    """
    stage.require_input(settings)
    zone = stage.settings(settings).timezone
    unfinished = unfinished_dates(settings.home, stage.table)
    earliest = stage.earliest_input(settings, now_ns)
    over = [when for when, until_ns in unfinished if when >= earliest and day_of(when, zone).next_ns <= until_ns]
    computed = stage.table.computed_dates(settings.home)
    first, last = due_dates(date_at(now_ns, zone), computed[-1] if computed else None, over)
    if earliest > last:
        raise RunError(
            f"{stage.table.computed}: {stage.input_retention(settings)[1]} is too short to compute {last}; set it to 3d or more"
        )
    # After a pause, the run also records the days that can no longer be computed, once: the next run starts after them.
    return first if computed else max(first, earliest), last


def build_lakes_schedule(settings: Settings, job: dg.JobDefinition) -> dg.ScheduleDefinition:
    """Return the hourly schedule of the lakes' job, which waits for the end of an earlier run."""

    @dg.schedule(
        name=settings.dagster.name("hourly_lakes"),
        job=job,
        cron_schedule="27 * * * *",
        execution_timezone="UTC",
        default_status=schedule_status(settings),
    )
    def hourly() -> dg.RunRequest | dg.SkipReason:
        busy = [stream.label for stream in settings.streams if stream.lake and is_filling(settings, stream)]
        return dg.SkipReason(f"a run fills the lake of {', '.join(busy)}") if busy else dg.RunRequest()

    return hourly
