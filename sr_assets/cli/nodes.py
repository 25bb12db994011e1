"""Commands about nodes: `nodes`, `node`, `retire`, `unretire`, and `summary`, which counts them by site."""

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from sr_assets.adapters.logs import configure_logging, print_error, print_warning
from sr_assets.cli.base import NOTHING_MATCHES, SECONDS, cli, configured, echo, need_feeds, table_or_json
from sr_assets.cli.completing import complete_node, complete_site, complete_stream
from sr_assets.cli.render import Format, age_text, print_document, print_json, print_note, show
from sr_assets.cli.warnings import note_age
from sr_assets.cli.watching import watchable
from sr_assets.domain.errors import ConfigurationError, NothingMatchesError, did_you_mean

if TYPE_CHECKING:
    from sr_assets.adapters.published.fleet_reader import Rows
    from sr_assets.adapters.state.operator_requests import Action
    from sr_assets.settings import Settings

#: The columns that a narrow window keeps, and the summed columns of the summary.
_SUMMARY: Final = ("replicator", "name", "stream", "observer", "outage", "up", "timeout", "retired")
_SUMMED: Final = ("up", "timeout", "retired", "new_24h")
_NODE: Final = ("name", "status", "age_seconds")
_HISTORY: Final = ("event", "event_time", "name", "age_seconds")
#: Limit of the table for all sites' nodes; JSON and CSV have no limit.
MOST_SHOWN = 100
#: The columns that a narrow window keeps.
_FIRST = ("node", "status", "age_seconds", "name", "status_since")
_site_option = click.option(
    "--site", metavar="S", shell_complete=complete_site, help="The site, if several sites know the node."
)


def print_node(tables: Iterable[tuple[str, "Rows"]], messages: "Rows", form: Format) -> None:
    """Print one node's tables under their titles, then its newest message of each stream."""
    for title, rows in tables:
        show(rows.columns, rows.values, form, title=title, first=_NODE if "status" in rows.columns else _HISTORY)
        sys.stdout.write("\n")
    for site, stream, stored_at, subject, payload_bytes, payload, metadata in messages.values:
        print_note(f"{site}/{stream}: {payload_bytes} bytes on {subject}, stored {stored_at:%Y-%m-%d %H:%M:%S}")
        print_document(metadata if metadata is not None else payload)


def print_summary(rows: "Rows", form: Format) -> None:
    """Print the summary with blind and dark sites in red, its sums, and the meaning of `blind` and `unwatched`."""
    records = [dict(zip(rows.columns, row, strict=True)) for row in rows.values]
    observer, outage = rows.columns.index("observer"), rows.columns.index("outage")
    show(rows.columns, rows.values, form, first=_SUMMARY, alarmed=lambda row: row[observer] == "blind" or row[outage])
    sites = len({(record["replicator"], record["name"]) for record in records})
    blind = sum(record["observer"] == "blind" for record in records)
    up, silent, retired, new = (sum(record[column] for record in records) for column in _SUMMED)
    as_of = max(record["as_of"] for record in records)
    counted = f"{up} up, {silent} silent, {retired} retired, {new} new in 24 h"
    print_note(f"{sites} sites ({blind} blind): {counted}; {age_text(as_of)}")
    for record in records:
        if record["outage"]:
            where = f"{record['name'] or record['replicator']}/{record['stream']}"
            held = f"{record['held']} nodes" if record["held"] else "its nodes"
            print_note(f"{where}: {record['outage']}: the announcements of {held} are held")
        if record["flapping"]:
            print_note(f"{record['name']}/{record['stream']}: {record['flapping']} nodes flap")
    if blind:
        print_note("blind: heartbeat overdue; node states may be stale")
    if any(record["observer"] == "unwatched" for record in records):
        print_note("unwatched: never sent a heartbeat; node states may be stale without notice")


