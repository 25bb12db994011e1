"""Command `schema`: the configuration, the published tables and the published events as data."""

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, Literal

import click

from sr_assets.cli.base import cli, echo

Described = Literal["config", "tables", "events"]
SchemaForm = Literal["json", "dbt", "sql", "markdown"]


@cli.command(epilog="Example: sr-assets schema tables --format dbt")
@click.argument(
    "described", metavar="[config|tables|events]", type=click.Choice(("config", "tables", "events")), default="tables"
)
@click.option(
    "-o",
    "--format",
    "form",
    type=click.Choice(("json", "dbt", "sql", "markdown")),
    default="json",
    show_default=True,
    help="dbt and sql describe tables.",
)
def schema(described: Described, form: SchemaForm) -> None:
    """Print the schema of the configuration, the tables (default) or the events, without reading a configuration.

    JSON is a JSON Schema of the configuration and of events, and a list of columns of tables; dbt is a sources.yml; sql is
    CREATE TABLE.
    """
    if described != "tables" and form in ("dbt", "sql"):
        raise click.UsageError(f"--format {form} describes tables; use json or markdown for {described}")
    printed = {"config": _config, "tables": _tables, "events": _events}[described](form)
    for line in printed.rstrip("\n").split("\n"):
        echo(line)


def _config(form: SchemaForm) -> str:
    from sr_assets.settings.json_schema import config_schema
    from sr_assets.settings.key_tables import key_table
    from sr_assets.settings.mapping import blocks_by_path
    from sr_assets.settings.top_level import Settings

    if form == "json":
        return json.dumps(config_schema(), indent=2)
    return "\n".join(f"### {path or 'Top level'}\n\n{key_table(block)}" for path, block in blocks_by_path(Settings))


def _events(form: SchemaForm) -> str:
    text = files("sr_assets").joinpath("schemas/events.json").read_text(encoding="utf-8")
    if form == "json":
        return text
    return "\n".join(_event_section(event) for event in json.loads(text)["definitions"].values())


def _event_section(event: dict[str, Any]) -> str:
    rows = [
        f"| `{name}` | {_json_type(field)} | {field.get('description', '')} |"
        for name, field in event["properties"].items()
    ]
    return "\n".join(
        (
            f"### {event['title']}",
            "",
            event["description"],
            "",
            "| field | type | meaning |",
            "| --- | --- | --- |",
            *rows,
            "",
        )
    )


def _json_type(field: dict[str, Any]) -> str:
    values = [field["const"]] if "const" in field else field.get("enum")
    if values is not None:
        return ", ".join(f"`{json.dumps(value).strip(chr(34))}`" for value in values)
    kind = field["type"]
    return kind if isinstance(kind, str) else " or ".join(kind)


def _tables(form: SchemaForm) -> str:
    from sr_assets.adapters.published.catalog import ROWS, columns_of

    tables = {table: (row, list(columns_of(table, links=False))) for table, row in ROWS.items()}
    if form == "sql":
        return "\n".join(line for table, (row, columns) in tables.items() for line in _ddl(table, row, columns))
    if form == "markdown":
        return "\n".join(_table_section(table, row, columns) for table, (row, columns) in tables.items())
    if form == "dbt":
        import yaml

        named = [
            {
                "name": table,
                "description": f"One row per {row}.",
                "columns": [{"name": name, "data_type": kind, "description": text} for name, kind, text in columns],
            }
            for table, (row, columns) in tables.items()
        ]
        source = {"name": "fleet", "database": "fleet", "schema": "main", "tables": named}
        return str(yaml.safe_dump({"version": 2, "sources": [source]}, sort_keys=False, allow_unicode=True, width=120))
    listed = {
        table: {
            "row": row,
            "columns": [{"name": name, "type": kind, "description": text} for name, kind, text in columns],
        }
        for table, (row, columns) in tables.items()
    }
    return json.dumps(listed, indent=2)


def _ddl(table: str, row: str, columns: list[tuple[str, str, str]]) -> Iterator[str]:
    from sr_assets.adapters.published.tables import literal

    declared = ", ".join(f'"{name}" {kind}' for name, kind, _ in columns)
    yield f"CREATE TABLE {table} ({declared});"
    yield f"COMMENT ON TABLE {table} IS {literal(f'One row per {row}.')};"
    for name, _, text in columns:
        yield f'COMMENT ON COLUMN {table}."{name}" IS {literal(text)};'


def _table_section(table: str, row: str, columns: list[tuple[str, str, str]]) -> str:
    rows = [f"| `{name}` | {kind} | {text} |" for name, kind, text in columns]
    return "\n".join(
        (f"### {table}", "", f"One row per {row}.", "", "| column | type | meaning |", "| --- | --- | --- |", *rows, "")
    )
