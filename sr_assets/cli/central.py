"""The global view on the command line: `summary`, and what `nodes`, `node` and `advisories` show with it.

Not here: those commands themselves (`look`), how rows are drawn (`render`).
"""

import contextlib
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from sr_assets.cli.base import ask, cli, configured, form_option, print_rows
from sr_assets.domain.errors import ConfigurationError, RunError

if TYPE_CHECKING:
    from sr_assets.adapters.published.tables import Rows
    from sr_assets.domain.availability import Advisory
    from sr_assets.settings import Settings

#: What a person is shown of a list at once; programs get all of it.
MOST_SHOWN = 100
_POLL_SECONDS = 0.5
_ADVISORY_COLUMNS = (
    "event_time",
    "replicator",
    "name",
    "stream",
    "node",
    "event",
    "age_seconds",
    "previous",
    "outage_seconds",
    "late",
    "returned",
    "seen",
    "received_at",
    "transition",
    "source",
    "event_id",
)


def _age(now: str, time: str) -> str:
    """Return SQL for how many seconds ago a time was, 0 when it is ahead; NULL when one of them is not known."""
    return f"CASE WHEN {now} >= {time} THEN (epoch_us({now}) - epoch_us({time})) / 1e6 WHEN {now} < {time} THEN 0.0 END"


def _need_feeds(settings: "Settings", asked: str) -> None:
    if not settings.feeds:
        raise ConfigurationError(f"{asked}: no feed is configured; add one to feeds")


def show_nodes(settings: "Settings", wanted: Mapping[str, Any], form: Any) -> None:
    """Show the nodes of all sites; ages are against the feed's clock. `wanted`: site, stream, status, silent_for, like."""
    _need_feeds(settings, "--global")
    query = f"""
        SELECT a.replicator, a.name, a.stream, a.node, a.status, age_seconds, a.last_seen, a.status_since, a.event_time,
            a.received_at, a.source, blind
        FROM global_availability AS a
        JOIN (SELECT name || '/' || stream AS feed, watermark FROM replication) AS r USING (feed)
        LEFT JOIN (SELECT replicator, name, stream, blind FROM global_summary) AS s ON s.replicator = a.replicator
            AND s.name IS NOT DISTINCT FROM a.name AND s.stream IS NOT DISTINCT FROM a.stream,
        LATERAL (SELECT {_age("r.watermark", "a.last_seen")} AS age_seconds)
        WHERE ($site IS NULL OR $site IN (a.name, a.replicator))
            AND ($stream IS NULL OR a.stream = $stream)
            AND ($status IS NULL OR a.status = $status)
            AND ($silent_for IS NULL OR age_seconds >= $silent_for)
            AND ($like IS NULL OR a.node GLOB $like)
        ORDER BY a.replicator, a.name, a.stream, a.node
    """
    if form != "table":
        rows = ask(settings, query, wanted)
        print_rows(rows.columns, rows.values, form)
        return
    rows = ask(settings, f"{query} LIMIT {MOST_SHOWN + 1}", wanted)
    print_rows(rows.columns, rows.values[:MOST_SHOWN], form)
    if len(rows.values) > MOST_SHOWN:
        click.echo(
            f"only the first {MOST_SHOWN} are shown: narrow them, or take all with --format json or csv", err=True
        )


NODE_STATE = f"""
    SELECT a.replicator, a.name, a.stream, a.status, {_age("r.watermark", "a.last_seen")} AS age_seconds, a.last_seen,
        a.status_since, a.event_time, a.received_at, a.source, a.feed
    FROM global_availability AS a
    JOIN (SELECT name || '/' || stream AS feed, watermark FROM replication) AS r USING (feed)
    WHERE a.node = $node ORDER BY a.replicator, a.name, a.stream
"""
NODE_HISTORY = """
    SELECT replicator, name, stream, transition, event, event_time, previous, age_seconds, outage_seconds, late, returned,
        received_at
    FROM global_advisories WHERE node = $node ORDER BY replicator, name, stream, transition, event_time, event
"""


def show_advisories(settings: "Settings", since: float | None, node: str | None, event: str | None, form: Any) -> None:
    """Show the history of all sites, from the table."""
    _need_feeds(settings, "--global")
    query = f"""
        SELECT {", ".join(_ADVISORY_COLUMNS)} FROM global_advisories AS a
        JOIN (SELECT name || '/' || stream AS feed, watermark FROM replication) AS r USING (feed)
        WHERE ($since IS NULL OR epoch_us(r.watermark) - epoch_us(a.event_time) <= $since * 1e6)
            AND ($node IS NULL OR a.node = $node)
            AND ($event IS NULL OR a.event = $event)
        ORDER BY a.event_time, a.replicator, a.name, a.stream, a.node, a.transition
    """
    rows = ask(settings, query, {"since": since, "node": node, "event": event})
    print_rows(rows.columns, rows.values, form)


