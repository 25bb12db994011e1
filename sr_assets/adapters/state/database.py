"""The file `state.duckdb`: its tables, creating and opening it, and the errors of a file that cannot be opened.

Times are unix nanoseconds. Tables have no keys or indexes: scanning a column is fast enough, and DuckDB updates indexed rows
slowly.
"""

import contextlib
import errno
import os
import re
from pathlib import Path
from typing import Final

import duckdb

from sr_assets.adapters.home import OtherSchemaError
from sr_assets.adapters.private import sync_folder
from sr_assets.adapters.state import (
    copy_log,
    copy_queue,
    counters,
    global_view,
    guard,
    heartbeats,
    latencies,
    nodes,
    operator_requests,
    partitions,
    snapshot_index,
    undecided,
)
from sr_assets.adapters.state.attached import AttachedFile
from sr_assets.domain.errors import RunError, cannot_write

SCHEMA_VERSION: Final = 1

#: The numbers of the last commits; the highest one is the state's.
_COMMITS: Final = "CREATE TABLE commits (number BIGINT);"
#: The latest event of a stream's published transitions that this state has deleted.
_FORGOTTEN: Final = "CREATE TABLE forgotten_events (stream VARCHAR, event_ns BIGINT);"
#: The streams whose open intent's last attempt ended in order, with an error or at the end of its run.
_ENDED: Final = "CREATE TABLE ended_attempts (stream VARCHAR);"
SCHEMA: Final = f"""
CREATE TABLE about (schema_version INTEGER);
{_COMMITS}
{_FORGOTTEN}
CREATE TABLE streams (
    stream VARCHAR, created_ns BIGINT, next_sequence BIGINT, epoch_ns BIGINT DEFAULT 0, watermark_ns BIGINT,
    planned_ns BIGINT, last_stored_ns BIGINT, mark_sequence BIGINT, mark_ns BIGINT,
    hole_open BOOLEAN DEFAULT false, source_last_sequence BIGINT,
    lag_messages BIGINT, lag_ns BIGINT, progress_ns BIGINT, alive_ns BIGINT, alive_due_ns BIGINT, started VARCHAR,
    starts BIGINT, reset_starts BIGINT DEFAULT 0, forgotten_transition BIGINT DEFAULT 0,
    policy VARCHAR, advisories_stored BOOLEAN DEFAULT false, seen_messages BIGINT DEFAULT 0,
    skipped_messages BIGINT DEFAULT 0, too_old_messages BIGINT DEFAULT 0, no_sender_messages BIGINT DEFAULT 0,
    gap_messages BIGINT DEFAULT 0, late_sightings BIGINT DEFAULT 0, ahead_clocks BIGINT DEFAULT 0,
    last_error VARCHAR, last_error_since_ns BIGINT, as_of_ns BIGINT);
CREATE TABLE copying (
    stream VARCHAR, created_ns BIGINT, starts BIGINT, target_stream VARCHAR, target_created_ns BIGINT,
    target_sequence BIGINT, target_holds BIGINT, target_checked BIGINT, copied_messages BIGINT, copied_bytes BIGINT,
    parked_messages BIGINT, lost_messages BIGINT, error VARCHAR, error_since_ns BIGINT,
    target_looked BIGINT DEFAULT 0, target_looked_ns BIGINT DEFAULT 0, target_adopted BIGINT DEFAULT 0);
CREATE TABLE intents (
    stream VARCHAR, first BIGINT, available BIGINT, next BIGINT, planned_ns BIGINT, cutoff_ns BIGINT, created_ns BIGINT,
    target_created_ns BIGINT, target_sequence BIGINT, resend BOOLEAN, waits BOOLEAN, folded BOOLEAN DEFAULT false,
    target_stream VARCHAR, starts BIGINT DEFAULT 0, source_sequence BIGINT, source_ns BIGINT,
    adopted_first BIGINT DEFAULT 0, adopted_next BIGINT DEFAULT 0, whole_first BIGINT DEFAULT 0, part BIGINT DEFAULT 0,
    begun BIGINT DEFAULT 1);
{_ENDED}
CREATE TABLE nodes (
    stream VARCHAR, node VARCHAR, first_seen_ns BIGINT, seen_ns BIGINT, sequence BIGINT, copied_ns BIGINT,
    copied_bytes BIGINT, status VARCHAR, status_since_ns BIGINT, retired_at_ns BIGINT, times_retired BIGINT,
    transition BIGINT, deadline_ns BIGINT, class VARCHAR);
{nodes.SCHEMA}
CREATE TABLE transitions (
    event_id VARCHAR, stream VARCHAR, node VARCHAR, event VARCHAR, event_ns BIGINT, detected_ns BIGINT, seen_ns BIGINT,
    age_ns BIGINT, sequence BIGINT, previous VARCHAR, transition BIGINT, late BOOLEAN, returned BOOLEAN,
    outage_ns BIGINT, published_ns BIGINT, outbox BOOLEAN, epoch BIGINT DEFAULT 0, undone_ns BIGINT, class VARCHAR,
    suppressed_by VARCHAR, suppressed_until_ns BIGINT, held_by VARCHAR, held_until_ns BIGINT,
    waits_ns BIGINT, due_ns BIGINT, withheld BOOLEAN, announced_ns BIGINT);
CREATE TABLE gaps (
    stream VARCHAR, first_sequence BIGINT, last_sequence BIGINT, messages BIGINT, reason VARCHAR, noticed_ns BIGINT);
CREATE TABLE parked (
    stream VARCHAR, sequence BIGINT, stored_ns BIGINT, subject VARCHAR, payload_bytes BIGINT, reason VARCHAR,
    parked_ns BIGINT);
{snapshot_index.SCHEMA}
{copy_log.SCHEMA}
{copy_queue.SCHEMA}
{counters.SCHEMA}
{heartbeats.SCHEMA}
{latencies.SCHEMA}
{operator_requests.SCHEMA}
{guard.SCHEMA}
{undecided.SCHEMA}
{partitions.SCHEMA}
{global_view.SCHEMA}
"""
TABLES: Final = frozenset(re.findall(r"CREATE TABLE (\w+)", SCHEMA))
#: Tables that hold the current state of a stream.
CURRENT_TABLES: Final = (
    "streams",
    "copying",
    "intents",
    "ended_attempts",
    "nodes",
    "blind_spans",
    "copy_queue",
    "copies",
    "resends",
    "staged",
    "snapshots",
    "history",
    "counters",
    "guards",
    "guard_sightings",
    "flapping_nodes",
    "partitions",
)
#: Tables that hold the history of a stream.
HISTORY_TABLES: Final = (
    "transitions",
    "gaps",
    "parked",
    "blind_history",
    "heartbeats",
    "latencies",
    "site_events",
    "node_events",
    "answered_requests",
    "forgotten_events",
)
#: Tables of the events that somebody waits for.
EVENT_TABLES: Final = frozenset(
    {"transitions", "site_events", "node_events", *re.findall(r"global_\w+", global_view.SCHEMA)}
)
#: The columns and the tables that the states of earlier builds lack.
_LATER_COLUMNS: Final = {
    "transitions": (
        "undone_ns BIGINT",
        "class VARCHAR",
        "suppressed_by VARCHAR",
        "suppressed_until_ns BIGINT",
        "held_by VARCHAR",
        "held_until_ns BIGINT",
        "waits_ns BIGINT",
        "due_ns BIGINT",
        "withheld BOOLEAN",
        "announced_ns BIGINT",
    ),
    "nodes": ("class VARCHAR",),
    "intents": ("whole_first BIGINT DEFAULT 0", "part BIGINT DEFAULT 0", "begun BIGINT DEFAULT 1"),
    "history": ("rows BIGINT", "first_hour BIGINT", "last_hour BIGINT"),
    "global_sites": ("outage VARCHAR", "outage_ns BIGINT"),
}
_LATER_TABLES: Final = (
    f"{latencies.SCHEMA} {operator_requests.SCHEMA} {guard.SCHEMA} {undecided.SCHEMA} {partitions.SCHEMA} {_COMMITS}"
    f" {_FORGOTTEN} {_ENDED}"
)
#: What stands for the rows of a table that an earlier build did not have: its last commit is as late as its newest row, and
#: it may have deleted any event before that.
EARLIER_ROWS: Final = {
    "commits": "INSERT INTO commits SELECT max(as_of_ns) FROM streams HAVING max(as_of_ns) IS NOT NULL",
    "forgotten_events": "INSERT INTO forgotten_events SELECT stream, as_of_ns FROM streams WHERE as_of_ns IS NOT NULL",
}
#: The content of an empty state that this process has created: DuckDB takes 70 ms of CPU time for its tables.
_empty: Final[list[bytes]] = []
#: How many replaced and how many broken states are kept.
_ASIDES: Final = 2
#: Parts of DuckDB's messages about a file that may be intact.
_INTACT_FILE_ERRORS: Final = (
    "Could not set lock",
    *map(os.strerror, (errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE)),
)


