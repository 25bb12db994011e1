"""A site's private state: its lock, `state.duckdb` with one transaction per batch, and `status.json` beside it.

Here: the schema and every statement on it, but for the tables of the global view (`global_view`). Not here: the rules
that make the rows (`domain.tracking`), what is published of them (`fleet`).

`state.duckdb` is opened only by the process that holds the site's lock. Everything a batch changes — position, node
states, transitions, gaps, parked messages, counters — is one transaction, and the intent it was done for goes with it.
Times are unix nanoseconds. Hot tables have no keys or indexes: rows are found by scanning a column, which is fast, and
are never updated in place through an index.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import duckdb

from sr_assets.adapters.state import copy_log, global_view
from sr_assets.adapters.state.copy_log import CopyLog
from sr_assets.domain.errors import RunError, cannot_write
from sr_assets.domain.tracking import NODE_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from sr_assets.domain.positions import SequenceRange

SCHEMA_VERSION: Final = 2
COUNTERS: Final = (
    "seen_messages",
    "copied_messages",
    "copied_bytes",
    "skipped_messages",
    "too_old_messages",
    "no_sender_messages",
    "gap_messages",
    "parked_messages",
    "late_sightings",
)
_SCHEMA: Final = f"""
CREATE TABLE IF NOT EXISTS about (schema_version INTEGER);
CREATE TABLE IF NOT EXISTS streams (
    stream VARCHAR, created_ns BIGINT, next_sequence BIGINT, watermark_ns BIGINT, planned_ns BIGINT,
    last_stored_ns BIGINT,
    source_last_sequence BIGINT, lag_messages BIGINT, lag_ns BIGINT, target_created_ns BIGINT,
    target_sequence BIGINT, target_holds BIGINT, target_checked BIGINT, progress_ns BIGINT,
    alive_ns BIGINT, alive_due_ns BIGINT, started VARCHAR, starts BIGINT,
    {", ".join(f"{counter} BIGINT DEFAULT 0" for counter in COUNTERS)},
    last_error VARCHAR, last_error_since_ns BIGINT, as_of_ns BIGINT);
CREATE TABLE IF NOT EXISTS intents (
    stream VARCHAR, first BIGINT, available BIGINT, next BIGINT, planned_ns BIGINT, cutoff_ns BIGINT, created_ns BIGINT,
    target_created_ns BIGINT, target_sequence BIGINT, resend BOOLEAN, waits BOOLEAN);
CREATE TABLE IF NOT EXISTS nodes (
    stream VARCHAR, node VARCHAR, first_seen_ns BIGINT, seen_ns BIGINT, sequence BIGINT, copied_ns BIGINT,
    copied_bytes BIGINT, status VARCHAR, status_since_ns BIGINT, retired_at_ns BIGINT, times_retired BIGINT,
    transition BIGINT, deadline_ns BIGINT);
CREATE TABLE IF NOT EXISTS transitions (
    event_id VARCHAR, stream VARCHAR, node VARCHAR, event VARCHAR, event_ns BIGINT, detected_ns BIGINT, seen_ns BIGINT,
    age_ns BIGINT, sequence BIGINT, previous VARCHAR, transition BIGINT, late BOOLEAN, returned BOOLEAN,
    outage_ns BIGINT, published_ns BIGINT, outbox BOOLEAN);
CREATE TABLE IF NOT EXISTS gaps (
    stream VARCHAR, first_sequence BIGINT, last_sequence BIGINT, messages BIGINT, reason VARCHAR, noticed_ns BIGINT);
CREATE TABLE IF NOT EXISTS parked (
    stream VARCHAR, sequence BIGINT, stored_ns BIGINT, subject VARCHAR, payload_bytes BIGINT, reason VARCHAR,
    parked_ns BIGINT);
CREATE TABLE IF NOT EXISTS snapshots (stream VARCHAR, node VARCHAR, sequence BIGINT, file VARCHAR);
CREATE TABLE IF NOT EXISTS staged (stream VARCHAR, first BIGINT, next BIGINT);
{copy_log.SCHEMA}
{global_view.SCHEMA}
"""
#: What brings a state of an earlier schema up to this one.
_MIGRATIONS: Final = {
    1: """
    ALTER TABLE streams ADD COLUMN target_checked BIGINT DEFAULT 0;
    ALTER TABLE streams ADD COLUMN progress_ns BIGINT;
    ALTER TABLE streams ADD COLUMN alive_ns BIGINT;
    ALTER TABLE streams ADD COLUMN alive_due_ns BIGINT;
    UPDATE streams SET target_checked = target_sequence;
    ALTER TABLE intents ADD COLUMN resend BOOLEAN DEFAULT false;
    ALTER TABLE intents ADD COLUMN waits BOOLEAN DEFAULT false;
    """
}
#: What DuckDB says of a file that may be in order all the same.
_OUTER_TROUBLE: Final = (
    "Could not set lock",
    *map(os.strerror, (errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE)),
)


class SiteBusyError(RunError):
    """Another run holds the site."""


class BrokenStateError(RunError):
    """A site's state is there but cannot be read any more."""


