"""The nightly deletion of our old runs and their data, with each storage, in an instance that also serves others."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest

from sr_assets.automation.jobs import SITE_TAG
from sr_assets.automation.old_runs import _Retention, delete_old_data
from sr_assets_tests.postgres import postgres

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.process
SPECS = [dg.AssetSpec(name, skippable=True) for name in ("source", "replica")]
CHECKS = [dg.AssetCheckSpec("check", asset="replica")]


@dg.multi_asset(specs=SPECS, check_specs=CHECKS)
def site(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]:
    """Record events of each kind that a site's run records."""
    print("a line in the run's log")  # noqa: T201  captured by Dagster
    for spec in SPECS:
        yield dg.MaterializeResult(spec.key, metadata={"number": 1})
    for check in CHECKS:
        yield dg.AssetCheckResult(asset_key=check.asset_key, check_name=check.name, passed=True)


JOB = dg.Definitions(assets=[site], jobs=[dg.define_asset_job("site", [site])]).resolve_job_def("site")
OURS = {SITE_TAG: "london"}
KEYS = [spec.key for spec in SPECS]
DAYS = dg.StaticPartitionsDefinition(["monday", "tuesday"])


@dg.asset(partitions_def=DAYS)
def daily() -> None:
    """One day of a table."""


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


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.nightly)])
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


def set_age(instance: dg.DagsterInstance, run_id: str, age: timedelta, status: dg.DagsterRunStatus) -> None:
    """Set a run's age and status in the storage."""
    from dagster._core.storage.runs.schema import RunsTable

    with instance.run_storage.connect() as connection:  # type: ignore[attr-defined]
        changed = RunsTable.update().where(RunsTable.c.run_id == run_id)
        created = (datetime.now(UTC) - age).replace(tzinfo=None)
        connection.execute(changed.values(create_timestamp=created, status=status.value))


def run_at(
    instance: dg.DagsterInstance,
    age: timedelta,
    status: dg.DagsterRunStatus = dg.DagsterRunStatus.SUCCESS,
    tags: dict[str, str] = OURS,
) -> str:
    """Run the job, then set its age and status; return the run's id."""
    run_id = JOB.execute_in_process(instance=instance, tags={"status": status.value, **tags}).run_id
    set_age(instance, run_id, age, status)
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


def runless(instance: dg.DagsterInstance) -> dict[str, int]:
    """Return the number of rows without a run, by table; SQLite's shard of them counts as `shard`."""
    from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable, SqlEventLogStorageTable

    storage = instance.event_log_storage
    counts = {}
    for name, opened, table in (
        ("shard", storage.run_connection(""), SqlEventLogStorageTable),  # type: ignore[attr-defined]
        ("events", storage.index_connection(), SqlEventLogStorageTable),  # type: ignore[attr-defined]
        ("checks", storage.index_connection(), AssetCheckExecutionsTable),  # type: ignore[attr-defined]
    ):
        with opened as connection:
            counts[name] = len(connection.execute(table.select().where(table.c.run_id == "")).fetchall())
    return counts


def report_without_run(instance: dg.DagsterInstance, asset: dg.AssetKey, count: int) -> None:
    """Report observations and check results of an asset, as those of native streams, which belong to no run."""
    for number in range(count):
        instance.report_runless_asset_event(dg.AssetObservation(asset, metadata={"number": number}))
        instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(asset_key=asset, check_name="alive", passed=bool(number % 2))
        )


ALL_DATA = {"file", "runs", "asset_check_executions", "event_logs"}


def clean(instance: dg.DagsterInstance, untagged: tuple[str, ...] = ()) -> None:
    """Do the work of the nightly job."""
    delete_old_data(instance, KEYS, untagged)


