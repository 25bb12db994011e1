"""Commands that start or change something: `demo`, `up`, `run`, `recover`, `retry-parked`, `forget`.

Each command imports its heavy dependencies itself, so that the others start quickly.
"""

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sr_assets.adapters.logs import configure_logging, set_print_format
from sr_assets.cli.base import (
    FILE,
    SECONDS,
    cli,
    configured,
    echo,
    note_action,
    stream_option,
    ui_port_option,
)
from sr_assets.cli.completing import complete_stream
from sr_assets.cli.warnings import warn, warn_of_configuration, warn_of_home
from sr_assets.operate.bars import progress_bars

if TYPE_CHECKING:
    from sr_assets.settings import Settings


@cli.command(epilog="Example: sr-assets demo --no-ui --for 60")
@click.option(
    "--sites",
    type=click.IntRange(1, 20),
    default=2,
    show_default=True,
    help="Number of sites that report to the centre.",
)
@click.option("--nodes", type=click.IntRange(1), default=100, show_default=True, help="Number of nodes per site.")
@ui_port_option
@click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep all data in this directory (default: a temporary one).",
)
@click.option("--no-ui", is_flag=True, help="Do not start the web UI.")
@click.option(
    "--for", "for_seconds", type=SECONDS, help="Stop this long after the first published table, with a last drain."
)
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")
def demo(
    sites: int, nodes: int, port: int, home: Path | None, no_ui: bool, for_seconds: float | None, as_json: bool
) -> int:
    """Run the platform on this machine: sites, a centre, an emulated fleet."""
    from sr_assets.embedded.demo import run_demo

    return run_demo(
        sites=sites, nodes=nodes, port=port, home=home, ui=not no_ui, for_seconds=for_seconds, as_json=as_json
    )


@cli.command(epilog="Example: sr-assets up --port 3000")
@ui_port_option
@click.option("--read-only", is_flag=True, help="Make the UI read-only.")
@click.option(
    "--auth-file",
    type=FILE,
    help="Require a login from this private file: one user:password or token per line.",
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address of the UI; another one needs --auth-file."
)
@click.option(
    "--trust-proxy",
    metavar="[USER]",
    is_flag=False,
    flag_value="",
    help="Accept requests of a proxy that runs as USER; with --read-only and --public-host, --auth-file is not needed.",
)
@click.option(
    "--public-host", "public_hosts", metavar="NAME", multiple=True, help="Accept only this host name; repeatable."
)
@click.option("--no-ui", is_flag=True, help="Run only Dagster's daemon, without the webserver.")
@configured
def up(
    settings: "Settings",
    port: int,
    read_only: bool,
    auth_file: Path | None,
    host: str,
    trust_proxy: str | None,
    public_hosts: tuple[str, ...],
    no_ui: bool,
) -> int:
    """Run Dagster's webserver and daemon until Ctrl-C.

    Without --auth-file, the UI accepts only connections of the user who started it. Leave TLS to a proxy.
    """
    from sr_assets.operate.services import serve
    from sr_assets.operate.ui_access import Ui

    set_print_format(settings.log_format)
    warn(settings)
    _outlive_rotation(settings)
    if no_ui and (read_only or auth_file or trust_proxy is not None or public_hosts or host != "127.0.0.1"):
        raise click.UsageError("--no-ui excludes the options of the UI")
    return serve(settings, None if no_ui else Ui(port, read_only, auth_file, host, trust_proxy, public_hosts))


