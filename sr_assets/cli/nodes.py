"""Commands about nodes: `nodes`, `node`, and `summary`, which counts them by site.

Not here: the SQL (`adapters.published.queries`), how rows are drawn (`render`).
"""

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from sr_assets.cli.base import SECONDS, cli, configured, need_feeds, table_or_json
from sr_assets.cli.render import Format, print_json, show
from sr_assets.cli.views import print_node, print_summary
from sr_assets.cli.warnings import note_age
from sr_assets.cli.watching import watchable
from sr_assets.domain.errors import ConfigurationError, RunError

if TYPE_CHECKING:
    from sr_assets.adapters.published.reading import Rows
    from sr_assets.settings import Settings

#: How many nodes of all sites a person is shown at once; programs get all of them.
MOST_SHOWN = 100
#: The columns that a narrow window keeps.
_FIRST = ("node", "status", "age_seconds", "name")


@cli.command()
@click.option("--site", help="Only this site.")
@click.option("--stream", help="Only this stream, or name/stream.")
@click.option("--status", type=click.Choice(("up", "timeout", "retired")), help="Only nodes of this status.")
@click.option("--silent-for", type=SECONDS, help="Only nodes not seen for so long.")
@click.option("--like", metavar="PATTERN", help="Only nodes whose name matches, as in 'web*'.")
@click.option("--global", "everywhere", is_flag=True, help="The nodes of all sites, as the feeds report them.")
@watchable
def nodes(
    settings: "Settings", site: str | None, stream: str | None, everywhere: bool, form: Format, **narrowed: Any
) -> None:
    """Show which nodes there are; ages are against the table's watermark."""
    from sr_assets.adapters.published import queries

    if everywhere:
        _show_global(settings, form, site=site, stream=stream, **narrowed)
        return
    rows = queries.nodes(settings.home, labels=_labels(settings, site, stream), **narrowed)
    show(rows.columns, rows.values, form, first=_FIRST)
    if form in ("table", "wide"):
        note_age(settings)


def _show_global(settings: "Settings", form: Format, **narrowed: Any) -> None:
    """Show the nodes of all sites; ages are against the feed's clock."""
    from sr_assets.adapters.published import queries

    need_feeds(settings, "--global")
    if form in ("json", "csv"):
        rows = queries.global_nodes(settings.home, **narrowed)
        show(rows.columns, rows.values, form)
        return
    rows = queries.global_nodes(settings.home, **narrowed, limit=MOST_SHOWN + 1)
    show(rows.columns, rows.values[:MOST_SHOWN], form, first=_FIRST)
    note_age(settings)
    if len(rows.values) > MOST_SHOWN:
        click.echo(
            f"only the first {MOST_SHOWN} are shown: narrow them, or take all with --format json or csv", err=True
        )


def _labels(settings: "Settings", site: str | None, stream: str | None) -> list[str] | None:
    """Return the streams, as name/stream, that two filters leave; None without a filter."""
    if site is None and stream is None:
        return None
    if site is not None and site not in settings.sites:
        near = difflib.get_close_matches(site, settings.sites, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigurationError(f"no site {site!r} is configured; {hint}configured: {', '.join(settings.sites)}")
    entries = settings.streams if stream is None else settings.find(stream)
    return [entry.label for entry in entries if site in (None, entry.name)]


@cli.command()
@click.argument("name")
@table_or_json
@configured
def node(settings: "Settings", name: str, form: Format) -> None:
    """Show one node, at every site that knows it: its state, its history of transitions, its latest metadata.

    What this installation tracks itself comes first, then what the feeds report of all sites.
    """
    from sr_assets.adapters.published import queries

    home = settings.home
    states, global_states = queries.node_states(home, name), queries.global_node_states(home, name)
    if not states.values and not global_states.values:
        similar = " or ".join(map(repr, queries.similar_nodes(home, name)))
        raise RunError(f"no node {name!r} is known{f'; did you mean {similar}?' if similar else ''}")
    history, global_history = queries.node_history(home, name), queries.global_node_history(home, name)
    messages = _newest_messages(settings, name)
    if form == "json":
        print_json([*_records(states, history, messages), *_with_history(global_states, global_history, 3)])
        return
    # What this installation tracks is shown also when it is empty, unless only other sites know the node.
    ours = [(name, states), ("history", history)]
    theirs = [(f"{name}, at all sites", global_states), ("history at all sites", global_history)]
    tables = [(title, rows) for title, rows in ours if rows.values or not global_states.values]
    print_node([*tables, *((title, rows) for title, rows in theirs if rows.values)], messages, form)
    note_age(settings)


def _newest_messages(settings: "Settings", name: str) -> "Rows":
    """Return a node's newest messages; none, with a warning, when their Parquet files no longer exist."""
    from sr_assets.adapters.published import queries
    from sr_assets.adapters.published.reading import Rows

    try:
        return queries.node_snapshots(settings.home, name)
    except ConfigurationError as error:
        click.echo(f"warning: no metadata: {error}", err=True)
        return Rows((), [])


def _records(states: "Rows", history: "Rows", messages: "Rows") -> Iterator[dict[str, Any]]:
    """Yield a node's state at each stream that tracks it, with its history and its newest message."""
    newest = {tuple(row[:2]): dict(zip(messages.columns[2:], row[2:], strict=True)) for row in messages.values}
    for record in _with_history(states, history, 2):
        snapshot = newest.get((record["name"], record["stream"]))
        yield record | {"metadata": (snapshot or {}).get("metadata"), "snapshot": snapshot}


def _with_history(states: "Rows", history: "Rows", shared: int) -> Iterator[dict[str, Any]]:
    """Yield each state with its history; the first `shared` columns of both are the key."""
    for state in states.values:
        transitions = [
            dict(zip(history.columns[shared:], row[shared:], strict=True))
            for row in history.values
            if row[:shared] == state[:shared]
        ]
        yield dict(zip(states.columns, state, strict=True)) | {"history": transitions}


@cli.command()
@watchable
def summary(settings: "Settings", form: Format) -> None:
    """Show every site that the feeds report: its nodes, its rates, the age of its newest heartbeat.

    A blind site is one whose heartbeat is overdue; its node states may be stale.
    """
    from sr_assets.adapters.published import queries

    need_feeds(settings, "summary")
    rows = queries.summary(settings.home)
    if form in ("json", "csv"):
        show(rows.columns, rows.values, form)
    elif rows.values:
        print_summary(rows, form)
    else:
        click.echo("no site is reported yet: a site appears with its first advisory (`sr-assets lag` shows the feeds)")
