"""The public functions on published tables: `read`, `connect`, `tables`."""

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pytest

import sr_assets
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets_tests.published import node_row, publish_nodes


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with two nodes, one of them copied."""
    home = tmp_path / "home"
    publish_nodes(home, node_row("a", "up", 0), node_row("b", "up", 0, copied=False))
    return home


def test_read_keeps_utc_times_and_integers_with_missing_values(home: Path) -> None:
    nodes = sr_assets.read("last_seen_nodes", home=home).set_index("node")
    assert nodes.loc["a", "last_seen"] == pd.Timestamp(datetime(2026, 1, 31, 12, tzinfo=UTC))
    assert str(nodes["last_copied"].dtype) == "datetime64[us, UTC]"
    assert nodes["last_copied"].isna().to_list() == [False, True]
    assert str(nodes["copied_bytes"].dtype) == "Int64"
    assert nodes["copied_bytes"].to_list() == [900, pd.NA]


def test_read_returns_views_and_empty_tables(home: Path) -> None:
    assert sr_assets.read("node_availability", home=home)["status"].to_list() == ["up", "up"]
    gaps = sr_assets.read("gaps", home=home)
    assert gaps.empty
    assert str(gaps["noticed_at"].dtype) == "datetime64[us, UTC]"
    assert sr_assets.read("node_snapshots", home=home).empty


def test_read_finds_the_home_by_configuration_or_environment(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SR_ASSETS_HOME", raising=False)
    file = tmp_path / "replication.yaml"
    file.write_text(f"name: X\nstate_store: {home}\nstreams: [{{stream: REG, source_url: a:1, target_url: b:1}}]\n")
    assert len(sr_assets.read("last_seen_nodes", config=file)) == 2
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
    assert len(sr_assets.read("last_seen_nodes")) == 2


def test_read_refuses_an_unknown_table_and_lists_the_tables(home: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"no table 'last_seen' is published; did you mean 'last_seen_nodes'\?"
    ) as e:
        sr_assets.read("last_seen", home=home)
    assert "node_snapshots" in str(e.value)
    assert "latest_snapshots" not in str(e.value)
    with pytest.raises(ConfigurationError, match="no table"):
        sr_assets.read('gaps" JOIN "last_seen_nodes', home=home)


def test_read_takes_columns_and_rows_in_several_forms(home: Path) -> None:
    frame = sr_assets.read("last_seen_nodes", ["node", "copied_bytes"], "node > ?", ["a"], home=home)
    assert (frame.columns.to_list(), frame["node"].to_list()) == (["node", "copied_bytes"], ["b"])
    arrow = sr_assets.read("last_seen_nodes", ["node"], where="status = 'up'", as_="arrow", home=home)
    assert arrow.to_pylist() == [{"node": "a"}, {"node": "b"}]
    relation = sr_assets.read("last_seen_nodes", where="node = $1", parameters=["a"], as_="duckdb", home=home)
    assert relation.project("node").fetchall() == [("a",)]


def test_read_returns_polars_with_the_same_values(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = sr_assets.read("last_seen_nodes", as_="polars", home=home)
    assert frame.filter(pl.col("copied_bytes").is_null())["node"].to_list() == ["b"]
    assert frame.schema["last_seen"] == pl.Datetime("us", "UTC")
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ConfigurationError, match=r"polars is not installed; `pip install polars`"):
        sr_assets.read("last_seen_nodes", as_="polars", home=home)


def test_connection_shows_one_publication_until_it_is_closed(home: Path) -> None:
    with sr_assets.connect(home=home) as connection:
        publish_nodes(home, node_row("c", "up", 0))
        query = "SELECT count(*), (SELECT count(*) FROM node_availability) FROM last_seen_nodes"
        assert connection.execute(query).fetchall() == [(2, 2)]
        with sr_assets.connect(home=home) as later:
            assert later.execute(query).fetchall() == [(3, 3)]
        assert connection.execute(query).fetchall() == [(2, 2)]
        assert connection.sql("SELECT max(last_seen)::VARCHAR FROM last_seen_nodes").fetchall() == [
            ("2026-01-31 12:00:00+00",)
        ]
        with pytest.raises(duckdb.Error, match="read-only"):
            connection.execute("DROP VIEW last_seen_nodes")
    with pytest.raises(duckdb.Error, match="closed"):
        connection.execute("SELECT 1")


def test_tables_describes_each_column_that_can_be_read(home: Path) -> None:
    described = sr_assets.tables()
    with sr_assets.connect(home=home) as connection:
        names = {name for (name,) in connection.execute("SHOW TABLES").fetchall()}
        assert set(described["table"]) == names
        for table, rows in described.groupby("table"):
            assert rows["column"].to_list() == connection.table(str(table)).columns
    assert not described["description"].str.contains(r"\]\(").any()
    assert described.query("table == 'gaps'")["row"].unique().tolist() == ["hole in a source"]


@pytest.mark.parametrize(
    ("where", "parameters"),
    (
        ("copied_bytes = ?", [np.int64(900)]),
        ("node = $node", {"node": "a"}),
        ("node = 'a'", None),
        ("node = ?", (name for name in "a")),
    ),
)
def test_read_takes_what_analysts_have_at_hand(home: Path, where: str, parameters: Any) -> None:
    columns = (name for name in ("node",))
    assert sr_assets.read("last_seen_nodes", columns, where, parameters, home=home)["node"].to_list() == ["a"]
    assert sr_assets.read("last_seen_nodes", "node", " ", home=home).columns.to_list() == ["node"]


def test_relation_keeps_its_publication_and_hides_no_later_one(home: Path) -> None:
    before = sr_assets.read("last_seen_nodes", as_="duckdb", home=home)
    publish_nodes(home, node_row("c", "up", 0))
    assert sr_assets.read("last_seen_nodes", home=home)["node"].to_list() == ["a", "b", "c"]
    assert before.order("node").project("node").fetchall() == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    (
        ({"columns": ["nodes"]}, "table last_seen_nodes has no column 'nodes'; did you mean 'node'?"),
        ({"where": "nod = 'a'"}, "table last_seen_nodes: where: Binder Error: "),
        ({"where": "node = ?"}, "table last_seen_nodes: where: "),
        ({"where": "true) UNION (SELECT 1"}, "table last_seen_nodes: where: "),
        ({"as_": "numpy"}, "as_: 'numpy' is unknown; use one of: pandas, arrow, polars, duckdb"),
        ({"columns": [1]}, "table last_seen_nodes has no column 1; the columns are: name, "),
        ({"columns": "NODES"}, "table last_seen_nodes has no column 'NODES'; did you mean 'node'?"),
        ({"where": "node::int = 1"}, "table last_seen_nodes: where: Conversion Error: "),
        ({"where": "node"}, "table last_seen_nodes: where: "),
        ({"where": " ", "parameters": ["a"]}, "table last_seen_nodes: parameters belong to a condition"),
        ({"where": "node = ?", "parameters": 5}, "parameters: 5 is not a list; pass one value for each `?`"),
        ({"where": "node = ?", "parameters": "a"}, "parameters: 'a' is not a list"),
    ),
)
def test_read_refuses_a_wrong_choice_in_one_line(home: Path, arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError) as e:
        sr_assets.read("last_seen_nodes", home=home, **arguments)
    assert str(e.value).startswith(reason)
    assert "\n" not in str(e.value)


def test_read_before_the_first_publication_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nothing is published yet"):
        sr_assets.read("last_seen_nodes", home=tmp_path)


def test_read_leaves_no_connection_open(home: Path) -> None:
    """An open connection would keep returning the old file."""
    sr_assets.read("replication", home=home)
    publish_nodes(home, sequence=9)
    assert sr_assets.read("replication", home=home)["next_sequence"].to_list() == [9]


@pytest.mark.process
def test_importing_the_package_imports_no_library() -> None:
    script = (
        "import sys; before = set(sys.modules); import sr_assets;"
        "print([name for name in sys.modules if name not in before and name.partition('.')[0] not in sys.stdlib_module_names])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "['sr_assets']\n"
    with pytest.raises(AttributeError, match="no attribute 'write'"):
        sr_assets.write  # noqa: B018