@cli.command(epilog="Example: sr-assets nodes --status timeout --like 'web*'")
@click.option("--site", shell_complete=complete_site, help="Only this site.")
@click.option("--stream", shell_complete=complete_stream, help="Only this stream (or name/stream).")
@click.option("--status", type=click.Choice(("up", "timeout", "retired")), help="Only nodes with this status.")
@click.option("--silent-for", type=SECONDS, help="Only nodes silent for at least this long.")
@click.option("--like", metavar="PATTERN", help="Only nodes whose name matches a pattern such as 'web*'.")
@click.option("--global", "everywhere", is_flag=True, help="Show the nodes of all sites in the feeds.")
@click.option("--fail-empty", is_flag=True, help="Exit with 3 if no node matches.")
@watchable
def nodes(
    settings: "Settings",
    site: str | None,
    stream: str | None,
    everywhere: bool,
    fail_empty: bool,
    form: Format,
    **narrowed: Any,
) -> int:
    """List nodes, with ages relative to the table's watermark."""
    from sr_assets.adapters.published import queries
    from sr_assets.stages.tracking.windows import maintenance_of

    if everywhere:
        listed = _show_global(settings, form, site=site, stream=stream, **narrowed)
    else:
        with queries.nodes(settings.home, labels=_labels(settings, site, stream), **narrowed) as (columns, rows):
            maintained, counted = maintenance_of(settings, columns), itertools.count()
            marked = ((*row, maintained(row)) for row, _ in zip(rows, counted, strict=False))
            show((*columns, "maintenance"), marked, form, first=_FIRST)
        listed = next(counted)
        if form in ("table", "wide"):
            note_age(settings)
    return NOTHING_MATCHES if fail_empty and not listed else 0


def _show_global(settings: "Settings", form: Format, **narrowed: Any) -> int:
    """Print the nodes of all sites, with ages relative to the feed's clock; return how many were printed, at least."""
    from sr_assets.adapters.published import queries

    need_feeds(settings, "--global")
    if form in ("json", "csv"):
        counted = itertools.count()
        with queries.global_nodes(settings.home, **narrowed) as (columns, rows):
            show(columns, (row for row, _ in zip(rows, counted, strict=False)), form)
        return next(counted)
    with queries.global_nodes(settings.home, **narrowed, limit=MOST_SHOWN + 1) as (columns, rows):
        shown = list(rows)
    show(columns, shown[:MOST_SHOWN], form, first=_FIRST)
    note_age(settings)
    if len(shown) > MOST_SHOWN:
        echo(f"only the first {MOST_SHOWN} nodes are shown; add filters, or use --format json or csv for all", err=True)
    return len(shown)


def _labels(settings: "Settings", site: str | None, stream: str | None) -> list[str] | None:
    """Return the streams, as name/stream, that match both filters, or None without a filter."""
    if site is None and stream is None:
        return None
    if site is not None and site not in settings.sites:
        hint = did_you_mean(site, settings.sites)
        raise ConfigurationError(f"site {site!r} is not configured; {hint}configured: {', '.join(settings.sites)}")
    entries = settings.streams if stream is None else settings.find(stream)
    return [entry.label for entry in entries if site in (None, entry.name)]


@cli.command(epilog="Example: sr-assets node web1.example.net")
@click.argument("name", shell_complete=complete_node)
@table_or_json
@configured
def node(settings: "Settings", name: str, form: Format) -> None:
    """Show one node at every site that knows it: its status, its transitions, its newest metadata.

    The sites of this installation come first, followed by the reports of the feeds.
    """
    from sr_assets.adapters.published import queries
    from sr_assets.stages.tracking.windows import mark_maintained

    home = settings.home
    states = mark_maintained(settings, queries.node_states(home, name))
    global_states = queries.global_node_states(home, name)
    if not states.values and not global_states.values:
        similar = " or ".join(map(repr, queries.similar_nodes(home, name)))
        raise NothingMatchesError(f"node {name!r} is unknown{f'; did you mean {similar}?' if similar else ''}")
    history, global_history = queries.node_history(home, name), queries.global_node_history(home, name)
    messages = _newest_messages(settings, name)
    if form == "json":
        print_json([*_records(states, history, messages), *_with_history(global_states, global_history, 3)])
        return
    # Print even empty tables of this installation, unless only other sites know the node.
    local_tables = [(name, states), ("history", history)]
    global_tables = [(f"{name}, at all sites", global_states), ("history at all sites", global_history)]
    tables = [(title, rows) for title, rows in local_tables if rows.values or not global_states.values]
    print_node([*tables, *((title, rows) for title, rows in global_tables if rows.values)], messages, form)
    note_age(settings)