def follow_advisories(
    settings: "Settings", since: float | None, node: str | None, event: str | None, form: Any
) -> None:
    """Print the advisories of all feeds as their streams store them, until interrupted."""
    from sr_assets.cli.render import print_lines
    from sr_assets.stages.feeds.follow import Follower

    _need_feeds(settings, "--global")
    since_ns = None if since is None else int(since * 1e9)
    with contextlib.ExitStack() as stack:
        tails = [stack.enter_context(closing(Follower(feed, since_ns))) for feed in settings.feeds]
        answered = dict.fromkeys(range(len(tails)), False)
        header = True
        while True:
            found = []
            for place, tail in enumerate(tails):
                try:
                    found += tail.poll()
                    answered[place] = True
                except RunError as error:
                    # At first it may be a mistake, later it is an outage, which a tail outlives.
                    if not any(answered.values()):
                        raise
                    if answered[place]:
                        click.echo(f"warning: {tail.feed.label}: {error}; trying on", err=True)
                    answered[place] = False
            rows = _rows(found, node, event)
            if rows or header:
                print_lines(_ADVISORY_COLUMNS, rows, form, header=header)
            header = False
            if not found:
                time.sleep(_POLL_SECONDS)


def _rows(found: Iterable[tuple["Advisory", int]], node: str | None, event: str | None) -> list[tuple[Any, ...]]:
    from sr_assets.domain.availability import LIFE_CYCLE

    return [
        (
            _time(told.event_ns),
            told.replicator,
            told.name or None,
            told.stream or None,
            told.node,
            LIFE_CYCLE[told.event_code].value,
            told.age_seconds,
            told.previous,
            told.outage_seconds,
            told.late,
            told.returned,
            None if told.seen_ns is None else _time(told.seen_ns),
            _time(received_ns),
            told.transition or None,
            told.origin,
            told.event_id,
        )
        for told, received_ns in found
        if node in (None, told.node) and event in (None, LIFE_CYCLE[told.event_code].value)
    ]


def _time(ns: int) -> datetime:
    return datetime.fromtimestamp(ns // 1000 / 1e6, UTC)


@cli.command()
@form_option
@configured
def summary(settings: "Settings", form: Any) -> None:
    """Show every site that the feeds tell of: its nodes, its rates, how long ago it was heard.

    A blind site is one whose observer has been silent for longer than it said; its states are not to be trusted.
    """
    _need_feeds(settings, "summary")
    query = f"""
        SELECT s.replicator, s.name, s.stream, s.observer, s.up, s.timeout, s.retired, s.new_24h, coalesce(h.last_hour, 0) AS
            advisories_1h, coalesce(h.last_day, 0) AS advisories_24h,
            {_age("s.as_of", "s.last_advisory_at")} AS last_advisory_age_seconds,
            {_age("s.as_of", "s.observer_alive_at")} AS observer_age_seconds,
            s.lag_messages, s.tracked_nodes, s.last_advisory_at, s.observer_alive_at, s.watermark, s.as_of, s.feed
        FROM global_summary AS s LEFT JOIN (
            SELECT a.replicator, a.name, a.stream,
                count(*) FILTER (a.received_at > r.watermark - INTERVAL 1 HOUR) AS last_hour, count(*) AS last_day
            FROM global_advisories AS a
            JOIN (SELECT name || '/' || stream AS feed, watermark FROM replication) AS r USING (feed)
            WHERE a.received_at > r.watermark - INTERVAL 24 HOUR GROUP BY ALL
        ) AS h ON h.replicator = s.replicator AND h.name IS NOT DISTINCT FROM s.name
            AND h.stream IS NOT DISTINCT FROM s.stream
        ORDER BY s.replicator, s.name, s.stream
    """
    rows = ask(settings, query)
    if form == "table":
        _show_screen(rows)
        return
    print_rows(rows.columns, rows.values, form)


_SCREEN = (
    "replicator",
    "name",
    "stream",
    "observer",
    "up",
    "timeout",
    "retired",
    "new_24h",
    "advisories_1h",
    "last_advisory_age_seconds",
    "observer_age_seconds",
)


def _show_screen(rows: "Rows") -> None:
    """Show what fits a screen, below it a sum and what the words mean that alarm, the lines of blind sites in red."""
    if not rows.values:
        click.echo("no site has been heard of yet: a feed tells of a site with its first advisory (`sr-assets lag`)")
        return
    places = [rows.columns.index(column) for column in _SCREEN]
    shown = [tuple(row[place] for place in places) for row in rows.values]
    total = [sum(row[place] for row in shown) for place in range(4, 9)]
    print_rows(_SCREEN, shown, "table", alarmed=lambda row: row[3] == "blind")
    sites = len({row[:2] for row in shown})
    blind = sum(row[3] == "blind" for row in shown)
    as_of = max(row[rows.columns.index("as_of")] for row in rows.values)
    click.echo(
        f"{sites} sites ({blind} blind): {total[0]} up, {total[1]} silent, {total[2]} retired, {total[3]} new in 24 h;"
        f" as of {as_of:%Y-%m-%d %H:%M:%S}"
    )
    if blind:
        click.echo(
            "blind: nobody watches there any more, as far as is heard; its nodes are shown as they were last told"
        )
    if any(row[3] == "unwatched" for row in shown):
        click.echo("unwatched: never said that it watches; its silence cannot be told from peace")
