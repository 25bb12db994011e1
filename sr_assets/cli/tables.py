"""Commands on the published tables: `export`, `query`, and `availability`, the uptime and outages of nodes, sites or days."""

from typing import TYPE_CHECKING

import click

from sr_assets.adapters import times
from sr_assets.cli.base import SECONDS, SINCE, cli, configured, echo, form_option
from sr_assets.cli.completing import complete_site, complete_tables
from sr_assets.cli.render import Format, show
from sr_assets.operate.bars import progress_bars

if TYPE_CHECKING:
    from sr_assets.adapters.published.availability import By
    from sr_assets.adapters.published.export import Form
    from sr_assets.settings import Settings

#: The columns that a narrow window keeps, by kind of row.
_KEYS: "dict[By, tuple[str, ...]]" = {"node": ("node", "name"), "site": ("name", "stream"), "day": ("date",)}
_FIGURES = ("availability_percent", "outages", "longest_outage_seconds")


@cli.command(epilog="Example: sr-assets export /srv/fleet --format parquet")
@click.argument("target")
@click.option(
    "-o",
    "--format",
    "form",
    type=click.Choice(("duckdb", "parquet", "csv")),
    default="duckdb",
    show_default=True,
    help="One new DuckDB file, or files in a folder.",
)
@click.option(
    "--tables",
    metavar="A,B",
    shell_complete=complete_tables,
    help="Only these tables (default: all except node_snapshot_history).",
)
@click.option("--since", type=SINCE, metavar="T", help="Only rows since a time, or since a duration ago, such as 30d.")
@configured
@progress_bars()
def export(settings: "Settings", target: str, form: "Form", tables: str | None, since: int | None) -> None:
    """Write a copy of the published tables that needs no other file.

    Parquet and CSV files go to a folder, or to an object store such as s3://bucket/folder. Files whose rows have not changed
    since the last export are not written again.
    """
    from sr_assets.adapters.published.export import export_tables

    names = [name.strip() for name in tables.split(",")] if tables is not None else ()
    done = export_tables(settings.home, target, form, names, since)
    if form != "duckdb":
        echo(f"{target}: {done.tables} tables, {done.written} files written, {done.unchanged} unchanged")


@cli.command(epilog='Example: sr-assets query "SELECT status, count(*) FROM last_seen_nodes GROUP BY status"')
@click.argument("sql")
@click.option("--timeout", type=SECONDS, default="60s", show_default=True, help="End a query that takes longer.")
@form_option
@configured
def query(settings: "Settings", sql: str, timeout: float, form: Format) -> None:
    """Run one SELECT on the published tables.

    The query cannot access other files, the network or settings. SHOW TABLES and DESCRIBE list tables and columns. Rows are
    printed as they arrive, tables in blocks.
    """
    from sr_assets.adapters.published.fleet_reader import user_query

    with user_query(settings.home, sql, seconds=timeout) as (columns, rows):
        show(columns, rows, form)


@cli.command(epilog="Example: sr-assets availability --by site --since 30d")
@click.option("--site", shell_complete=complete_site, help="Only this site.")
@click.option("--node", help="Only this node.")
@click.option("--since", type=SECONDS, default="30d", show_default=True, help="Period up to now, in whole days.")
@click.option(
    "--by",
    type=click.Choice(("node", "site", "day")),
    default="node",
    show_default=True,
    help="Print one row for each of these.",
)
@form_option
@configured
def availability(
    settings: "Settings", site: str | None, node: str | None, since: float, by: "By", form: Format
) -> None:
    """Show the availability of nodes, least available first.

    Availability is the share of the observed time in which a node was up. Nodes that were retired throughout are omitted.
    """
    from sr_assets.adapters.published import availability as queries
    from sr_assets.domain.days import date_at

    first = date_at(times.time_ns() - int(since * 1e9), settings.availability.timezone)
    rows = queries.availability(settings.home, by=by, site=site, node=node, since=first)
    show(rows.columns, rows.values, form, first=(*_KEYS[by], *_FIGURES))
    if not rows.values:
        echo(
            f"no day since {first} has been computed yet; `sr-assets up` computes days every hour, or materialise"
            " fleet/availability_daily in the UI",
            err=True,
        )
