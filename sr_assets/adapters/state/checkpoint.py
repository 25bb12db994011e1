"""A checkpoint: a site's state in one compressed file, for another host or a lost disk.

A zip archive of `about.json` and one Parquet file per table. Values that follow from others are left out: names of nodes in
transitions, differences of equal times, and event ids. The archive checks each part against its checksum.
"""

import contextlib
import json
import re
import shutil
import struct
import time
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import duckdb
import pyarrow as pa

from sr_assets.adapters.private import own_folder, sync_folder, write_private
from sr_assets.adapters.state.database import EARLIER_ROWS, SCHEMA, SCHEMA_VERSION, create_database, keep_newest_asides
from sr_assets.domain.advisories import event_id
from sr_assets.domain.errors import RunError
from sr_assets.domain.tracking.maintenance import Window

FORMAT: Final = 1
_ABOUT: Final = "about.json"
_STATE: Final = "state.duckdb"
_NOTE: Final = "checkpoint.json"
_PORTION: Final = 100_000
#: Level 3 takes a fifth of the time of level 9, for a file that is 4 % larger.
_PARQUET: Final = "(FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 3, PARQUET_VERSION v2)"
#: A node's rows in both tables have the order of `place`.
_PLACED: Final = "SELECT *, row_number() OVER (ORDER BY stream, node) AS place FROM nodes"
#: `nodes` first, because others are read with it. Not from the catalog: it would list, and keep open, the `fleet.duckdb`
#: that another thread is writing.
_TABLES: Final = ("nodes", *sorted(set(re.findall(r"CREATE TABLE (\w+)", SCHEMA)) - {"about", "nodes"}))
#: How the large tables are written, and how they are read again; the others as they are.
_WRITTEN: Final = {
    "nodes": f"""
        SELECT * EXCLUDE (place)
            REPLACE (deadline_ns - seen_ns AS deadline_ns, status_since_ns - first_seen_ns AS status_since_ns)
        FROM ({_PLACED}) ORDER BY place
        """,
    "transitions": f"""
        SELECT t.* EXCLUDE (stream, node, event_id)
            REPLACE (
                t.event_ns - coalesce(n.status_since_ns, 0) AS event_ns, t.seen_ns - t.event_ns AS seen_ns,
                t.detected_ns - t.event_ns AS detected_ns, t.published_ns - t.detected_ns AS published_ns),
            n.place, if(n.place IS NULL, t.stream, NULL) AS stream, if(n.place IS NULL, t.node, NULL) AS node,
            if(list_contains($computed, t.stream), NULL, t.event_id) AS event_id
        FROM transitions t LEFT JOIN ({_PLACED}) n USING (stream, node) ORDER BY n.place, t.transition, t.event_ns
        """,
    "snapshots": f"""
        SELECT s.sequence, s.file, n.place, if(n.place IS NULL, s.stream, NULL) AS stream,
            if(n.place IS NULL, s.node, NULL) AS node
        FROM snapshots s LEFT JOIN ({_PLACED}) n USING (stream, node) ORDER BY n.place
        """,
}
_READ: Final = {
    "nodes": """
        SELECT * REPLACE (deadline_ns + seen_ns AS deadline_ns, status_since_ns + first_seen_ns AS status_since_ns)
        FROM read_parquet($file)
        """,
    "transitions": f"""
        SELECT * EXCLUDE (place, whole_ns)
            REPLACE (
                whole_ns AS event_ns, seen_ns + whole_ns AS seen_ns, detected_ns + whole_ns AS detected_ns,
                published_ns + detected_ns + whole_ns AS published_ns)
        FROM (
            SELECT t.* REPLACE (coalesce(n.stream, t.stream) AS stream, coalesce(n.node, t.node) AS node),
                t.event_ns + coalesce(n.status_since_ns, 0) AS whole_ns
            FROM read_parquet($file) t LEFT JOIN ({_PLACED}) n USING (place))
        """,
    "snapshots": f"""
        SELECT coalesce(n.stream, s.stream) AS stream, coalesce(n.node, s.node) AS node, s.sequence, s.file
        FROM read_parquet($file) s LEFT JOIN ({_PLACED}) n USING (place)
        """,
}

