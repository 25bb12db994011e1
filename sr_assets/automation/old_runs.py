"""The nightly job that deletes old runs and their data in Dagster's storage, and its schedule."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import dagster as dg

from sr_assets.automation.orphaned_runs import BATCH, delete_run_data, find_orphaned_runs


@dataclass(frozen=True, slots=True)
class _Retention:
    """The maximum age and number of retained runs with one of these statuses."""

    statuses: tuple[dg.DagsterRunStatus, ...]
    max_age: timedelta
    max_runs: int


_RETENTIONS: Final = (
    _Retention((dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.CANCELED), timedelta(days=7), 5_000),
    _Retention((dg.DagsterRunStatus.FAILURE,), timedelta(days=30), 1_000),
)


@dg.op(
    description=(
        "Deletes ended runs older than 7 days (failed runs: 30 days), and all but the newest 5,000 (failed runs: 1,000)."
    )
)
def delete_old_runs(context: dg.OpExecutionContext) -> None:
    """Delete old runs, oldest first, with their data and the orphaned data of runs deleted earlier; no fleet data."""
    instance, deleted, orphaned = context.instance, 0, 0
    for limits in _RETENTIONS:
        for run_ids in _old_runs(instance, limits):
            for run_id in run_ids:
                instance.delete_run(run_id)
            delete_run_data(instance, run_ids)
            deleted += len(run_ids)
            context.log.info("deleted %d runs so far", deleted)
    # Runs deleted by hand, or by a nightly job that was interrupted.
    for run_ids in find_orphaned_runs(instance):
        delete_run_data(instance, run_ids)
        orphaned += len(run_ids)
    context.log.info("deleted %d runs, and orphaned data of %d runs deleted earlier", deleted, orphaned)


def _old_runs(instance: dg.DagsterInstance, limits: _Retention) -> Iterator[list[str]]:
    """Yield the runs to delete, in batches; the caller deletes each batch before it requests the next."""
    statuses = list(limits.statuses)
    old = dg.RunsFilter(statuses=statuses, created_before=datetime.now(UTC) - limits.max_age)
    while batch := instance.get_run_records(old, limit=BATCH, ascending=True):
        yield [record.dagster_run.run_id for record in batch]
    ended = dg.RunsFilter(statuses=statuses)
    while (surplus := instance.get_runs_count(ended) - limits.max_runs) > 0:
        batch = instance.get_run_records(ended, limit=min(surplus, BATCH), ascending=True)
        yield [record.dagster_run.run_id for record in batch]


@dg.job(description="Limits the size of Dagster's own storage.", executor_def=dg.in_process_executor)
def retention() -> None:
    """Delete old runs; dagster.yaml limits old ticks."""
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
