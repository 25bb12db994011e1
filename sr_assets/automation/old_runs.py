"""The nightly removal of old runs, with all that Dagster's storage has of them: its job and schedule.

Here: which runs are old. Not here: what is left of a run that Dagster has deleted (`leftovers`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import dagster as dg

from sr_assets.automation.orphaned_runs import BATCH, delete_run_data, find_orphaned_runs


@dataclass(frozen=True, slots=True)
class _Kept:
    """How long runs that ended in one of these ways are kept, and how many of them at most."""

    statuses: tuple[dg.DagsterRunStatus, ...]
    longest: timedelta
    most: int


_KEPT: Final = (
    _Kept((dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.CANCELED), timedelta(days=7), 5_000),
    _Kept((dg.DagsterRunStatus.FAILURE,), timedelta(days=30), 1_000),
)


@dg.op(
    description=(
        "Deletes ended runs that were created more than 7 days ago (failed ones: 30 days), and all but the newest 5,000"
        " (failed ones: 1,000)."
    )
)
def delete_old_runs(context: dg.OpExecutionContext) -> None:
    """Delete old runs, oldest first, with all that is left of these and of earlier ones; no data of ours is in them."""
    instance, deleted, left_over = context.instance, 0, 0
    for kept in _KEPT:
        for run_ids in _old_runs(instance, kept):
            for run_id in run_ids:
                instance.delete_run(run_id)
            delete_run_data(instance, run_ids)
            deleted += len(run_ids)
            context.log.info("deleted %d runs so far", deleted)
    # Those that were deleted by hand, or before a night's job was ended.
    for run_ids in find_orphaned_runs(instance):
        delete_run_data(instance, run_ids)
        left_over += len(run_ids)
    context.log.info("deleted %d runs, and what was left of %d that had been deleted before", deleted, left_over)


def _old_runs(instance: dg.DagsterInstance, kept: _Kept) -> Iterator[list[str]]:
    """Yield the runs to delete, in batches; those that were yielded have to be deleted before the next batch is taken."""
    statuses = list(kept.statuses)
    old = dg.RunsFilter(statuses=statuses, created_before=datetime.now(UTC) - kept.longest)
    while batch := instance.get_run_records(old, limit=BATCH, ascending=True):
        yield [record.dagster_run.run_id for record in batch]
    ended = dg.RunsFilter(statuses=statuses)
    while (surplus := instance.get_runs_count(ended) - kept.most) > 0:
        batch = instance.get_run_records(ended, limit=min(surplus, BATCH), ascending=True)
        yield [record.dagster_run.run_id for record in batch]


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
