"""The nightly job that deletes old runs in Dagster's storage, and its schedule.

Dagster deletes only a run's rows among its runs and events. The job also deletes the orphaned data of deleted runs: files and
check executions.
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Final

import dagster as dg

from sr_assets.automation.jobs import RUN_CONFIG


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

#: The number of runs per query.
_BATCH: Final = 500
#: The suffixes of a shard's files.
_SHARD: Final = (".db", ".db-wal", ".db-shm")
_RUN_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


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
            _delete_run_data(instance, run_ids)
            deleted += len(run_ids)
            context.log.info("deleted %d runs so far", deleted)
    # Runs deleted by hand, or by a nightly job that was interrupted.
    for run_ids in _find_orphaned_runs(instance):
        _delete_run_data(instance, run_ids)
        orphaned += len(run_ids)
    context.log.info("deleted %d runs, and orphaned data of %d runs deleted earlier", deleted, orphaned)


def _old_runs(instance: dg.DagsterInstance, limits: _Retention) -> Iterator[list[str]]:
    """Yield the runs to delete, in batches; the caller deletes each batch before it requests the next."""
    statuses = list(limits.statuses)
    old = dg.RunsFilter(statuses=statuses, created_before=datetime.now(UTC) - limits.max_age)
    while batch := instance.get_run_records(old, limit=_BATCH, ascending=True):
        yield [record.dagster_run.run_id for record in batch]
    ended = dg.RunsFilter(statuses=statuses)
    while (surplus := instance.get_runs_count(ended) - limits.max_runs) > 0:
        batch = instance.get_run_records(ended, limit=min(surplus, _BATCH), ascending=True)
        yield [record.dagster_run.run_id for record in batch]


def _delete_run_data(instance: dg.DagsterInstance, run_ids: Sequence[str]) -> None:
    """Delete the orphaned data of deleted runs: logs, artifacts, event shards and check executions."""
    folder, shards = Path(instance.storage_directory()), _shards(instance)
    for run_id in run_ids:
        instance.compute_log_manager.delete_logs(prefix=[run_id])
        shutil.rmtree(folder / run_id, ignore_errors=True)
        if shards:
            for suffix in _SHARD:
                (shards / f"{run_id}{suffix}").unlink(missing_ok=True)
    connected, table = _check_executions(instance)
    with connected as connection:
        connection.execute(table.delete().where(table.c.run_id.in_(run_ids)))


def _find_orphaned_runs(instance: dg.DagsterInstance) -> Iterator[list[str]]:
    """Yield, in batches, the deleted runs that have orphaned data."""
    shards = _shards(instance)
    folders = [folder for folder in (Path(instance.storage_directory()), shards) if folder and folder.is_dir()]
    names = [path.name for folder in folders for path in folder.iterdir()]
    seen = {match.group() for name in names if (match := _RUN_ID.match(name))}
    connected, table = _check_executions(instance)
    with connected as connection:
        rows = connection.execute(table.select().with_only_columns(table.c.run_id).distinct()).fetchall()
    # A check that was reported without a run has an empty run id, whose folder would be that of all runs.
    seen |= {run_id for (run_id,) in rows if _RUN_ID.fullmatch(run_id)}
    remaining = iter(sorted(seen))
    while batch := list(islice(remaining, _BATCH)):
        records = instance.get_run_records(dg.RunsFilter(run_ids=batch))
        if deleted := sorted(set(batch) - {record.dagster_run.run_id for record in records}):
            yield deleted


def _shards(instance: dg.DagsterInstance) -> Path | None:
    """Return the directory with a SQLite file per run's events, or None if a database stores them."""
    path_for_shard = getattr(instance.event_log_storage, "path_for_shard", None)
    return Path(path_for_shard("index")).parent if path_for_shard else None


def _check_executions(instance: dg.DagsterInstance) -> tuple[AbstractContextManager[Any], Any]:
    """Return a context manager for a connection to the check executions, and their table.

    Dagster has no public way to delete these rows. Dagster's version is pinned, and tests delete runs
    from each storage.
    """
    from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable

    storage: Any = instance.event_log_storage
    return storage.index_connection(), AssetCheckExecutionsTable


@dg.job(description="Limits the size of Dagster's own storage.", executor_def=dg.in_process_executor, config=RUN_CONFIG)
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
