"""Commands about the leader election: `members` and `step-down`."""

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from sr_assets.adapters.logs import print_error
from sr_assets.cli.base import cli, configured, form_option
from sr_assets.cli.render import Format, show
from sr_assets.domain.errors import ConfigurationError, did_you_mean

if TYPE_CHECKING:
    from sr_assets.settings import Settings

_STEP_DOWN_SECONDS = 30.0


@cli.command()
@form_option
@configured
def members(settings: "Settings", form: Format) -> int:
    """Query the leader, the followers and the newest checkpoint of every site.

    Exit code 1 if a server cannot be queried.
    """
    from sr_assets.stages.members import find_members, site_checkpoint

    columns = ["name", "leader", "leader_host", "leader_since", "followers"]
    columns += ["checkpoint_at", "checkpoint_age_seconds", "checkpoint_position"]
    rows, sites = [], find_members(settings)
    for site in sites:
        checkpoint = site_checkpoint(settings, site.name)
        age_seconds = None if checkpoint.at_ns is None else max(0.0, time.time() - checkpoint.at_ns / 1e9)
        term = (site.leader, site.leader_host, _time(site.since_ns), list(site.followers))
        rows.append((site.name, *term, _time(checkpoint.at_ns), age_seconds, checkpoint.position))
    show(columns, rows, form, first=("name", "leader", "leader_host", "leader_since"))
    for site in sites:
        if site.problem:
            print_error(f"{site.name}: {site.problem}")
    return int(any(site.problem for site in sites))


@cli.command("step-down")
@click.option("--site", metavar="S", help="Only this site (default: every site that this member leads).")
@configured
def step_down(settings: "Settings", site: str | None) -> int:
    """Give up the leadership, and do not campaign for two TTLs.

    Exit code 1 if this member does not lead.
    """
    from sr_assets.adapters.state.lease import Lease
    from sr_assets.stages.leadership import step_down as give_up

    if site is not None and site not in settings.sites:
        raise ConfigurationError(
            f"--site {site}: is not configured; {did_you_mean(site, settings.sites)}configured: {', '.join(settings.sites)}"
        )
    left = 0
    for name in [site] if site else settings.sites:
        if give_up(settings, name, _STEP_DOWN_SECONDS):
            click.echo(f"{name}: stepped down")
            left += 1
        elif site:
            print_error(f"{name}: this member does not lead: {Lease.read(settings.home / 'sites' / name).line}")
    if not left and not site:
        print_error("this member leads no site; `sr-assets members` lists the leaders")
    return int(not left)


def _time(at_ns: int | None) -> datetime | None:
    return None if at_ns is None else datetime.fromtimestamp(at_ns // 1_000_000_000, UTC)
