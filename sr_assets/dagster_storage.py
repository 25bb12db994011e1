"""Internals of Dagster's storage without a public API: its files, its tables, ids and tags of runs, data of deleted runs.

Dagster deletes only a run's rows among its runs and events. Its public API reads or deletes no check results of deleted
runs, no events without a run and no files. `sr_assets_tests/test_dagster_internals.py` fails if Dagster changes one of these
internals. Dagster is imported inside functions: processes that start quickly import this module.
"""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import dagster as dg
    from sqlalchemy import Connection, Table

#: The number of runs or rows per statement.
_BATCH: Final = 500
#: The suffixes of a shard's files.
_SHARD: Final = (".db", ".db-wal", ".db-shm")
_RUN_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_NO_RUN: Final = ""


def has_history(folder: Path) -> bool:
    """Return whether an instance's folder has `history`, the folder of the SQLite storage; opening it would create it."""
    return (folder / "history").exists()


def is_created(folder: Path) -> bool:
    """Return whether an instance's folder has `history/runs.db`, SQLite's file; opening the instance would import Dagster."""
    return (folder / "history" / "runs.db").exists()


def create_storage(instance: dg.DagsterInstance) -> None:
    """Create the tables of runs, events and schedules: Dagster creates each at its first use.

    `get_runs_count`, `all_asset_keys` and `all_instigator_state` use them. No public method uses all three, and the public
    command `dagster instance migrate` changes existing tables.
    """
    instance.get_runs_count()
    instance.all_asset_keys()
    instance.all_instigator_state()


def run_ids(instance: dg.DagsterInstance, filters: dg.RunsFilter) -> Sequence[str]:
    """Return the ids of runs, newest first, by `get_run_ids`; the public `get_run_records` reads and parses whole runs."""
    return instance.get_run_ids(filters)


def existing_runs(instance: dg.DagsterInstance, ids: Sequence[str]) -> set[str]:
    """Return those of these ids that runs have."""
    from dagster import RunsFilter

    batches = (ids[begin : begin + _BATCH] for begin in range(0, len(ids), _BATCH))
    return {run_id for batch in batches for run_id in run_ids(instance, RunsFilter(run_ids=batch))}


def tag_values(instance: dg.DagsterInstance, tags: Sequence[str]) -> dict[str, list[str]]:
    """Return the values that each tag has in any run, sorted, by `get_run_tags`.

    A public filter by tag needs the values.
    """
    return {tag: sorted(values) for tag, values in instance.get_run_tags(tags)}


def newest_materializations(instance: dg.DagsterInstance) -> set[str]:
    """Return the runs that materialized an asset, or one of its partitions, last.

    Read from the table of events: the public methods read one asset or partition at a time.
    """
    import sqlalchemy as sa
    from dagster import DagsterEventType

    events = _events()
    newest = (
        sa.select(sa.func.max(events.c.id))
        .where(events.c.dagster_event_type == DagsterEventType.ASSET_MATERIALIZATION.value)
        .group_by(events.c.asset_key, events.c.partition)
    )
    with _index(instance) as connection:
        return {row.run_id for row in connection.execute(sa.select(events.c.run_id).where(events.c.id.in_(newest)))}


def delete_files(instance: dg.DagsterInstance, run_id: str) -> None:
    """Delete a run's logs, artifacts and event shard.

    Found by `compute_log_manager`, `storage_directory` and `path_for_shard`. The public `delete_run` leaves them.
    """
    if not _RUN_ID.fullmatch(run_id):
        # The path of a run without an id would be the folder of all runs.
        raise ValueError(f"{run_id!r} is not the id of a run")
    instance.compute_log_manager.delete_logs(prefix=[run_id])
    shutil.rmtree(Path(instance.storage_directory()) / run_id, ignore_errors=True)
    # A database has no shards.
    if path_for_shard := getattr(instance.event_log_storage, "path_for_shard", None):
        shards = Path(path_for_shard("index")).parent
        for suffix in _SHARD:
            (shards / f"{run_id}{suffix}").unlink(missing_ok=True)


def delete_checks(instance: dg.DagsterInstance, ids: Sequence[str]) -> None:
    """Delete the check results of runs from their table; the public `delete_run` leaves them."""
    table = _checks()
    with _index(instance) as connection:
        _delete_rows(connection, table, "run_id", ids)


