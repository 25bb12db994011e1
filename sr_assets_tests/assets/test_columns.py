"""The columns in the UI: every column of every asset has its DuckDB type and a description."""

from pathlib import Path

import dagster as dg
import pytest

from sr_assets.adapters.published.catalog import _OWN, _SHARED, COLUMN_TYPES, ROWS, columns_of
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.definitions import build
from sr_assets.settings import load_settings
from sr_assets_tests.published import publish_nodes

CONFIGURATION = """
name: US-EAST
streams:
  - {name: london, stream: TRACKED, source_url: a:1, target_url: b:1, inspect_field: sender, inspect_duration: 1h}
feeds:
  - {name: centre, stream: FEED, url: b:1}
topology:
  clusters: {hub: {url: "c:1"}}
  streams: [{cluster: hub, stream: ALL, subjects: ["a.>"]}]
"""


@pytest.mark.parametrize("table", COLUMN_TYPES)
def test_every_column_of_a_table_has_a_description(table: str) -> None:
    for name, _, description in columns_of(table):
        assert description, name
        assert description.endswith("."), description


def test_every_published_table_says_what_a_row_is() -> None:
    assert ROWS.keys() == COLUMN_TYPES.keys() - {"messages", "lake"}


def test_every_description_belongs_to_a_column() -> None:
    assert {
        (table, name) for table, names in _OWN.items() for name in names if name not in COLUMN_TYPES[table]
    } == set()
    assert _SHARED.keys() <= {name for types in COLUMN_TYPES.values() for name in types}


def test_columns_match_the_published_tables(tmp_path: Path) -> None:
    publish_nodes(tmp_path)
    with open_fleet(tmp_path) as fleet:
        for table in COLUMN_TYPES.keys() - {"messages", "lake"}:
            described = {name: kind for name, kind, *_ in fleet.execute(f"DESCRIBE {table}").fetchall()}
            spelled = {
                name: kind.replace("TIMESTAMP WITH TIME ZONE", "TIMESTAMPTZ") for name, kind in described.items()
            }
            assert spelled == COLUMN_TYPES[table], table


def test_every_shared_table_shows_its_columns(tmp_path: Path) -> None:
    file = tmp_path / "replication.yaml"
    file.write_text(CONFIGURATION)
    definitions = build(load_settings(file, {"SR_ASSETS_HOME": str(tmp_path)}))
    for spec in definitions.resolve_all_asset_specs():
        # A replay has counts only.
        if spec.key.path[0] == "fleet" and spec.key.path[1] != "replay":
            assert isinstance(spec.metadata["dagster/column_schema"], dg.TableSchema), spec.key
