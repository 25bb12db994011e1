"""The commands `status-page` and `metrics`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sr_assets.cli.base import FILE, cli, configured, echo, echo_document

if TYPE_CHECKING:
    from sr_assets.settings import Settings


@cli.command("status-page", epilog="Example: sr-assets status-page /var/www/html/fleet.html")
@click.argument("file", type=FILE)
@configured
def status_page(settings: "Settings", file: Path) -> None:
    """Write the status of sites, nodes and replication to one HTML file that needs no network.

    The page comes from the published tables; no server is queried. An existing file is replaced.
    """
    from sr_assets.operate.page import write_page

    write_page(settings, file)
    echo(f"written: {file}")


@cli.command(epilog="Example: sr-assets metrics --once")
@click.option("--once", is_flag=True, help="Print the metrics and exit.")
@configured
def metrics(settings: "Settings", once: bool) -> None:
    """Serve metrics for Prometheus, as `up` and `run --follow` do.

    The metrics come from the published tables; no server is queried.
    """
    from sr_assets.operate.metrics import Exposition, serve_metrics

    if once:
        exposition = Exposition(settings)
        exposition.renew()
        echo_document(exposition.text())
    else:
        serve_metrics(settings)