class BrokenStateError(RunError):
    """A site's state exists but is unreadable."""


def first_line(error: duckdb.Error) -> str:
    """Return DuckDB's message without its hints."""
    return str(error).splitlines()[0]


def opening_error(file: Path, error: duckdb.Error) -> RunError:
    """Return BrokenStateError for a damaged file, or RunError for an intact file that cannot be opened."""
    reason = first_line(error)
    if any(part in reason for part in _INTACT_FILE_ERRORS):
        return RunError(f"the state {file} cannot be opened ({reason}); it was not changed")
    return BrokenStateError(
        f"the state {file} cannot be read ({reason}); set it aside and run `sr-assets recover` for each stream of the site"
    )


def open_database(file: Path) -> AttachedFile:
    """Open a state, or create it if it is missing.

    Raises BrokenStateError if it is not a readable state, OtherSchemaError if another version wrote it, and RunError if it
    cannot be opened.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        if not file.exists():
            create_database(file)
        opened = AttachedFile(file)
    except duckdb.Error as error:
        raise opening_error(file, error) from None
    connection = opened.main
    try:
        versions = connection.execute("SELECT schema_version FROM about").fetchall()
    except duckdb.Error as error:
        opened.close()
        raise opening_error(file, error) from None
    # The first unreleased schema was called 1 too; it had no table `copying`. Listing the tables would take 10 ms.
    with contextlib.suppress(duckdb.CatalogException):
        connection.execute("FROM copying LIMIT 0")
        if versions == [(SCHEMA_VERSION,)]:
            _add_missing(connection)
            return opened
    opened.close()
    raise OtherSchemaError(file, versions[0][0] if versions else None)


def _add_missing(connection: duckdb.DuckDBPyConnection) -> None:
    """Add the columns and tables that the state of an earlier build lacks."""
    columns = [f"{table}.{column.split()[0]}" for table, added in _LATER_COLUMNS.items() for column in added]
    tables = ", ".join([*_LATER_COLUMNS, *re.findall(r"CREATE TABLE (\w+)", _LATER_TABLES)])
    try:
        connection.execute(f"SELECT {', '.join(columns)} FROM {tables} LIMIT 0")
    except (duckdb.BinderException, duckdb.CatalogException):
        for table, added in _LATER_COLUMNS.items():
            for column in added:
                connection.execute(f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {column}")
        known = {table for (table,) in connection.execute("SHOW TABLES").fetchall()}
        connection.execute(_LATER_TABLES.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS"))
        for table, rows in EARLIER_ROWS.items():
            if table not in known:
                connection.execute(rows)


def create_database(file: Path) -> None:
    """Create an empty state atomically: half a file would need a recovery."""
    draft = file.with_name(f".{file.name}.new")
    for leftover in (draft, draft.with_name(f"{draft.name}.wal"), file.with_name(f"{file.name}.wal")):
        leftover.unlink(missing_ok=True)
    if _empty:
        try:
            with draft.open("xb") as written:
                written.write(_empty[0])
                written.flush()
                os.fsync(written.fileno())
        except OSError as error:
            raise RunError(cannot_write(file, error)) from None
    else:
        with AttachedFile(draft) as opened:
            opened.main.execute(SCHEMA)
            opened.main.execute("INSERT INTO about VALUES (?)", [SCHEMA_VERSION])
            opened.main.execute("CHECKPOINT")  # Closing would do so too, but without an error on a full disk.
        _empty.append(draft.read_bytes())
    draft.replace(file)
    sync_folder(file.parent)


def keep_newest_asides(file: Path, kind: str) -> None:
    """Delete all but the newest two states of a kind, `replaced` or `broken`, that were set aside; with their logs."""
    names = {aside.name.removesuffix(".wal") for aside in file.parent.glob(f"{file.name}.{kind}-*")}
    for name in sorted(names)[:-_ASIDES]:
        for aside in (file.with_name(name), file.with_name(f"{name}.wal")):
            aside.unlink(missing_ok=True)