def _newest_messages(settings: "Settings", name: str) -> "Rows":
    """Return a node's newest messages, or no rows and a warning if their Parquet files no longer exist."""
    from sr_assets.adapters.published import queries
    from sr_assets.adapters.published.fleet_reader import Rows

    try:
        return queries.node_snapshots(settings.home, name)
    except ConfigurationError as error:
        print_warning(f"no metadata: {error}")
        return Rows((), [])


def _records(states: "Rows", history: "Rows", messages: "Rows") -> Iterator[dict[str, Any]]:
    """Yield a node's state in each stream that tracks it, with its history and its newest message."""
    newest = {tuple(row[:2]): dict(zip(messages.columns[2:], row[2:], strict=True)) for row in messages.values}
    for record in _with_history(states, history, 2):
        snapshot = newest.get((record["name"], record["stream"]))
        yield record | {"metadata": (snapshot or {}).get("metadata"), "snapshot": snapshot}


def _with_history(states: "Rows", history: "Rows", shared: int) -> Iterator[dict[str, Any]]:
    """Yield each state with its history; the first `shared` columns of both tables are the key."""
    for state in states.values:
        transitions = [
            dict(zip(history.columns[shared:], row[shared:], strict=True))
            for row in history.values
            if row[:shared] == state[:shared]
        ]
        yield dict(zip(states.columns, state, strict=True)) | {"history": transitions}


@cli.command(epilog="Example: sr-assets retire web1.example.net --reason sold")
@click.argument("name", metavar="NODE", shell_complete=complete_node)
@_site_option
@click.option("--reason", metavar="R", default="", help="The reason, recorded in operator_actions.")
@configured
def retire(settings: "Settings", name: str, site: str | None, reason: str) -> int:
    """Retire a node now, as if its silence had exceeded `inspect_duration`; its next message brings it back.

    One `expire` is announced, so that a centre follows.
    """
    return _act(settings, "retire", name, site, reason)


@cli.command(epilog="Example: sr-assets unretire web1.example.net")
@click.argument("name", metavar="NODE", shell_complete=complete_node)
@_site_option
@configured
def unretire(settings: "Settings", name: str, site: str | None) -> int:
    """Undo `retire`: the node is up or in timeout again, as its silence demands. Nothing is announced."""
    return _act(settings, "unretire", name, site, "")


def _act(settings: "Settings", action: "Action", node: str, site: str | None, reason: str) -> int:
    """Act on a node in each of its streams and print the results. Exit code 1 if none was changed."""
    from sr_assets.stages.operator_commands import act_on_node

    if settings.logfile is not None:
        configure_logging(settings)
    answers = act_on_node(settings, action, node, site, reason)
    for answer in answers:
        (echo if answer.done else print_error)(answer.line)
    return int(not any(answer.done for answer in answers))


@cli.command(epilog="Example: sr-assets summary --watch")
@watchable
def summary(settings: "Settings", form: Format) -> None:
    """List every site in the feeds: its nodes, its rates, the age of its newest heartbeat.

    The heartbeat of a blind site is overdue; its node states may be stale.
    """
    from sr_assets.adapters.published import queries
    from sr_assets.stages.tracking.windows import mark_maintained

    need_feeds(settings, "summary")
    rows = mark_maintained(settings, queries.summary(settings.home))
    if form in ("json", "csv"):
        show(rows.columns, rows.values, form)
    elif rows.values:
        print_summary(rows, form)
    else:
        echo("no site has reported yet; a site appears with its first advisory (`sr-assets lag` shows the feeds)")
