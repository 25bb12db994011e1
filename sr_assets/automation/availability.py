"""When the daily availability is computed: each hour today's, and earlier days once they are over everywhere.

Not here: computing it (`assets.availability`), which days are due (`domain.days`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import dagster as dg

from sr_assets.adapters.published.availability import computed_dates
from sr_assets.adapters.published.availability_queries import unfinished_dates
from sr_assets.domain.days import date_at, day_of, due_dates
from sr_assets.domain.errors import RunError

if TYPE_CHECKING:
    from datetime import date

    from sr_assets.settings import Settings

#: Dagster's tags of a run over several partitions, as its documentation of backfills names them.
FIRST_TAG: Final = "dagster/asset_partition_range_start"
LAST_TAG: Final = "dagster/asset_partition_range_end"


def build_availability_job(asset: dg.AssetsDefinition) -> dg.UnresolvedAssetJobDefinition:
    """Return the job that computes days."""
    return dg.define_asset_job(
        "availability",
        selection=[asset],
        description="Compute how long each node was up, for one or more days.",
        executor_def=dg.in_process_executor,
    )


def build_availability_schedule(settings: Settings, job: dg.UnresolvedAssetJobDefinition) -> dg.ScheduleDefinition:
    """Return the hourly schedule of the job; one run computes all days that are due."""

    @dg.schedule(
        name="hourly_availability",
        job=job,
        cron_schedule="7 * * * *",
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.RUNNING,
    )
    def hourly_availability(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        now_ns = int(context.scheduled_execution_time.timestamp()) * 10**9
        try:
            first, last = due_days(settings, now_ns)
        except RunError as error:
            return dg.SkipReason(str(error))
        return dg.RunRequest(tags={FIRST_TAG: first.isoformat(), LAST_TAG: last.isoformat()})

    return hourly_availability


def due_days(settings: Settings, now_ns: int) -> tuple[date, date]:
    """Return the first and the last day that have to be computed; raises RunError when nothing was published yet."""
    zone = settings.availability_timezone
    unfinished = unfinished_dates(settings.home)
    over = [when for when, watermark_ns in unfinished if day_of(when, zone).next_ns <= watermark_ns]
    computed = computed_dates(settings.home)
    return due_dates(date_at(now_ns, zone), computed[-1] if computed else None, over)
