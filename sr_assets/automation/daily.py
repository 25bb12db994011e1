"""Jobs and schedules of the daily tables: hourly for the current day, and a last time for each completed day."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import dagster as dg

from sr_assets.adapters.published.queries import unfinished_dates
from sr_assets.domain.days import date_at, day_of, due_dates
from sr_assets.domain.errors import RunError, SrAssetsError

if TYPE_CHECKING:
    from datetime import date

    from sr_assets.settings import Settings
    from sr_assets.stages.daily import DailyStage

#: Dagster's documented tags of a backfill run over a range of partitions.
FIRST_TAG: Final = "dagster/asset_partition_range_start"
LAST_TAG: Final = "dagster/asset_partition_range_end"


def build_daily_job(stage: DailyStage, asset: dg.AssetsDefinition) -> dg.UnresolvedAssetJobDefinition:
    """Return the job that computes one or more days of a table."""
    return dg.define_asset_job(
        stage.table.computed,
        selection=[asset],
        description=f"Compute {stage.table.name} for one or more days.",
        executor_def=dg.in_process_executor,
    )


def build_daily_schedule(
    settings: Settings, stage: DailyStage, job: dg.UnresolvedAssetJobDefinition, minute: int
) -> dg.ScheduleDefinition:
    """Return the hourly schedule of a table's job; one run computes all due days."""

    @dg.schedule(
        name=f"hourly_{stage.table.computed}",
        job=job,
        cron_schedule=f"{minute} * * * *",
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.RUNNING,
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

    Raises RunError if no site has published yet, or the history is too short to compute a day.
    """
    zone = stage.settings(settings).timezone
    unfinished = unfinished_dates(settings.home, stage.table)
    over = [when for when, until_ns in unfinished if day_of(when, zone).next_ns <= until_ns]
    computed = stage.table.computed_dates(settings.home)
    first, last = due_dates(date_at(now_ns, zone), computed[-1] if computed else None, over)
    earliest = stage.first_date(settings, now_ns)
    if earliest > last:
        raise RunError(
            f"{stage.table.computed}: {stage.input_retention(settings)[1]} is too short to compute {last}; set it to 3d or more"
        )
    return max(first, earliest), last
