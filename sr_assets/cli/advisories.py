"""The command `advisories`: transitions from the published tables, or live from the feeds' streams."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sr_assets.adapters import times
from sr_assets.adapters.logs import print_warning
from sr_assets.cli.base import SECONDS, cli, need_feeds
from sr_assets.cli.render import Format, Lines, show
from sr_assets.cli.warnings import note_age
from sr_assets.cli.watching import watchable
from sr_assets.domain.errors import RunError
from sr_assets.domain.received import Advisory
from sr_assets.operate.processes import INTERRUPTED

if TYPE_CHECKING:
    from sr_assets.settings import Settings
    from sr_assets.stages.feeds import Follower

_FOLLOW_SECONDS = 0.5
#: The columns that a narrow window keeps.
_FIRST = ("node", "event", "event_time", "name")


@cli.command(epilog="Example: sr-assets advisories --event timeout --since 1h")
@click.option("--since", type=SECONDS, help="Only transitions within this time before the table's watermark.")
@click.option("--node", help="Only this node.")
@click.option("--event", type=click.Choice(("new", "timeout", "recover", "expire")), help="Only this event.")
@click.option(
    "--follow",
    is_flag=True,
    help="Print transitions as they are published, starting now or at --since; JSON becomes one object per line.",
)
@click.option(
    "--global",
    "everywhere",
    is_flag=True,
    help="Show the advisories of all sites in the feeds; with --follow, directly from the feeds' streams.",
)
@watchable
def advisories(
    settings: "Settings",
    since: float | None,
    node: str | None,
    event: str | None,
    follow: bool,
    everywhere: bool,
    form: Format,
) -> int:
    """List transitions: nodes that are new, silent, recovered or retired."""
    from sr_assets.adapters.published import queries

    if everywhere:
        need_feeds(settings, "--global")
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            (_follow_streams if everywhere else _follow_tables)(settings, since, node, event, form)
        return INTERRUPTED
    read_advisories = queries.global_advisories if everywhere else queries.advisories
    rows = read_advisories(settings.home, since=since, node=node, event=event)
    show(rows.columns, rows.values, form, first=_FIRST)
    if form in ("table", "wide"):
        note_age(settings)
    return 0


def _follow_tables(
    settings: "Settings", since: float | None, node: str | None, event: str | None, form: Format
) -> None:
    """Print the transitions of the last `since` seconds (None: no old ones), then the new ones of each publication."""
    from sr_assets.adapters.published import queries

    read_advisories = partial(queries.advisories, settings.home, node=node, event=event)
    lines: Lines | None = None
    printed: set[str] = set()
    for _ in _publications(settings.home / "fleet.duckdb"):
        rows = read_advisories(since=None)
        fresh = [row for row in rows.values if row[-1] not in printed]
        printed.update(row[-1] for row in fresh)
        if lines is None:
            lines = Lines(rows.columns, form, _FIRST)
            lines.header()
            fresh = [] if since is None else read_advisories(since=since).values
            printed.update(row[-1] for row in fresh)
        lines.rows(fresh)


def _publications(file: Path) -> Iterator[None]:
    """Yield for the first published file and after each replacement."""
    from sr_assets.adapters.published.manifest import identity

    seen: list[int] = []
    while True:
        if (current := identity(file)) and current != seen:
            seen = current
            yield
        times.sleep(_FOLLOW_SECONDS)


def _follow_streams(
    settings: "Settings", since: float | None, node: str | None, event: str | None, form: Format
) -> None:
    """Print the advisories of all feeds as their streams store them, until an interrupt."""
    from sr_assets.adapters.published.queries import GLOBAL_ADVISORY_COLUMNS
    from sr_assets.stages.feeds import Follower

    since_ns = None if since is None else int(since * 1e9)
    with contextlib.ExitStack() as stack:
        followers = [stack.enter_context(closing(Follower(feed, since_ns))) for feed in settings.feeds]
        lines = Lines(GLOBAL_ADVISORY_COLUMNS, form, _FIRST)
        for number, received in enumerate(_rounds(followers)):
            if number == 0:
                lines.header()
            lines.rows(_rows(received, node, event))
            if not received:
                times.sleep(_FOLLOW_SECONDS)


def _rounds(followers: Sequence["Follower"]) -> Iterator[list[tuple["Advisory", int]]]:
    """Poll all feeds in endless rounds; yield each round's advisories with their stored times (unix ns).

    Raises RunError if no feed was ever readable, because the configuration may be wrong. A later failure is an outage: it
    prints a warning and polling continues.
    """
    readable = [False] * len(followers)
    while True:
        received: list[tuple[Advisory, int]] = []
        for index, follower in enumerate(followers):
            try:
                received += follower.poll()
                readable[index] = True
            except RunError as error:
                if not any(readable):
                    raise
                if readable[index]:
                    print_warning(f"{follower.feed.label}: {error}; polling continues")
                readable[index] = False
        yield received


def _rows(received: Iterable[tuple["Advisory", int]], node: str | None, event: str | None) -> Iterator[tuple[Any, ...]]:
    """Yield the advisories of a node and event as rows of `GLOBAL_ADVISORY_COLUMNS`."""
    from sr_assets.domain.received import REPORTED

    for advisory, received_ns in received:
        kind = REPORTED[advisory.event_code]
        if node not in (None, advisory.node) or event not in (None, kind):
            continue
        yield (
            _time(advisory.event_ns),
            advisory.replicator,
            advisory.name or None,
            advisory.stream or None,
            advisory.node,
            kind,
            advisory.age_seconds,
            advisory.previous,
            advisory.outage_seconds,
            advisory.late,
            advisory.returned,
            None if advisory.seen_ns is None else _time(advisory.seen_ns),
            _time(received_ns),
            advisory.transition or None,
            advisory.origin,
            advisory.event_id,
        )


def _time(ns: int) -> datetime:
    return datetime.fromtimestamp(ns // 1000 / 1e6, UTC)
