"""The schemas: of the configuration, the tables and the events, as files and as printed."""

import json
from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft7Validator

from sr_assets.adapters.published.catalog import COLUMN_TYPES, ROWS
from sr_assets.cli.base import cli
from sr_assets.settings.json_schema import config_schema
from sr_assets.settings.key_tables import key_table
from sr_assets_tests.event_schema import events_schema
from sr_assets_tests.test_documents import Block, blocks

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted([*(ROOT / "conf").glob("*.yaml"), *(ROOT / "conf" / "three-tiers").glob("*.yaml")])
STREAM = {"stream": "S", "source_url": "a:1", "target_url": "b:1"}


def printed(*words: str) -> str:
    result = CliRunner().invoke(cli, ["schema", *words])
    assert result.exit_code == 0, result.output
    return result.output


def problems(configuration: object) -> list[str]:
    # Times are text for an editor.
    read = json.loads(json.dumps(configuration, default=str))
    return [error.json_path for error in Draft7Validator(config_schema()).iter_errors(read)]


def test_file_for_editors_is_the_printed_schema() -> None:
    """After a change of a key: `sr-assets schema config > schemas/config.json`."""
    Draft7Validator.check_schema(config_schema())
    assert printed("config") == (ROOT / "schemas" / "config.json").read_text()


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_examples_are_valid_and_name_their_schema(file: Path) -> None:
    first, _, text = file.read_text().partition("\n")
    schema = first.removeprefix("# yaml-language-server: $schema=")
    assert (file.parent / schema).resolve() == ROOT / "schemas" / "config.json"
    assert problems(yaml.safe_load(text)) == []


@pytest.mark.parametrize("block", blocks("yaml", "yaml fragment"), ids=str)
def test_documented_configurations_are_valid(block: Block) -> None:
    keys = yaml.safe_load(block.text)
    streams = [{**STREAM, **entry} for entry in keys.pop("streams", [{}])]
    assert problems({"name": "X", **({} if "feeds" in keys else {"streams": streams}), **keys}) == []


@pytest.mark.parametrize(
    ("keys", "path"),
    (
        ({"name": "X", "sensor": {"intervall": "1m"}}, "$.sensor"),
        ({"name": "X", "log_format": "xml"}, "$.log_format"),
        ({"name": "X", "concurrency": 0}, "$.concurrency"),
        ({"name": "X", "metrics": {"port": 70000}}, "$.metrics"),
        ({"name": "X", "streams": [{**STREAM, "on_poison": "parc"}]}, "$.streams"),
        ({"name": "X", "streams": [{"stream": "S"}]}, "$.streams"),
        ({"streams": [STREAM]}, "$"),
    ),
)
def test_mistakes_in_keys_and_choices_are_found(keys: dict[str, Any], path: str) -> None:
    assert problems(keys) == [path]


@pytest.mark.parametrize(
    "keys",
    (
        {"loglevel": "INFO", "log_format": "Json"},
        {"loglevel": "${LEVEL}", "concurrency": "${COUNT}", "linger": 0},
        {"run_budget": {"data": "ops/budget", "default": "5m"}},
        {"streams": [{**STREAM, "on_poison": "PARK", "target": {"storage": "File"}, "tls": None}]},
    ),
)
def test_unusual_spellings_are_valid(keys: dict[str, Any]) -> None:
    assert problems({"name": "X", "streams": [STREAM]} | keys) == []


def test_tables_are_the_same_in_every_form() -> None:
    listed = json.loads(printed())
    kinds = {table: {column["name"]: column["type"] for column in listed[table]["columns"]} for table in listed}
    assert kinds == {table: COLUMN_TYPES[table] for table in ROWS}
    (source,) = yaml.safe_load(printed("tables", "--format", "dbt"))["sources"]
    assert {table["name"]: {c["name"]: c["data_type"] for c in table["columns"]} for table in source["tables"]} == kinds
    with duckdb.connect() as connection:
        connection.execute(printed("tables", "--format", "sql"))
        created = connection.execute("SELECT table_name, column_name FROM duckdb_columns() WHERE comment IS NOT NULL")
        assert created.fetchall().sort() == [(table, name) for table in kinds for name in kinds[table]].sort()
        assert connection.execute(
            "SELECT count(*) FROM duckdb_tables() WHERE comment LIKE 'One row per %'"
        ).fetchall() == [(len(kinds),)]
    assert "### last_seen_nodes\n\nOne row per tracked node" in printed("tables", "--format", "markdown")


def test_configuration_in_markdown_has_every_block_of_the_reference() -> None:
    from sr_assets.settings.blocks import SensorSettings

    text = printed("config", "--format", "markdown")
    assert f"### sensor\n\n{key_table(SensorSettings)}" in text
    assert "### streams[].partitions\n" in text


def test_events_are_printed_as_schema_and_as_tables() -> None:
    assert json.loads(printed("events")) == events_schema()
    text = printed("events", "--format", "markdown")
    assert "| `event` | `new`, `timeout`, `recover`, `expire` | What became true. |" in text
    assert "| `previous` | `up`, `timeout`, `retired`, `null` |" in text


def test_unfitting_form_is_one_line() -> None:
    result = CliRunner().invoke(cli, ["schema", "events", "--format", "sql"])
    assert (result.exit_code, "describes tables; use json or markdown for events" in result.output) == (2, True)
