"""Commands about members and their checkpoints: `members`, `step-down`, `checkpoint` and `restore`."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sr_assets.adapters import times
from sr_assets.adapters.logs import print_error
from sr_assets.cli.base import cli, configured, echo, form_option, note_action
from sr_assets.cli.completing import complete_site
from sr_assets.cli.render import Format, show
from sr_assets.domain.errors import ConfigurationError, RunError, did_you_mean
from sr_assets.operate.bars import progress_bars

if TYPE_CHECKING:
    from sr_assets.settings import Settings

_STEP_DOWN_SECONDS = 30.0


@cli.command(epilog="Example: sr-assets members")
@form_option
@configured
def members(settings: "Settings", form: Format) -> int:
    """Query the leader, the followers and the newest checkpoint of every site.

    Exit code 1 if a server cannot be queried.
    """
    from sr_assets.stages.checkpointing import find_checkpoint
    from sr_assets.stages.leadership import find_members

    columns = ["name", "leader", "leader_host", "leader_since", "followers"]
    columns += ["checkpoint_at", "checkpoint_age_seconds", "checkpoint_position"]
    rows: list[tuple[object, ...]] = []
    problems = []
    for site in find_members(settings):
        at_ns = position = None
        problems += [f"{site.name}: {site.problem}"] if site.problem else []
        try:
            if checkpoint := find_checkpoint(settings, site.name):
                at_ns, position = checkpoint.at_ns, _position(checkpoint.positions)
        except RunError as error:
            problems.append(f"{site.name}: {error}")
        age_seconds = None if at_ns is None else max(0.0, times.time() - at_ns / 1e9)
        term = (site.leader, site.leader_host, _time(site.since_ns), list(site.followers))
        rows.append((site.name, *term, _time(at_ns), age_seconds, position))
    show(columns, rows, form, first=("name", "leader", "leader_host", "leader_since"))
    for problem in problems:
        print_error(problem)
    return int(bool(problems))


def _position(positions: dict[str, int]) -> int | str | None:
    """Return the next sequence of the only stream, or of the first ones as text."""
    from sr_assets.stages.checkpointing import described_positions

    if len(positions) == 1:
        return next(iter(positions.values()))
    return described_positions(positions, " ") or None


@cli.command(epilog="Example: sr-assets checkpoint --site london")
@click.option("--site", metavar="S", shell_complete=complete_site, help="Only this site (default: every site).")
@click.option("-o", "file", type=click.Path(path_type=Path), help="Write into this file instead of the store.")
@configured
@progress_bars()
def checkpoint(settings: "Settings", site: str | None, file: Path | None) -> int:
    """Write a checkpoint of a site's state now."""
    from sr_assets.stages.operator_commands import save_site

    sites = _sites(settings, site)
    if file is not None and len(sites) > 1:
        raise ConfigurationError(f"-o {file}: holds one site; name it with --site: {', '.join(sites)}")
    for name in sites:
        echo(save_site(settings, name, file))
    return 0


@cli.command(epilog="Example: sr-assets restore --site london")
@click.option("--site", metavar="S", shell_complete=complete_site, help="Only this site (default: every site).")
@click.option("--unsigned", is_flag=True, help="Also a checkpoint without the signature of checkpoint.key.")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=False)
@configured
@progress_bars()
def restore(settings: "Settings", site: str | None, file: Path | None, *, unsigned: bool) -> int:
    """Replace a site's state by its newest checkpoint in the store, or by FILE.

    The previous state is set aside. The next run continues from the checkpoint; copies and advisories made since count as
    made.
    """
    from sr_assets.stages.checkpointing import restore_site

    sites = _sites(settings, site)
    if file is not None and len(sites) > 1:
        raise ConfigurationError(f"{file}: holds one site; name it with --site: {', '.join(sites)}")
    for name in sites:
        done = restore_site(settings, name, file, unsigned=unsigned)
        note_action(settings, "restore", name, done)
        echo(done)
    return 0


def _sites(settings: "Settings", site: str | None) -> list[str]:
    if site is not None and site not in settings.sites:
        raise ConfigurationError(
            f"--site {site}: is not configured; {did_you_mean(site, settings.sites)}configured: {', '.join(settings.sites)}"
        )
    return [site] if site else list(settings.sites)


@cli.command("step-down", epilog="Example: sr-assets step-down")
@click.option(
    "--site",
    metavar="S",
    shell_complete=complete_site,
    help="Only this site (default: every site that this member leads).",
)
@configured
def step_down(settings: "Settings", site: str | None) -> int:
    """Give up the leadership, and do not campaign for two TTLs.

    Exit code 1 if this member does not lead.
    """
    from sr_assets.adapters.state.lease import Lease
    from sr_assets.stages.leadership import step_down as give_up

    left = 0
    for name in _sites(settings, site):
        if give_up(settings, name, _STEP_DOWN_SECONDS):
            note_action(settings, "step-down", name)
            echo(f"{name}: stepped down")
            left += 1
        elif site:
            print_error(f"{name}: this member does not lead: {Lease.read(settings.home / 'sites' / name).line}")
    if not left and not site:
        print_error("this member leads no site; `sr-assets members` lists the leaders")
    return int(not left)


def _time(at_ns: int | None) -> datetime | None:
    return None if at_ns is None else datetime.fromtimestamp(at_ns // 1_000_000_000, UTC)
