"""The published tables as inputs of users' assets, through the input manager."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import sr_assets
from sr_assets.adapters.published.daily_tables import AVAILABILITY
from sr_assets.domain.errors import ConfigurationError
from sr_assets_tests.published import MINUTE_NS, SITE, STREAM, node_row, publish_nodes

TABLE = dg.AssetKey(["choria", "fleet", "last_seen_nodes"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration whose home has two nodes, one silent."""
    file = tmp_path / "replication.yaml"
    tracked = "inspect_field: sender, inspect_duration: 1h"
    file.write_text(
        f"name: HUB\nstate_store: {tmp_path}\nstreams:\n"
        f"  - {{name: {SITE}, stream: {STREAM}, source_url: a:1, target_url: b:1, {tracked}}}\n"
    )
    publish_nodes(tmp_path, node_row("web1", "up", 0), node_row("web2", "timeout", 40 * MINUTE_NS))
    return file


def value_of(made: dg.AssetsDefinition, platform: dg.Definitions, *upstream: dg.AssetKey) -> Any:
    """Materialise an asset of a user, with `upstream` assets in the same run, and return its value."""
    definitions = dg.Definitions.merge(platform, dg.Definitions(assets=[made]))
    result = definitions.resolve_implicit_global_asset_job_def().execute_in_process(
        asset_selection=[made.key, *upstream], raise_on_error=True
    )
    return result.output_for_node("mine")


def nodes_of_pandas(last_seen_nodes: pd.DataFrame) -> object:
    return last_seen_nodes["node"].to_list()


def nodes_of_polars(last_seen_nodes: pl.DataFrame) -> object:
    return last_seen_nodes["node"].to_list()


def nodes_of_arrow(last_seen_nodes: pa.Table) -> object:
    return last_seen_nodes["node"].to_pylist()


def nodes_of_duckdb(last_seen_nodes: duckdb.DuckDBPyRelation) -> object:
    return [node for (node,) in last_seen_nodes.project("node").fetchall()]


def nodes_of_anything(last_seen_nodes):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201  a user's own
    assert isinstance(last_seen_nodes, pd.DataFrame)
    return last_seen_nodes["node"].to_list()


@pytest.mark.parametrize("read", (nodes_of_pandas, nodes_of_polars, nodes_of_arrow, nodes_of_duckdb, nodes_of_anything))
def test_annotation_chooses_the_form_of_a_table(file: Path, read: Callable[..., object]) -> None:
    mine = dg.asset(name="mine", ins={"last_seen_nodes": dg.AssetIn(key=TABLE)})(read)
    assert value_of(mine, sr_assets.build_definitions(file, key_prefix="choria")) == ["web1", "web2"]


def test_input_of_the_run_that_publishes_the_table(file: Path) -> None:
    mine = dg.asset(name="mine", ins={"last_seen_nodes": dg.AssetIn(key=TABLE)})(nodes_of_pandas)
    assert value_of(mine, sr_assets.build_definitions(file, key_prefix="choria"), TABLE) == ["web1", "web2"]


def test_metadata_of_an_input_chooses_columns_and_rows(file: Path) -> None:
    chosen = dg.AssetIn(key=TABLE, metadata={"columns": ["node", "status"], "where": "status = 'timeout' -- now"})

    @dg.asset(ins={"silent": chosen})
    def mine(silent: pa.Table) -> object:
        return silent.to_pylist()

    platform = sr_assets.build_definitions(file, key_prefix="choria")
    assert value_of(mine, platform) == [{"node": "web2", "status": "timeout"}]


def test_partition_of_an_asset_gets_its_day_of_a_daily_table(file: Path) -> None:
    days, folder = ("2026-01-30", "2026-01-31"), file.parent / "availability"
    for day in days:
        values = {**dict.fromkeys(AVAILABILITY.kinds, "NULL"), "date": f"DATE '{day}'"}
        row = ", ".join(f"{value} AS {name}" for name, value in values.items())
        duckdb.execute(f"COPY (SELECT {row}) TO '{folder}/{day}.parquet'")
    platform = sr_assets.build_definitions(file, key_prefix="choria")
    daily = dg.AssetKey(["choria", "fleet", "availability_daily"])
    partitions = platform.resolve_assets_def(daily).partitions_def

    @dg.asset(ins={"day": dg.AssetIn(key=daily)}, partitions_def=partitions)
    def mine(day: pa.Table) -> object:
        return [str(when) for when in day["date"].to_pylist()]

    definitions = dg.Definitions.merge(platform, dg.Definitions(assets=[mine]))
    result = definitions.resolve_implicit_global_asset_job_def().execute_in_process(
        asset_selection=[mine.key], partition_key=days[0]
    )
    assert result.output_for_node("mine") == [days[0]]


def test_other_deployment_reads_tables_of_a_configuration(file: Path) -> None:
    manager = sr_assets.fleet_tables_io_manager.configured({"config": str(file)})
    mine = dg.asset(name="mine", ins={"last_seen_nodes": dg.AssetIn(key=TABLE, input_manager_key="tables")})(
        nodes_of_pandas
    )
    assert value_of(mine, dg.Definitions([dg.AssetSpec(TABLE)], resources={"tables": manager})) == ["web1", "web2"]


def test_wrong_use_of_the_manager_is_one_line(file: Path) -> None:
    platform = sr_assets.build_definitions(file, key_prefix="choria")

    def as_text(last_seen_nodes: str) -> object:
        return last_seen_nodes

    mine = dg.asset(name="mine", ins={"last_seen_nodes": dg.AssetIn(key=TABLE)})(as_text)
    with pytest.raises(
        ConfigurationError, match=r"^the input last_seen_nodes is annotated with <class 'str'>; use pandas"
    ):
        value_of(mine, platform)
    chosen = dg.AssetIn(key=TABLE, metadata={"columns": ["nod"]})
    mine = dg.asset(name="mine", ins={"last_seen_nodes": chosen})(nodes_of_pandas)
    with pytest.raises(ConfigurationError, match=r"last_seen_nodes has no column 'nod'; did you mean 'node'\?"):
        value_of(mine, platform)

    @dg.asset(io_manager_key="sr_assets_choria_fleet_tables_io_manager", name="mine")
    def written() -> int:
        return 1

    with pytest.raises(ConfigurationError, match=r"^mine: fleet_tables_io_manager only reads"):
        value_of(written, platform)
