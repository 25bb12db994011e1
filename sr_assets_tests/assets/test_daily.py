"""The daily tables in Dagster: partitions, schedules, runs over several days, and the commands that read them."""

import json
import os
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import dagster as dg
import duckdb
import pytest

from sr_assets.adapters.spark.engine import stop_engine
from sr_assets.assets.daily import INVENTORY_ASSET
from sr_assets.automation.jobs import FIRST_TAG, LAST_TAG, due_days
from sr_assets.definitions import build
from sr_assets.domain.errors import RunError
from sr_assets.settings import Settings
from sr_assets.spark_engine import SparkEngine
from sr_assets_tests.histories import SITE, Change, Histories, Message, configured, publish
from sr_assets_tests.rig import Command

KEY = dg.AssetKey(["fleet", "availability_daily"])
HOUR_NS = 3600 * 10**9


def today() -> date:
    """Return the current day: a constant of the module would be yesterday after midnight."""
    return datetime.now(UTC).date()


def yesterday() -> date:
    return today() - timedelta(days=1)


def today_ns() -> int:
    return int(datetime(today().year, today().month, today().day, tzinfo=UTC).timestamp()) * 10**9


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A site with two nodes, one silent yesterday from 18:00 to 21:00; the watermark is 01:00 today."""
    settings = configured(tmp_path)
    began_ns = today_ns() - 30 * HOUR_NS
    histories: Histories = {
        "steady": [Change(began_ns, "new", None)],
        "shaky": [
            Change(began_ns, "new", None),
            Change(today_ns() - 6 * HOUR_NS, "timeout", "up"),
            Change(today_ns() - 3 * HOUR_NS, "recover", "timeout"),
        ],
    }
    versions = {"steady": ["0.30.2", "0.31.0"], "shaky": ["0.30.2", "0.30.2"]}
    messages = [
        Message(node, at_ns, {"build_info": {"version": version}})
        for node, each in versions.items()
        for version, at_ns in zip(each, (today_ns() - 12 * HOUR_NS, today_ns() + HOUR_NS // 2), strict=True)
    ]
    publish(settings.home, histories, today_ns() + HOUR_NS, messages=messages)
    return settings


def tick(settings: Settings, hour: int) -> dg.RunRequest | dg.SkipReason:
    schedule = build(settings).resolve_schedule_def("hourly_availability")
    when = datetime(today().year, today().month, today().day, hour, 7, tzinfo=UTC)
    with dg.DagsterInstance.ephemeral() as instance:
        context = dg.build_schedule_context(instance=instance, scheduled_execution_time=when)
        data = schedule.evaluate_tick(context)
    return data.run_requests[0] if data.run_requests else dg.SkipReason(data.skip_message)


def test_partitions_are_the_computable_days_including_today(settings: Settings) -> None:
    asset = build(settings).resolve_assets_def(KEY)
    assert asset.partitions_def is not None
    keys = asset.partitions_def.get_partition_keys()
    assert keys[-1] == today().isoformat()
    assert keys[0] == (today() - timedelta(days=89)).isoformat()


def test_schedule_requests_yesterday_until_it_is_computed(settings: Settings) -> None:
    request = tick(settings, 2)
    assert isinstance(request, dg.RunRequest)
    assert (request.tags[FIRST_TAG], request.tags[LAST_TAG]) == (yesterday().isoformat(), today().isoformat())


def test_schedule_skips_with_a_reason_before_the_first_publication(tmp_path: Path) -> None:
    skipped = tick(configured(tmp_path), 2)
    assert isinstance(skipped, dg.SkipReason)
    assert "nothing is published yet" in (skipped.skip_message or "")


def test_one_availability_run_computes_and_checks_several_days(
    settings: Settings, engine_home: Path, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = configured(tmp_path)
    object.__setattr__(elsewhere, "home", engine_home)
    definitions = build(settings, {"spark": SparkEngine(settings=elsewhere)})
    tags = {FIRST_TAG: yesterday().isoformat(), LAST_TAG: today().isoformat()}
    with dg.DagsterInstance.ephemeral() as instance:
        result = definitions.resolve_job_def("availability").execute_in_process(instance=instance, tags=tags)
        assert result.success
        assert instance.get_materialized_partitions(KEY) == {yesterday().isoformat(), today().isoformat()}
    assert {check.check_name: check.passed for check in result.get_asset_check_evaluations()} == {
        "seconds_add_up": True,
        "no_node_missing": True,
    }
    metadata = result.asset_materializations_for_node("fleet__availability_daily")[0].metadata
    assert (metadata["dagster/row_count"].value, metadata["computed_in"].value) == (4, "the run's process")
    assert str(metadata["availability"].value).startswith("![availability by day](data:image/png;base64,iVBOR")
    worst = metadata["worst_nodes"]
    assert isinstance(worst, dg.TableMetadataValue)
    assert [record.data["node"] for record in worst.records] == ["shaky", "steady"]
    request = tick(settings, 3)
    assert isinstance(request, dg.RunRequest)
    assert request.tags[FIRST_TAG] == today().isoformat()

    monkeypatch.setenv("SR_ASSETS_CONFIG", str(tmp_path / "replication.yaml"))
    monkeypatch.setenv("SR_ASSETS_HOME", str(settings.home))
    code, output, _ = command("availability", "--by", "day", "--format", "json")
    assert code == 0
    days = {row["date"]: row for row in json.loads(output)}
    assert days[yesterday().isoformat()]["availability_percent"] == pytest.approx(100 * 45 / 48)
    assert days[yesterday().isoformat()]["longest_outage_seconds"] == 3 * 3600
    assert days[today().isoformat()]["final"] is False
    code, output, _ = command("availability", "--site", SITE, "--node", "steady", "--since", "2d")
    assert code == 0
    assert "steady" in output
    assert "shaky" not in output


def test_one_inventory_run_counts_and_checks_several_days(
    settings: Settings, engine_home: Path, tmp_path: Path
) -> None:
    elsewhere = configured(tmp_path)
    object.__setattr__(elsewhere, "home", engine_home)
    definitions = build(settings, {"spark": SparkEngine(settings=elsewhere)})
    tags = {FIRST_TAG: yesterday().isoformat(), LAST_TAG: today().isoformat()}
    with dg.DagsterInstance.ephemeral() as instance:
        result = definitions.resolve_job_def("inventory").execute_in_process(instance=instance, tags=tags)
    assert result.success
    assert {check.check_name: check.passed for check in result.get_asset_check_evaluations()} == {
        "values_add_up": True,
        "no_node_missing": True,
    }
    metadata = result.asset_materializations_for_node("fleet__inventory_daily")[0].metadata
    assert str(metadata["versions"].value).startswith("![nodes by agent version](data:image/png;base64,iVBOR")
    values = metadata["values"]
    assert isinstance(values, dg.TableMetadataValue)
    counted = [tuple(record.data.values()) for record in values.records if record.data["property"] == "agent_version"]
    assert counted == [("agent_version", "0.30.2", 1, 0, 1), ("agent_version", "0.31.0", 1, 1, 0)]


# A run in this process computes several days too.
@pytest.mark.nightly
def test_materialize_missing_computes_no_day_that_has_rows(settings: Settings) -> None:
    """A new instance shows every day as missing. A day that the instance knows is computed again."""
    definitions, file = build(settings), settings.home / "availability" / f"{yesterday()}.parquet"

    def compute(instance: dg.DagsterInstance, first: date, last: date) -> dict[str, dg.MetadataValue]:
        tags = {FIRST_TAG: first.isoformat(), LAST_TAG: last.isoformat()}
        result = definitions.resolve_job_def("availability").execute_in_process(instance=instance, tags=tags)
        assert all(check.passed for check in result.get_asset_check_evaluations())
        return dict(result.asset_materializations_for_node("fleet__availability_daily")[0].metadata)

    before = yesterday() - timedelta(days=2)
    with dg.DagsterInstance.ephemeral() as instance:
        first = compute(instance, yesterday(), today())
        assert first["days"].value == 2
        written_ns = file.stat().st_mtime_ns
        again = compute(instance, yesterday(), yesterday())
        assert (again["days"].value, again["kept_days"].value) == (1, 0)
        assert file.stat().st_mtime_ns > written_ns
    written_ns = file.stat().st_mtime_ns
    with dg.DagsterInstance.ephemeral() as instance:
        missing = compute(instance, before, today())
        # Two days without rows, and today, whose rows are not final.
        assert (missing["days"].value, missing["kept_days"].value) == (3, 1)
        assert file.stat().st_mtime_ns == written_ns
        # The nodes are known since the day before yesterday.
        assert missing["dagster/row_count"].value == int(str(first["dagster/row_count"].value)) + 2
        assert len(instance.get_materialized_partitions(KEY)) == 4


@pytest.mark.nightly
@pytest.mark.process
def test_dagster_command_computes_a_range_and_recomputes_one_day(settings: Settings, tmp_path: Path) -> None:
    folder = settings.home / "dagster"
    folder.mkdir()
    folder.joinpath("dagster.yaml").write_text("telemetry: {enabled: false}")
    environ = {
        **os.environ,
        "SR_ASSETS_CONFIG": str(tmp_path / "replication.yaml"),
        "SR_ASSETS_HOME": str(settings.home),
        "DAGSTER_HOME": str(folder),
    }
    days = {when: settings.home / "availability" / f"{when}.parquet" for when in (yesterday(), today())}
    command = [sys.executable, "-m", "dagster", "asset", "materialize", "-m", "sr_assets.definitions"]
    command += ["--select", "fleet/availability_daily"]
    try:
        for chosen in (("--partition-range", f"{yesterday()}...{today()}"), ("--partition", f"{today()}")):
            made = {when: file.stat().st_ino for when, file in days.items() if file.exists()}
            done = subprocess.run([*command, *chosen], env=environ, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
    finally:
        stop_engine(settings.home)
    # The range wrote both files; the single day replaced only its own.
    assert {when: days[when].stat().st_ino == before for when, before in made.items()} == {
        yesterday(): True,
        today(): False,
    }
    with duckdb.connect(str(settings.home / "fleet.duckdb"), read_only=True) as fleet:
        rows = fleet.execute("SELECT date, node, outages FROM availability_daily ORDER BY ALL").fetchall()
    assert rows == [
        (yesterday(), "shaky", 1),
        (yesterday(), "steady", 0),
        (today(), "shaky", 0),
        (today(), "steady", 0),
    ]
    with dg.DagsterInstance.from_config(str(folder)) as instance:
        assert instance.get_materialized_partitions(KEY) == {yesterday().isoformat(), today().isoformat()}


def test_schedule_reports_a_retention_that_is_too_short(tmp_path: Path) -> None:
    settings = configured(tmp_path, snapshots="{retention: 1d}")
    publish(settings.home, {}, today_ns() + HOUR_NS)
    with pytest.raises(RunError, match=r"snapshots.retention is too short .*set it to 3d or more"):
        due_days(settings, INVENTORY_ASSET.stage, today_ns() + 2 * HOUR_NS)


def test_command_reports_that_no_day_is_computed(
    settings: Settings, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(tmp_path / "replication.yaml"))
    monkeypatch.setenv("SR_ASSETS_HOME", str(settings.home))
    code, _, errors = command("availability", "--since", "7d")
    assert code == 0
    assert errors.startswith(f"no day since {today() - timedelta(days=7)} has been computed yet")
