"""The `sr-assets` command: thin, one function per command.

Here: options, which query or stage a command is, what is printed, exit codes. Not here: how rows are drawn (`tables`), the work
itself. Everything heavy is imported by the command that needs it, so that help comes at once.

Exit codes: 0, 1 (a run, a server or a lookup failed), 2 (configuration or usage), 130 (interrupted). An error is one line.
"""

import contextlib
import difflib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sr_assets.domain.errors import ConfigurationError, RunError, SrAssetsError

if TYPE_CHECKING:
    from sr_assets.adapters.fleet import Rows
    from sr_assets.settings import Settings, StreamSettings

_FOLLOW_SECONDS = 0.5
_INTERRUPTED = 130


class _Seconds(click.ParamType[float]):
    """A duration as in the configuration, or plain seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        from sr_assets.settings import parse_duration

        if isinstance(value, float):
            return value
        try:
            return float(value) if str(value).replace(".", "", 1).isdecimal() else parse_duration(value) / 1e9
        except ConfigurationError as error:
            self.fail(str(error), param, ctx)


_SECONDS = _Seconds()
_form = click.option(
    "--format",
    "form",
    type=click.Choice(("table", "json", "csv")),
    default="table",
    show_default=True,
    help="How rows are shown.",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit."""
    sys.exit(run_command(arguments))


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; whatever goes wrong is one line on stderr."""
    try:
        return int(cli.main(arguments, prog_name="sr-assets", standalone_mode=False) or 0)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except ConfigurationError as error:
        return _fail(str(error), 2)
    except SrAssetsError as error:
        return _fail(str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read us has enough; closing stdout at exit must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _fail(message: str, code: int) -> int:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return code


def _configured(command: Callable[..., Any]) -> Callable[..., Any]:
    """Hand the settings to a command, which are read when it is called."""

    @wraps(command)
    def with_settings(*arguments: Any, **options: Any) -> Any:
        return command(_settings(), *arguments, **options)

    return with_settings


def _settings() -> "Settings":
    from sr_assets.settings import load_settings

    return load_settings()


def _print_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]], form: Any, title: str | None = None) -> None:
    from sr_assets import tables

    tables.show(columns, rows, form, title=title)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="The configuration; default: SR_ASSETS_CONFIG, else conf/replication.yaml.",
)
@click.version_option(version("sr-assets"), prog_name="sr-assets")
def cli(config: Path | None) -> None:
    """Replicate, sample and track fleets of machines that report over NATS JetStream."""
    if config is not None:
        os.environ["SR_ASSETS_CONFIG"] = str(config.absolute())


# --------------------------------------------------------------------------------------------------------- what works


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
    "--for", "for_seconds", type=_SECONDS, help="Stop so long after the first published table, with a last drain."
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
@_configured
def up(settings: "Settings", port: int) -> int:
    """Run Dagster's webserver and daemon for the configuration, until Ctrl-C."""
    from sr_assets.operate import serve

    _warn(settings)
    return serve(settings, port)


@cli.command()
@click.option(
    "--stream", "names", multiple=True, metavar="NAME", help="Only this stream, or name/stream; may be repeated."
)
@click.option("--once", is_flag=True, help="Drain to where the sources are now, publish and end; the default.")
@click.option("--follow", is_flag=True, help="Go on until Ctrl-C.")
@_configured
def run(settings: "Settings", names: tuple[str, ...], once: bool, follow: bool) -> int:
    """Do what the sensors' runs do without the UI, recorded in the same Dagster instance.

    Sites work side by side, as many as there are cores. Exit code 1: a stream failed, the others ran.
    """
    from sr_assets.operate import run_sites

    if once and follow:
        raise click.UsageError("--once and --follow exclude each other")
    _warn(settings)
    chosen = {stream.label: stream for name in names for stream in settings.find(name)}
    return run_sites(settings, list(chosen.values()) or settings.streams, once=not follow)