class SiteLock:
    """The right to work on a site, held from `with` to its end; the kernel frees it however the holder ends.

    Its file says who holds it and since when. Raises SiteBusyError when another holds it for `wait_seconds` on.
    """

    def __init__(self, folder: Path, owner: str, wait_seconds: float) -> None:
        """Name the site's folder and who asks."""
        self._file = folder / "lock"
        self._owner = owner
        self._wait_seconds = wait_seconds

    def __enter__(self) -> Self:
        """Take the lock."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._handle = self._file.open("a+")
        deadline = time.monotonic() + self._wait_seconds
        while True:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    self._handle.close()
                    raise SiteBusyError(
                        f"site {self._file.parent.name} is under way: {lock_owner(self._file.parent)}"
                    ) from None
                time.sleep(0.1)
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._handle.seek(0)
        self._handle.truncate()
        self._handle.write(f"{self._owner} (pid {os.getpid()}) since {since}\n")
        self._handle.flush()
        return self

    def __exit__(self, *_: object) -> None:
        """Free the lock."""
        self._handle.close()


def lock_owner(folder: Path) -> str | None:
    """Return who holds a site's lock and since when; None when nobody does."""
    try:
        with (folder / "lock").open() as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return handle.read().strip() or "a run that has just started"
    except FileNotFoundError:
        return None
    return None


@dataclass(frozen=True, slots=True)
class Intent:
    """What a batch is about to do, committed before it does anything.

    Done again after a crash, with the very same numbers. `available` is the first sequence of the range that the source
    still held: what lies before it was overtaken. `resend`: what the target lost of the range is sent again, nothing is
    read anew; `waits`: it was open when that was found out, and comes after.
    """

    stream: str
    first: int
    available: int
    next: int
    planned_ns: int | None
    cutoff_ns: int | None
    created_ns: int
    target_created_ns: int
    target_sequence: int
    resend: bool = False
    waits: bool = False


@dataclass(slots=True)
class StreamState:
    """Where a stream stands: one row of `streams`.

    `target_sequence` is our last acknowledged copy's place in the target, `target_holds` the source sequence that stands
    there, `target_checked` how far it is known who wrote what there. `progress_ns` is when the position last moved, or
    was level, `alive_ns` when the stream's observer last said that it is alive, and `alive_due_ns` when it said that the
    next run is due.
    """

    stream: str
    created_ns: int
    next_sequence: int
    watermark_ns: int | None = None
    planned_ns: int | None = None
    last_stored_ns: int | None = None
    source_last_sequence: int = 0
    lag_messages: int = 0
    lag_ns: int = 0
    target_created_ns: int = 0
    target_sequence: int = 0
    target_holds: int = 0
    target_checked: int = 0
    progress_ns: int | None = None
    alive_ns: int | None = None
    alive_due_ns: int | None = None
    started: str | None = None
    starts: int = 0
    seen_messages: int = 0
    copied_messages: int = 0
    copied_bytes: int = 0
    skipped_messages: int = 0
    too_old_messages: int = 0
    no_sender_messages: int = 0
    gap_messages: int = 0
    parked_messages: int = 0
    late_sightings: int = 0
    last_error: str | None = None
    last_error_since_ns: int | None = None
    as_of_ns: int | None = None

    @classmethod
    def not_begun(cls, stream: str) -> Self:
        """Return the row of a stream that could not even begin: it has no source yet, only an error."""
        return cls(stream, 0, 0)

    @property
    def begun(self) -> bool:
        """Tell whether there is a position."""
        return self.created_ns != 0


