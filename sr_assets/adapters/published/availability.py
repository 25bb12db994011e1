"""The table `availability_daily`: its columns, its files, and the view over them.

A day is one file, `availability/YYYY-MM-DD.parquet`, replaced as a whole. Not here: what its rows are computed of
(`availability_history`), the computation (`spark.availability`), what is asked of the table (`availability_queries`).
"""

from __future__ import annotations

import glob
from datetime import date
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.private import make_shared_folder
from sr_assets.adapters.published.table import literal

if TYPE_CHECKING:
    from pathlib import Path

    import duckdb

FOLDER: Final = "availability"
#: A file without rows, so that the view's pattern always matches one.
_EMPTY: Final = "0000-00-00.parquet"
COLUMNS: Final = """
    date DATE, replicator VARCHAR, name VARCHAR, stream VARCHAR, node VARCHAR, up_seconds DOUBLE, timeout_seconds DOUBLE,
    retired_seconds DOUBLE, blind_seconds DOUBLE, transitions BIGINT, outages BIGINT, longest_outage_seconds DOUBLE,
    final BOOLEAN
    """
_NAMES: Final = tuple(column.split()[0] for column in COLUMNS.split(","))


def computed_dates(home: Path) -> list[date]:
    """Return the dates that were computed, in order."""
    found = (file.stem for file in (home / FOLDER).glob("????-??-??.parquet") if file.name != _EMPTY)
    return sorted(date.fromisoformat(text) for text in found)


def forget_before(home: Path, first: date) -> None:
    """Remove the files of days before a date."""
    for when in computed_dates(home):
        if when < first:
            (home / FOLDER / f"{when}.parquet").unlink(missing_ok=True)


def view(connection: duckdb.DuckDBPyConnection, home: Path, mode: int) -> str:
    """Return the query of the view `availability_daily`; it shows a day from when its file is there."""
    empty = home / FOLDER / _EMPTY
    if not empty.exists():
        make_shared_folder(empty.parent)
        nothing = ", ".join(["NULL"] * len(_NAMES))
        write_rows(connection, empty, f"SELECT {nothing} WHERE false", mode)
    pattern = literal(f"{glob.escape(str(home))}/{FOLDER}/*.parquet")
    return f"SELECT * FROM read_parquet({pattern}, hive_partitioning = false)"


def write_rows(connection: duckdb.DuckDBPyConnection, file: Path, query: str, mode: int) -> int:
    """Replace a file of the table by the rows of a query, atomically; returns how many rows it has."""
    draft = file.with_name(f".{file.name}.new")
    kinds = ", ".join(f"{name}::{kind} AS {name}" for name, kind in (column.split() for column in COLUMNS.split(",")))
    source = f"SELECT {kinds} FROM ({query}) AS made ({', '.join(_NAMES)})"
    ((rows,),) = connection.execute(
        f"COPY ({source}) TO {literal(str(draft))} (FORMAT parquet, COMPRESSION zstd)"
    ).fetchall()
    draft.chmod(mode)
    draft.replace(file)
    return int(rows)
