"""Command `emulate`: a fleet of nodes that publish Choria registration messages, as daemons or over one connection."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sr_assets.cli.base import FILE, SECONDS, cli, echo

if TYPE_CHECKING:
    from sr_assets.domain.clusters import ClusterSettings
    from sr_assets.embedded.daemons import Job
    from sr_assets.embedded.fleet_plan import Churn, FleetPlan

#: A fleet from this size on says what it needs, also without an option of daemons.
_LARGE_NODES = 100


@cli.command(epilog="Example: sr-assets emulate --url nats://localhost:4222 --nodes 1000")
@click.option(
    "--url", required=True, help="The server, in the syntax of source_url: nats://[user:${PASSWORD}@]host:port."
)
@click.option("--ca", metavar="FILE", help="CA of the server's certificate, as tls.ca.")
@click.option("--cert", metavar="FILE", help="Client certificate, as tls.cert.")
@click.option("--key", metavar="FILE", help="Key of the client certificate, as tls.key.")
@click.option(
    "--subject",
    default="choria.stream.input.registration.%s",
    show_default=True,
    help="Subject of the messages; %s is the node.",
)
@click.option("--nodes", type=click.IntRange(1), required=True, help="Number of nodes.")
@click.option(
    "--interval", type=SECONDS, default="300s", show_default=True, help="Time between two messages of a node."
)
@click.option("--for", "for_seconds", type=SECONDS, help="Stop after this time (default: Ctrl-C).")
@click.option(
    "--bytes",
    "payload_bytes",
    type=int,
    default=7000,
    show_default=True,
    help="Typical size of a message in bytes; each node's size is between a third and 3.5 times of it.",
)
@click.option(
    "--churn",
    metavar="SHARE[,SHORT,LONG]",
    help="Share of nodes that fall silent and recover, and the lengths of their silence (default: 4 and 13 intervals).",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the fleet; the same seed gives the same fleet."
)
@click.option(
    "--plan", "plan_file", type=FILE, help="YAML file with the fleet's churn, silences and outages (docs/measure.md)."
)
@click.option(
    "--connections",
    type=click.Choice(["per-node", "shared"]),
    help="One connection per node (default), or one for all nodes.",
)
@click.option(
    "--processes", type=click.IntRange(1, 64), help="Processes that share the nodes' connections (default: 1)."
)
@click.option("--agents", type=click.IntRange(1, 1000), help="Agents of each node, `discovery` included (default: 2).")
@click.option("--collectives", type=click.IntRange(1, 1000), help="Collectives of each node (default: 1).")
@click.option(
    "--adapter", is_flag=True, help="Send registrations without JetStream; an adapter as in Choria stores them."
)
@click.option(
    "--ingest",
    metavar="SUBJECT",
    help="Subject that the adapter reads (default: mcollective.broadcast.agent.registration).",
)
@click.option("--rpc", is_flag=True, help="Answer pings, and requests for the action `generate`.")
@click.option(
    "--http-port",
    type=click.IntRange(0, 65535),
    help="Serve /debug/vars and /metrics on this port of 127.0.0.1; 0 chooses one.",
)
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
    plan_file: Path | None,
    connections: str | None,
    **daemons: "int | str | None",
) -> None:
    """Publish Choria registration messages like a fleet of nodes.

    Each node has its own connection, with the subscriptions of a Choria daemon. First the command prints the open files and
    the memory that it needs; it ends with exit code 1 if the `ulimit` is lower.
    """
    from sr_assets.embedded.fleet_plan import FleetPlan
    from sr_assets.embedded.plan_file import read_plan_file
    from sr_assets.settings import load_cluster

    cluster = load_cluster(url, {"ca": ca, "cert": cert, "key": key})
    planned, windows = read_plan_file(plan_file) if plan_file is not None else (None, ())
    if planned and churn:
        raise click.UsageError("--churn and churn in --plan exclude each other")
    plan = FleetPlan(nodes, interval, seed, planned or _churn(churn, interval), payload_bytes, windows=windows)
    chosen = {name: value for name, value in daemons.items() if value is not None and value is not False}
    if connections != "shared":
        job, port = _job(plan, cluster, subject, for_seconds, chosen)
        _run_daemons(job, port, told=bool(chosen or connections or nodes >= _LARGE_NODES))
    elif chosen:
        raise click.UsageError(f"--connections shared excludes --{min(chosen).replace('_', '-')}")
    else:
        _share(plan, cluster, subject, for_seconds)


def _job(
    plan: "FleetPlan",
    cluster: "ClusterSettings",
    subject: str,
    for_seconds: float | None,
    chosen: "dict[str, int | str]",
) -> "tuple[Job, int | None]":
    """Return the job of the chosen options, and the port of its counters."""
    from sr_assets.embedded.choria_rpc import REGISTRATION_SUBJECT
    from sr_assets.embedded.daemons import Job

    if "ingest" in chosen and "adapter" not in chosen:
        raise click.UsageError("--ingest needs --adapter")
    job = Job(
        plan,
        cluster,
        subject,
        for_seconds,
        agent_count=int(chosen.get("agents", 2)),
        collective_count=int(chosen.get("collectives", 1)),
        adapter="adapter" in chosen,
        ingest=str(chosen.get("ingest", REGISTRATION_SUBJECT)),
        rpc="rpc" in chosen,
        processes=min(plan.nodes, int(chosen.get("processes", 1))),
    )
    return job, int(chosen["http_port"]) if "http_port" in chosen else None


def _share(plan: "FleetPlan", cluster: "ClusterSettings", subject: str, for_seconds: float | None) -> None:
    """Run a fleet that shares one connection."""
    from sr_assets.embedded.emulator import Fleet

    fleet = Fleet(plan, cluster, subject, for_seconds=for_seconds)
    try:
        fleet.run()
    finally:
        if fleet.published:
            echo(f"published {fleet.published} messages of {plan.nodes} nodes", err=True)


def _run_daemons(job: "Job", port: int | None, *, told: bool) -> None:
    """Run a fleet with one connection per node; `told`: say first what it needs."""
    from sr_assets.embedded.daemons import DaemonFleet, check_needs, describe
    from sr_assets.embedded.daemons.status import StatusServer

    needs = check_needs(job)
    fleet = DaemonFleet(job)
    with contextlib.ExitStack() as stack:
        if told:
            echo(needs, err=True)
        if port is not None:
            url = stack.enter_context(StatusServer(job, fleet.counters, port))
            echo(f"Counters: {url}/debug/vars, {url}/metrics", err=True)
        try:
            fleet.run()
        finally:
            for line in describe(fleet.counters(), job):
                echo(line, err=True)


def _churn(text: str | None, interval: float) -> "Churn | None":
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
        f"--churn {text!r} is invalid; use a share from 0 to 1, or a share and two durations such as 0.2,12m,1h"
    )