@cli.command()
@click.option("--stream", "name", required=True, metavar="NAME", help="The stream, or name/stream.")
@_configured
def recover(settings: "Settings", name: str) -> None:
    """Rebuild a stream's position and nodes from its target and source.

    For a lost state, and to take over from the Go replicator.
    """
    from sr_assets.resources import configure_logging
    from sr_assets.stages.recover import recover_stream

    configure_logging(settings)
    found = settings.find(name)
    if len(found) > 1:
        raise ConfigurationError(
            f"--stream {name}: there are several, name one: {', '.join(stream.label for stream in found)}"
        )
    click.echo(recover_stream(settings, found[0]))


@cli.command()
@click.option("--url", required=True, help="The server: nats://[user:password@]host:port.")
@click.option(
    "--subject",
    default="choria.stream.input.registration.%s",
    show_default=True,
    help="Where nodes publish; %s is the node.",
)
@click.option("--nodes", type=click.IntRange(1), required=True, help="How many nodes.")
@click.option("--interval", type=_SECONDS, default="300s", show_default=True, help="How often each node publishes.")
@click.option("--for", "for_seconds", type=_SECONDS, help="Stop after so long; default: Ctrl-C.")
@click.option(
    "--bytes",
    "payload_bytes",
    type=int,
    default=7000,
    show_default=True,
    help="The typical size; nodes send from a third to 3.5 times of it.",
)
@click.option(
    "--churn",
    metavar="SHARE[,SHORT,LONG]",
    help="The share of nodes that come and go, and how long they are silent; default 4 and 13 intervals.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed tells the same story.")
def emulate(
    url: str,
    subject: str,
    nodes: int,
    interval: float,
    for_seconds: float | None,
    payload_bytes: int,
    churn: str | None,
    seed: int,
) -> None:
    """Be a fleet of nodes that publish Choria registration messages."""
    from sr_assets.embedded.fleet import Fleet, FleetPlan

    plan = FleetPlan(nodes, interval, seed, _churn(churn, interval), payload_bytes)
    fleet = Fleet(plan, url, subject, for_seconds=for_seconds)
    try:
        fleet.run()
    finally:
        click.echo(f"published {fleet.published} messages of {nodes} nodes", err=True)


def _churn(text: str | None, interval: float) -> Any:
    from sr_assets.embedded.fleet import Churn

    if text is None:
        return None
    share, *silences = text.replace(":", ",").split(",")
    try:
        times = [_SECONDS.convert(silence, None, None) for silence in silences] or [4 * interval, 13 * interval]
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
@_configured
def spark_start(settings: "Settings") -> None:
    """Start the engine, so that the first run finds it warm."""
    from sr_assets.adapters.spark_engine import start_engine

    if settings.spark.mode != "connect-local":
        raise ConfigurationError(
            f"spark.mode is {settings.spark.mode.partition(':')[0]}: only connect-local has an engine of ours"
        )
    engine = start_engine(settings.spark, settings.home.resolve())
    click.echo(f"running: pid {engine.pid}, port {engine.port}")


@spark.command("status")
@_configured
def spark_status(settings: "Settings") -> int:
    """Say whether the engine runs; exit code 1 when it does not."""
    from sr_assets.adapters.spark_engine import engine_status
    from sr_assets.tables import duration

    engine = engine_status(settings.home.resolve())
    click.echo(
        f"running: pid {engine.pid}, port {engine.port}, for {duration(int(time.time() - engine.started_at))}"
        if engine
        else "not running"
    )
    return 0 if engine else 1


@spark.command("stop")
@_configured
def spark_stop(settings: "Settings") -> None:
    """Stop the engine; the next run starts another."""
    from sr_assets.adapters.spark_engine import stop_engine

    click.echo("stopped" if stop_engine(settings.home.resolve()) else "was not running")


# ------------------------------------------------------------------------------------------------------- what is there


@cli.command()
@click.option("--connect", is_flag=True, help="Try every link and each permission; changes nothing.")
@_form
@_configured
def check(settings: "Settings", connect: bool, form: Any) -> int:
    """Validate the configuration and print what would run."""
    from sr_assets.operate import check_home

    _warn(settings)
    check_home(settings.home)
    if not connect:
        columns = ("name", "stream", "from", "to", "filter", "start", "sampling", "advisories")
        _print_rows(
            columns,
            [_described(stream) for stream in settings.streams],
            form,
            f"replicator {settings.replicator}, home {settings.home}, Spark {settings.spark.public['mode']}",
        )
        return 0
    from sr_assets.stages.links import try_links

    trials = try_links(settings)
    shown = [
        (trial.stream, trial.cluster, trial.tried, "ok" if trial.works else "failed", trial.learned) for trial in trials
    ]
    _print_rows(("stream", "cluster", "tried", "result", "learned"), shown, form)
    failed = [trial for trial in trials if not trial.works]
    for trial in failed:
        _fail(f"{trial.stream}: {trial.tried}: {trial.learned}", 1)
    return int(bool(failed))


