"""A checkpoint: a site's state in one compressed file, for another host or a lost disk.

A zip archive of `about.json` and one Parquet file per table. Values that follow from others are left out: names of nodes in
transitions, differences of equal times, and event ids. The archive checks each part against its checksum.
"""

import contextlib
import hashlib
import hmac
import json
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import duckdb

from sr_assets.adapters import control, times
from sr_assets.adapters.private import own_folder, sync_folder
from sr_assets.adapters.progress_lines import LongWork, tracked
from sr_assets.adapters.state.database import (
    BrokenStateError,
    create_database,
    keep_newest_asides,
    opening_error,
)
from sr_assets.adapters.state.operator_settings import read_window
from sr_assets.adapters.state.schema import SCHEMA_VERSION, TABLES
from sr_assets.domain.advisories import EventIds
from sr_assets.domain.errors import RunError, SrAssetsError, cannot_write
from sr_assets.domain.positions import DAY_NS
from sr_assets.domain.tracking.maintenance import Window
from sr_assets.settings.values import shown

FORMAT: Final = 1
_ABOUT: Final = "about.json"
_STATE: Final = "state.duckdb"
_LARGEST: Final = (1 << 63) - 1
#: The largest part about the origin, the most rows of a table, and the most bytes of their texts and lists.
_ABOUT_BYTES: Final = 8 << 20
_MOST_ROWS: Final = 100_000_000
#: A table has no more rows than the first, or than the second for each byte of the archive: repeated rows take nearly no
#: bytes, and minutes. Of a fleet with numbered names, each node a second after the other, a byte holds 2.6 rows; of nodes
#: with names and times of their own, less than one.
_FEW_ROWS: Final = 200_000
_ROWS_A_BYTE: Final = 8
_MOST_BYTES: Final = 16 << 30
#: Sequences and counters are smaller, so that the sum of two of them is still a number of the tables.
_LARGEST_COUNT: Final = 1 << 62
_LONGEST_WINDOW_NS: Final = 366 * DAY_NS
#: The types of the tables' columns, each with the bytes of a value that has no fixed length.
_TYPES: Final = {
    **dict.fromkeys(("BIGINT", "INTEGER", "TINYINT", "DOUBLE", "BOOLEAN"), ""),
    "VARCHAR": "strlen({})",
    "BIGINT[]": "8 * len({})",
}
#: A signed file ends with this and an HMAC-SHA256 of everything before, as the comment of the archive.
_SEAL: Final = b"sr-assets checkpoint hmac-sha256 "
_SEAL_BYTES: Final = len(_SEAL) + 64
#: Level 3 takes a fifth of the time of level 9, for a file that is 4 % larger.
_PARQUET: Final = "(FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 3, PARQUET_VERSION v2)"
#: A node's rows in both tables have the order of `place`.
_PLACED: Final = "SELECT *, row_number() OVER (ORDER BY stream, node) AS place FROM nodes"
#: `nodes` first, because others are read with it. Not from the catalog: it would list, and keep open, the `fleet.duckdb`
#: that another thread is writing.
_TABLES: Final = ("nodes", *sorted(TABLES.keys() - {"about", "nodes"}))
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

#: SQL expression for the `source_mark` in the name of a file of the history.
_MARK: Final = "regexp_extract({}, '/[0-9]+-[0-9]+([^/]*)$', 1)"

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


def read_description(description: Mapping[str, Any]) -> Stored | None:
    """Return the stored checkpoint that an object's description names, or None if its fields have other types."""
    fields = {name: description[name] for name in Stored._fields if name in description}
    positions, commit = fields.get("positions"), fields.get("commit")
    sound = (
        _is_number(fields.get("at_ns"))
        and _is_mapping(positions, _is_number)
        and (commit is None or _is_number(commit))
        and isinstance(fields.get("markers", ""), str)
    )
    return Stored(**fields) if sound else None


