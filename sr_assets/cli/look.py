"""Commands that show something: check, nodes, node, advisories, lag, export, query.

Not here: how rows are drawn (`render`); everything heavy is imported by the command that needs it.
"""

import contextlib
import difflib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sr_assets.cli.base import SECONDS, ask, cli, configured, fail, form_option, print_rows, warn
from sr_assets.cli.central import NODE_HISTORY, NODE_STATE, follow_advisories, show_advisories, show_nodes
from sr_assets.domain.errors import ConfigurationError, RunError

if TYPE_CHECKING:
    from sr_assets.adapters.published.reading import Rows
    from sr_assets.settings import Entry, Settings


_FOLLOW_SECONDS = 0.5


@cli.command()
@click.option("--connect", is_flag=True, help="Try every link and each permission; changes nothing.")
@form_option
@configured
def check(settings: "Settings", connect: bool, form: Any) -> int:
    """Validate the configuration and print what would run."""
    from sr_assets.operate import check_home

    warn(settings)
    check_home(settings.home)
    if not connect:
        columns = ("name", "stream", "from", "to", "filter", "start", "sampling", "advisories")
        print_rows(
            columns,
            [_described(entry) for entry in settings.entries],
            form,
            f"replicator {settings.replicator}, home {settings.home}, Spark {settings.spark.public['mode']}",
        )
        return 0
    from sr_assets.stages.connectivity import probe_connectivity

    trials = probe_connectivity(settings)
    shown = [
        (trial.stream, trial.cluster, trial.tried, "ok" if trial.works else "failed", trial.learned) for trial in trials
    ]
    print_rows(("stream", "cluster", "tried", "result", "learned"), shown, form)
    failed = [trial for trial in trials if not trial.works]
    for trial in failed:
        fail(f"{trial.stream}: {trial.tried}: {trial.learned}", 1)
    return int(bool(failed))


def _described(stream: "Entry") -> tuple[str | None, ...]:
    from sr_assets.cli.render import duration
    from sr_assets.settings import FeedSettings

    start = stream.start.kind if stream.start.kind in ("all", "end") else f"{stream.start.kind} {stream.start.value}"
    if isinstance(stream, FeedSettings):
        view = "the global view"
        return stream.name, stream.stream, stream.source.label, view, stream.filter_subject, start, None, None
    sampling = None
    if stream.policy is not None and stream.extractor is not None:
        interval, silent = duration(stream.policy.interval_ns / 1e9), duration(stream.policy.warning_ns / 1e9)
        sampling = f"by {stream.extractor.text} every {interval}, silent after {silent}"
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


@cli.command()
@click.option("--site", help="Only this site.")
@click.option("--stream", help="Only this stream, or name/stream.")
@click.option("--status", type=click.Choice(("up", "timeout", "retired")), help="Only nodes of this status.")
@click.option("--silent-for", type=SECONDS, help="Only nodes not heard of for so long.")
@click.option("--like", metavar="PATTERN", help="Only nodes whose name matches, as in 'web*'.")
@click.option("--global", "everywhere", is_flag=True, help="The nodes of all sites, as the feeds tell of them.")
@form_option
@configured
def nodes(
    settings: "Settings",
    site: str | None,
    stream: str | None,
    status: str | None,
    silent_for: float | None,
    like: str | None,
    everywhere: bool,
    form: Any,
) -> None:
    """Show which nodes there are; ages are against the table's watermark."""
    if everywhere:
        told = {"site": site, "stream": stream, "status": status, "silent_for": silent_for, "like": like}
        show_nodes(settings, told, form)
        return
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
    rows = ask(settings, query, wanted)
    print_rows(rows.columns, rows.values, form)


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
@configured
def node(settings: "Settings", name: str, form: str) -> None:
    """Show one node, at every site that knows it: its state, its history of transitions, its latest metadata.

    What this installation tracks itself comes first, then what the feeds tell of all sites.
    """
    states, told = ask(settings, _NODE_STATE, {"node": name}), ask(settings, NODE_STATE, {"node": name})
    if not states.values and not told.values:
        raise RunError(f"no node {name!r} is known{_similar(settings, name)}")
    history, told_history = ask(settings, _NODE_HISTORY, {"node": name}), ask(settings, NODE_HISTORY, {"node": name})
    snapshots = _latest(settings, name)
    if form == "json":
        _print_node_json(states, history, snapshots, told, told_history)
        return
    from sr_assets.cli import render

    for title, rows in ((name, states), ("history", history), (f"{name}, at all sites", told), ("told", told_history)):
        if rows.values or (rows in (states, history) and not told.values):
            print_rows(rows.columns, rows.values, "table", title)
    for site, stream, stored_at, subject, payload_bytes, payload, metadata in snapshots.values:
        shown = render.text(
            "", f"{site}/{stream}: {payload_bytes} bytes on {subject}, stored {stored_at:%Y-%m-%d %H:%M:%S}"
        )
        render.console().print(shown)
        render.print_document(metadata if metadata is not None else payload)


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
    from sr_assets.adapters.published.reading import Rows

    try:
        return ask(settings, _NODE_SNAPSHOT, {"node": name})
    except ConfigurationError as error:
        click.echo(f"warning: no metadata: {error}", err=True)
        return Rows((), [])


