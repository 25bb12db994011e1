"""Publishing a site's tables: new files for its rows (large tables: a base and a delta), and a `fleet.duckdb` with them.

The cost depends on the site alone: other sites' files are neither read nor rewritten. An open reader keeps its version;
the next open sees the new one. Payloads are not copied: `node_snapshots` is a view over the Parquet history.

A large table has a base file and a file of deltas. All its rows are written again if a base row changed or was deleted without a
newer row of its key, or if the deltas have written as many rows as the base file holds. So each row is written about three
times.
"""

from __future__ import annotations

import filecmp
import stat
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self, cast

import duckdb
import pyarrow as pa

from sr_assets.adapters.crash_points import Point, reach
from sr_assets.adapters.private import make_shared_folder
from sr_assets.adapters.published.fleet_file import Run, publish_index
from sr_assets.adapters.published.manifest import LOCK_SECONDS, read_manifest
from sr_assets.adapters.published.publication import (
    BaseFile,
    Publication,
    file_name,
    publication_folder,
    read_publication,
    sweep,
    write_publication,
)
from sr_assets.adapters.published.stream_status import PublishedStream, status_rows, stream_statuses
from sr_assets.adapters.published.tables import TABLES, TOPOLOGY_SITE, TOPOLOGY_TABLES, Table, literal, of_streams
from sr_assets.domain.errors import RunError, cannot_write

if TYPE_CHECKING:
    from sr_assets.adapters.state.status_file import StreamStatus
from sr_assets.adapters.state.store import SiteState

#: Below this number of rows, writing all of them is as fast as finding the new ones.
LARGE: Final = 10_000
#: One row in so many of a base file may be in each delta file too.
_RECENT_SHARE: Final = 10
#: The tables with rows in the state of a site. One query: each costs as much as reading a small table.
_FILLED: Final = " UNION ALL ".join(f"(SELECT '{name}' FROM {table.state} LIMIT 1)" for name, table in TABLES.items())


class Written(NamedTuple):
    """A written file."""

    name: str
    size: int
    rows: int


class Files:
    """The files of one publication, with permissions `mode`, as a context manager that deletes them on failure.

    Raises RunError if they cannot be written.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, folder: Path, mode: int) -> None:
        self._connection, self._folder, self._mode = connection, folder, mode
        self.token = uuid.uuid4().hex
        self._started: list[Path] = []

    def __enter__(self) -> Self:
        """Return self; no file is open yet."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Delete the files of a failed publication."""
        if kind is None:
            reach(Point.WRITTEN_TABLES)
            return
        for file in self._started:
            file.unlink(missing_ok=True)
        if isinstance(error, duckdb.OperationalError):
            raise RunError(cannot_write(self._folder, OSError(str(error).splitlines()[0]))) from None

    def write(self, name: str, table: Table, query: str) -> Written | None:
        """Write the rows of a query, cast to a table's columns, to a file; return None for no rows."""
        file = self._folder / file_name(name, self.token)
        self._started.append(file)
        kinds = table.kinds | ({"row_key": "UBIGINT", "row_mark": "UBIGINT"} if table.replaced else {})
        cast = ", ".join(f"{column}::{kind} AS {column}" for column, kind in kinds.items())
        source = f"SELECT {cast} FROM ({query}) AS made ({', '.join(kinds)})"
        ((rows,),) = self._connection.execute(
            f"COPY ({source}) TO {literal(str(file))} (FORMAT parquet, COMPRESSION zstd)"
        ).fetchall()
        if not rows:
            file.unlink()
            return None
        file.chmod(self._mode)
        return Written(file.name, file.stat().st_size, rows)

    def discard_repeated(
        self, written: Written, earlier: Mapping[str, int], later: Mapping[str, int], base: BaseFile | None
    ) -> bool:
        """Delete the written file of a small table if its only earlier file has the same content; return whether it has.

        Without a change of its rows, the table's view and data version then stay as they are.
        """
        if later or base is not None or written.rows >= LARGE or list(earlier.values()) != [written.size]:
            return False
        before, now = self._folder / next(iter(earlier)), self._folder / written.name
        if stat.S_IMODE(before.stat().st_mode) != self._mode or not filecmp.cmp(before, now, shallow=False):
            return False
        now.unlink()
        return True