#: The errors that reading a damaged archive may raise.
_DAMAGES: Final = (OSError, ValueError, KeyError, EOFError, RuntimeError, struct.error, zlib.error, zipfile.BadZipFile)
#: `replicator` and `name` of an entry, which its event ids contain.
Identity = tuple[str, str]


@dataclass(frozen=True, slots=True)
class About:
    """The origin of a checkpoint: its site, its time (unix ns), and the next sequence of each stream.

    `computed` are the streams whose event ids follow from `identities`: replicator and name by stream. `maintenance` are the
    windows that operators added.
    """

    replicator: str
    site: str
    at_ns: int
    positions: dict[str, int]
    identities: dict[str, Identity]
    computed: list[str]
    paused: list[str]
    maintenance: list[dict[str, Any]] = field(default_factory=list)
    format: int = FORMAT
    schema: int = SCHEMA_VERSION


class Stored(NamedTuple):
    """A stored checkpoint: its time (unix ns), the next sequence of each stream, the number of its last commit, and a digest
    of the markers of operators.

    An earlier build stored one without a number.
    """

    at_ns: int
    positions: dict[str, int]
    commit: int | None = None
    markers: str = ""


def last_stored(folder: Path) -> Stored | None:
    """Return the last checkpoint that this home has stored of a site, or None."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Stored(**json.loads((folder / _NOTE).read_text()))
    return None


def note_stored(folder: Path, stored: Stored) -> None:
    """Note the checkpoint that was stored, for readers without the site's lock."""
    write_private(folder / _NOTE, json.dumps(stored._asdict()))


