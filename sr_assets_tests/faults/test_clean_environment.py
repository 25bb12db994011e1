"""The commands in processes that inherit nothing from the tests, neither variables nor an engine, on each kind of Spark."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from sr_assets.adapters.published.queries import ask
from sr_assets.adapters.spark.engine import stop_engine
from sr_assets.domain.days import day_of
from sr_assets.embedded.nats_server import NatsServer
from sr_assets_tests.histories import HOUR, Change, configured, publish
from sr_assets_tests.rig import Rig, Sent
from sr_assets_tests.spark_cluster import SparkCluster

pytestmark = pytest.mark.timeout(600)


def clean_run(folder: Path, home: Path, *command: str) -> None:
    """Run a Python module with the environment of a new login; it must succeed."""
    home_folder, instance = folder / "user", folder / "dagster"
    for created in (home_folder, instance):
        created.mkdir(exist_ok=True)
    environ = {
        "HOME": str(home_folder),
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        "SR_ASSETS_CONFIG": str(folder / "replication.yaml"),
        "SR_ASSETS_HOME": str(home),
        "DAGSTER_HOME": str(instance),
    }
    completed = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *command],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr


def run_site(spark: dict[str, Any], folder: Path, source: NatsServer, target: NatsServer) -> None:
    """Copy a plain and a sampled stream; every batch goes through Spark."""
    numbers = iter(range(100))
    folder.mkdir()
    (folder / "home").mkdir()
    rig = Rig(folder / "home", source, target, lambda stem: f"{stem}_{folder.name}_{next(numbers)}")
    plain, sampled = rig.make("PLAIN"), rig.make("NODES")
    rig.publish(plain, [Sent(b"%d" % n) for n in range(3_000)])
    rig.publish(sampled, [Sent(json.dumps({"sender": f"n{n % 40}", "n": n}).encode()) for n in range(2_000)])
    rig.add(plain)
    rig.add(sampled, inspect_field="sender", inspect_duration="1h")
    rig.spark = {**spark, "from_messages": 0}
    rig.settings()
    (rig.home / "replication.yaml").rename(folder / "replication.yaml")
    clean_run(folder, rig.home, "sr_assets", "run", "--once")
    assert [int(copy.payload) for copy in rig.copies(plain)] == list(range(3_000))
    assert [json.loads(copy.payload)["n"] for copy in rig.copies(sampled)] == list(range(40))
    history = rig.rows("SELECT node, payload FROM node_snapshots")
    assert sorted(json.loads(row["payload"])["n"] for row in history) == list(range(40))
    stop_engine(rig.home)


def compute_day(spark: dict[str, Any], folder: Path) -> None:
    """Compute a daily table with Dagster's own command."""
    folder.mkdir()
    date = datetime.now(UTC).date() - timedelta(days=2)
    settings, day = configured(folder, spark=yaml.safe_dump(spark, default_flow_style=True).strip()), day_of(date)
    changes = [Change(day.first_ns, "new", None), Change(day.first_ns + 6 * HOUR, "timeout", "up")]
    publish(settings.home, {"a": changes}, day.next_ns)
    table = ("--select", "fleet/availability_daily", "--partition", str(date))
    clean_run(folder, settings.home, "dagster", "asset", "materialize", "-m", "sr_assets.definitions", *table)
    sql = "SELECT node, up_seconds, timeout_seconds, outages, final FROM availability_daily"
    assert ask(settings.home, sql).values == [("a", 6 * 3600.0, 18 * 3600.0, 1, True)]
    stop_engine(settings.home)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkCluster]:
    with SparkCluster() as started:
        yield started


# The demo also starts Spark without Java on the PATH.
@pytest.mark.nightly
def test_local_spark_needs_nothing_of_the_environment(rig: Rig, tmp_path: Path) -> None:
    run_site({}, tmp_path / "site", rig.source, rig.target)


# The site's run finds Spark in the same way, and the tests of the daily assets run Dagster's command.
@pytest.mark.nightly
def test_daily_table_needs_nothing_of_the_environment(tmp_path: Path) -> None:
    compute_day({}, tmp_path / "daily")


@pytest.mark.long
def test_cluster_needs_nothing_of_the_environment(rig: Rig, tmp_path: Path, cluster: SparkCluster) -> None:
    spark = {"mode": cluster.mode, "config": cluster.config}
    run_site(spark, tmp_path / "standalone", rig.source, rig.target)
    compute_day(spark, tmp_path / "daily")


# The local engine is a Connect server too.
@pytest.mark.nightly
def test_connect_server_needs_nothing_of_the_environment(rig: Rig, tmp_path: Path, cluster: SparkCluster) -> None:
    with cluster.connect() as mode:
        run_site({"mode": mode}, tmp_path / "server", rig.source, rig.target)
        compute_day({"mode": mode}, tmp_path / "daily")
