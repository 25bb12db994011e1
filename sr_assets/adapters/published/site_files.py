"""The files of a site's publication: one Parquet file for each table that has rows.

Here: writing them as of one moment. Not here: the tables (`schema`), the record of what was written (`publication`).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import duckdb

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.published.publication import Publication, file_name
from sr_assets.adapters.published.schema import TABLES
from sr_assets.adapters.published.table import Table, literal
from sr_assets.domain.errors import RunError, cannot_write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sr_assets.adapters.state.store import SiteState


@dataclass(frozen=True, slots=True)
class PublishedStream:
    """The part of a configured stream, or feed, that the published tables need."""

    stream: str
    target_stream: str | None
    tracked: bool
    paused: bool = False


def write_site(
    folder: Path, site: str, since: int, state: SiteState, streams: Sequence[PublishedStream], mode: int
) -> Publication:
    """Write a site's tables into its folder, files of permissions `mode`; returns the publication, not noted yet.

    Of a stream or feed that `streams` does not name but the state knows, the rows stay: a mistake in the configuration
    empties no table. Raises RunError when they cannot be written.
    """
    connection = state.connection
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE configured (stream VARCHAR, target_stream VARCHAR, tracked BOOLEAN, paused BOOLEAN)"
    )
    rows = [(one.stream, one.target_stream, one.tracked, one.paused) for one in [*streams, *_unnamed(state, streams)]]
    if rows:
        connection.executemany("INSERT INTO configured VALUES (?, ?, ?, ?)", rows)

    queries = {
        name: f"{table.query} AND {table.entry} IN (SELECT stream FROM configured)".replace("$name", literal(site))
        for name, table in TABLES.items()
    }
    # One transaction reads all tables as of one moment: copying commits beside us, and its rows in one table belong to
    # counters in another.
    with state.moment():
        token, files = write_files(connection, folder, mode, queries)
        history = connection.execute(
            "SELECT DISTINCT file FROM snapshots WHERE stream IN (SELECT stream FROM configured) ORDER BY file"
        ).fetchall()
    return Publication(site, token, since, files, [file for (file,) in history])


def write_files(
    connection: duckdb.DuckDBPyConnection, folder: Path, mode: int, queries: Mapping[str, str]
) -> tuple[str, dict[str, dict[str, int]]]:
    """Write the rows of each query, by table, to a file of its own if there are any.

    Returns the token in the files' names, and the files' sizes by table and name.
    """
    files: dict[str, dict[str, int]] = {}
    token = uuid.uuid4().hex
    try:
        for name_of_table, query in queries.items():
            file = folder / file_name(name_of_table, token)
            size = _write_file(connection, file, TABLES[name_of_table], query)
            if size is None:
                continue
            file.chmod(mode)
            files[name_of_table] = {file.name: size}
    except BaseException as error:
        for table in TABLES:
            (folder / file_name(table, token)).unlink(missing_ok=True)
        if not isinstance(error, duckdb.OperationalError):
            raise
        raise RunError(cannot_write(folder, OSError(str(error).splitlines()[0]))) from None
    reach(Point.WRITTEN_TABLES)
    return token, files


def _write_file(connection: duckdb.DuckDBPyConnection, file: Path, table: Table, query: str) -> int | None:
    """Write the rows of a query to a Parquet file; returns its size, None when there are none."""
    cast = ", ".join(f"{name}::{kind} AS {name}" for name, kind in table.kinds.items())
    source = f"SELECT {cast} FROM ({query}) AS made ({', '.join(table.kinds)})"
    rows = connection.execute(f"COPY ({source}) TO {literal(str(file))} (FORMAT parquet, COMPRESSION zstd)").fetchall()[
        0
    ][0]
    if not rows:
        file.unlink()
        return None
    return file.stat().st_size


def _unnamed(state: SiteState, streams: Sequence[PublishedStream]) -> list[PublishedStream]:
    """Return what the state knows beyond the streams that are configured."""
    named = {stream.stream for stream in streams}
    return [
        PublishedStream(stream, state.load_copying(stream).target_stream, tracked=state.nodes(stream).any())
        for stream in state.known_streams()
        if stream not in named
    ]
