"""The nightly job that deletes old runs of this platform in Dagster's storage, and its schedule.

The instance may also serve others. The job touches only runs with a tag of this platform, and events and check results of
its assets. Dagster deletes only a run's rows among its runs and events; the job also deletes the run's files and check
results, and old events and check results that belong to no run.
"""

import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import dagster as dg
from dagster_shared.serdes import deserialize_value

from sr_assets.adapters import times
from sr_assets.automation.jobs import JOB_TAG, RUN_CONFIG, SITE_TAG
from sr_assets.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Connection, Table

JOB: Final = "retention"
#: The age from which events and check results without a run are deleted, except the newest of each asset and check.
_RUNLESS_AGE: Final = timedelta(days=30)
#: The number of runs or rows per statement.
_BATCH: Final = 500
#: The suffixes of a shard's files.
_SHARD: Final = (".db", ".db-wal", ".db-shm")
_RUN_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_NO_RUN: Final = ""


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


def owns_instance(settings: Settings) -> bool:
    """Return whether the Dagster instance of this process is `<home>/dagster` or has the settings that we wrote."""
    folder = os.environ.get("DAGSTER_HOME")
    if not folder:
        return False
    if Path(folder).absolute() == (settings.home / "dagster").absolute():
        return True
    ours = files("sr_assets").joinpath("dagster.yaml").read_text(encoding="utf-8").splitlines()
    try:
        return (Path(folder) / "dagster.yaml").read_text(encoding="utf-8").startswith(ours[0])
    except (OSError, ValueError):
        return False


def build_retention(
    settings: Settings, assets: Iterable[dg.AssetsDefinition | dg.AssetSpec], jobs: Iterable[str]
) -> tuple[dg.JobDefinition, dg.ScheduleDefinition]:
    """Return the nightly job and its schedule, which runs unless another owner's instance is in use.

    `assets` and `jobs` are the platform's.
    """
    owned = owns_instance(settings)
    # Runs of earlier versions have no tag.
    job = settings.dagster.name(JOB)
    untagged = frozenset([*jobs, job]) if owned else frozenset()
    keys = frozenset(
        key for asset in assets for key in (asset.keys if isinstance(asset, dg.AssetsDefinition) else [asset.key])
    )

    @dg.op(
        name=settings.dagster.name("delete_old_runs"),
        description=(
            "Deletes ended runs of this platform older than 7 days (failed runs: 30 days), and all but the newest 5,000"
            " (failed runs: 1,000). The newest materialization of each asset and partition stays."
        ),
    )
    def delete_old_runs(context: dg.OpExecutionContext) -> None:
        context.log.info("%s", delete_old_data(context.instance, keys, untagged))

    @dg.job(
        name=job,
        description="Limits the size of Dagster's own storage.",
        executor_def=dg.in_process_executor,
        config=RUN_CONFIG,
        tags={JOB_TAG: JOB},
    )
    def retention() -> None:
        delete_old_runs()

    runs = owned if settings.run_retention is None else settings.run_retention
    return retention, dg.ScheduleDefinition(
        name=settings.dagster.name("nightly_retention"),
        job=retention,
        cron_schedule="17 3 * * *",
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.RUNNING if runs else dg.DefaultScheduleStatus.STOPPED,
    )


def delete_old_data(
    instance: dg.DagsterInstance, assets: Collection[dg.AssetKey], untagged: Collection[str] = ()
) -> str:
    """Delete old runs of this platform with their data, and old events of its assets without a run; return a summary.

    `untagged` are jobs whose runs are the platform's even without its tag. Fleet data is not touched.
    """
    deleted, kept = 0, _newest_materializations(instance)
    for limits in _RETENTIONS:
        for filters in _platform_runs(instance, untagged):
            old = [run_id for run_id in _old_runs(instance, limits, filters) if run_id not in kept]
            for run_id in old:
                _delete_run(instance, run_id)
            deleted += len(old)
    # Runs deleted by hand, or by a nightly job that was interrupted.
    orphaned = _orphaned_runs(instance, assets)
    for run_id in orphaned:
        _delete_files(instance, run_id)
    _delete_checks(instance, orphaned)
    runless = _delete_runless(instance, assets)
    return (
        f"deleted {deleted} runs, orphaned data of {len(orphaned)} runs deleted earlier,"
        f" and {runless} events and check results without a run"
    )


