"""Commands on all published tables: `export` and `query`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sr_assets.cli.base import FILE, SECONDS, cli, configured, form_option
from sr_assets.cli.render import Format, show

if TYPE_CHECKING:
    from sr_assets.settings import Settings


@cli.command()
@click.argument("file", type=FILE)
@configured
def export(settings: "Settings", file: Path) -> None:
    """Write a self-contained copy of the published tables as a DuckDB file."""
    from sr_assets.adapters.published.reading import export_fleet

    export_fleet(settings.home, file)


@cli.command()
@click.argument("sql")
@click.option("--timeout", type=SECONDS, default="60s", show_default=True, help="End a query that takes longer.")
@form_option
@configured
def query(settings: "Settings", sql: str, timeout: float, form: Format) -> None:
    """Run one SELECT on the published tables.

    The query cannot access other files, the network or settings. SHOW TABLES and DESCRIBE list tables and columns. Rows are
    printed as they arrive, tables in blocks.
    """
    from sr_assets.adapters.published.user_query import user_query

    with user_query(settings.home, sql, seconds=timeout) as (columns, rows):
        show(columns, rows, form)
