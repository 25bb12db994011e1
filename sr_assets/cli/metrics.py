"""The command `metrics`.

Not here: the metrics (`operate.metrics`).
"""

from typing import TYPE_CHECKING

import click

from sr_assets.cli.base import cli, configured

if TYPE_CHECKING:
    from sr_assets.settings import Settings


@cli.command()
@click.option("--once", is_flag=True, help="Print them and end.")
@configured
def metrics(settings: "Settings", once: bool) -> None:
    """Serve metrics for Prometheus, as `up` and `run --follow` do beside their work.

    From what is published; no server is asked.
    """
    from sr_assets.operate.metrics import Exposition, serve_metrics

    if once:
        exposition = Exposition(settings)
        exposition.renew()
        click.echo(exposition.text(), nl=False)
    else:
        serve_metrics(settings)
