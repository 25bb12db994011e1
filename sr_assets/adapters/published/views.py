"""The views of `fleet.duckdb`, as queries over the files of all sites' publications."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import duckdb

from sr_assets.adapters.published import actions
from sr_assets.adapters.published.daily import DAILY_TABLES
from sr_assets.adapters.published.publication import Publication, publication_folder
from sr_assets.adapters.published.schema import (
    HISTORY,
    INTERNAL,
    NO_HISTORY,
    NO_SNAPSHOTS,
    TABLES,
    VIEWS,
    history_query,
    snapshots_query,
)
from sr_assets.adapters.published.table import literal
from sr_assets.adapters.published.topology_schema import TOPOLOGY_TABLES


class View(NamedTuple):
    """A view: its name and its query."""

    name: str
    query: str


def fleet_views(
    connection: duckdb.DuckDBPyConnection, home: Path, publications: Sequence[Publication], mode: int
) -> Iterator[View]:
    """Yield each view: the tables over the sites' files, and the views derived from them.

    `connection` writes a missing file that a view needs, with permissions `mode`.
    """
    # Strings: with a thousand sites, Path objects would take most of the time.
    folders = [(str(publication_folder(home, publication.site)), publication) for publication in publications]
    tables = {}
    for name, table in (TABLES | TOPOLOGY_TABLES).items():
        rows = [f"{folder}/{file}" for folder, publication in folders for file in publication.files.get(name, ())]
        later = [f"{folder}/{file}" for folder, publication in folders for file in publication.later.get(name, ())]
        tables[name] = _table_query(table.kinds, rows, later)
    yield from (View(name, query) for name, query in tables.items() if name not in INTERNAL)
    listed = sorted({f"{home}/{file}" for publication in publications for file in publication.history})
    # A missing Parquet file hides its own rows, not the whole publication.
    history = _literals(file for file in listed if Path(file).exists())
    latest = tables["latest_snapshots"]
    yield View("node_snapshots", snapshots_query(history, literal(f"{home}/"), latest) if history else NO_SNAPSHOTS)
    # DuckDB refuses a pattern without a match.
    any_file = next(home.glob(HISTORY), None)
    yield View("node_snapshot_history", history_query(str(home), tables["history_files"]) if any_file else NO_HISTORY)
    yield from (View(table.name, table.view(connection, home, mode)) for table in DAILY_TABLES)
    yield View(actions.NAME, actions.actions_query(home))
    for name, query in VIEWS.items():
        yield View(name, query.format(**{table: f"({rows})" for table, rows in tables.items()}))


def _table_query(kinds: dict[str, str], rows: Sequence[str], later: Sequence[str]) -> str:
    """Return the query over the files of a table, where rows in the files `later` replace others of the same key."""
    columns = ", ".join(kinds)
    if not rows:
        return f"SELECT {', '.join(f'NULL::{kind} AS {column}' for column, kind in kinds.items())} WHERE false"
    if not later:
        return f"SELECT {columns} FROM {_parquet(rows)}"
    return f"""
        SELECT {columns} FROM {_parquet(rows)} AS earlier
        WHERE NOT EXISTS (SELECT 1 FROM {_parquet(later)} AS later WHERE later.row_key = earlier.row_key)
        UNION ALL SELECT {columns} FROM {_parquet(later)}
        """


def _parquet(files: Iterable[str]) -> str:
    return f"read_parquet([{_literals(files)}], hive_partitioning = false)"


def _literals(files: Iterable[str]) -> str:
    return ", ".join(map(literal, files))
