"""The command `status-page`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sr_assets.cli.base import FILE, cli, configured, echo

if TYPE_CHECKING:
    from sr_assets.settings import Settings


@cli.command("status-page")
@click.argument("file", type=FILE)
@configured
def status_page(settings: "Settings", file: Path) -> None:
    """Write the status of sites, nodes and replication to one HTML file that needs no network.

    The page comes from the published tables; no server is queried. An existing file is replaced.
    """
    from sr_assets.operate.page import write_page

    write_page(settings, file)
    echo(f"written: {file}")
