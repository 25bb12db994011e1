"""The daily tables in Dagster: partitions, schedules, runs over several days, and the commands that read them."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import duckdb
import pytest

from sr_assets.adapters.spark.engine import stop_engine
from sr_assets.assets.daily import AVAILABILITY_ASSET, INVENTORY_ASSET
from sr_assets.automation.jobs import FIRST_TAG, LAST_TAG, due_days
from sr_assets.definitions import build
from sr_assets.domain.errors import RunError
from sr_assets.settings import Settings
from sr_assets.spark_engine import SparkEngine
from sr_assets_tests.histories import SITE, Change, Histories, Message, configured, publish
from sr_assets_tests.rig import Command

KEY = AVAILABILITY_ASSET.key
HOUR_NS = 3600 * 10**9
TODAY = datetime.now(UTC).date()
YESTERDAY = TODAY - timedelta(days=1)
TODAY_NS = int(datetime(TODAY.year, TODAY.month, TODAY.day, tzinfo=UTC).timestamp()) * 10**9


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A site with two nodes, one silent yesterday from 18:00 to 21:00; the watermark is 01:00 today."""
    settings = configured(tmp_path)
    began_ns = TODAY_NS - 30 * HOUR_NS
    histories: Histories = {
        "steady": [Change(began_ns, "new", None)],
        "shaky": [
            Change(began_ns, "new", None),
            Change(TODAY_NS - 6 * HOUR_NS, "timeout", "up"),
            Change(TODAY_NS - 3 * HOUR_NS, "recover", "timeout"),
        ],
    }
    versions = {"steady": ["0.30.2", "0.31.0"], "shaky": ["0.30.2", "0.30.2"]}
    messages = [
        Message(node, at_ns, {"build_info": {"version": version}})
        for node, each in versions.items()
        for version, at_ns in zip(each, (TODAY_NS - 12 * HOUR_NS, TODAY_NS + HOUR_NS // 2), strict=True)
    ]
    publish(settings.home, histories, TODAY_NS + HOUR_NS, messages=messages)
    return settings


def tick(settings: Settings, hour: int) -> dg.RunRequest | dg.SkipReason:
    schedule = build(settings).resolve_schedule_def("hourly_availability")
    when = datetime(TODAY.year, TODAY.month, TODAY.day, hour, 7, tzinfo=UTC)
    with dg.DagsterInstance.ephemeral() as instance:
        context = dg.build_schedule_context(instance=instance, scheduled_execution_time=when)
        data = schedule.evaluate_tick(context)
    return data.run_requests[0] if data.run_requests else dg.SkipReason(data.skip_message)


def test_partitions_are_the_computable_days_including_today(settings: Settings) -> None:
    asset = build(settings).resolve_assets_def(KEY)
    assert asset.partitions_def is not None
    keys = asset.partitions_def.get_partition_keys()
    assert keys[-1] == TODAY.isoformat()
    assert keys[0] == (TODAY - timedelta(days=89)).isoformat()


def test_schedule_requests_yesterday_until_it_is_computed(settings: Settings) -> None:
    request = tick(settings, 2)
    assert isinstance(request, dg.RunRequest)
    assert (request.tags[FIRST_TAG], request.tags[LAST_TAG]) == (YESTERDAY.isoformat(), TODAY.isoformat())


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
    tags = {FIRST_TAG: YESTERDAY.isoformat(), LAST_TAG: TODAY.isoformat()}
    with dg.DagsterInstance.ephemeral() as instance:
        result = definitions.resolve_job_def("availability").execute_in_process(instance=instance, tags=tags)
        assert result.success
        assert instance.get_materialized_partitions(KEY) == {YESTERDAY.isoformat(), TODAY.isoformat()}
    assert {check.check_name: check.passed for check in result.get_asset_check_evaluations()} == {
        "seconds_add_up": True,
        "no_node_missing": True,
    }
    metadata = result.asset_materializations_for_node("fleet__availability_daily")[0].metadata
    assert metadata["dagster/row_count"].value == 4
    assert str(metadata["availability"].value).startswith("![availability by day](data:image/png;base64,iVBOR")
    worst = metadata["worst_nodes"]
    assert isinstance(worst, dg.TableMetadataValue)
    assert [record.data["node"] for record in worst.records] == ["shaky", "steady"]
    request = tick(settings, 3)
    assert isinstance(request, dg.RunRequest)
    assert request.tags[FIRST_TAG] == TODAY.isoformat()

    monkeypatch.setenv("SR_ASSETS_CONFIG", str(tmp_path / "replication.yaml"))
    monkeypatch.setenv("SR_ASSETS_HOME", str(settings.home))
    code, output, _ = command("availability", "--by", "day", "--format", "json")
    assert code == 0
    days = {row["date"]: row for row in json.loads(output)}
    assert days[YESTERDAY.isoformat()]["availability_percent"] == pytest.approx(100 * 45 / 48)
    assert days[YESTERDAY.isoformat()]["longest_outage_seconds"] == 3 * 3600
    assert days[TODAY.isoformat()]["final"] is False
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
    tags = {FIRST_TAG: YESTERDAY.isoformat(), LAST_TAG: TODAY.isoformat()}
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
    days = {when: settings.home / "availability" / f"{when}.parquet" for when in (YESTERDAY, TODAY)}
    command = [sys.executable, "-m", "dagster", "asset", "materialize", "-m", "sr_assets.definitions"]
    command += ["--select", "fleet/availability_daily"]
    try:
        for chosen in (("--partition-range", f"{YESTERDAY}...{TODAY}"), ("--partition", f"{TODAY}")):
            made = {when: file.stat().st_ino for when, file in days.items() if file.exists()}
            done = subprocess.run([*command, *chosen], env=environ, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
    finally:
        stop_engine(settings.home)
    # The range wrote both files; the single day replaced only its own.
    assert {when: days[when].stat().st_ino == before for when, before in made.items()} == {
        YESTERDAY: True,
        TODAY: False,
    }
    with duckdb.connect(str(settings.home / "fleet.duckdb"), read_only=True) as fleet:
        rows = fleet.execute("SELECT date, node, outages FROM availability_daily ORDER BY ALL").fetchall()
    assert rows == [(YESTERDAY, "shaky", 1), (YESTERDAY, "steady", 0), (TODAY, "shaky", 0), (TODAY, "steady", 0)]
    with dg.DagsterInstance.from_config(str(folder)) as instance:
        assert instance.get_materialized_partitions(KEY) == {YESTERDAY.isoformat(), TODAY.isoformat()}


def test_schedule_reports_a_retention_that_is_too_short(tmp_path: Path) -> None:
    settings = configured(tmp_path, snapshots="{retention: 1d}")
    publish(settings.home, {}, TODAY_NS + HOUR_NS)
    with pytest.raises(RunError, match=r"snapshots.retention is too short .*set it to 3d or more"):
        due_days(settings, INVENTORY_ASSET.stage, TODAY_NS + 2 * HOUR_NS)


def test_command_reports_that_no_day_is_computed(
    settings: Settings, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(tmp_path / "replication.yaml"))
    monkeypatch.setenv("SR_ASSETS_HOME", str(settings.home))
    code, _, errors = command("availability", "--since", "7d")
    assert code == 0
    assert errors.startswith(f"no day since {TODAY - timedelta(days=7)} has been computed yet")
