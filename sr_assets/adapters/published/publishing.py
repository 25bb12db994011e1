"""Publishing a site's tables: `fleet.duckdb`, written as a whole new file and moved into place.

A site replaces its own rows and carries over the other sites'. Readers keep the file they opened; the next open sees
the new one. Payloads are not copied: `node_snapshots` is a view over the Parquet history. Not here: the tables
(`schema`), reading them (`reading`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import duckdb

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.private import living_holder, open_private, write_private
from sr_assets.adapters.published.schema import (
    NO_SNAPSHOTS,
    SCHEMA_VERSION,
    SNAPSHOT_INFO,
    STORAGE_VERSION,
    TABLES,
    VIEWS,
    snapshots_query,
)
from sr_assets.domain.errors import RunError, cannot_write

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from sr_assets.adapters.state.store import SiteState


#: How long a run waits for another site that publishes: one that stands still must not stop all the others.
LOCK_SECONDS: Final = 30.0


class FleetBusyError(RunError):
    """Another site publishes, or stands still while it does."""


@dataclass(frozen=True, slots=True)
class PublishedStream:
    """The part of a configured stream, or feed, that the published tables need."""

    stream: str
    target_stream: str | None
    tracked: bool
    paused: bool = False


def publish_site(
    home: Path,
    name: str,
    state: SiteState,
    streams: Sequence[PublishedStream],
    *,
    sites: Sequence[str],
    run_id: str,
    as_of_ns: int,
    mode: int = 0o600,
    wait_seconds: float = LOCK_SECONDS,
) -> str:
    """Replace a site's rows, in a new `fleet.duckdb` of permissions `mode` in the old file's place; returns its generation.

    Of a stream or feed that `streams` does not name but the state knows, the rows stay: a mistake in the configuration
    empties no table. Rows of sites not among `sites` are dropped. A new generation means that the file was made from
    nothing: every other site has to publish again. Two sites publish one after the other (`fleet.lock`). Raises RunError
    when it cannot be written, FleetBusyError when another site holds the lock for `wait_seconds` on: then the old one stays.
    """
    home.mkdir(parents=True, exist_ok=True)
    file, draft = home / "fleet.duckdb", home / ".fleet.duckdb.new"
    with _locked(home / "fleet.lock", name, wait_seconds):
        for leftover in (draft, _wal(draft)):
            leftover.unlink(missing_ok=True)
        generation = _write_draft(draft, file, name, state, streams, sites, (as_of_ns, run_id))
        draft.chmod(mode)
        reach(Point.PUBLISHING_TABLES)
        draft.replace(file)
        # Of a reader who wrote into the file before: it belongs to no file any more.
        _wal(file).unlink(missing_ok=True)
        reach(Point.PUBLISHED_TABLES)
        write_private(home / "fleet.json", json.dumps({"generation": generation, "home": str(home.resolve())}))
    return generation


def _write_draft(
    draft: Path,
    file: Path,
    name: str,
    state: SiteState,
    streams: Sequence[PublishedStream],
    sites: Sequence[str],
    run: tuple[int, str],
) -> str:
    """Write what is to be published into a file of its own; `run` is its time and its id. Returns the generation."""
    connection = state.connection
    try:
        connection.execute(f"ATTACH '{quoted(draft)}' AS fleet (STORAGE_VERSION '{STORAGE_VERSION}')")
        generation = _carry_over(connection, file, name, sites)
        _insert_site(connection, name, [*streams, *_unnamed(state, streams)])
        _describe(connection, file.parent.resolve(), *run, generation)
        # Detaching would do it too, but without a reason when it cannot.
        connection.execute("CHECKPOINT fleet")
        connection.execute("DETACH fleet")
    except BaseException as error:
        with contextlib.suppress(duckdb.Error):
            connection.execute("DETACH fleet")
        if not isinstance(error, duckdb.OperationalError):
            raise
        raise RunError(cannot_write(draft, OSError(str(error).splitlines()[0]))) from None
    return generation


@contextlib.contextmanager
def _locked(file: Path, name: str, wait_seconds: float) -> Iterator[None]:
    """Hold the lock of the published file, whose text says who does."""
    with open_private(file) as lock:
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = living_holder(lock.read()) or "a process that has not said who it is"
                    raise FleetBusyError(
                        f"{file} has been held by {holder} for {wait_seconds:.0f} s;"
                        " nothing was published, the next run does it; if that process stands still, end it"
                    ) from None
                time.sleep(0.05)
        lock.seek(0)
        lock.truncate()
        lock.write(f"{name} (pid {os.getpid()})\n")
        lock.flush()
        yield


def _wal(file: Path) -> Path:
    """Return what DuckDB keeps beside a file that is written to."""
    return file.with_name(f"{file.name}.wal")


def read_generation(home: Path) -> str | None:
    """Return the generation of the published file; None when there is none, or its home was moved since."""
    if not (home / "fleet.duckdb").exists():
        return None
    try:
        known = json.loads((home / "fleet.json").read_text())
        return str(known["generation"]) if known["home"] == str(home.resolve()) else None
    except (OSError, ValueError, KeyError):
        return None


def quoted(path: Path) -> str:
    """Return a path escaped for single quotes in SQL."""
    return str(path.resolve()).replace("'", "''")


def _carry_over(connection: duckdb.DuckDBPyConnection, file: Path, name: str, sites: Sequence[str]) -> str:
    """Create the tables with the other sites' rows, and return the generation."""
    for name_of_table, table in TABLES.items():
        connection.execute(f"CREATE TABLE fleet.{name_of_table} ({table.columns})")
    connection.execute(f"CREATE TABLE fleet.snapshot_info ({SNAPSHOT_INFO})")
    others = [site for site in sites if site != name]
    if not _attach_published(connection, file):
        # Missing or broken: start from nothing, with another generation.
        return uuid.uuid4().hex
    try:
        info = connection.execute("SELECT schema_version, generation FROM published.snapshot_info").fetchone()
        if info is None or info[0] != SCHEMA_VERSION:
            return uuid.uuid4().hex
        for name_of_table, table in TABLES.items():
            connection.execute(
                f"""
                INSERT INTO fleet.{name_of_table} SELECT * FROM published.{name_of_table}
                WHERE list_contains(?::VARCHAR[], {table.site})
                """,
                [others],
            )
        return str(info[1])
    except duckdb.Error:
        for name_of_table in TABLES:
            connection.execute(f"DELETE FROM fleet.{name_of_table}")
        return uuid.uuid4().hex
    finally:
        connection.execute("DETACH published")