@cli.command(epilog="Example: sr-assets run --once")
@click.option(
    "--stream",
    "names",
    multiple=True,
    metavar="NAME",
    shell_complete=complete_stream,
    help="Run only this stream (or name/stream); repeatable.",
)
@click.option("--once", is_flag=True, help="Process the current messages of the sources, publish and end (default).")
@click.option("--follow", is_flag=True, help="Continue until Ctrl-C.")
@configured
def run(settings: "Settings", names: tuple[str, ...], once: bool, follow: bool) -> int:
    """Do the work of `up` without Dagster's daemon and UI, recorded in the same Dagster instance.

    --once does all work that is due: the sites' runs, then daily tables, native streams, retention and notifications.
    Each site runs in its own process: at most `concurrency` at a time with --once, all with --follow.

    Exit code 1: a stream failed; the others ran.
    """
    from sr_assets.operate.runs import run_sites

    if once and follow:
        raise click.UsageError("--once and --follow exclude each other")
    set_print_format(settings.log_format)
    warn_of_configuration(settings)
    _outlive_rotation(settings)
    chosen = {stream.label: stream for name in names for stream in settings.find(name)}
    if not settings.entries and settings.heartbeats is None and not settings.topology:
        echo("nothing to run: no streams, feeds, native streams or heartbeats are configured")
        return 0
    entries = list(chosen.values()) or settings.entries
    return run_sites(settings, entries, once=not follow, begin=lambda: warn_of_home(settings))


def _outlive_rotation(settings: "Settings") -> None:
    """Ignore SIGHUP from log rotation: `logfile` is reopened without a signal."""
    if settings.logfile is not None:
        # Child processes would inherit SIG_IGN.
        signal.signal(signal.SIGHUP, lambda *_: None)


@cli.command(epilog="Example: sr-assets recover --stream NODES")
@stream_option
@click.option(
    "--force",
    is_flag=True,
    help="Rebuild even if the state is readable, or the source was recreated or rolled back.",
)
@configured
@progress_bars()
def recover(settings: "Settings", name: str, force: bool) -> None:
    """Rebuild a stream's position and nodes from its target and source.

    Use it after the loss of a state, and to take over from the Stream Replicator. The site's other streams keep their state.
    """
    from sr_assets.stages.replication.recover import recover_stream

    configure_logging(settings)
    refusal = "a feed has no state to recover; without a state it folds its stream from the start"
    stream = settings.stream_named(name, refusal)
    done = recover_stream(settings, stream, force=force)
    note_action(settings, "recover", stream.label, done)
    for line in done.split("\n"):
        echo(line)


@cli.command(epilog="Example: sr-assets login ann")
@click.argument("user")
@click.password_option(help="The password; asked for if it is missing.")
def login(user: str, password: str) -> None:
    """Print a line for the file of `up --auth-file`, from which nobody can read the password."""
    from sr_assets.operate.ui_access import hashed_login

    if not user or ":" in user or not user.isprintable() or not password:
        raise click.UsageError("USER needs a name without ':', and a password")
    echo(hashed_login(user, password))


@cli.command("retry-parked", epilog="Example: sr-assets retry-parked --stream NODES")
@stream_option
@configured
def retry_parked(settings: "Settings", name: str) -> int:
    """Copy a stream's parked messages again, each once, after the target was changed to accept them.

    Exit code 1: the run failed; the next run continues.
    """
    from sr_assets.operate.runs import run_sites
    from sr_assets.stages.operator_commands import request_parked

    set_print_format(settings.log_format)
    stream = settings.stream_named(name, "a feed copies no messages")
    again, gone = request_parked(settings, stream)
    if gone:
        echo(f"{stream.label}: {gone} parked messages stay parked: the source no longer holds them")
    if not again:
        echo(f"{stream.label}: no message to copy again")
        return 0
    echo(f"{stream.label}: copying {again} parked messages again")
    return run_sites(settings, [stream], once=True)


@cli.command(epilog="Example: sr-assets forget --site london --stream NODES")
@click.option("--site", required=True, metavar="S", help="The site: an entry's name, or a name that a feed reports.")
@click.option("--stream", metavar="S", help="Delete only this stream of the site.")
@click.option("--replicator", metavar="R", help="The replicator, if feeds report several sites of that name.")
@configured
@progress_bars()
def forget(settings: "Settings", site: str, stream: str | None, replicator: str | None) -> None:
    """Delete the rows, folder and history of a site or stream that is no longer configured.

    At a centre, delete a site that its feeds report.
    """
    from sr_assets.stages.forgetting import forget as forget_site

    configure_logging(settings)
    for line in forget_site(settings, site, stream, replicator):
        note_action(settings, "forget", f"{site}/{stream}" if stream else site, line)
        echo(line)