def _described(stream: "StreamSettings") -> tuple[str | None, ...]:
    from sr_assets.tables import duration

    start = stream.start.kind if stream.start.kind in ("all", "end") else f"{stream.start.kind} {stream.start.value}"
    sampling = None
    if stream.policy is not None and stream.finder is not None:
        interval, silent = duration(stream.policy.interval_ns / 1e9), duration(stream.policy.warning_ns / 1e9)
        sampling = f"by {stream.finder.text} every {interval}, silent after {silent}"
    return (
        stream.name,
        stream.stream,
        stream.source.label,
        f"{stream.target.label} {stream.target_stream}",
        stream.filter_subject,
        start,
        sampling,
        stream.advisory.subject if stream.advisory else None,
    )


def _warn(settings: "Settings") -> None:
    """Say what of the configuration has no effect, and which warning durations the fleet itself contradicts."""
    for warning in (*settings.warnings, *_short_warnings(settings)):
        click.echo(f"warning: {warning}", err=True)


def _short_warnings(settings: "Settings") -> list[str]:
    """Return the tracked streams where half of the nodes come back by themselves: in a tree the upstream sends that rarely."""
    from sr_assets.tables import duration

    query = """
        SELECT name || '/' || stream, median(age_seconds) FROM node_advisories
        WHERE event = 'recover' GROUP BY name, stream
        HAVING count(DISTINCT node) * 2 > (SELECT count(*) FROM node_availability AS all_nodes
            WHERE (all_nodes.name, all_nodes.stream) = (node_advisories.name, node_advisories.stream))
    """
    try:
        often = dict(_ask(settings, query).values)
    except SrAssetsError:
        return []
    return [
        f"{stream.label}: most nodes time out and recover, after {duration(often[stream.label])}: warn_duration "
        f"({duration(stream.policy.warning_ns / 1e9)}) must exceed how often the source hears of them"
        for stream in settings.streams
        if stream.policy is not None and stream.label in often
    ]


@cli.command()
@click.option("--site", help="Only this site.")
@click.option("--stream", help="Only this stream, or name/stream.")
@click.option("--status", type=click.Choice(("up", "timeout", "retired")), help="Only nodes of this status.")
@click.option("--silent-for", type=_SECONDS, help="Only nodes not heard of for so long.")
@click.option("--like", metavar="PATTERN", help="Only nodes whose name matches, as in 'web*'.")
@_form
@_configured
def nodes(
    settings: "Settings",
    site: str | None,
    stream: str | None,
    status: str | None,
    silent_for: float | None,
    like: str | None,
    form: Any,
) -> None:
    """Show which nodes there are; ages are against the table's watermark."""
    query = """
        SELECT a.name, a.stream, a.node, a.status, age_seconds, a.last_seen, a.status_since, a.first_seen,
            l.last_copied, l.copied_bytes, l.last_sequence
        FROM node_availability AS a
        JOIN (SELECT name, stream, watermark FROM replication) AS r USING (name, stream)
        LEFT JOIN last_seen_nodes AS l USING (name, stream, node),
        LATERAL (SELECT greatest(0, (epoch_us(r.watermark) - epoch_us(a.last_seen)) / 1e6) AS age_seconds)
        WHERE list_contains($labels, a.name || '/' || a.stream)
            AND ($status IS NULL OR a.status = $status)
            AND ($silent_for IS NULL OR age_seconds >= $silent_for)
            AND ($like IS NULL OR a.node GLOB $like)
        ORDER BY a.name, a.stream, a.node
    """
    wanted = {"labels": _labels(settings, site, stream), "status": status, "silent_for": silent_for, "like": like}
    rows = _ask(settings, query, wanted)
    _print_rows(rows.columns, rows.values, form)