def _attach_published(connection: duckdb.DuckDBPyConnection, file: Path) -> bool:
    """Attach the published file to be read; of one that somebody has open for writing a copy, as it was published."""
    copy = file.with_name(f".{file.name}.read")
    with contextlib.suppress(duckdb.Error):
        connection.execute(f"ATTACH '{quoted(file)}' AS published (READ_ONLY)")
        return True
    try:
        shutil.copyfile(file, copy)
        connection.execute(f"ATTACH '{quoted(copy)}' AS published (READ_ONLY)")
    except (OSError, duckdb.Error):
        return False
    finally:
        # The open file stays readable without its name.
        copy.unlink(missing_ok=True)
    return True


def _unnamed(state: SiteState, streams: Sequence[PublishedStream]) -> list[PublishedStream]:
    """Return what the state knows beyond the streams that are configured."""
    named = {stream.stream for stream in streams}
    return [
        PublishedStream(stream, state.load_copying(stream).target_stream, tracked=state.nodes(stream).any())
        for stream in state.known_streams()
        if stream not in named
    ]


def _insert_site(connection: duckdb.DuckDBPyConnection, name: str, streams: Sequence[PublishedStream]) -> None:
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE configured (stream VARCHAR, target_stream VARCHAR, tracked BOOLEAN, paused BOOLEAN)"
    )
    rows = [(stream.stream, stream.target_stream, stream.tracked, stream.paused) for stream in streams]
    if rows:
        connection.executemany("INSERT INTO configured VALUES (?, ?, ?, ?)", rows)
    # One transaction reads all tables as of one moment: copying commits beside us, and its rows in one table belong to
    # counters in another.
    connection.execute("BEGIN TRANSACTION")
    try:
        for name_of_table, table in TABLES.items():
            connection.execute(
                f"INSERT INTO fleet.{name_of_table} {table.query} AND {table.entry} IN (SELECT stream FROM configured)",
                {"name": name},
            )
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _describe(connection: duckdb.DuckDBPyConnection, home: Path, as_of_ns: int, run_id: str, generation: str) -> None:
    """Add the table `snapshot_info` and the views; a view names the history's files in this home."""
    connection.execute(
        "INSERT INTO fleet.snapshot_info VALUES (make_timestamptz(?::BIGINT // 1000), ?, ?, ?)",
        [as_of_ns, run_id, SCHEMA_VERSION, generation],
    )
    named = connection.execute("SELECT DISTINCT file FROM fleet.latest_snapshots ORDER BY file").fetchall()
    # A missing Parquet file costs its own rows, not the whole publication.
    files = [home / file for (file,) in named if (home / file).exists()]
    listed = ", ".join("'" + str(file).replace("'", "''") + "'" for file in files)
    snapshots = snapshots_query(listed, quoted(home)) if files else NO_SNAPSHOTS
    for view, query in {"node_snapshots": snapshots, **VIEWS}.items():
        connection.execute(f"CREATE VIEW fleet.{view} AS {query}")
