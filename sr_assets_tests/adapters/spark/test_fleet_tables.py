"""The published tables in Spark have the rows that DuckDB shows, also in a home that was moved."""

import gc
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import sr_assets
from sr_assets.adapters.published import manifest
from sr_assets.adapters.published.actions import record_action
from sr_assets.adapters.published.catalog import COLUMN_TYPES, ROWS
from sr_assets.adapters.spark import fleet_tables
from sr_assets.adapters.spark.run_session import HomeEngine, SparkConnection
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.settings import SparkSettings
from sr_assets.spark import read_table
from sr_assets.stages.daily_computation import AVAILABILITY_STAGE, INVENTORY_STAGE
from sr_assets_tests.adapters.spark.scripts import clean_environment
from sr_assets_tests.histories import FIRST, varied_home
from sr_assets_tests.published import node_row, publish_nodes

#: The columns that need quotes in DuckDB; each has an alias.
RESERVED = {"operator_actions": {"at", "user"}}


@pytest.fixture(scope="module")
def spark(engine_home: Path) -> Iterator[SparkSession]:
    with closing(SparkConnection(HomeEngine(SparkSettings(), engine_home), 0, "daily")) as connection:
        yield connection.session()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: SparkSession) -> Path:
    """A home with rows in most tables; some rows replace others."""
    settings = varied_home(tmp_path, monkeypatch)
    with closing(SparkConnection(HomeEngine(SparkSettings(), tmp_path), None, "daily")) as no_spark:
        for stage in (AVAILABILITY_STAGE, INVENTORY_STAGE):
            stage.compute_days(settings, [FIRST + timedelta(days=days) for days in range(4)], no_spark)
    record_action(settings.home, "pause", "london/REG", 'it\'s "quoted"')
    return settings.home


def rows_in_duckdb(home: Path, table: str) -> list[str]:
    with sr_assets.connect(home=home) as connection:
        relation = connection.table(table)
        return sorted(repr([comparable(value) for value in row]) for row in relation.fetchall())


def rows_in_spark(frame: DataFrame) -> list[str]:
    return sorted(repr([comparable(value) for value in row]) for row in frame.collect())


def comparable(value: Any) -> Any:
    """Return a value without differences of the two libraries: zones of times, types of bytes, and text of JSON."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).replace(tzinfo=None)
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, str) and value.startswith("{"):
        return json.loads(value)
    return value


def test_tables_of_a_moved_home_are_the_same_in_duckdb_and_spark(
    home: Path, spark: SparkSession, tmp_path: Path
) -> None:
    before = {table: rows_in_duckdb(home, table) for table in ROWS}
    filled = {table for table, rows in before.items() if rows}
    assert filled >= {
        "last_seen_nodes",
        "retired_nodes",
        "node_snapshots",
        "node_snapshot_history",
        "availability_daily",
        "inventory_daily",
        "operator_actions",
        "global_availability",
        "blind_spans",
    }
    moved = tmp_path / "b's [*] {2} é"
    home.rename(moved)
    for table, rows in before.items():
        frame = read_table(spark, table, home=moved)
        assert frame.columns == list(COLUMN_TYPES[table]), table
        assert rows_in_duckdb(moved, table) == rows, table
        assert rows_in_spark(frame) == rows, table


@pytest.mark.nightly
def test_every_column_of_every_table_needs_no_quotes(home: Path, spark: SparkSession) -> None:
    with sr_assets.connect(home=home) as connection:
        for table, columns in COLUMN_TYPES.items():
            if table not in ROWS:
                continue
            names = [name for name in columns if name not in RESERVED.get(table, ())]
            selected = ", ".join(f"count({name}), min({name})" for name in names)
            query = f"SELECT {selected} FROM {table} WHERE {names[0]} IS NOT NULL"
            in_duckdb = connection.execute(query).fetchall()
            read_table(spark, table, home=home).createOrReplaceTempView(table)
            in_spark = spark.sql(query.replace("min(payload_raw)", "min(hex(payload_raw))")).collect()
            assert in_spark[0][0] == in_duckdb[0][0], table


def test_files_of_a_dataframe_stay_until_ten_minutes_after_it_is_gone(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "_GRACE_SECONDS", 0.0)
    publish_nodes(tmp_path, node_row("a", "up", 0))

    def republish(node: str) -> None:
        # A file is deleted by the second publication after its replacement.
        for sequence in (9, 10, 11):
            publish_nodes(tmp_path, node_row(f"{node}{sequence}", "up", 0), sequence=sequence)

    frame = read_table(spark, "last_seen_nodes", home=tmp_path)
    derived = read_table(spark, "last_seen_nodes", home=tmp_path).select("node")
    republish("b")
    assert [row.node for row in frame.collect()] == ["a"]
    assert [row.node for row in derived.collect()] == ["a"]
    del frame
    gc.collect()
    monkeypatch.setattr(fleet_tables, "_HELD_SECONDS", -1.0)
    assert read_table(spark, "last_seen_nodes", home=tmp_path).count() == 4
    republish("c")
    with pytest.raises(Exception, match=r"FILE_NOT_EXIST|does not exist"):
        derived.collect()


@pytest.mark.nightly
@pytest.mark.process
def test_documented_example_runs_in_a_session_of_its_own(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "tables.md").read_text()
    (example,) = re.findall(r"```python tables\n(.*?)```", text, re.DOTALL)
    publish_nodes(tmp_path, node_row("a", "up", 0))
    file = tmp_path / "replication.yaml"
    file.write_text(f"name: X\nstate_store: {tmp_path}\nstreams: [{{stream: REG, source_url: a:1, target_url: b:1}}]\n")
    environ = {**clean_environment(tmp_path), "SR_ASSETS_CONFIG": str(file)}
    done = subprocess.run([sys.executable, "-c", example], env=environ, capture_output=True, text=True, check=True)
    assert "|up|1|" in done.stdout.replace(" ", "")


def test_read_table_refuses_in_one_line(tmp_path: Path, spark: SparkSession) -> None:
    with pytest.raises(RunError, match="nothing is published yet"):
        read_table(spark, "last_seen_nodes", home=tmp_path)
    publish_nodes(tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"no table 'last_seen' is published; did you mean 'last_seen_nodes'\?"
    ):
        read_table(spark, "last_seen", home=tmp_path)
    for file in (tmp_path / "published").rglob("replication-*.parquet"):
        file.unlink()
    shutil.rmtree(tmp_path / "inventory")
    for table in ("replication", "inventory_daily"):
        with pytest.raises(RunError, match=r"cannot be read: it is missing; the site's next run writes it again"):
            read_table(spark, table, home=tmp_path)
