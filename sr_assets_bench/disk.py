"""The size of Dagster's SQLite storage after thousands of runs: one real run and copies of its data."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
import uuid
from contextlib import closing
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from sr_assets_bench.rig import SITE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sr_assets_bench.rig import Bench

_MINUTES: Final = 5


def measure_disk(bench: Bench, runs: int) -> dict[str, Any]:
    """Measure the storage after a number of runs, one every five minutes, before and after the nightly job, and the
    job's seconds.
    """
    import dagster as dg

    from sr_assets.assets.specs import site_job_name
    from sr_assets.definitions import build, build_sites

    folder = bench.home / "dagster"
    folder.mkdir()
    (folder / "dagster.yaml").write_text(files("sr_assets").joinpath("dagster.yaml").read_text(encoding="utf-8"))
    bench.create(bench.source, "DISK")
    bench.publish("DISK", 100, 100, 1_000)
    tracked = {"stream": "DISK", "target_subject_prefix": "disk", "inspect_field": "sender", "inspect_duration": "1h"}
    settings = bench.settings([tracked])
    job = build_sites(settings, [SITE]).resolve_job_def(site_job_name(settings, SITE))
    before = os.environ.get("DAGSTER_HOME")
    os.environ["DAGSTER_HOME"] = str(folder)
    try:
        with dg.DagsterInstance.get() as instance:
            run_id = job.execute_in_process(instance=instance).run_id
            first = folder_bytes(folder)
            copies = [str(uuid.uuid4()) for _ in range(runs)]
            copy_run(folder, run_id, copies)
            make_older(folder, {copy: number * _MINUTES for number, copy in enumerate(copies)})
            most, started = folder_bytes(folder), time.perf_counter()
            build(settings).resolve_job_def("retention").execute_in_process(instance=instance)
            seconds, left = time.perf_counter() - started, instance.get_runs_count()
        left_bytes = folder_bytes(folder)
    finally:
        shutil.rmtree(folder)
        del os.environ["DAGSTER_HOME"]
        if before is not None:
            os.environ["DAGSTER_HOME"] = before
    return {
        "runs": runs,
        "run_kib": round((most - first) / runs / 1024),
        "before_mib": round(most / 2**20),
        "left_mib": round(left_bytes / 2**20),
        "left_runs": left,
        "seconds": round(seconds, 1),
    }


def copy_run(folder: Path, run_id: str, copies: Sequence[str]) -> None:
    """Add copies of a run, files and rows, to an instance under other run ids."""
    history = folder / "history"
    for copy in copies:
        shutil.copy(history / "runs" / f"{run_id}.db", history / "runs" / f"{copy}.db")
        shutil.copytree(folder / "storage" / run_id, folder / "storage" / copy)
    for database, table in (
        (history / "runs" / "index.db", "event_logs"),
        (history / "runs" / "index.db", "asset_check_executions"),
        (history / "runs.db", "runs"),
        (history / "runs.db", "run_tags"),
    ):
        with closing(sqlite3.connect(database)) as connection, connection:
            names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[1] != "id"]
            values = ", ".join(f"replace({name}, :run_id, :copy)" for name in names)
            statement = f"INSERT INTO {table} ({', '.join(names)}) SELECT {values} FROM {table} WHERE run_id = :run_id"
            connection.executemany(statement, [{"copy": copy, "run_id": run_id} for copy in copies])


def make_older(folder: Path, minutes: dict[str, int]) -> None:
    """Set the creation times of runs to a number of minutes earlier."""
    older = "UPDATE runs SET create_timestamp = datetime(create_timestamp, '-' || :minutes || ' minutes') WHERE run_id = :id"
    with closing(sqlite3.connect(folder / "history" / "runs.db")) as connection, connection:
        connection.executemany(older, [{"minutes": value, "id": run_id} for run_id, value in minutes.items()])


def folder_bytes(folder: Path) -> int:
    """Return the size of all files in a folder, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