class SiteState:
    """The open `state.duckdb` of one site. Used inside the site's lock, by `with`; closed also on an exception."""

    def __init__(self, folder: Path) -> None:
        """Name the site's folder."""
        self._folder = folder

    def __enter__(self) -> Self:
        """Open the file, making it when it is missing; an earlier schema is brought up to this one.

        Raises BrokenStateError when it is no database of ours (any more), RunError when it cannot be had, or is another
        version's.
        """
        file = self._folder / "state.duckdb"
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            if not file.exists():
                self._make(file)
            self._connection = _connect(file)
        except duckdb.Error as error:
            raise _complaint(file, error) from None
        try:
            versions = self._connection.execute("SELECT schema_version FROM about").fetchall()
        except duckdb.Error as error:
            self._connection.close()
            raise _complaint(file, error) from None
        version = versions[0][0] if versions else None
        if version not in (SCHEMA_VERSION, *_MIGRATIONS):
            self._connection.close()
            raise RunError(
                f"the state {file} has schema {version}, this version of sr-assets knows {SCHEMA_VERSION}; use the version"
                " that wrote it"
            )
        if version != SCHEMA_VERSION:
            with self.transaction():
                self._connection.execute(_MIGRATIONS[version])
                self._connection.execute(_SCHEMA)
                self._connection.execute("UPDATE about SET schema_version = ?", [SCHEMA_VERSION])
        return self

    @staticmethod
    def _make(file: Path) -> None:
        """Make an empty state, at once or not at all: half a file would have to be recovered from."""
        draft = file.with_name(f".{file.name}.new")
        for left in (draft, draft.with_name(f"{draft.name}.wal"), file.with_name(f"{file.name}.wal")):
            left.unlink(missing_ok=True)
        with _connect(draft) as connection:
            connection.execute(_SCHEMA)
            connection.execute("INSERT INTO about VALUES (?)", [SCHEMA_VERSION])
            connection.execute("CHECKPOINT")  # closing would do it too, but say nothing when there is no room
        draft.replace(file)

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._connection.close()

    @property
    def connection(self) -> duckdb.DuckDBPyConnection:
        """The connection, for publishing what is in here."""
        return self._connection

    @property
    def global_tables(self) -> global_view.GlobalTables:
        """The tables of the global view, which the site's feeds fold into."""
        return global_view.GlobalTables(self._connection)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit everything done inside, or nothing; raises RunError when it cannot be written."""
        self._connection.execute("BEGIN TRANSACTION")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        try:
            self._connection.execute("COMMIT")
        except duckdb.OperationalError as error:
            raise RunError(
                cannot_write(f"the state {self._folder / 'state.duckdb'}", OSError(_first_line(error)))
            ) from None

    def _row(self, query: str, values: Sequence[Any]) -> tuple[Any, ...] | None:
        # Fetched to the end: DuckDB 2 lets nothing be registered while a result is unfinished.
        rows = self._connection.execute(query, values).fetchall()
        return rows[0] if rows else None

    def load_stream(self, stream: str) -> StreamState | None:
        """Return where a stream stands; None before its first run."""
        names = ", ".join(StreamState.__dataclass_fields__)
        row = self._row(f"SELECT {names} FROM streams WHERE stream = ?", [stream])
        return StreamState(*row) if row else None

    def save_stream(self, state: StreamState) -> None:
        """Write where a stream stands; to be called inside a transaction."""
        values = asdict(state)
        self._connection.execute("DELETE FROM streams WHERE stream = ?", [state.stream])
        marks = ", ".join("?" * len(values))
        self._connection.execute(f"INSERT INTO streams ({', '.join(values)}) VALUES ({marks})", list(values.values()))

    def open_intent(self, stream: str, *, resend: bool = False) -> Intent | None:
        """Return the intent, of a batch or of sending again, that was not committed; None when there is none."""
        names = ", ".join(Intent.__dataclass_fields__)
        row = self._row(f"SELECT {names} FROM intents WHERE stream = ? AND resend = ?", [stream, resend])
        return Intent(*row) if row else None

    def save_intent(self, intent: Intent) -> None:
        """Write an intent in the place of the one before; to be called inside a transaction."""
        self.clear_intent(intent.stream, resend=intent.resend)
        values = asdict(intent)
        marks = ", ".join("?" * len(values))
        self._connection.execute(f"INSERT INTO intents ({', '.join(values)}) VALUES ({marks})", list(values.values()))

    def clear_intent(self, stream: str, *, resend: bool = False) -> None:
        """Drop an intent of a stream; to be called in the transaction that commits its batch."""
        self._connection.execute("DELETE FROM intents WHERE stream = ? AND resend = ?", [stream, resend])

    def copy_log(self, stream: str) -> CopyLog:
        """Return a stream's copy_log of copies."""
        return CopyLog(self._connection, stream)

    def fold_input(self, stream: str, sightings: pa.Table) -> pa.Table:
        """Return what the fold needs: one row per sighting with a sender, and one per known node among them, with
        `sighting` 0.

        Columns: sender, sighting (its sequence), stored_ns, payload_bytes, forced, then those of `NODE_COLUMNS`
        (null for sightings).
        """
        self._connection.register("sightings", sightings)
        try:
            return self._connection.sql(
                f"""
                SELECT node AS sender, 0::BIGINT AS sighting, 0::BIGINT AS stored_ns, 0::BIGINT AS payload_bytes, false AS
                forced, {", ".join(NODE_COLUMNS)} FROM nodes WHERE stream = ? AND node IN (SELECT sender FROM sightings)
                UNION ALL BY NAME SELECT sender, sequence AS sighting, stored_ns, payload_bytes, forced FROM sightings WHERE
                sender IS NOT NULL
                """,
                params=[stream],
            ).to_arrow_table()
        finally:
            self._connection.unregister("sightings")

    def due_nodes(self, stream: str, watermark_ns: int) -> list[tuple[Any, ...]]:
        """Return the nodes whose deadline lies before the watermark: node, then `NODE_COLUMNS`; by deadline."""
        return self._connection.execute(
            f"SELECT node, {', '.join(NODE_COLUMNS)} FROM nodes WHERE stream = ? AND deadline_ns < ? ORDER BY"
            " deadline_ns, node",
            [stream, watermark_ns],
        ).fetchall()

    def merge_nodes(self, stream: str, nodes: pa.Table) -> None:
        """Write the states of nodes (columns node, `NODE_COLUMNS`, deadline_ns); to be called inside a transaction."""
        columns = ", ".join(("node", *NODE_COLUMNS, "deadline_ns"))
        self._connection.register("merged", nodes)
        try:
            # Out and in again: DuckDB's MERGE and UPDATE of 100,000 known nodes take four seconds, this a tenth of one.
            self._connection.execute(
                "DELETE FROM nodes WHERE stream = ? AND node IN (SELECT node FROM merged)", [stream]
            )
            self._connection.execute(f"INSERT INTO nodes (stream, {columns}) SELECT ?, {columns} FROM merged", [stream])
        finally:
            self._connection.unregister("merged")

    def add_rows(self, table: str, rows: pa.Table) -> None:
        """Append rows to `transitions`, `gaps` or `parked` by column name; to be called inside a transaction."""
        self._connection.register("added", rows)
        try:
            self._connection.execute(f"INSERT INTO {table} BY NAME SELECT * FROM added")
        finally:
            self._connection.unregister("added")

    def drop_retired(self, stream: str, before_ns: int) -> None:
        """Forget the nodes that retired before a time; to be called inside a transaction."""
        self._connection.execute(
            "DELETE FROM nodes WHERE stream = ? AND status = 'retired' AND retired_at_ns < ?", [stream, before_ns]
        )

    def next_deadline(self, stream: str) -> int | None:
        """Return the earliest deadline of a stream's nodes in unix ns; None when none is waiting."""
        row = self._row("SELECT min(deadline_ns) FROM nodes WHERE stream = ?", [stream])
        return None if row is None else row[0]

    def count_nodes(self, stream: str) -> int:
        """Return how many nodes of a stream are not retired."""
        row = self._row("SELECT count(*) FROM nodes WHERE stream = ? AND status <> 'retired'", [stream])
        return int(row[0]) if row else 0

    def outbox(self, stream: str, limit: int) -> list[dict[str, Any]]:
        """Return the next transitions to publish, in the order in which they happened (per node: of `transition`)."""
        cursor = self._connection.execute(
            "SELECT * FROM transitions WHERE stream = ? AND outbox AND published_ns IS NULL ORDER BY event_ns, node,"
            " transition LIMIT ?",
            [stream, limit],
        )
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def outbox_size(self, stream: str) -> int:
        """Return how many transitions wait to be published."""
        row = self._row(
            "SELECT count(*) FROM transitions WHERE stream = ? AND outbox AND published_ns IS NULL", [stream]
        )
        return int(row[0]) if row else 0

    def mark_published(self, event_ids: Sequence[str], at_ns: int) -> None:
        """Remember that transitions were acknowledged."""
        with self.transaction():
            self._connection.execute(
                "UPDATE transitions SET published_ns = ? WHERE event_id IN (SELECT unnest(?::VARCHAR[]))",
                [at_ns, list(event_ids)],
            )

    def stage(self, stream: str, first: int, next_sequence: int) -> None:
        """Remember that a batch left staged files; to be called in the transaction that commits it."""
        self._connection.execute("INSERT INTO staged VALUES (?, ?, ?)", [stream, first, next_sequence])

    def staged(self, stream: str) -> list[tuple[int, int]]:
        """Return the committed batches whose staged files are not in the table of the newest yet."""
        return self._connection.execute(
            "SELECT first, next FROM staged WHERE stream = ? ORDER BY first", [stream]
        ).fetchall()

    def index_snapshots(self, stream: str, first: int, next_sequence: int, files: Sequence[Path]) -> None:
        """Bring the newest-per-node table up to a batch's files, and forget that it was staged."""
        with self.transaction():
            if files:
                self._connection.execute(
                    "CREATE OR REPLACE TEMP TABLE fresh AS SELECT node, max(sequence) AS sequence, arg_max(filename,"
                    " sequence) AS file FROM read_parquet(?, filename = true, hive_partitioning = false) GROUP BY node",
                    [[str(file) for file in files]],
                )
                self._connection.execute(
                    "DELETE FROM snapshots WHERE stream = ? AND node IN (SELECT node FROM fresh)", [stream]
                )
                self._connection.execute(
                    "INSERT INTO snapshots (stream, node, sequence, file) SELECT ?, node, sequence, file FROM fresh",
                    [stream],
                )
                self._connection.execute("DROP TABLE fresh")
            self._connection.execute(
                "DELETE FROM staged WHERE stream = ? AND first = ? AND next = ?", [stream, first, next_sequence]
            )

    def move_snapshots(self, stream: str, old_day: str, file: Path) -> None:
        """Point the newest-per-node table from a day's files (their folder) to the one file they became."""
        with self.transaction():
            self._connection.execute(
                "UPDATE snapshots SET file = ? WHERE stream = ? AND starts_with(file, ?)",
                [str(file), stream, f"{old_day}/"],
            )

    def snapshot_files(self, stream: str) -> set[str]:
        """Return the files that hold a node's newest message."""
        return {
            row[0]
            for row in self._connection.execute(
                "SELECT DISTINCT file FROM snapshots WHERE stream = ?", [stream]
            ).fetchall()
        }

    def forget_snapshots(self, stream: str, files: Sequence[str]) -> None:
        """Drop the nodes whose newest message stood in files that are gone."""
        with self.transaction():
            self._connection.execute(
                "DELETE FROM snapshots WHERE stream = ? AND file IN (SELECT unnest(?::VARCHAR[]))",
                [stream, list(files)],
            )