def sign(key: str, name: str, stored: Stored, file: Path) -> dict[str, Any]:
    """Return the description of a stored checkpoint, with the digest of its file and, with a key, a signature of both."""
    described = {**stored._asdict(), "sha256": _digest(file)}
    return {**described, "hmac": _signature(key, name, stored, described["sha256"])} if key else described


def is_signed(key: str, name: str, stored: Stored, description: Mapping[str, Any]) -> bool:
    """Return whether a holder of the key has signed a description for an object of this name.

    The signature covers the number of the last commit, which rises with each checkpoint.
    """
    expected = _signature(key, name, stored, str(description.get("sha256")))
    return hmac.compare_digest(expected.encode(), str(description.get("hmac")).encode(errors="replace"))


def _signature(key: str, name: str, stored: Stored, digest: str) -> str:
    signed = json.dumps(["sr-assets checkpoint", name, *stored, digest], sort_keys=True)
    return hmac.new(key.encode(), signed.encode(), "sha256").hexdigest()


def holds_digest(file: Path, description: Mapping[str, Any]) -> bool:
    """Return whether a file has the content that a description names."""
    return description.get("sha256") == _digest(file)


def is_sealed(file: Path, key: str, name: str) -> bool:
    """Return whether a holder of the key has written a file for an object of this name."""
    size = file.stat().st_size
    if size < _SEAL_BYTES:
        return False
    with file.open("rb") as content:
        content.seek(size - _SEAL_BYTES)
        seal = content.read()
    return hmac.compare_digest(seal, _seal(file, key, name, size - _SEAL_BYTES))


def _seal(file: Path, key: str, name: str, size: int) -> bytes:
    signed = json.dumps(["sr-assets checkpoint file", name, _digest(file, size)])
    return _SEAL + hmac.new(key.encode(), signed.encode(), "sha256").hexdigest().encode()


def _digest(file: Path, size: int | None = None) -> str:
    digest, left = hashlib.sha256(), file.stat().st_size if size is None else size
    with file.open("rb") as content:
        while left > 0 and (part := content.read(min(left, 1 << 20))):
            digest.update(part)
            left -= len(part)
    return digest.hexdigest()


def last_seen(folder: Path) -> int:
    """Return the highest number of a signed checkpoint that this home has stored, restored or shown, or 0."""
    home, site = control.place_of(folder)
    rows = control.query(home, "SELECT seen FROM checkpoints WHERE site = ?", site)
    return int(rows[0][0]) if rows else 0


def note_seen(folder: Path, number: int) -> None:
    """Note the number of a signed checkpoint, so that nobody can replay an earlier one."""
    home, site = control.place_of(folder)
    statement = (
        "INSERT INTO checkpoints (site, seen) VALUES (?, ?) ON CONFLICT DO UPDATE SET seen = max(seen, excluded.seen)"
    )
    control.change(home, statement, site, number)


def last_stored(folder: Path) -> Stored | None:
    """Return the last checkpoint that this home has stored of a site, or None."""
    home, site = control.place_of(folder)
    rows = control.query(home, "SELECT stored FROM checkpoints WHERE site = ? AND stored IS NOT NULL", site)
    with contextlib.suppress(ValueError, TypeError):
        return Stored(**json.loads(rows[0][0])) if rows else None
    return None


def note_stored(folder: Path, stored: Stored) -> None:
    """Note the checkpoint that was stored, for readers without the site's lock."""
    home, site = control.place_of(folder)
    statement = (
        "INSERT INTO checkpoints (site, stored) VALUES (?, ?) ON CONFLICT DO UPDATE SET stored = excluded.stored"
    )
    control.change(home, statement, site, json.dumps(stored._asdict()))


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
    key: str = "",
    name: str = "",
) -> About:
    """Write a checkpoint of the state, as the connection's transaction sees it; the file appears when it is complete.

    With a `key`, sign it for an object of this name.
    """
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
            for table in tracked(f"{site}: writing tables of the checkpoint", _TABLES):
                part = parts / f"{table}.parquet"
                query = _WRITTEN.get(table, f"FROM {table}")
                values = {"computed": computed} if "$computed" in query else {}
                path = str(part).replace("'", "''")
                connection.execute(f"COPY ({query}) TO '{path}' {_PARQUET}", values)
                archive.write(part, part.name)
                part.unlink()
            # A comment of the seal's length: its length precedes it, and is signed too.
            archive.comment = b" " * _SEAL_BYTES if key else b""
        if key:
            size = draft.stat().st_size - _SEAL_BYTES
            with draft.open("r+b") as content:
                content.seek(size)
                content.write(_seal(draft, key, name, size))
        draft.chmod(0o600)
        draft.replace(file)
    except duckdb.IOException as error:
        raise RunError(cannot_write(file, OSError(str(error).partition("\n")[0]))) from None
    finally:
        shutil.rmtree(parts, ignore_errors=True)
    return about


