"""The commands that start or change something: demo, up, run, recover, forget, emulate, spark.

Not here: what they do (`embedded`, `operate`, `stages`); everything heavy is imported by the command that needs it.
"""

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sr_assets.adapters.logs import set_print_format
from sr_assets.cli.base import SECONDS, cli, configured, stream_named
from sr_assets.cli.warnings import warn
from sr_assets.domain.durations import duration
from sr_assets.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from sr_assets.settings import Settings


@cli.command()
@click.option(
    "--sites", type=click.IntRange(1, 20), default=2, show_default=True, help="How many sites report to the centre."
)
@click.option("--nodes", type=click.IntRange(1), default=100, show_default=True, help="How many nodes each site has.")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=3000, show_default=True, help="Where the UI listens, on loopback."
)
@click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where everything is kept; default: a folder that is removed at the end.",
)
@click.option("--no-ui", is_flag=True, help="Without the web UI.")
@click.option(
    "--for", "for_seconds", type=SECONDS, help="Stop so long after the first published table, with a last drain."
)
@click.option("--json", "as_json", is_flag=True, help="The last line is one JSON object.")
def demo(
    sites: int, nodes: int, port: int, home: Path | None, no_ui: bool, for_seconds: float | None, as_json: bool
) -> int:
    """Show the platform on this machine: sites, a centre, an emulated fleet."""
    from sr_assets.embedded.demo import run_demo

    return run_demo(
        sites=sites, nodes=nodes, port=port, home=home, ui=not no_ui, for_seconds=for_seconds, as_json=as_json
    )


@cli.command()
@click.option(
    "--port", type=click.IntRange(1, 65535), default=3000, show_default=True, help="Where the UI listens, on loopback."
)
@click.option("--read-only", is_flag=True, help="Nothing can be launched, ended or changed in the UI.")
@click.option(
    "--auth-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Ask for a login: a file, yours alone, with user:password or a token in each line.",
)
@configured
def up(settings: "Settings", port: int, read_only: bool, auth_file: Path | None) -> int:
    """Run Dagster's webserver and daemon for the configuration, until Ctrl-C.

    Without a login the UI answers this user's browsers and programs, and no other user's.
    """
    from sr_assets.operate import Ui, serve

    set_print_format(settings.log_format)
    warn(settings)
    _outlive_rotation(settings)
    return serve(settings, Ui(port, read_only, auth_file))


@cli.command()
@click.option(
    "--stream", "names", multiple=True, metavar="NAME", help="Only this stream, or name/stream; may be repeated."
)
@click.option("--once", is_flag=True, help="Drain to where the sources are now, publish and end; the default.")
@click.option("--follow", is_flag=True, help="Go on until Ctrl-C.")
@configured
def run(settings: "Settings", names: tuple[str, ...], once: bool, follow: bool) -> int:
    """Do what the sensors' runs do without the UI, recorded in the same Dagster instance.

    Sites run side by side: with --once as many as `concurrency` says, with --follow all of them.

    Exit code 1: a stream failed, the others ran.
    """
    from sr_assets.operate import run_sites

    if once and follow:
        raise click.UsageError("--once and --follow exclude each other")
    set_print_format(settings.log_format)
    warn(settings)
    _outlive_rotation(settings)
    chosen = {stream.label: stream for name in names for stream in settings.find(name)}
    if not settings.entries and settings.heartbeats is None:
        click.echo(
            "nothing to run: there are no streams and feeds; native streams are made by `topology apply`, or by `up`"
        )
        return 0
    return run_sites(settings, list(chosen.values()) or settings.entries, once=not follow)


def _outlive_rotation(settings: "Settings") -> None:
    """Ignore SIGHUP, which log rotation sends to have a log opened anew: `logfile` is opened anew without it."""
    if settings.logfile is not None:
        # Not SIG_IGN, which our children would inherit.
        signal.signal(signal.SIGHUP, lambda *_: None)


@cli.command()
@click.option("--stream", "name", required=True, metavar="NAME", help="The stream, or name/stream.")
@click.option(
    "--force", is_flag=True, help="Also when its state is readable, or its source was made again or went back."
)
@configured
def recover(settings: "Settings", name: str, force: bool) -> None:
    """Rebuild a stream's position and nodes from its target and source.

    For a lost state, and to take over from the Stream Replicator. The site's other streams keep their state.
    """
    from sr_assets.operate.bars import progress_bars
    from sr_assets.resources import configure_logging
    from sr_assets.stages.replication.recover import recover_stream

    configure_logging(settings)
    refusal = "a feed has nothing to recover: without a state it folds its stream again from the start"
    with progress_bars():
        done = recover_stream(settings, stream_named(settings, name, refusal), force=force)
    click.echo(done)


