"""`fleet.duckdb`: views over the files of all sites' publications. Each publication replaces it atomically.

DuckDB binds a new view, which opens its files, so a publication begins with a copy of the last file and replaces only the
views that changed. The leaders of sites are rows of `fleet.duckdb` itself, because they change without a run of the site.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import stat
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import duckdb
import orjson

from sr_assets.adapters.crash_points import Point, reach
from sr_assets.adapters.home import OtherSchemaError
from sr_assets.adapters.private import remove_files, write_private
from sr_assets.adapters.published import actions
from sr_assets.adapters.published.daily_tables import DAILY_TABLES, names
from sr_assets.adapters.published.manifest import (
    LOCK_SECONDS,
    Manifest,
    has_absolute_views,
    identity,
    locked,
    read_manifest,
    retain_open_files,
    shows,
    write_manifest,
)
from sr_assets.adapters.published.publication import (
    COLUMNS,
    FILES,
    Publication,
    publication_folder,
    read_publication,
    site_folder,
    site_folders,
)
from sr_assets.adapters.published.tables import (
    HISTORY,
    INTERNAL,
    NO_HISTORY,
    NO_SNAPSHOTS,
    SCHEMA_VERSION,
    SNAPSHOT_INFO,
    STORAGE_VERSION,
    TABLES,
    TOPOLOGY_SITE,
    TOPOLOGY_TABLES,
    VIEWS,
    Table,
    at,
    history_query,
    literal,
    parquet,
    refuse_other_schema,
    snapshots_query,
)
from sr_assets.adapters.state.checkpoint import last_stored
from sr_assets.adapters.state.lease import Lease
from sr_assets.domain.days import dates_between
from sr_assets.domain.errors import RunError, cannot_write

if TYPE_CHECKING:
    import duckdb

LEADERS_TABLE: Final = "site_leaders"
LEADERS_COLUMNS: Final = (
    "name VARCHAR, role VARCHAR, leader VARCHAR, leader_host VARCHAR, since TIMESTAMPTZ, checkpoint_at TIMESTAMPTZ"
)
#: The file that names the Parquet files of each table.
TABLES_FILE: Final = "tables.json"
_MIXED: Final = "mixed"
_MOVE_SECONDS: Final = 5.0


#: A file in a view, as DuckDB shows it, and a list of files.
_LITERAL: Final = r"'((?:[^']|'')*)'"
_LISTED: Final = r"list_value\(((?:'(?:[^']|'')*'(?:, )?)+)\)"


class View(NamedTuple):
    """A view: its name and its query."""

    name: str
    query: str


class TableFiles(NamedTuple):
    """The files of a table, relative to the home: `rows`, and `later` ones, whose rows replace others of the same key."""

    rows: list[str]
    later: list[str]


def _table_files(publications: Sequence[Publication]) -> dict[str, TableFiles]:
    # Strings: with a thousand sites, Path objects would take most of the time.
    folders = [(site_folder(publication.site), publication) for publication in publications]
    return {
        name: TableFiles(
            [f"{folder}/{file}" for folder, publication in folders for file in publication.files.get(name, ())],
            [f"{folder}/{file}" for folder, publication in folders for file in publication.later.get(name, ())],
        )
        for name in TABLES | TOPOLOGY_TABLES
    }


def _write_tables_file(home: Path, files: Mapping[str, TableFiles], as_of_ns: int, mode: int) -> None:
    """Replace the list of the files of each table, for readers of Parquet other than DuckDB."""
    listed: dict[str, dict[str, object]] = {}
    for name, (rows, later) in files.items():
        listed[name] = {"files": rows}
        if later:
            listed[name] |= {"newer_files": later, "key": "row_key", "shown": (TABLES | TOPOLOGY_TABLES)[name].shown}
    as_of = datetime.fromtimestamp(as_of_ns / 1e9, UTC).isoformat()
    content = orjson.dumps({"version": 1, "format": "parquet", "as_of": as_of, "tables": listed}).decode()
    write_private(home / TABLES_FILE, content, mode, durable=False)


def fleet_views(
    connection: duckdb.DuckDBPyConnection,
    home: Path,
    publications: Sequence[Publication],
    files: Mapping[str, TableFiles],
    mode: int,
) -> Iterator[View]:
    """Yield each view: the tables over the sites' `files`, and the views derived from them.

    `connection` writes a missing file that a view needs, with permissions `mode`.
    """
    path = str(home)
    # A site that has not run since an upgrade has files of other columns.
    uniform = all(publication.columns == COLUMNS for publication in publications)
    tables = {
        name: _table_query(path, table, *files[name], uniform=uniform)
        for name, table in (TABLES | TOPOLOGY_TABLES).items()
    }
    yield from (View(name, query) for name, query in tables.items() if name not in INTERNAL)
    listed = sorted({file for publication in publications for file in publication.history})
    # A missing Parquet file hides its own rows, not the whole publication.
    history = [file for file in listed if Path(path, file).exists()]
    latest = tables["latest_snapshots"]
    yield View("node_snapshots", snapshots_query(path, history, latest) if history else NO_SNAPSHOTS)
    # DuckDB refuses a pattern without a match.
    any_file = next(home.glob(HISTORY), None)
    yield View("node_snapshot_history", history_query(path, tables["history_files"]) if any_file else NO_HISTORY)
    yield from (View(table.name, table.view(connection, home, mode)) for table in DAILY_TABLES)
    yield View(actions.NAME, actions.actions_query(home))
    for name, query in VIEWS.items():
        yield View(name, query.format(**{table: f"({rows})" for table, rows in tables.items()}))


def _table_query(home: str, table: Table, rows: Sequence[str], later: Sequence[str], *, uniform: bool) -> str:
    """Return the query over the files of a table in a home, where rows in the files `later` replace others of the same key.

    Columns that a file lacks are NULL; `uniform` files have all.
    """
    kinds, columns = table.kinds, ", ".join(table.kinds)
    nothing = f"SELECT {', '.join(f'NULL::{kind} AS {column}' for column, kind in kinds.items())} WHERE false"
    if not rows:
        return nothing
    before, after = parquet(home, rows), parquet(home, later)
    if not uniform:
        before, after = (
            f"({nothing} UNION ALL BY NAME SELECT * FROM {parquet(home, files, 'union_by_name = true')})"
            for files in (rows, later)
        )
    if not later:
        return f"SELECT {columns} FROM {before}"
    return f"""
        SELECT {columns} FROM {before} AS earlier
        WHERE NOT EXISTS (SELECT 1 FROM {after} AS later WHERE later.row_key = earlier.row_key)
        UNION ALL SELECT {columns} FROM {after} WHERE {table.shown}
        """


def view_files(connection: duckdb.DuckDBPyConnection, view: str) -> tuple[list[str], list[str]]:
    """Return the files of a table's view in the opened `fleet.duckdb`, and those whose rows replace others by `row_key`.

    They are relative to the home. For `node_snapshot_history` they are the files of `history_files`.
    """
    query = "SELECT sql FROM duckdb_views() WHERE view_name = $view AND NOT internal"
    ((sql,),) = connection.execute(query, {"view": view}).fetchall()
    lists = [[text.replace("''", "'") for text in re.findall(_LITERAL, listed)] for listed in re.findall(_LISTED, sql)]
    return (lists[0] if lists else []), (lists[1] if len(lists) > 1 else [])


def listed_history(connection: duckdb.DuckDBPyConnection, home: Path) -> list[str]:
    """Return the files of `node_snapshot_history`, relative to the home, including expired ones."""
    lists, _ = view_files(connection, "node_snapshot_history")
    if not lists:
        return []
    rows = connection.execute(f"SELECT DISTINCT file FROM {parquet(str(home), lists)} ORDER BY file").fetchall()
    return [file for (file,) in rows]


def history_files(
    connection: duckdb.DuckDBPyConnection, home: Path, days: tuple[date, date] | None = None
) -> list[str]:
    """Return the existing files of `node_snapshot_history`, relative to the home; `days` are the first and last UTC date."""
    files = [file for file in listed_history(connection, home) if (home / file).exists()]
    if days is None:
        return files
    dates = {f"date={when}" for when in dates_between(*days)}
    return [file for file in files if dates.intersection(file.split("/"))]


class Leader(NamedTuple):
    """A row of `site_leaders`; the times are in unix ns."""

    site: str
    role: str
    leader: str | None
    host: str | None
    since_ns: int | None
    checkpoint_ns: int | None


def read_leaders(home: Path, sites: Iterable[str]) -> list[Leader]:
    """Return the leader of each site. A site without an election is led by this home."""
    return [_row(home, site) for site in sorted(sites) if site != TOPOLOGY_SITE]


def common_leader(rows: Iterable[Leader]) -> tuple[str, str | None]:
    """Return the common role and leader of all sites, or `mixed` and None if the sites differ."""
    agreed = {(row.role, row.leader) for row in rows}
    return agreed.pop() if len(agreed) == 1 else (_MIXED, None)


def write_leaders(connection: duckdb.DuckDBPyConnection, rows: Sequence[Leader]) -> None:
    """Create or replace `fleet.site_leaders`."""
    connection.execute(f"CREATE OR REPLACE TABLE fleet.{LEADERS_TABLE} ({LEADERS_COLUMNS})")
    if rows:
        insert = f"INSERT INTO fleet.{LEADERS_TABLE} SELECT $1, $2, $3, $4, {at('$5::BIGINT')}, {at('$6::BIGINT')}"
        connection.executemany(insert, rows)


def _row(home: Path, site: str) -> Leader:
    folder = home / "sites" / site
    lease, checkpoint = Lease.read(folder), last_stored(folder)
    role = "leader" if lease.holds or not lease.keys else "follower"
    return Leader(site, role, lease.leader, lease.leader_host, lease.since_ns, checkpoint and checkpoint.at_ns)


class Run(NamedTuple):
    """Content of `snapshot_info`: the time of a publication (unix ns), and its run."""

    as_of_ns: int
    run_id: str


def publish_index(
    connection: duckdb.DuckDBPyConnection,
    home: Path,
    publication: Publication,
    *,
    sites: Sequence[str],
    run: Run,
    mode: int,
    wait_seconds: float,
) -> Manifest:
    """Make `fleet.duckdb` show the last publication of each of `sites`, including the given one.

    Concurrent sites take turns (`fleet.lock`); if another site has already shown this publication, nothing is
    rewritten. Returns the manifest. Raises RunError if the file cannot be written, and FleetBusyError if another site
    holds the lock for `wait_seconds`; the old file then stays.
    """
    with locked(home, publication.site, wait_seconds):
        manifest = read_manifest(home)
        if shows(home, publication.site, publication.token, manifest):
            return manifest
        if manifest.file != identity(home / "fleet.duckdb"):
            _refuse_other_schema(connection, home / "fleet.duckdb")
        return _publish(connection, home, manifest, sites, run, mode)


def _publish(
    connection: duckdb.DuckDBPyConnection, home: Path, manifest: Manifest, sites: Sequence[str], run: Run, mode: int
) -> Manifest:
    """Replace the published file; call it inside the lock."""
    file, draft = home / "fleet.duckdb", home / ".fleet.duckdb.new"
    publications = _read_publications(home, sites)
    # A lost manifest must not lower the number.
    number = max((manifest.number, *(publication.since for publication in publications))) + 1
    files = _table_files(publications)
    known = manifest.parts if _is_reusable(home, manifest) else {}
    try:
        parts = _write_draft(connection, draft, home.resolve(), publications, files, sites, run, mode, known)
    except (duckdb.Error, RunError):
        if not known:
            raise
        # The last file may be damaged.
        parts = _write_draft(connection, draft, home.resolve(), publications, files, sites, run, mode, {})
    draft.chmod(mode)
    tokens = {publication.site: publication.token for publication in publications}
    opened = retain_open_files(home, manifest, number)
    made = Manifest(str(home.resolve()), number, identity(draft), tokens, opened, parts, relative=True)
    # Write the manifest first: after a crash the old file's readers are still known.
    write_manifest(home, made)
    _write_tables_file(home, files, run.as_of_ns, mode)
    reach(Point.PUBLISHING_TABLES)
    draft.replace(file)
    # A log of a reader who wrote into the replaced file.
    _wal(file).unlink(missing_ok=True)
    _remove_gone(home, sites, made)
    reach(Point.PUBLISHED_TABLES)
    return made


def _is_reusable(home: Path, manifest: Manifest) -> bool:
    """Return whether `fleet.duckdb` is the file of the manifest, unchanged, and its paths are still right."""
    file = home / "fleet.duckdb"
    return bool(manifest.file) and (
        (manifest.home, manifest.file) == (str(home.resolve()), identity(file)) and not _wal(file).exists()
    )


def republish(home: Path, sites: Sequence[str], run: Run, mode: int) -> None:
    """Make `fleet.duckdb` again from the last publication of each site.

    Raises RunError if no site has published or the file cannot be written, FleetBusyError if another process holds the lock.
    """
    try:
        with locked(home, f"run {run.run_id}", LOCK_SECONDS), duckdb.connect() as connection:
            if not _read_publications(home, sites):
                raise RunError(f"nothing is published yet: run a site first (`sr-assets run --once`); home {home}")
            _publish(connection, home, read_manifest(home), sites, run, mode)
    except OSError as error:
        raise RunError(cannot_write(home / "fleet.duckdb", error)) from None


def table_versions(home: Path) -> dict[str, str]:
    """Return the version of each table that a publication writes, which changes with its rows; empty before the first one.

    A daily table has none: its files change without a publication.
    """
    manifest = read_manifest(home)
    if not manifest.parts:
        return {}
    published = {name: f"{checksum:08x}" for name, checksum in manifest.parts.items() if name not in names()}
    return {**published, "snapshot_info": str(manifest.number), actions.NAME: actions.version(home)}


def renew_views(home: Path) -> None:
    """Rewrite the views of an earlier version, once.

    Raises RunError or OSError if that fails, and DuckDB's error if the file is not a published one.
    """
    if has_absolute_views(read_manifest(home)):
        with locked(home, "a reader", _MOVE_SECONDS):
            if has_absolute_views(read_manifest(home)):
                _rewrite(home, ())


def show_leaders(home: Path, sites: Iterable[str]) -> None:
    """Rewrite `fleet.duckdb`, if it exists, after a change of a leader; errors leave it for the next publication."""
    if (home / "fleet.duckdb").exists():
        with contextlib.suppress(duckdb.Error, OSError, RunError), locked(home, "an election", _MOVE_SECONDS):
            _rewrite(home, sites)


def _rewrite(home: Path, sites: Iterable[str]) -> None:
    """Replace the published file by one of the same time and run; call it inside the lock."""
    manifest, file = read_manifest(home), home / "fleet.duckdb"
    with duckdb.connect() as connection:
        connection.execute(f"ATTACH {literal(str(file.resolve()))} AS before (READ_ONLY)")
        about = connection.execute("SELECT epoch_ns(as_of), run_id FROM before.snapshot_info").fetchall()
        connection.execute("DETACH before")
        shown = sorted({*manifest.sites, *sites})
        _publish(connection, home, manifest, shown, Run(*about[0]), stat.S_IMODE(file.stat().st_mode))


def _refuse_other_schema(connection: duckdb.DuckDBPyConnection, file: Path) -> None:
    """Raise OtherSchemaError if another version wrote the published file; a missing or damaged one may be replaced."""
    with contextlib.suppress(duckdb.Error):
        connection.execute(f"ATTACH {literal(str(file.resolve()))} AS other (READ_ONLY)")
        try:
            refuse_other_schema(connection, "other", file)
        finally:
            connection.execute("DETACH other")


def _read_publications(home: Path, sites: Iterable[str]) -> list[Publication]:
    publications = []
    for site in sorted(sites):
        with contextlib.suppress(OtherSchemaError):
            publications.append(read_publication(publication_folder(home, site), other_columns=True))
    return [publication for publication in publications if publication is not None]


def _remove_gone(home: Path, sites: Sequence[str], manifest: Manifest) -> None:
    """Delete the files of sites that are no longer shown, once no open file needs them."""
    for site, folder in site_folders(home):
        if site in sites:
            continue
        gone = folder / "gone"
        try:
            since = int(gone.read_text())
        except (FileNotFoundError, ValueError):
            write_private(gone, str(manifest.number))
            continue
        if all(number >= since for number in manifest.numbers):
            remove_files(folder, *FILES, gone.name)


def _wal(file: Path) -> Path:
    """Return DuckDB's log next to a file that is open for writing."""
    return file.with_name(f"{file.name}.wal")


