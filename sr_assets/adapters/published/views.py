"""The views of `fleet.duckdb`: each one's query over the files of some sites' publications.

Not here: the tables and what is made of them (`schema`), making the file (`index`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sr_assets.adapters.published.daily import DAILY_TABLES
from sr_assets.adapters.published.publication import publication_folder
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

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import duckdb

    from sr_assets.adapters.published.publication import Publication


def views(
    connection: duckdb.DuckDBPyConnection, home: Path, publications: Sequence[Publication], mode: int
) -> Iterator[tuple[str, str]]:
    """Yield each view's name and query: the tables over the sites' files, and what is made of them.

    A file that a view needs and nobody has written yet is written by `connection`, with permissions `mode`.
    """
    # As text: with a thousand sites, paths would take most of the time.
    folders = [(str(publication_folder(home, publication.site)), publication) for publication in publications]
    tables = {}
    for name, table in (TABLES | TOPOLOGY_TABLES).items():
        rows = [f"{folder}/{file}" for folder, publication in folders for file in publication.files.get(name, ())]
        later = [f"{folder}/{file}" for folder, publication in folders for file in publication.later.get(name, ())]
        tables[name] = _table_query(table.kinds, rows, later)
    yield from ((name, query) for name, query in tables.items() if name not in INTERNAL)
    named = sorted({f"{home}/{file}" for publication in publications for file in publication.history})
    # A missing Parquet file costs its own rows, not the whole publication.
    history = _listed(file for file in named if Path(file).exists())
    latest = tables["latest_snapshots"]
    yield "node_snapshots", snapshots_query(history, literal(f"{home}/"), latest) if history else NO_SNAPSHOTS
    # A pattern that matches nothing is an error.
    some = next(home.glob(HISTORY), None)
    yield "node_snapshot_history", history_query(str(home), tables["history_files"]) if some else NO_HISTORY
    yield from ((table.name, table.view(connection, home, mode)) for table in DAILY_TABLES)
    for name, query in VIEWS.items():
        yield name, query.format(**{table: f"({shown})" for table, shown in tables.items()})


def _table_query(kinds: dict[str, str], rows: Sequence[str], later: Sequence[str]) -> str:
    """Return the query over the files of a table; rows in the files `later` hide earlier ones."""
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
    return f"read_parquet([{_listed(files)}], hive_partitioning = false)"


def _listed(files: Iterable[str]) -> str:
    return ", ".join(map(literal, files))