def _labels(settings: "Settings", site: str | None, stream: str | None) -> list[str]:
    """Return the streams, as name/stream, that two filters leave."""
    if site is not None and site not in settings.sites:
        near = difflib.get_close_matches(site, settings.sites, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigurationError(f"no site {site!r} is configured; {hint}configured: {', '.join(settings.sites)}")
    found = settings.streams if stream is None else settings.find(stream)
    return [one.label for one in found if site in (None, one.name)]


@cli.command()
@click.argument("name")
@click.option(
    "--format",
    "form",
    type=click.Choice(("table", "json")),
    default="table",
    show_default=True,
    help="How it is shown.",
)
@_configured
def node(settings: "Settings", name: str, form: str) -> None:
    """Show one node: its state, its history of transitions, its latest metadata."""
    states = _ask(settings, _NODE_STATE, {"node": name})
    if not states.values:
        raise RunError(f"no node {name!r} is known{_similar(settings, name)}")
    history = _ask(settings, _NODE_HISTORY, {"node": name})
    snapshots = _latest(settings, name)
    if form == "json":
        _print_node_json(states, history, snapshots)
        return
    from sr_assets import tables

    _print_rows(states.columns, states.values, "table", name)
    _print_rows(history.columns, history.values, "table", "history")
    for site, stream, stored_at, subject, payload_bytes, payload, metadata in snapshots.values:
        shown = tables.text(
            "", f"{site}/{stream}: {payload_bytes} bytes on {subject}, stored {stored_at:%Y-%m-%d %H:%M:%S}"
        )
        tables.console().print(shown)
        tables.print_document(metadata if metadata is not None else payload)


_NODE_STATE = """
    SELECT a.name, a.stream, a.status, greatest(0, (epoch_us(r.watermark) - epoch_us(a.last_seen)) / 1e6) AS age_seconds,
        a.last_seen, a.status_since, a.first_seen, l.last_copied, l.copied_bytes, l.last_sequence,
        gone.retired_at, gone.times_retired
    FROM node_availability AS a
    JOIN (SELECT name, stream, watermark FROM replication) AS r USING (name, stream)
    LEFT JOIN last_seen_nodes AS l USING (name, stream, node)
    LEFT JOIN retired_nodes AS gone USING (name, stream, node)
    WHERE a.node = $node ORDER BY a.name, a.stream
"""
_NODE_HISTORY = """
    SELECT name, stream, transition, event, event_time, previous, age_seconds, outage_seconds, late, returned, published_at
    FROM node_advisories WHERE node = $node ORDER BY name, stream, transition
"""
_NODE_SNAPSHOT = """
    SELECT name, stream, stored_at, subject, payload_bytes, payload, metadata
    FROM node_snapshots WHERE node = $node ORDER BY name, stream
"""


def _latest(settings: "Settings", name: str) -> "Rows":
    """Return a node's latest messages; none, with a warning, when their Parquet files are gone."""
    from sr_assets.adapters.fleet import Rows

    try:
        return _ask(settings, _NODE_SNAPSHOT, {"node": name})
    except ConfigurationError as error:
        click.echo(f"warning: no metadata: {error}", err=True)
        return Rows((), [])


def _print_node_json(states: "Rows", history: "Rows", snapshots: "Rows") -> None:
    from sr_assets.tables import print_json

    latest = {tuple(row[:2]): dict(zip(snapshots.columns[2:], row[2:], strict=True)) for row in snapshots.values}
    print_json(
        [
            dict(zip(states.columns, state, strict=True))
            | {
                "history": [
                    dict(zip(history.columns[2:], row[2:], strict=True))
                    for row in history.values
                    if row[:2] == state[:2]
                ]
            }
            | {"metadata": latest.get(state[:2], {}).get("metadata"), "snapshot": latest.get(state[:2])}
            for state in states.values
        ]
    )


def _similar(settings: "Settings", name: str) -> str:
    query = """
        SELECT DISTINCT node, jaro_winkler_similarity(lower(node), lower($node)) AS likeness FROM node_availability
        WHERE likeness > 0.8 OR contains(lower(node), lower($node)) ORDER BY likeness DESC, node LIMIT 3
    """
    found = [row[0] for row in _ask(settings, query, {"node": name}).values]
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


@cli.command()
@click.option("--since", type=_SECONDS, help="Only what happened so long before the table's watermark, or later.")
@click.option("--node", help="Only this node.")
@click.option("--event", type=click.Choice(("new", "timeout", "recover", "expire")), help="Only this event.")
@click.option(
    "--follow", is_flag=True, help="Go on with what is published from now on; JSON is then one object a line."
)
@_form
@_configured
def advisories(
    settings: "Settings", since: float | None, node: str | None, event: str | None, follow: bool, form: Any
) -> None:
    """Show the feed: which nodes appeared, fell silent, came back, retired."""
    query = """
        SELECT a.event_time, a.name, a.stream, a.node, a.event, a.age_seconds, a.previous, a.outage_seconds, a.late, a.returned,
            a.seen, a.detected_at, a.transition, a.published_at, a.event_id
        FROM node_advisories AS a JOIN (SELECT name, stream, watermark FROM replication) AS r USING (name, stream)
        WHERE ($since IS NULL OR epoch_us(r.watermark) - epoch_us(a.event_time) <= $since * 1e6)
            AND ($node IS NULL OR a.node = $node)
            AND ($event IS NULL OR a.event = $event)
        ORDER BY a.event_time, a.name, a.stream, a.node, a.transition
    """
    wanted = {"since": since, "node": node, "event": event}
    if not follow:
        rows = _ask(settings, query, wanted)
        _print_rows(rows.columns, rows.values, form)
        return
    _follow(settings, query, wanted, form)


def _follow(settings: "Settings", query: str, wanted: Mapping[str, Any], form: Any) -> None:
    """Print what a query finds, and what it finds more each time the file was published anew, until interrupted."""
    from sr_assets.tables import print_lines

    printed: set[str] = set()
    for number, _ in enumerate(_publications(settings.home / "fleet.duckdb")):
        rows = _ask(settings, query, wanted)
        fresh = [row for row in rows.values if row[-1] not in printed]
        printed.update(row[-1] for row in fresh)
        print_lines(rows.columns, fresh, form, header=number == 0)


def _publications(file: Path) -> Iterator[None]:
    """Yield whenever there is another published file than before, the first included."""
    seen = None
    while True:
        with contextlib.suppress(FileNotFoundError):
            status = file.stat()
            if (identity := (status.st_ino, status.st_mtime_ns)) != seen:
                seen = identity
                yield
        time.sleep(_FOLLOW_SECONDS)


@cli.command()
@_form
@_configured
def lag(settings: "Settings", form: Any) -> int:
    """Show how far every stream is behind, asked of the servers now.

    Exit code 1 when a source could not be asked.
    """
    from sr_assets.stages.lag import measure_lag

    lags = measure_lag(settings)
    columns = ("name", "stream", "position", "source_last_sequence", "lag_messages", "lag_seconds", "problem")
    _print_rows(
        columns,
        [
            (one.name, one.stream, one.position, one.source_last_sequence, one.messages, one.seconds, one.problem)
            for one in lags
        ],
        form,
    )
    unknown = [one for one in lags if one.source_last_sequence is None]
    for one in unknown:
        _fail(f"{one.name}/{one.stream}: {one.problem}", 1)
    return int(bool(unknown))


@cli.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@_configured
def export(settings: "Settings", file: Path) -> None:
    """Write a self-contained copy of the published tables, a DuckDB file."""
    from sr_assets.adapters.fleet import export_fleet

    export_fleet(settings.home, file)


@cli.command()
@click.argument("sql")
@_form
@_configured
def query(settings: "Settings", sql: str, form: Any) -> None:
    """Answer one SELECT on the published tables.

    It reads nothing else: no other file, no network, no settings. SHOW TABLES and DESCRIBE say what there is.
    """
    rows = _ask(settings, sql)
    _print_rows(rows.columns, rows.values, form)


def _ask(settings: "Settings", sql: str, parameters: Mapping[str, Any] | None = None) -> "Rows":
    from sr_assets.adapters.fleet import open_fleet, read_rows

    with open_fleet(settings.home, confined=True) as connection:
        return read_rows(connection, sql, parameters or ())