def checked_runs(instance: dg.DagsterInstance, assets: Collection[dg.AssetKey]) -> list[str]:
    """Return the ids of existing and deleted runs with check results of these assets, sorted.

    Read from the table of check results: no public method reads those of deleted runs.
    """
    import sqlalchemy as sa

    table, names = _checks(), {key.to_string() for key in assets}
    with _index(instance) as connection:
        rows = connection.execute(sa.select(table.c.run_id, table.c.asset_key).distinct()).fetchall()
    return sorted({run_id for run_id, asset in rows if asset in names and _RUN_ID.fullmatch(run_id or "")})


def delete_runless(
    instance: dg.DagsterInstance, assets: Collection[dg.AssetKey], before: datetime, observed_before: datetime
) -> int:
    """Delete events and check results of these assets without a run, from before a time; return their number.

    Observations are many and have a time of their own. The newest of each asset and check stays. No public method
    reads or deletes single events.
    """
    import sqlalchemy as sa
    from dagster import DagsterEventType

    events, checks = _events(), _checks()
    limits = defaultdict[str | None, datetime](
        lambda: before, {DagsterEventType.ASSET_OBSERVATION.value: observed_before}
    )
    names, storage = {key.to_string() for key in assets}, instance.event_log_storage
    query = sa.select(events.c.id, events.c.timestamp, events.c.event).where(events.c.run_id == _NO_RUN)
    deleted = 0
    # SQLite has the events twice: in their shard and in the index.
    for opened in (storage.run_connection(_NO_RUN), _index(instance)):  # type: ignore[attr-defined]
        with opened as connection:
            rows = connection.execute(query.order_by(events.c.id.desc())).fetchall()
            identified = [(row.id, row.timestamp, _subject(row.event)) for row in rows]
            old = _outdated((*row, limits[row[2][1][0]] if row[2][0] in assets else None) for row in identified)
            _delete_rows(connection, events, "id", old)
            # In another storage both connections reach the same rows.
            deleted = max(deleted, len(old))
    query = sa.select(checks.c.id, checks.c.create_timestamp, checks.c.asset_key, checks.c.check_name)
    with _index(instance) as connection:
        rows = connection.execute(query.where(checks.c.run_id == _NO_RUN).order_by(checks.c.id.desc())).fetchall()
        old = _outdated((row[0], row[1], row[2:], before if row.asset_key in names else None) for row in rows)
        _delete_rows(connection, checks, "id", old)
    return deleted + len(old)


def _subject(event: str) -> tuple[dg.AssetKey | None, tuple[str | None, ...]]:
    """Return the asset of a stored event, and what distinguishes it from the asset's other events, first its type."""
    from dagster import EventLogEntry, deserialize_value

    entry = deserialize_value(event, EventLogEntry).dagster_event
    if entry is None:
        return None, (None,)
    data = entry.event_specific_data
    asset = entry.asset_key or getattr(data, "asset_key", None)
    return asset, (entry.event_type_value, getattr(data, "check_name", None), entry.partition)


def _outdated(rows: Iterable[tuple[int, datetime, Any, datetime | None]]) -> list[int]:
    """Return the ids of the old rows that are not the newest of their subject.

    Each row has its id, its time, its subject, and the time before which it is old, or None; the newest row is the first.
    """
    seen: set[Any] = set()
    old = []
    for row_id, at, subject, before in rows:
        if subject in seen and before is not None and at < before.replace(tzinfo=None):
            old.append(row_id)
        seen.add(subject)
    return old


def _delete_rows(connection: Connection, table: Table, column: str, values: Sequence[object]) -> None:
    for begin in range(0, len(values), _BATCH):
        connection.execute(table.delete().where(table.c[column].in_(values[begin : begin + _BATCH])))


def _index(instance: dg.DagsterInstance) -> AbstractContextManager[Any]:
    """Return a context manager for a connection to the events and check results of all runs."""
    connection: AbstractContextManager[Any] = instance.event_log_storage.index_connection()  # type: ignore[attr-defined]
    return connection


def _events() -> Table:
    from dagster._core.storage.event_log.schema import SqlEventLogStorageTable

    return SqlEventLogStorageTable


def _checks() -> Table:
    from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable

    return AssetCheckExecutionsTable
