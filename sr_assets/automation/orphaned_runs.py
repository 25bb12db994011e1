"""Orphaned data of deleted runs in Dagster's storage: files and check executions.

Dagster deletes only a run's rows among its runs and events.
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any, Final

import dagster as dg

#: The number of runs per query.
BATCH: Final = 500
#: The suffixes of a shard's files.
_SHARD: Final = (".db", ".db-wal", ".db-shm")
_RUN_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def delete_run_data(instance: dg.DagsterInstance, run_ids: Sequence[str]) -> None:
    """Delete the orphaned data of deleted runs: logs, artifacts, event shards and check executions."""
    folder, shards = Path(instance.storage_directory()), _shards(instance)
    for run_id in run_ids:
        instance.compute_log_manager.delete_logs(prefix=[run_id])
        shutil.rmtree(folder / run_id, ignore_errors=True)
        if shards:
            for suffix in _SHARD:
                (shards / f"{run_id}{suffix}").unlink(missing_ok=True)
    connected, table = _check_executions(instance)
    with connected as connection:
        connection.execute(table.delete().where(table.c.run_id.in_(run_ids)))


def find_orphaned_runs(instance: dg.DagsterInstance) -> Iterator[list[str]]:
    """Yield, in batches, the deleted runs that have orphaned data."""
    shards = _shards(instance)
    files = [path.name for folder in (Path(instance.storage_directory()), shards) if folder for path in _listed(folder)]
    seen = {match.group() for name in files if (match := _RUN_ID.match(name))}
    connected, table = _check_executions(instance)
    with connected as connection:
        seen |= {row[0] for row in connection.execute(table.select().with_only_columns(table.c.run_id).distinct())}
    remaining = iter(sorted(seen))
    while batch := list(islice(remaining, BATCH)):
        records = instance.get_run_records(dg.RunsFilter(run_ids=batch))
        if deleted := sorted(set(batch) - {record.dagster_run.run_id for record in records}):
            yield deleted


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _shards(instance: dg.DagsterInstance) -> Path | None:
    """Return the directory with a SQLite file per run's events, or None if a database stores them."""
    path_for_shard = getattr(instance.event_log_storage, "path_for_shard", None)
    return Path(path_for_shard("index")).parent if path_for_shard else None


def _check_executions(instance: dg.DagsterInstance) -> tuple[AbstractContextManager[Any], Any]:
    """Return a context manager for a connection to the check executions, and their table.

    Dagster has no public way to delete these rows. Dagster's version is pinned, and tests delete runs
    from each storage.
    """
    from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable

    storage: Any = instance.event_log_storage
    return storage.index_connection(), AssetCheckExecutionsTable
