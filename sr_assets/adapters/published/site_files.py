"""What a site publishes: the rows of its state, as of one moment, in files.

Here: which rows go into which file. Not here: the tables (`schema`), a file (`files`), the record of what was written
(`publication`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sr_assets.adapters.published.delta_files import IncrementalTable
from sr_assets.adapters.published.files import Files
from sr_assets.adapters.published.publication import Publication
from sr_assets.adapters.published.schema import TABLES
from sr_assets.adapters.published.table import literal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import duckdb

    from sr_assets.adapters.published.table import Table
    from sr_assets.adapters.state.store import SiteState


@dataclass(frozen=True, slots=True)
class PublishedStream:
    """The part of a configured stream, or feed, that the published tables need."""

    stream: str
    target_stream: str | None
    tracked: bool
    paused: bool = False


def write_site(
    folder: Path,
    site: str,
    state: SiteState,
    streams: Sequence[PublishedStream],
    *,
    since: int,
    before: Publication | None,
    mode: int,
) -> Publication:
    """Write a site's tables into its folder, files of permissions `mode`; returns the publication, not noted yet.

    `before` is the site's last publication, `since` the number of the last `fleet.duckdb`. Of a stream or feed that `streams`
    does not name but the state knows, the rows stay: a mistake in the configuration empties no table. Raises RunError when
    they cannot be written.
    """
    connection = state.connection
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE configured (stream VARCHAR, target_stream VARCHAR, tracked BOOLEAN, paused BOOLEAN)"
    )
    rows = [
        (stream.stream, stream.target_stream, stream.tracked, stream.paused)
        for stream in [*streams, *_unnamed(state, streams)]
    ]
    if rows:
        connection.executemany("INSERT INTO configured VALUES (?, ?, ?, ?)", rows)
    # One transaction reads all tables as of one moment: copying commits beside us, and its rows in one table belong to
    # counters in another.
    with state.read_snapshot(), Files(connection, folder, mode) as files:
        publication = Publication(site, files.token, since, {}, _history(connection))
        filled = _filled(connection)
        for name in TABLES:
            table = TABLES[name]
            if table.state in filled:
                _write_table(connection, folder, files, publication, before, name, table)
    return publication


def _write_table(
    connection: duckdb.DuckDBPyConnection,
    folder: Path,
    files: Files,
    publication: Publication,
    before: Publication | None,
    name: str,
    table: Table,
) -> None:
    """Write the rows of one table, of a large one that grows the later ones only, and take them into a publication."""
    query = f"{table.query} AND {table.entry} IN (SELECT stream FROM configured)".replace(
        "$name", literal(publication.site)
    )
    growing = None if table.growth is None else IncrementalTable(connection, publication.site, table)
    if growing is not None and before is not None and name in before.earlier:
        kept = growing.keep(before.earlier[name], folder)
        if kept is not None:
            publication.earlier[name] = kept
            publication.files[name] = {kept.file: before.files[name][kept.file]}
            written = files.write(name, table, f"{query} AND {growing.later(kept.until_ns)}")
            if written is not None:
                beside = publication.later if table.replaced else publication.files
                beside.setdefault(name, {})[written.name] = written.size
            return
    written = files.write(name, table, query)
    if written is not None:
        publication.files[name] = {written.name: written.size}
        if growing is not None and (begun := growing.begin(written)) is not None:
            publication.earlier[name] = begun._replace(since=publication.since)


def _filled(connection: duckdb.DuckDBPyConnection) -> set[str]:
    """Return the tables of the state that have rows: an empty file takes longer than to look."""
    survey = " UNION ALL ".join(
        f"(SELECT '{state}' FROM {state} LIMIT 1)" for state in sorted({table.state for table in TABLES.values()})
    )
    return {state for (state,) in connection.execute(survey).fetchall()}


def _history(connection: duckdb.DuckDBPyConnection) -> list[str]:
    rows = connection.execute(
        "SELECT DISTINCT file FROM snapshots WHERE stream IN (SELECT stream FROM configured) ORDER BY file"
    ).fetchall()
    return [file for (file,) in rows]


def _unnamed(state: SiteState, streams: Sequence[PublishedStream]) -> list[PublishedStream]:
    """Return what the state knows beyond the streams that are configured."""
    named = {stream.stream for stream in streams}
    return [
        PublishedStream(stream, state.load_copying(stream).target_stream, tracked=state.nodes(stream).any())
        for stream in state.known_streams()
        if stream not in named
    ]