def _write_draft(
    connection: duckdb.DuckDBPyConnection,
    draft: Path,
    home: Path,
    publications: Sequence[Publication],
    files: Mapping[str, TableFiles],
    sites: Sequence[str],
    run: Run,
    mode: int,
    known: Mapping[str, int],
) -> dict[str, int]:
    """Write the views on some publications into a new file; return their checksums.

    `known` are the checksums of `fleet.duckdb`, whose views are kept if they would be the same; empty for another file.
    """
    for leftover in (draft, _wal(draft)):
        leftover.unlink(missing_ok=True)
    views, leaders = list(fleet_views(connection, home, publications, files, mode)), read_leaders(home, sites)
    parts = {view.name: _checksum(view) for view in views} | {LEADERS_TABLE: _checksum(leaders)}
    if known.keys() == parts.keys():
        shutil.copyfile(home / "fleet.duckdb", draft)
    else:
        known = {}
    try:
        connection.execute(f"ATTACH {literal(str(draft.resolve()))} AS fleet (STORAGE_VERSION '{STORAGE_VERSION}')")
        changed = {name for name, checksum in parts.items() if known.get(name) != checksum}
        _replace_parts(connection, run, leaders, views, changed)
        # Detaching would do so too, but without a reason on failure. FORCE waits for DuckDB's own transactions after the
        # commit; nobody else knows the draft.
        connection.execute("FORCE CHECKPOINT fleet")
        connection.execute("DETACH fleet")
    except BaseException as error:
        for statement in ("ROLLBACK", "DETACH fleet"):
            with contextlib.suppress(duckdb.Error):
                connection.execute(statement)
        if not isinstance(error, duckdb.OperationalError):
            raise
        raise RunError(cannot_write(draft, OSError(str(error).splitlines()[0]))) from None
    return parts


def _replace_parts(
    connection: duckdb.DuckDBPyConnection, run: Run, leaders: Sequence[Leader], views: Sequence[View], changed: set[str]
) -> None:
    """Write the changed tables and views of the attached file `fleet`, and `snapshot_info`, in one transaction."""
    connection.execute("BEGIN TRANSACTION")
    connection.execute(f"CREATE OR REPLACE TABLE fleet.snapshot_info ({SNAPSHOT_INFO})")
    connection.execute(
        "INSERT INTO fleet.snapshot_info VALUES (make_timestamptz(?::BIGINT // 1000), ?, ?, ?, ?, ?)",
        [run.as_of_ns, run.run_id, SCHEMA_VERSION, uuid.uuid4().hex, *common_leader(leaders)],
    )
    if LEADERS_TABLE in changed:
        write_leaders(connection, leaders)
    for view in (view for view in views if view.name in changed):
        connection.execute(f"CREATE OR REPLACE VIEW fleet.{view.name} AS {view.query}")
    connection.execute("COMMIT")


def _checksum(part: object) -> int:
    # Another version of DuckDB may bind a view differently.
    return zlib.crc32(f"{duckdb.__version__} {part!r}".encode())
