"""The demo's display: the steps of its start, then each site, the centre's view and the newest events."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sr_assets.adapters import times
from sr_assets.adapters.published.reading import Rows, open_fleet, read_rows
from sr_assets.domain.errors import SrAssetsError

_SITES = """
    SELECT name, site_summary.up, site_summary.timeout, site_summary.retired, copied_messages AS copied,
        skipped_messages AS skipped, lag_messages AS lag, replication.as_of AS as_of
    FROM replication JOIN site_summary USING (name, stream) ORDER BY name
"""
# The centre's view, folded only from the sites' advisories, so slightly late.
_CENTRE = """
    SELECT name, observer, up, timeout, retired, last_advisory_at, observer_alive_at, as_of
    FROM global_summary ORDER BY name
"""
_EVENTS = """
    SELECT event_time, name, node, event, age_seconds FROM node_advisories
    ORDER BY event_time DESC, node LIMIT 8
"""
_NUMBERS = frozenset({"up", "timeout", "retired", "copied", "skipped", "lag", "age_seconds"})
_STYLES = {"new": "green", "recover": "green", "timeout": "yellow", "expire": "red"}
_PLAIN_SECONDS = 10.0


@contextmanager
def step(console: Console, title: str) -> Iterator[None]:
    """Show a step in progress and, after success, its duration."""
    began = times.monotonic()
    with console.status(f"{title} ...", spinner="line"):
        yield
    console.print(f"[green]ok[/]  {title} [dim]({times.monotonic() - began:.1f} s)[/]", highlight=False)


class Summary:
    """The live summary, a context manager; without a terminal, a line per site every 10 seconds."""

    def __init__(self, console: Console, home: Path) -> None:
        self._console = console
        self._home = home
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._next_lines = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def refresh(self) -> None:
        """Show the current published data."""
        now = times.monotonic()
        if not self._console.is_terminal and now < self._next_lines:
            return
        self._next_lines = now + _PLAIN_SECONDS
        try:
            with open_fleet(self._home) as connection:
                sites, centre, events = (read_rows(connection, query) for query in (_SITES, _CENTRE, _EVENTS))
        except SrAssetsError:
            return
        if self._console.is_terminal:
            tables = Group(
                _table(sites, "sites"),
                _table(centre, "centre, from their advisories"),
                _table(events, "newest transitions"),
            )
            self._live.update(tables, refresh=True)
        else:
            for prefix, rows in (("", sites), ("centre: ", centre)):
                for row in rows.values:
                    cells = zip(rows.columns, row, strict=True)
                    parts = (f"{column} {value}" for column, value in cells if not isinstance(value, datetime))
                    self._console.print(prefix + "  ".join(parts), highlight=False)


def _table(rows: Rows, title: str) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for column in rows.columns:
        header = column.removesuffix("_seconds").replace("_", " ")
        table.add_column(header, justify="right" if column in _NUMBERS else "left", no_wrap=True)
    for row in rows.values:
        table.add_row(*map(_cell, row))
    return table


def _cell(value: object) -> Text:
    """Return a value as text; emulated names need no escapes."""
    if value is None:
        return Text("-", style="dim")
    if isinstance(value, datetime):
        return Text(f"{value:%Y-%m-%d %H:%M:%S}")
    if isinstance(value, float):
        return Text(f"{value:.0f} s")
    return Text(str(value), style=_STYLES.get(str(value), ""))
