"""The nightly job that deletes old runs of this platform in Dagster's storage, and its schedule.

The instance may also serve others. The job touches only runs with a tag of this platform, and events and check results of
its assets. Dagster deletes only a run's rows among its runs and events; the job also deletes the run's files and check
results, and old events and check results that belong to no run (`dagster_storage`).
"""

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import dagster as dg

from sr_assets.adapters import times
from sr_assets.automation.jobs import JOB_TAG, RUN_CONFIG, SITE_TAG
from sr_assets.dagster_storage import (
    checked_runs,
    delete_checks,
    delete_files,
    delete_runless,
    existing_runs,
    newest_materializations,
    run_ids,
    tag_values,
)
from sr_assets.settings import Settings

JOB: Final = "retention"
#: The age from which events and check results without a run are deleted, except the newest of each asset and check.
_RUNLESS_AGE: Final = timedelta(days=30)
#: The same for observations, which sensors record often.
_OBSERVATION_AGE: Final = timedelta(days=7)


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
    deleted, kept = 0, newest_materializations(instance)
    for limits in _RETENTIONS:
        for filters in _platform_runs(instance, untagged):
            old = [run_id for run_id in _old_runs(instance, limits, filters) if run_id not in kept]
            for run_id in old:
                _delete_run(instance, run_id)
            deleted += len(old)
    # Runs deleted by hand, or by a nightly job that was interrupted.
    orphaned = _orphaned_runs(instance, assets)
    for run_id in orphaned:
        delete_files(instance, run_id)
    delete_checks(instance, orphaned)
    now = times.utc_now()
    runless = delete_runless(instance, assets, now - _RUNLESS_AGE, now - _OBSERVATION_AGE)
    return (
        f"deleted {deleted} runs, orphaned data of {len(orphaned)} runs deleted earlier,"
        f" and {runless} events and check results without a run"
    )


def _platform_runs(instance: dg.DagsterInstance, untagged: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the filters that select the platform's runs."""
    for tag, values in tag_values(instance, [SITE_TAG, JOB_TAG]).items():
        yield {"tags": {tag: values}}
    for job in sorted(untagged):
        yield {"job_name": job}


def _old_runs(instance: dg.DagsterInstance, limits: _Retention, filters: dict[str, Any]) -> list[str]:
    """Return the ids of selected runs that are too old or too many, oldest first."""
    ended = {"statuses": list(limits.statuses), **filters}
    before = times.utc_now() - limits.max_age
    old = run_ids(instance, dg.RunsFilter(created_before=before, **ended))
    surplus = run_ids(instance, dg.RunsFilter(**ended))[limits.max_runs :]
    return list(dict.fromkeys([*surplus, *old]))[::-1]


def _delete_run(instance: dg.DagsterInstance, run_id: str) -> None:
    """Delete a run; its check results last, because they tell a later job of an interrupted deletion."""
    instance.delete_run(run_id)
    delete_files(instance, run_id)
    delete_checks(instance, [run_id])


def _orphaned_runs(instance: dg.DagsterInstance, assets: Collection[dg.AssetKey]) -> list[str]:
    """Return the deleted runs of which check results of these assets remain; nothing else names the owner of a deleted run."""
    checked = checked_runs(instance, assets)
    existing = existing_runs(instance, checked)
    return [run_id for run_id in checked if run_id not in existing]
