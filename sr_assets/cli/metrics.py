"""The command `metrics`."""

from typing import TYPE_CHECKING

import click

from sr_assets.cli.base import cli, configured, echo_document

if TYPE_CHECKING:
    from sr_assets.settings import Settings


@cli.command()
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