def _platform_runs(instance: dg.DagsterInstance, untagged: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the filters that select the platform's runs."""
    for tag, values in instance.get_run_tags([SITE_TAG, JOB_TAG]):
        yield {"tags": {tag: sorted(values)}}
    for job in sorted(untagged):
        yield {"job_name": job}


def _old_runs(instance: dg.DagsterInstance, limits: _Retention, filters: dict[str, Any]) -> list[str]:
    """Return the ids of selected runs that are too old or too many, oldest first."""
    ended = {"statuses": list(limits.statuses), **filters}
    before = times.utc_now() - limits.max_age
    old = instance.get_run_ids(dg.RunsFilter(created_before=before, **ended))
    surplus = instance.get_run_ids(dg.RunsFilter(**ended))[limits.max_runs :]
    return list(dict.fromkeys([*surplus, *old]))[::-1]


def _newest_materializations(instance: dg.DagsterInstance) -> set[str]:
    """Return the runs that materialized an asset, or one of its partitions, last."""
    import sqlalchemy as sa

    events = _events()
    newest = (
        sa.select(sa.func.max(events.c.id))
        .where(events.c.dagster_event_type == dg.DagsterEventType.ASSET_MATERIALIZATION.value)
        .group_by(events.c.asset_key, events.c.partition)
    )
    with _index(instance) as connection:
        return {row.run_id for row in connection.execute(sa.select(events.c.run_id).where(events.c.id.in_(newest)))}


def _delete_run(instance: dg.DagsterInstance, run_id: str) -> None:
    """Delete a run; its check results last, because they tell a later job of an interrupted deletion."""
    instance.delete_run(run_id)
    _delete_files(instance, run_id)
    _delete_checks(instance, [run_id])


def _delete_files(instance: dg.DagsterInstance, run_id: str) -> None:
    """Delete a run's logs, artifacts and event shard."""
    if not _RUN_ID.fullmatch(run_id):
        # The path of a run without an id would be the folder of all runs.
        raise ValueError(f"{run_id!r} is not the id of a run")
    instance.compute_log_manager.delete_logs(prefix=[run_id])
    shutil.rmtree(Path(instance.storage_directory()) / run_id, ignore_errors=True)
    if shards := _shards(instance):
        for suffix in _SHARD:
            (shards / f"{run_id}{suffix}").unlink(missing_ok=True)


def _delete_checks(instance: dg.DagsterInstance, run_ids: Sequence[str]) -> None:
    table = _checks()
    with _index(instance) as connection:
        for begin in range(0, len(run_ids), _BATCH):
            connection.execute(table.delete().where(table.c.run_id.in_(run_ids[begin : begin + _BATCH])))


def _orphaned_runs(instance: dg.DagsterInstance, assets: Collection[dg.AssetKey]) -> list[str]:
    """Return the deleted runs of which check results of these assets remain; nothing else names the owner of a deleted run."""
    import sqlalchemy as sa

    table, names = _checks(), {key.to_string() for key in assets}
    with _index(instance) as connection:
        rows = connection.execute(sa.select(table.c.run_id, table.c.asset_key).distinct()).fetchall()
    seen = sorted({run_id for run_id, asset in rows if asset in names and _RUN_ID.fullmatch(run_id or "")})
    orphaned = []
    for begin in range(0, len(seen), _BATCH):
        batch = seen[begin : begin + _BATCH]
        existing = {*instance.get_run_ids(dg.RunsFilter(run_ids=batch))}
        orphaned += [run_id for run_id in batch if run_id not in existing]
    return orphaned


def _delete_runless(instance: dg.DagsterInstance, assets: Collection[dg.AssetKey]) -> int:
    """Delete old events and check results without a run, except the newest of each asset and check; return their number."""
    import sqlalchemy as sa

    events, checks, before = _events(), _checks(), times.utc_now().replace(tzinfo=None) - _RUNLESS_AGE
    names, storage = {key.to_string(): key for key in assets}, instance.event_log_storage
    query = sa.select(events.c.id, events.c.timestamp, events.c.event).where(events.c.run_id == _NO_RUN)
    deleted = 0
    # SQLite has the events twice: in their shard and in the index.
    for opened in (storage.run_connection(_NO_RUN), _index(instance)):  # type: ignore[attr-defined]
        with opened as connection:
            rows = connection.execute(query.order_by(events.c.id.desc())).fetchall()
            identified = [(row.id, row.timestamp, _subject(row.event)) for row in rows]
            old = _outdated([(*row, row[2][0] in assets) for row in identified], before)
            _delete_rows(connection, events, old)
            # In another storage both connections reach the same rows.
            deleted = max(deleted, len(old))
    query = sa.select(checks.c.id, checks.c.create_timestamp, checks.c.asset_key, checks.c.check_name)
    with _index(instance) as connection:
        rows = connection.execute(query.where(checks.c.run_id == _NO_RUN).order_by(checks.c.id.desc())).fetchall()
        old = _outdated([(row[0], row[1], row[2:], row.asset_key in names) for row in rows], before)
        _delete_rows(connection, checks, old)
    return deleted + len(old)


def _subject(event: str) -> tuple[dg.AssetKey | None, tuple[str | None, ...]]:
    """Return the asset of a stored event, and what distinguishes it from the asset's other events."""
    entry = deserialize_value(event, dg.EventLogEntry).dagster_event
    if entry is None:
        return None, ()
    data = entry.event_specific_data
    asset = entry.asset_key or getattr(data, "asset_key", None)
    return asset, (entry.event_type_value, getattr(data, "check_name", None), entry.partition)


def _outdated(rows: Iterable[tuple[int, datetime, Any, bool]], before: datetime) -> list[int]:
    """Return the ids of our old rows that are not the newest of their subject; rows (id, time, subject, ours), newest first."""
    seen: set[Any] = set()
    old = []
    for row_id, at, subject, ours in rows:
        if subject in seen and ours and at < before:
            old.append(row_id)
        seen.add(subject)
    return old


def _delete_rows(connection: "Connection", table: "Table", ids: Sequence[int]) -> None:
    for begin in range(0, len(ids), _BATCH):
        connection.execute(table.delete().where(table.c.id.in_(ids[begin : begin + _BATCH])))


def _shards(instance: dg.DagsterInstance) -> Path | None:
    """Return the directory with a SQLite file per run's events, or None if a database stores them."""
    path_for_shard = getattr(instance.event_log_storage, "path_for_shard", None)
    return Path(path_for_shard("index")).parent if path_for_shard else None


# Dagster has no public way to read or delete single events and check results. Its version is pinned, and tests delete
# from each storage.


def _index(instance: dg.DagsterInstance) -> AbstractContextManager[Any]:
    """Return a context manager for a connection to the events and check results of all runs."""
    connection: AbstractContextManager[Any] = instance.event_log_storage.index_connection()  # type: ignore[attr-defined]
    return connection


def _events() -> "Table":
    from dagster._core.storage.event_log.schema import SqlEventLogStorageTable

    return SqlEventLogStorageTable


def _checks() -> "Table":
    from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable

    return AssetCheckExecutionsTable