def read_positions(connection: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """Return the next sequence of each stream that a state has read."""
    return dict(connection.execute("SELECT stream, next_sequence FROM streams WHERE created_ns <> 0").fetchall())


def write_checkpoint(
    connection: duckdb.DuckDBPyConnection,
    file: Path,
    *,
    replicator: str,
    site: str,
    at_ns: int,
    identities: Mapping[str, Identity],
    paused: frozenset[str],
    maintenance: Iterable[Window] = (),
) -> About:
    """Write a checkpoint of the state, as the connection's transaction sees it; the file appears when it is complete."""
    positions = read_positions(connection)
    computed = [stream for stream, identity in identities.items() if _follow(connection, stream, identity)]
    about = About(
        replicator, site, at_ns, positions, dict(identities), computed, sorted(paused), list(map(asdict, maintenance))
    )
    parts = file.with_name(f".{file.name}.parts")
    shutil.rmtree(parts, ignore_errors=True)
    own_folder(parts)
    draft = parts / "draft"
    try:
        with zipfile.ZipFile(draft, "w") as archive:
            archive.writestr(_ABOUT, json.dumps(asdict(about)))
            for table in _TABLES:
                part = parts / f"{table}.parquet"
                query = _WRITTEN.get(table, f"FROM {table}")
                values = {"computed": computed} if "$computed" in query else {}
                path = str(part).replace("'", "''")
                connection.execute(f"COPY ({query}) TO '{path}' {_PARQUET}", values)
                archive.write(part, part.name)
                part.unlink()
        draft.chmod(0o600)
        draft.replace(file)
    finally:
        shutil.rmtree(parts, ignore_errors=True)
    return about


def read_about(file: Path, replicator: str, site: str) -> About:
    """Return the origin of a checkpoint; raises RunError, one line, unless it can be restored for this site."""
    try:
        with zipfile.ZipFile(file) as archive:
            fields = json.loads(archive.read(_ABOUT))
            damaged = archive.testzip()
    except _DAMAGES as error:
        problem = str(error) or type(error).__name__
        raise RunError(f"{file}: is not a complete checkpoint ({problem}); use another one") from None
    if damaged:
        raise RunError(f"{file}: is damaged ({damaged} differs from its checksum); use another one")
    if (fields.get("format"), fields.get("schema")) != (FORMAT, SCHEMA_VERSION):
        raise RunError(
            f"{file}: is a checkpoint of format {fields.get('format')}, schema {fields.get('schema')}; this version reads"
            f" format {FORMAT}, schema {SCHEMA_VERSION}: upgrade this host first"
        )
    try:
        about = About(**fields)
    except TypeError as error:
        raise RunError(f"{file}: is not a complete checkpoint ({error}); use another one") from None
    if (about.replicator, about.site) != (replicator, site):
        raise RunError(f"{file}: is a checkpoint of {about.replicator}/{about.site}, not of {replicator}/{site}")
    return about


def restore_checkpoint(file: Path, about: About, folder: Path, home: Path) -> Path | None:
    """Replace the state in a site's folder by a checkpoint's; return the previous one, which is set aside, or None.

    The state does not name files of the history that this home lacks. An interruption leaves the previous state.
    """
    parts = folder / ".restoring"
    shutil.rmtree(parts, ignore_errors=True)
    own_folder(parts)
    try:
        with zipfile.ZipFile(file) as archive:
            archive.extractall(parts)
        draft = parts / _STATE
        create_database(draft)
        with duckdb.connect(str(draft)) as connection:
            connection.execute("BEGIN")
            for table in _TABLES:
                query = _READ.get(table, "FROM read_parquet($file)")
                part = parts / f"{table}.parquet"
                if part.exists():
                    connection.execute(f"INSERT INTO {table} BY NAME {query}", {"file": str(part)})
            for table, rows in EARLIER_ROWS.items():
                if not (parts / f"{table}.parquet").exists():  # an earlier build had fewer tables
                    connection.execute(rows)
            _compute_ids(connection, about)
            _forget_missing_files(connection, home)
            connection.execute("COMMIT")
            connection.execute("CHECKPOINT")
        return _put_in_place(draft, folder / _STATE)
    except duckdb.Error as error:
        raise RunError(
            f"{file}: cannot be restored ({str(error).splitlines()[0]}); the state was not changed"
        ) from None
    finally:
        shutil.rmtree(parts, ignore_errors=True)


def _put_in_place(draft: Path, state: Path) -> Path | None:
    aside = state.with_name(f"{_STATE}.replaced-{time.time_ns() // 1_000_000}")
    log = state.with_name(f"{_STATE}.wal")
    if log.exists():
        # It belongs to the previous state; the new one would replay it.
        log.replace(aside.with_name(f"{aside.name}.wal"))
    existed = state.exists()
    if existed:
        state.replace(aside)
    draft.replace(state)
    sync_folder(state.parent)
    keep_newest_asides(state, "replaced")
    return aside if existed else None


def _follow(connection: duckdb.DuckDBPyConnection, stream: str, identity: Identity) -> bool:
    """Return whether the event ids of a stream follow from its identity, as its first and its last row show."""
    rows = connection.execute(
        """
        SELECT event_id, node, event, event_ns FROM transitions WHERE stream = $1
            AND event_ns IN ((SELECT min(event_ns) FROM transitions WHERE stream = $1),
                             (SELECT max(event_ns) FROM transitions WHERE stream = $1))
        """,
        [stream],
    ).fetchall()
    return all(known == event_id(*identity, stream, *event) for known, *event in rows)


def _compute_ids(connection: duckdb.DuckDBPyConnection, about: About) -> None:
    """Fill in the event ids that the checkpoint leaves out."""
    rows = connection.execute("SELECT rowid, stream, node, event, event_ns FROM transitions WHERE event_id IS NULL")
    row_ids: list[int] = []
    ids: list[str] = []
    while portion := rows.fetchmany(_PORTION):
        row_ids += [row[0] for row in portion]
        ids += [event_id(*about.identities[stream], stream, *event) for _, stream, *event in portion]
    if not ids:
        return
    connection.register("computed", pa.table({"row_id": row_ids, "event_id": ids}))
    # An UPDATE of this many rows takes ten times as long.
    connection.execute(
        """
        CREATE TEMP TABLE complete AS SELECT t.* REPLACE (coalesce(t.event_id, c.event_id) AS event_id)
        FROM transitions t LEFT JOIN computed c ON c.row_id = t.rowid
        """
    )
    connection.execute("DELETE FROM transitions")
    connection.execute("INSERT INTO transitions BY NAME FROM complete")


def _forget_missing_files(connection: duckdb.DuckDBPyConnection, home: Path) -> None:
    files = connection.execute("SELECT DISTINCT file FROM history UNION SELECT DISTINCT file FROM snapshots").fetchall()
    missing = [file for (file,) in files if not (home / file).exists()]
    for table in ("history", "snapshots"):
        connection.execute(f"DELETE FROM {table} WHERE list_contains(?::VARCHAR[], file)", [missing])
