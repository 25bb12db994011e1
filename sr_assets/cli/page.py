"""The command `status-page`.

Not here: the page (`operate.page`).
"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from sr_assets.cli.base import cli, configured

if TYPE_CHECKING:
    from sr_assets.settings import Settings


@cli.command("status-page")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@configured
def status_page(settings: "Settings", file: Path) -> None:
    """Write a page about sites, nodes and replication: one HTML file that needs no network.

    From what is published; no server is asked. An older page is replaced.
    """
    from sr_assets.operate.page import write_page

    write_page(settings, file)
    click.echo(f"written: {file}")