@pytest.mark.parametrize("instance", ("sqlite", "postgres"), indirect=True)
def test_job_deletes_all_data_of_old_runs_and_none_of_recent_ones(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    old = [run_at(instance, timedelta(days=8)), run_at(instance, timedelta(days=31), dg.DagsterRunStatus.FAILURE)]
    kept = [run_at(instance, timedelta(days=6)), run_at(instance, timedelta(days=29), dg.DagsterRunStatus.FAILURE)]
    by_hand = run_at(instance, timedelta())
    instance.delete_run(by_hand)
    assert traces(instance, tmp_path, by_hand) == {"file", "asset_check_executions"}
    assert [traces(instance, tmp_path, run_id) for run_id in old] == [ALL_DATA] * 2
    clean(instance)
    assert [traces(instance, tmp_path, run_id) for run_id in (*old, by_hand)] == [set()] * 3
    assert [traces(instance, tmp_path, run_id) for run_id in kept] == [ALL_DATA] * 2
    assert all((Path(instance.storage_directory()) / run_id).is_dir() for run_id in kept)


def test_job_leaves_everything_of_others_alone(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    theirs = [run_at(instance, timedelta(days=400), tags={}), run_at(instance, timedelta(days=400), tags={"team": "x"})]
    run_at(instance, timedelta())
    deleted = JOB.execute_in_process(instance=instance).run_id
    instance.delete_run(deleted)
    report_without_run(instance, dg.AssetKey(["their", "asset"]), 3)
    storage = Path(instance.storage_directory())
    foreign = [storage / "notes.txt", storage / "notes" / "a.txt", storage / "11111111-2222-3333-4444-555555555555"]
    if (shards := getattr(instance.event_log_storage, "path_for_shard", None)) is not None:
        foreign += [Path(shards("notes")), Path(shards("11111111-2222-3333-4444-555555555555"))]
    for file in foreign:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("somebody's")
    before = runless(instance)
    delete_old_data(instance, [dg.AssetKey("another")])
    assert [traces(instance, tmp_path, run_id) for run_id in theirs] == [ALL_DATA] * 2
    assert traces(instance, tmp_path, deleted) == {"file", "asset_check_executions"}
    assert all(file.read_text() == "somebody's" for file in foreign)
    assert runless(instance) == before


def test_job_deletes_untagged_runs_of_named_jobs_only(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    old = run_at(instance, timedelta(days=8), tags={})
    run_at(instance, timedelta())
    clean(instance, ("another",))
    assert traces(instance, tmp_path, old) == ALL_DATA
    clean(instance, (JOB.name,))
    assert traces(instance, tmp_path, old) == set()


def test_newest_materialization_of_each_partition_stays(instance: dg.DagsterInstance) -> None:
    runs = [
        dg.materialize([daily], partition_key=day, instance=instance, tags=OURS).run_id
        for day in ("monday", "tuesday", "tuesday")
    ]
    for run_id in runs:
        set_age(instance, run_id, timedelta(days=400), dg.DagsterRunStatus.SUCCESS)
    clean(instance)
    assert [instance.has_run(run_id) for run_id in runs] == [True, False, True]
    assert instance.get_materialized_partitions(daily.key) == {"monday", "tuesday"}


def test_newest_events_without_a_run_stay(
    instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = run_at(instance, timedelta())
    report_without_run(instance, KEYS[0], 3)
    report_without_run(instance, dg.AssetKey("theirs"), 3)
    before = runless(instance)
    clean(instance)
    assert runless(instance) == before
    # All rows are old now.
    for age in ("_RUNLESS_AGE", "_OBSERVATION_AGE"):
        monkeypatch.setattr(f"sr_assets.automation.old_runs.{age}", timedelta(seconds=-10))
    clean(instance)
    assert {name: before[name] - count for name, count in runless(instance).items()} == {
        "shard": 4,
        "events": 4,
        "checks": 2,
    }
    record = instance.get_latest_asset_check_evaluation_record(dg.AssetCheckKey(KEYS[0], "alive"))
    assert record is not None
    (observed,) = instance.fetch_observations(KEYS[0], limit=10).records
    assert observed.asset_observation is not None
    assert observed.asset_observation.metadata["number"].value == 2
    # An empty run id is no reason to delete the folder of all runs.
    assert traces(instance, tmp_path, logged) == ALL_DATA
    assert (Path(instance.storage_directory()) / logged).is_dir()


def test_job_keeps_the_newest_of_too_many_runs(
    instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = _Retention((dg.DagsterRunStatus.SUCCESS,), timedelta(days=7), max_runs=2)
    monkeypatch.setattr("sr_assets.automation.old_runs._RETENTIONS", (limits,))
    runs = [run_at(instance, timedelta(hours=10 - number)) for number in range(4)]
    clean(instance)
    assert [bool(traces(instance, tmp_path, run_id)) for run_id in runs] == [False] * 2 + [True] * 2