def read_about(file: Path, replicator: str, site: str) -> About:
    """Return the origin of a checkpoint; raises RunError, one line, unless it can be restored for this site."""
    try:
        with zipfile.ZipFile(file) as archive:
            _refuse_members(file, archive.infolist())
            fields = json.loads(archive.read(_ABOUT))
            damaged = archive.testzip()
    except SrAssetsError:
        raise
    except Exception as error:  # noqa: BLE001  an archive from a store may raise anything
        raise RunError(f"{file}: is not a complete checkpoint ({_one_line(error)}); use another one") from None
    if damaged:
        raise RunError(f"{file}: is damaged ({damaged} differs from its checksum); use another one")
    if not isinstance(fields, dict):
        raise RunError(f"{file}: is not a complete checkpoint ({_ABOUT} is not an object); use another one")
    if (fields.get("format"), fields.get("schema")) != (FORMAT, SCHEMA_VERSION):
        raise RunError(
            f"{file}: is a checkpoint of format {shown(fields.get('format'))}, schema {shown(fields.get('schema'))}; this"
            f" version reads format {FORMAT}, schema {SCHEMA_VERSION}: upgrade this host first"
        )
    try:
        about = About(**fields)
        _check_about(about)
    except Exception as error:  # noqa: BLE001  its values may have any type
        raise RunError(f"{file}: is not a complete checkpoint ({_one_line(error)}); use another one") from None
    if (about.replicator, about.site) != (replicator, site):
        raise RunError(
            f"{file}: is a checkpoint of {_clean(f'{about.replicator}/{about.site}')}, not of {replicator}/{site}"
        )
    return about


def _refuse_members(file: Path, members: Iterable[zipfile.ZipInfo]) -> None:
    """Refuse an archive with other members than a checkpoint's, a repeated one, or compressed or overlapping ones."""
    allowed, size = {_ABOUT, *(f"{table}.parquet" for table in _TABLES)}, file.stat().st_size
    for member in members:
        if member.filename not in allowed:
            raise RunError(
                f"{file}: is not a checkpoint ({shown(member.filename)} is not a part of one); use another one"
            )
        allowed.remove(member.filename)
        largest = _ABOUT_BYTES if member.filename == _ABOUT else size
        # The parts are stored as they are, so together they are no larger than the file.
        size -= member.file_size
        if member.file_size > largest or size < 0 or member.compress_type != zipfile.ZIP_STORED:
            raise RunError(f"{file}: is not a checkpoint ({member.filename} is too large); use another one")


def _check_about(about: About) -> None:
    """Raise an error unless each field has its type."""
    sound = {
        "replicator, site": _is_texts([about.replicator, about.site]),
        "format, schema": _is_number(about.format) and _is_number(about.schema),
        "at_ns": _is_number(about.at_ns),
        "positions": _is_mapping(about.positions, _is_number),
        "identities": _is_mapping(about.identities, lambda value: _is_texts(value) and len(value) == 2),
        "computed": _is_texts(about.computed) and about.identities.keys() >= set(about.computed),
        "paused": _is_texts(about.paused),
        "maintenance": isinstance(about.maintenance, list) and all(map(_is_window, about.maintenance)),
    }
    if wrong := next((name for name, is_sound in sound.items() if not is_sound), None):
        raise ValueError(f"{wrong} has a wrong type or value")


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_texts(value: object) -> bool:
    """Return whether a value is a list of texts that tables can hold: JSON may contain unpaired surrogates."""
    return isinstance(value, list) and all(
        isinstance(each, str) and each.encode(errors="replace").decode() == each for each in value
    )


