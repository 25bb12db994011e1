"""The nightly deletion of old runs and their data, with each storage."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest

from sr_assets.automation.old_runs import _Retention, delete_old_runs, retention
from sr_assets_tests.postgres import postgres

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.process
SPECS = [dg.AssetSpec(name, skippable=True) for name in ("source", "state", "replica", "snapshots", "advisories")]
CHECKS = [dg.AssetCheckSpec(f"check{number}", asset="replica") for number in range(6)]


@dg.multi_asset(specs=SPECS, check_specs=CHECKS)
def site(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]:
    """Record as many events as a site's run."""
    print("a line in the run's log")  # noqa: T201  captured by Dagster
    for spec in SPECS:
        yield dg.MaterializeResult(spec.key, metadata={f"number{n}": n for n in range(10)})
    for check in CHECKS:
        yield dg.AssetCheckResult(asset_key=check.asset_key, check_name=check.name, passed=True)


JOB = dg.Definitions(assets=[site], jobs=[dg.define_asset_job("site", [site])]).resolve_job_def("site")


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with postgres() as url:
        yield url


@contextmanager
def opened(folder: Path, settings: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dg.DagsterInstance]:
    """Open an instance in a folder with the platform's settings and these."""
    (folder / "dagster.yaml").write_text((ROOT / "dagster.yaml").read_text() + settings)
    monkeypatch.setenv("DAGSTER_HOME", str(folder))
    with dg.DagsterInstance.get() as instance:
        yield instance


@pytest.fixture(params=["sqlite", "postgres"])
def instance(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dg.DagsterInstance]:
    """An instance with the platform's settings, on each storage."""
    settings = ""
    if request.param == "postgres":
        monkeypatch.setenv("DAGSTER_POSTGRES_URL", request.getfixturevalue("database"))
        settings = (ROOT / "conf" / "dagster" / "postgres.yaml").read_text()
    with opened(tmp_path, settings, monkeypatch) as dagster_instance:
        yield dagster_instance


def run_at(
    instance: dg.DagsterInstance, age: timedelta, status: dg.DagsterRunStatus = dg.DagsterRunStatus.SUCCESS
) -> str:
    """Run the job, then set its age and status in the storage; return the run's id."""
    from dagster._core.storage.runs.schema import RunsTable

    run_id = JOB.execute_in_process(instance=instance, tags={"status": status.value}).run_id
    with instance.run_storage.connect() as connection:  # type: ignore[attr-defined]
        changed = RunsTable.update().where(RunsTable.c.run_id == run_id)
        created = (datetime.now(UTC) - age).replace(tzinfo=None)
        connection.execute(changed.values(create_timestamp=created, status=status.value))
    return run_id


def traces(instance: dg.DagsterInstance, folder: Path, run_id: str) -> set[str]:
    """Return the kinds of data that exist of a run: files and tables."""
    from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable, SqlEventLogStorageTable

    kinds = {"file" for path in folder.rglob("*") if run_id in path.name}
    with instance.event_log_storage.index_connection() as connection:  # type: ignore[attr-defined]
        for table in (AssetCheckExecutionsTable, SqlEventLogStorageTable):
            if connection.execute(table.select().where(table.c.run_id == run_id)).first():
                kinds.add(table.name)
    return kinds | ({"runs"} if instance.get_run_by_id(run_id) else set())


ALL_DATA = {"file", "runs", "asset_check_executions", "event_logs"}


def clean(instance: dg.DagsterInstance) -> None:
    """Run the op of the nightly job."""
    with dg.build_op_context(instance=instance) as context:
        delete_old_runs(context)


def test_job_deletes_all_data_of_old_runs_and_none_of_recent_ones(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    old = [run_at(instance, timedelta(days=8)), run_at(instance, timedelta(days=31), dg.DagsterRunStatus.FAILURE)]
    kept = [run_at(instance, timedelta(days=6)), run_at(instance, timedelta(days=29), dg.DagsterRunStatus.FAILURE)]
    # As those of native streams; its run id is empty.
    without_run = dg.AssetCheckEvaluation(asset_key=CHECKS[0].asset_key, check_name="without_run", passed=True)
    instance.report_runless_asset_event(without_run)
    by_hand = run_at(instance, timedelta())
    instance.delete_run(by_hand)
    assert traces(instance, tmp_path, by_hand) == {"file", "asset_check_executions"}
    assert [traces(instance, tmp_path, run_id) for run_id in old] == [ALL_DATA] * 2
    clean(instance)
    assert [traces(instance, tmp_path, run_id) for run_id in (*old, by_hand)] == [set()] * 3
    assert [traces(instance, tmp_path, run_id) for run_id in kept] == [ALL_DATA] * 2
    assert all((Path(instance.storage_directory()) / run_id).is_dir() for run_id in kept)
    assert "asset_check_executions" in traces(instance, tmp_path, "")
    assert retention.name == "retention"


def test_job_keeps_the_newest_of_too_many_runs(
    instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sr_assets.automation.old_runs._BATCH", 2)
    limits = _Retention((dg.DagsterRunStatus.SUCCESS,), timedelta(days=7), max_runs=2)
    monkeypatch.setattr("sr_assets.automation.old_runs._RETENTIONS", (limits,))
    runs = [run_at(instance, timedelta(hours=10 - number)) for number in range(7)]
    clean(instance)
    assert [bool(traces(instance, tmp_path, run_id)) for run_id in runs] == [False] * 5 + [True] * 2