def _print_node_json(states: "Rows", history: "Rows", snapshots: "Rows", told: "Rows", told_history: "Rows") -> None:
    from sr_assets.cli.render import print_json

    latest = {tuple(row[:2]): dict(zip(snapshots.columns[2:], row[2:], strict=True)) for row in snapshots.values}
    ours = [
        one | {"metadata": latest.get(key, {}).get("metadata"), "snapshot": latest.get(key)}
        for key, one in _with_history(states, history, 2)
    ]
    print_json([*ours, *(one for _, one in _with_history(told, told_history, 3))])


def _with_history(states: "Rows", history: "Rows", key: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield each state with its history, and the columns they share, so many, that say whose it is."""
    for state in states.values:
        told = [
            dict(zip(history.columns[key:], row[key:], strict=True))
            for row in history.values
            if row[:key] == state[:key]
        ]
        yield state[:key], dict(zip(states.columns, state, strict=True)) | {"history": told}


def _similar(settings: "Settings", name: str) -> str:
    query = """
        SELECT DISTINCT node, jaro_winkler_similarity(lower(node), lower($node)) AS likeness
        FROM (SELECT node FROM node_availability UNION SELECT node FROM global_availability)
        WHERE likeness > 0.8 OR contains(lower(node), lower($node)) ORDER BY likeness DESC, node LIMIT 3
    """
    found = [row[0] for row in ask(settings, query, {"node": name}).values]
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


@cli.command()
@click.option("--since", type=SECONDS, help="Only what happened so long before the table's watermark, or later.")
@click.option("--node", help="Only this node.")
@click.option("--event", type=click.Choice(("new", "timeout", "recover", "expire")), help="Only this event.")
@click.option(
    "--follow", is_flag=True, help="Go on with what is published from now on; JSON is then one object a line."
)
@click.option(
    "--global",
    "everywhere",
    is_flag=True,
    help="The advisories of all sites, as the feeds tell; with --follow straight from their streams.",
)
@form_option
@configured
def advisories(
    settings: "Settings",
    since: float | None,
    node: str | None,
    event: str | None,
    follow: bool,
    everywhere: bool,
    form: Any,
) -> None:
    """Show the feed: which nodes appeared, fell silent, came back, retired."""
    if everywhere:
        (follow_advisories if follow else show_advisories)(settings, since, node, event, form)
        return
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
        rows = ask(settings, query, wanted)
        print_rows(rows.columns, rows.values, form)
        return
    _follow(settings, query, wanted, form)


def _follow(settings: "Settings", query: str, wanted: Mapping[str, Any], form: Any) -> None:
    """Print what a query finds, and what it finds more each time the file was published anew, until interrupted."""
    from sr_assets.cli.render import print_lines

    printed: set[str] = set()
    for number, _ in enumerate(_publications(settings.home / "fleet.duckdb")):
        rows = ask(settings, query, wanted)
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
@form_option
@configured
def lag(settings: "Settings", form: Any) -> int:
    """Show how far every stream is behind, asked of the servers now.

    Exit code 1 when a source could not be asked.
    """
    from sr_assets.stages.source.lag import measure_lag

    lags = measure_lag(settings)
    columns = ("name", "stream", "position", "source_last_sequence", "lag_messages", "lag_seconds", "problem")
    print_rows(
        columns,
        [
            (one.name, one.stream, one.position, one.source_last_sequence, one.messages, one.seconds, one.problem)
            for one in lags
        ],
        form,
    )
    unknown = [one for one in lags if one.source_last_sequence is None]
    for one in unknown:
        fail(f"{one.name}/{one.stream}: {one.problem}", 1)
    return int(bool(unknown))


@cli.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@configured
def export(settings: "Settings", file: Path) -> None:
    """Write a self-contained copy of the published tables, a DuckDB file."""
    from sr_assets.adapters.published.reading import export_fleet

    export_fleet(settings.home, file)


@cli.command()
@click.argument("sql")
@form_option
@configured
def query(settings: "Settings", sql: str, form: Any) -> None:
    """Answer one SELECT on the published tables.

    It reads nothing else: no other file, no network, no settings. SHOW TABLES and DESCRIBE say what there is.
    """
    rows = ask(settings, sql)
    print_rows(rows.columns, rows.values, form)