def _is_mapping(value: object, is_sound: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(is_sound, value.values()))


def _is_window(row: dict[str, Any]) -> bool:
    window = read_window(row)
    texts = [window.id, window.reason, *window.globs, *window.classes]
    sound = all(map(_is_number, (window.from_ns, window.to_ns, window.length_ns)))
    sound = sound and window.length_ns <= _LONGEST_WINDOW_NS and _is_texts(texts)
    if sound and window.cron is not None:
        # Raises an error for a cron expression without a time.
        window.end_ns(_LONGEST_WINDOW_NS)
    return sound


def _one_line(error: Exception) -> str:
    """Return an error's text for a message; it may quote the archive."""
    return _clean(" ".join(str(error).split())) or type(error).__name__


def _clean(text: str) -> str:
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text[:200])


def restore_checkpoint(file: Path, about: About, folder: Path, home: Path) -> Path | None:
    """Replace the state in a site's folder by a checkpoint's; return the previous one, which is set aside, or None.

    The state names the files of this home's own history. An interruption, or a checkpoint that cannot be
    restored for any reason, leaves the previous state: that is RunError, one line.
    """
    parts = folder / ".restoring"
    shutil.rmtree(parts, ignore_errors=True)
    own_folder(parts)
    try:
        with zipfile.ZipFile(file) as archive:
            _refuse_members(file, archive.infolist())
            archive.extractall(parts)
        draft = parts / _STATE
        create_database(draft)
        with duckdb.connect(str(draft)) as connection:
            connection.execute("BEGIN")
            for table in tracked(f"{about.site}: restoring tables of the checkpoint", _TABLES):
                query = _READ.get(table, "FROM read_parquet($file)")
                part = parts / f"{table}.parquet"
                if part.exists():
                    _refuse_huge(connection, part, max(_FEW_ROWS, _ROWS_A_BYTE * file.stat().st_size))
                    connection.execute(f"INSERT INTO {table} BY NAME {query}", {"file": str(part)})
            for table, definition in TABLES.items():
                if (
                    definition.earlier and not (parts / f"{table}.parquet").exists()
                ):  # an earlier build had fewer tables
                    connection.execute(definition.earlier)
            with LongWork(f"{about.site}: computing event ids"):
                _compute_ids(connection, about)
            with LongWork(f"{about.site}: saving the state"):
                connection.execute("COMMIT")
                _keep_own_history(connection, home / "sites" / about.site / _STATE)
                connection.execute("CHECKPOINT")
        return _put_in_place(draft, folder / _STATE)
    except SrAssetsError:
        raise
    except Exception as error:  # noqa: BLE001  the rows of a store's checkpoint may raise anything
        raise RunError(f"{file}: cannot be restored ({_one_line(error)}); the state was not changed") from None
    finally:
        shutil.rmtree(parts, ignore_errors=True)