@cli.command()
@click.option("--site", required=True, metavar="S", help="The site: an entry's name, or one that a feed reports.")
@click.option("--stream", metavar="S", help="Only this stream of it.")
@click.option("--replicator", metavar="R", help="The replicator, where feeds report several sites of that name.")
@configured
def forget(settings: "Settings", site: str, stream: str | None, replicator: str | None) -> None:
    """Remove a site or stream that is no more: its rows, its folder, its history.

    At a site one that left the configuration, at a centre one that its feeds report.
    """
    from sr_assets.resources import configure_logging
    from sr_assets.stages.forgetting import forget as forget_site

    configure_logging(settings)
    for line in forget_site(settings, site, stream, replicator):
        click.echo(line)


@cli.command()
@click.option("--url", required=True, help="The server, written as a source_url: nats://[user:${PASSWORD}@]host:port.")
@click.option("--ca", metavar="FILE", help="The CA of the server's certificate, as tls.ca.")
@click.option("--cert", metavar="FILE", help="Our certificate, as tls.cert.")
@click.option("--key", metavar="FILE", help="Its key, as tls.key.")
@click.option(
    "--subject",
    default="choria.stream.input.registration.%s",
    show_default=True,
    help="Where nodes publish; %s is the node.",
)
@click.option("--nodes", type=click.IntRange(1), required=True, help="How many nodes.")
@click.option("--interval", type=SECONDS, default="300s", show_default=True, help="How often each node publishes.")
@click.option("--for", "for_seconds", type=SECONDS, help="Stop after so long; default: Ctrl-C.")
@click.option(
    "--bytes",
    "payload_bytes",
    type=int,
    default=7000,
    show_default=True,
    help="The typical size of a message in bytes; a node's lies between a third and 3.5 times that.",
)
@click.option(
    "--churn",
    metavar="SHARE[,SHORT,LONG]",
    help="The share of nodes that come and go, and how long they are silent; default 4 and 13 intervals.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same fleet.")
def emulate(
    url: str,
    ca: str | None,
    cert: str | None,
    key: str | None,
    subject: str,
    nodes: int,
    interval: float,
    for_seconds: float | None,
    payload_bytes: int,
    churn: str | None,
    seed: int,
) -> None:
    """Publish Choria registration messages as a fleet of nodes does."""
    from sr_assets.embedded.emulator import Fleet
    from sr_assets.embedded.fleet_plan import FleetPlan
    from sr_assets.settings import load_cluster

    cluster = load_cluster(url, {"ca": ca, "cert": cert, "key": key})
    plan = FleetPlan(nodes, interval, seed, _churn(churn, interval), payload_bytes)
    fleet = Fleet(plan, cluster, subject, for_seconds=for_seconds)
    try:
        fleet.run()
    finally:
        if fleet.published:
            click.echo(f"published {fleet.published} messages of {nodes} nodes", err=True)


def _churn(text: str | None, interval: float) -> Any:
    from sr_assets.embedded.fleet_plan import Churn

    if text is None:
        return None
    share, *silences = text.replace(":", ",").split(",")
    try:
        times = [SECONDS.convert(silence, None, None) for silence in silences] or [4 * interval, 13 * interval]
        if len(times) == 2 and 0 <= float(share) <= 1:
            return Churn(float(share), *times)
    except ValueError:
        pass
    raise click.UsageError(
        f"--churn {text!r}: write a share from 0 to 1, or a share and two durations, as in 0.2,12m,1h"
    )


@cli.group()
def spark() -> None:
    """The warm Spark engine of this home."""


@spark.command("start")
@configured
def spark_start(settings: "Settings") -> None:
    """Start the engine, so that the first run finds it warm."""
    from sr_assets.adapters.spark.engine import start_engine

    if settings.spark.mode != "connect-local":
        raise ConfigurationError(
            f"spark.mode is {settings.spark.mode.partition(':')[0]}: only connect-local has an engine of ours"
        )
    engine = start_engine(settings.spark, settings.home.resolve())
    click.echo(f"running: pid {engine.pid}, port {engine.port}")


@spark.command("status")
@configured
def spark_status(settings: "Settings") -> int:
    """Show whether the engine runs; exit code 1 when it does not."""
    from sr_assets.adapters.spark.engine import engine_status

    engine = engine_status(settings.home.resolve())
    click.echo(
        f"running: pid {engine.pid}, port {engine.port}, for {duration(int(time.time() - engine.started_at))}"
        if engine
        else "not running"
    )
    return 0 if engine else 1


@spark.command("stop")
@configured
def spark_stop(settings: "Settings") -> None:
    """Stop the engine; the next run starts another."""
    from sr_assets.adapters.spark.engine import stop_engine

    click.echo("stopped" if stop_engine(settings.home.resolve()) else "was not running")
