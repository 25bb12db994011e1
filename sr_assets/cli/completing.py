"""Values for a shell's completion: sites, streams, nodes and tables. Without a configuration or tables there are none."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import click

from sr_assets.domain.errors import SrAssetsError

if TYPE_CHECKING:
    from sr_assets.settings import Settings

Complete = Callable[[click.Context, click.Parameter, str], list[str]]
_MOST_NODES: Final = 100


def _of_settings(names: "Callable[[Settings], Iterable[str]]") -> Complete:
    """Return a completion with names of the configuration."""

    def complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
        from sr_assets.settings import load_settings

        with suppress(SrAssetsError):
            return sorted({name for name in names(load_settings()) if name.startswith(incomplete)})
        return []

    return complete


def _stream_names(settings: "Settings") -> Iterator[str]:
    for entry in settings.entries:
        yield from (entry.stream, entry.label)


complete_site: Final = _of_settings(lambda settings: settings.sites)
complete_stream: Final = _of_settings(_stream_names)


def complete_node(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return published nodes, at most a hundred."""
    from sr_assets.adapters.published.fleet_reader import open_fleet
    from sr_assets.settings import load_settings

    query = "SELECT DISTINCT node FROM {} WHERE starts_with(node, ?) ORDER BY node LIMIT ?"
    with suppress(SrAssetsError), open_fleet(load_settings().home) as fleet:
        tables = ("node_availability", "global_availability")
        rows = [fleet.execute(query.format(table), [incomplete, _MOST_NODES]).fetchall() for table in tables]
        return sorted({node for table in rows for (node,) in table})[:_MOST_NODES]
    return []


def complete_tables(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return tables that continue a list with commas."""
    from sr_assets.adapters.published.catalog import ROWS

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{table}" for table in ROWS if table.startswith(last)]