class IncrementalTable:
    """The rows of one incremental table in a site's state that fulfil a condition."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, site: str, table: Table, condition: str) -> None:
        assert table.growth is not None
        self._connection, self._shown, self._late_ns = connection, table.shown, table.growth.late_ns
        self._time = f"coalesce({table.growth.time}, 0)"
        self._mark = table.growth.mark
        self._key = (table.growth.key or "").replace("$name", literal(site))
        self._rows = f"{table.state} WHERE {condition}"

    def later(self, until_ns: int) -> str:
        """Return the condition for rows of the delta file."""
        return f"{self._time} >= {until_ns}"

    def keep(self, base: BaseFile, folder: Path) -> BaseFile | None:
        """Return the base file if it and the delta rows are the whole table, or None if all rows must be written."""
        rows, mark, later = self._row(
            f"""
            SELECT count(*) FILTER (early AND shown), coalesce(sum({self._mark}) FILTER (early AND shown), 0),
                count(*) FILTER (NOT early)
            FROM (SELECT *, {self._time} < {base.until_ns} AS early, {self._shown} AS shown FROM {self._rows})
            """
        )
        if (rows, mark) != (base.rows, base.mark) and self._key:
            replaced, replaced_mark = self._row(
                f"""
                SELECT count(*), coalesce(sum(row_mark), 0) FROM read_parquet({literal(str(folder / base.file))})
                WHERE row_key IN (SELECT {self._key} FROM {self._rows} AND {self.later(base.until_ns)})
                """
            )
            rows, mark = rows + replaced, mark + replaced_mark
        written = base.written + later
        if (rows, mark) != (base.rows, base.mark) or written >= base.rows:
            return None
        return base._replace(written=written)

    def begin(self, written: Written) -> BaseFile | None:
        """Return a file with all rows as the new base file, or None if the table is small."""
        if written.rows < LARGE:
            return None
        rows, mark, until_ns = self._row(
            f"SELECT count(*), sum({self._mark}), max({self._time}) + 1 FROM {self._rows} AND {self._shown}"
        )
        if self._late_ns:
            # The delta has these rows too, so they must be few.
            from_ns = until_ns - self._late_ns
            (recent,) = self._row(f"SELECT count(*) FROM {self._rows} AND {self._shown} AND {self.later(from_ns)}")
            until_ns = from_ns if recent <= rows // _RECENT_SHARE else until_ns
        return BaseFile(written.name, rows, mark, until_ns)

    def _row(self, query: str) -> tuple[int, ...]:
        return tuple(map(int, self._connection.execute(query).fetchall()[0]))


def publish_site(
    home: Path,
    name: str,
    state: SiteState,
    streams: Sequence[PublishedStream],
    *,
    sites: Sequence[str],
    run: Run,
    mode: int = 0o600,
    wait_seconds: float = LOCK_SECONDS,
) -> dict[str, StreamStatus]:
    """Replace a site's rows in the published tables, in files of permissions `mode`; return the published status of each stream.

    Call it inside the site's lock.

    Rows of a stream or feed that is in the state but not in `streams` stay. Sites outside `sites` are no longer shown.
    Raises RunError if a file cannot be written, and FleetBusyError if another site holds `fleet.lock` for
    `wait_seconds`; the old tables then stay.
    """
    folder = publication_folder(home, name)
    try:
        make_shared_folder(folder)
        before = read_publication(folder)
        written, statuses = _write_site(
            folder, name, state, streams, since=read_manifest(home).number, before=before, mode=mode
        )
        publication = write_publication(folder, written, before)
        reach(Point.NOTED_TABLES)
        manifest = publish_index(
            state.connection.raw, home, publication, sites=sites, run=run, mode=mode, wait_seconds=wait_seconds
        )
        sweep(folder, publication, manifest.numbers)
    except OSError as error:
        raise RunError(cannot_write(folder, error)) from None
    return statuses


def publish_topology(
    home: Path,
    rows: Mapping[str, Sequence[Mapping[str, object]]],
    *,
    sites: Sequence[str],
    run: Run,
    mode: int = 0o600,
    wait_seconds: float = LOCK_SECONDS,
) -> None:
    """Replace the rows of the topology tables, given by table; only one process may call it at a time.

    `sites` are the sites that are shown too. Raises RunError if a file cannot be written.
    """
    folder = publication_folder(home, TOPOLOGY_SITE)
    try:
        make_shared_folder(folder)
        before = read_publication(folder)
        with duckdb.connect() as connection:
            with Files(connection, folder, mode) as files:
                publication = Publication(TOPOLOGY_SITE, files.token, read_manifest(home).number, {}, [])
                for name, table in TOPOLOGY_TABLES.items():
                    columns = {column: [row[column] for row in rows[name]] for column in table.kinds}
                    connection.register(f"rows_of_{name}", pa.table(columns))
                    written = files.write(name, table, f"SELECT * FROM rows_of_{name}")
                    if written is not None:
                        publication.files[name] = {written.name: written.size}
            publication = write_publication(folder, publication, before)
            manifest = publish_index(
                connection, home, publication, sites=sites, run=run, mode=mode, wait_seconds=wait_seconds
            )
        sweep(folder, publication, manifest.numbers)
    except OSError as error:
        raise RunError(cannot_write(folder, error)) from None


def _write_site(
    folder: Path,
    site: str,
    state: SiteState,
    streams: Sequence[PublishedStream],
    *,
    since: int,
    before: Publication | None,
    mode: int,
) -> tuple[Publication, dict[str, StreamStatus]]:
    """Write a site's tables into its folder; return the publication, which is not recorded yet, and each stream's status.

    The files have permissions `mode`. `before` is the site's last publication, `since` the number of the last
    `fleet.duckdb`. Rows of a stream or feed that is in the state but not in `streams` stay: a mistake in the
    configuration empties no table. Raises RunError if a file cannot be written.
    """
    connection = state.connection.raw
    # One snapshot for all tables: copying commits concurrently, and its rows belong to counters in another table.
    with state.read_snapshot(), Files(connection, folder, mode) as files:
        shown = [*streams, *_unnamed(state, streams)]
        names = [stream.stream for stream in shown]
        filled = state.connection.rows(_FILLED)
        publication = Publication(site, files.token, since, {}, _history(state, names))
        # The end of the snapshot forgets the name.
        statuses = stream_statuses(state, site, shown)
        connection.register("status", status_rows(statuses))
        for name in TABLES:
            table = TABLES[name]
            query = f"{table.query.replace('$name', literal(site))} AND {of_streams(table.entry, names)}"
            key = (str(folder), mode, query)
            if before is not None and state.connection.remembered(key, query) == before.content(name):
                publication.keep(name, before)
                continue
            if (name,) in filled:  # faster than writing an empty file
                _write_table(
                    connection, folder, files, publication, before, name, table, of_streams(table.entry, names)
                )
            if not table.reads_status:
                state.connection.remember(key, query, publication.content(name))
    return publication, statuses


def _write_table(
    connection: duckdb.DuckDBPyConnection,
    folder: Path,
    files: Files,
    publication: Publication,
    before: Publication | None,
    name: str,
    table: Table,
    condition: str,
) -> None:
    """Write the rows of one table that fulfil a condition, for an incremental table only the delta.

    Add the files to a publication.
    """
    query = f"{table.query.replace('$name', literal(publication.site))} AND {condition}"
    incremental = None if table.growth is None else IncrementalTable(connection, publication.site, table, condition)
    if incremental is not None and before is not None and name in before.earlier:
        base = incremental.keep(before.earlier[name], folder)
        if base is not None:
            publication.earlier[name] = base
            publication.files[name] = {base.file: before.files[name][base.file]}
            written = files.write(name, table, f"{query} AND {incremental.later(base.until_ns)}")
            if written is not None:
                delta = publication.later if table.replaced else publication.files
                delta.setdefault(name, {})[written.name] = written.size
            return
    written = files.write(name, table, f"{query} AND {table.shown}")
    if written is not None and before is not None and files.discard_repeated(written, *before.content(name)):
        publication.keep(name, before)
    elif written is not None:
        publication.files[name] = {written.name: written.size}
        if incremental is not None and (base := incremental.begin(written)) is not None:
            publication.earlier[name] = base._replace(since=publication.since)


def _history(state: SiteState, streams: Sequence[str]) -> list[str]:
    query = f"SELECT DISTINCT file FROM snapshots WHERE {of_streams('stream', streams)} ORDER BY file"
    return [file for (file,) in state.connection.rows(query)]


def _unnamed(state: SiteState, streams: Sequence[PublishedStream]) -> list[PublishedStream]:
    """Return the streams and feeds in the state that are not configured; call it inside a snapshot.

    A run changes only rows of configured ones, so the first list of a run is remembered.
    """
    named = frozenset(stream.stream for stream in streams)
    key, of_no_table = ("unnamed", named), ""
    unnamed = cast("list[PublishedStream] | None", state.connection.remembered(key, of_no_table))
    if unnamed is None:
        unnamed = [
            PublishedStream(stream, state.load_copying(stream).target_stream, tracked=state.nodes(stream).any())
            for stream in state.known_streams()
            if stream not in named
        ]
        state.connection.remember(key, of_no_table, unnamed)
    return unnamed