def _refuse_huge(connection: duckdb.DuckDBPyConnection, part: Path, most_rows: int) -> None:
    """Refuse a part with columns that no table has, rows that are too many or much larger than its file, or huge numbers."""
    file = [str(part)]
    rows = connection.execute("SELECT column_name, column_type FROM (DESCRIBE FROM read_parquet(?))", file).fetchall()
    if not all(name.isidentifier() and type_ in _TYPES for name, type_ in rows):
        raise ValueError(f"{part.name} has columns that no table has")
    # From the file's own statistics; the texts are read only if their number is bounded.
    (count,) = connection.execute("SELECT count(*) FROM read_parquet(?)", file).fetchall()[0]
    if count > (most_rows := min(most_rows, _MOST_ROWS)):
        raise ValueError(f"{part.name} has more than {most_rows:,} rows")
    sizes = [_TYPES[type_].format(f'"{name}"') for name, type_ in rows if _TYPES[type_]]
    total = " + ".join(f"coalesce(sum({size}), 0)" for size in sizes) or "0 * count(*)"
    (size,) = connection.execute(f"SELECT {total} FROM read_parquet(?)", file).fetchall()[0]
    if size > _MOST_BYTES:
        raise ValueError(f"{part.name} has more than {_MOST_BYTES >> 30} GiB of text and lists")
    for name, type_ in rows:
        if type_ == "BIGINT" and not name.endswith("_ns"):
            query = f'SELECT count(*) FROM read_parquet(?) WHERE "{name}" NOT BETWEEN {-_LARGEST_COUNT} AND {_LARGEST_COUNT}'
            if connection.execute(query, file).fetchall() != [(0,)]:
                raise ValueError(f"{part.name} has an impossible number in {name}")


def _put_in_place(draft: Path, state: Path) -> Path | None:
    aside = state.with_name(f"{_STATE}.replaced-{times.time_ns() // 1_000_000}")
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
    ids = EventIds(*identity, stream)
    return all(known == ids(*event) for known, *event in rows)


def _compute_ids(connection: duckdb.DuckDBPyConnection, about: About) -> None:
    """Fill in the event ids that the checkpoint leaves out."""
    if not connection.execute("SELECT 1 FROM transitions WHERE event_id IS NULL LIMIT 1").fetchall():
        return

    ids = {stream: EventIds(*identity, stream) for stream, identity in about.identities.items()}

    def computed(stream: str, node: str, event: str, event_ns: int) -> str:
        return ids[stream](node, event, event_ns)

    # Row by row, so that the memory does not depend on their number.
    connection.create_function("computed_id", computed, ["varchar", "varchar", "varchar", "bigint"], "varchar")
    # An UPDATE of this many rows takes ten times as long.
    connection.execute(
        """
        CREATE TEMP TABLE complete AS
        SELECT * REPLACE (
            CASE WHEN event_id IS NULL THEN computed_id(stream, node, event, event_ns) ELSE event_id END AS event_id)
        FROM transitions
        """
    )
    if connection.execute("SELECT 1 FROM complete WHERE event_id IS NULL LIMIT 1").fetchall():
        raise ValueError("a transition has no stream, node, event or time")
    connection.execute("DELETE FROM transitions")
    connection.execute("INSERT INTO transitions BY NAME FROM complete")


def _keep_own_history(connection: duckdb.DuckDBPyConnection, state: Path) -> None:
    """Index the files of this home's history that its state knows; another home's may have their names, and other rows.

    Nodes whose newest message others have copied are left out. Without a readable state, the next run reads the files.
    Raises RunError if another process has the state open.
    """
    connection.execute("CREATE TEMP TABLE newest AS FROM snapshots")
    connection.execute("DELETE FROM history")
    connection.execute("DELETE FROM snapshots")
    quoted = str(state).replace("'", "''")
    try:
        connection.execute(f"ATTACH '{quoted}' AS own (READ_ONLY)")
        connection.execute(
            f"""
            INSERT INTO snapshots SELECT stream, node, held.sequence, held.file FROM own.snapshots AS held
            JOIN own.nodes AS before USING (stream, node) JOIN nodes USING (stream, node)
            LEFT JOIN newest USING (stream, node)
            WHERE nodes.copied_ns <= before.copied_ns OR nodes.copied_ns IS NULL AND (
                newest.sequence IS NULL
                OR newest.sequence <= held.sequence AND {_MARK.format("newest.file")} = {_MARK.format("held.file")})
            """
        )
        connection.execute("INSERT INTO history BY NAME FROM own.history")
    except duckdb.Error as error:
        problem = opening_error(state, error)
        if not isinstance(problem, BrokenStateError):
            raise problem from None
        connection.execute("DELETE FROM snapshots")