def gap_row(stream: str, hole: SequenceRange, messages: int, reason: str, noticed_ns: int) -> dict[str, Any]:
    """Return a row of table `gaps`: `messages` are missing in a range of source sequences, noticed at a time in ns."""
    row = {"stream": stream, "first_sequence": hole.first, "last_sequence": hole.next - 1}
    return {**row, "messages": messages, "reason": reason, "noticed_ns": noticed_ns}


def _connect(file: Path) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(str(file), config={"threads": 2, "memory_limit": "1GB"})
    connection.execute("SET TimeZone = 'UTC'")
    return connection


def _first_line(error: duckdb.Error) -> str:
    return str(error).splitlines()[0]


def _complaint(file: Path, error: duckdb.Error) -> RunError:
    """Return what is wrong with a file: with itself, or just with how we get at it."""
    said = _first_line(error)
    if any(sign in said for sign in _OUTER_TROUBLE):
        return RunError(f"the state {file} cannot be opened ({said}); nothing in it was changed")
    return BrokenStateError(
        f"the state {file} cannot be read ({said}); set it aside and run `sr-assets recover` for each stream of the site"
    )


def write_status(folder: Path, status: dict[str, Any]) -> None:
    """Replace `status.json`, which the sensor and the command line read, at once.

    `written_at` is put into it: seconds by the clock that nobody sets, and since which start of the machine it counts.
    """
    draft = folder / ".status.json"
    draft.write_text(json.dumps({**status, "written_at": [time.monotonic(), _machine_start()]}, indent=1))
    draft.replace(folder / "status.json")


def status_age_seconds(status: dict[str, Any]) -> float | None:
    """Return how long ago a status was written, whatever became of the time of day since.

    None when it was on another machine or before this one's last start.
    """
    seconds, start = status.get("written_at", (math.inf, ""))
    age_seconds = time.monotonic() - seconds
    return age_seconds if start == _machine_start() and age_seconds >= 0 else None


def _machine_start() -> str:
    """Return what tells this start of this machine from every other; empty where the system does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def read_status(folder: Path) -> dict[str, Any]:
    """Return what `status.json` says; empty before the first run."""
    try:
        found = json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
