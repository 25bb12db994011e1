"""The Parquet history: compaction of many small files, and a node's messages in 30 daily files."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from typing import TYPE_CHECKING, Any, Final

import duckdb
import pyarrow as pa
from pyarrow import parquet

from sr_assets.adapters.history_paths import relative_name
from sr_assets.adapters.published.compaction import describe, merge
from sr_assets.adapters.published.history import SCHEMA, open_writer, stream_folder
from sr_assets.adapters.published.tables import history_query, snapshots_query
from sr_assets.domain.history_layout import HistoryFile, plan_merges
from sr_assets_bench.rig import SITE, PeakMemory

if TYPE_CHECKING:
    from pathlib import Path

    from sr_assets.domain.history_layout import HistoryFile, plan_merges
from sr_assets_bench.rig import Bench

_STREAM: Final = "HISTORY"
_DAYS: Final = 30
_ROWS_OF_A_FILE: Final = 100
#: A run polls its source every 1.5 s.
_FILES_OF_A_MINUTE: Final = 40
_ROWS_OF_A_BATCH: Final = 1_700
_LOOK_UPS: Final = 5
_DAY_US: Final = 86_400 * 1_000_000


def measure_history(bench: Bench, files: int, nodes: int, payload_bytes: int = 1_000) -> dict[str, Any]:
    """Measure a day of `files` small files until they are one file; then a node's rows in 30 days of `nodes` rows."""
    folder = stream_folder(bench.home.resolve(), SITE, _STREAM)
    shutil.rmtree(folder, ignore_errors=True)
    blob = os.urandom(1 << 20).hex()
    day = _day(folder, _DAYS)
    listed: dict[Path, HistoryFile] = {}
    most_files = 0
    seconds, rewritten, made = 0.0, 0, files * _ROWS_OF_A_FILE
    with PeakMemory(bench.home) as memory:
        for number in range(files):
            file = _write(day, number * _ROWS_OF_A_FILE, _ROWS_OF_A_FILE, nodes, blob, payload_bytes)
            started = time.perf_counter()
            listed[file] = describe(file)
            rewritten += _compact(listed, bench.home / "scratch", over=number == files - 1)
            seconds += time.perf_counter() - started
            most_files = max(most_files, len(listed))
    about = parquet.read_metadata(next(iter(listed)))
    for date in range(1, _DAYS):
        file = _write(_day(folder, date), made + date * nodes, nodes, nodes, blob, payload_bytes)
        _compact({file: describe(file)}, bench.home / "scratch", over=True)
    return {
        "small_files": files,
        "rows": made,
        "compacting_seconds": round(seconds, 2),
        "rewritten_times": round(rewritten / made, 2),
        "row_groups": about.num_row_groups,
        "most_files": most_files,
        "peak_mib": memory.most_bytes >> 20,
        **_look_ups(bench.home.resolve(), folder, nodes),
        **_minute(folder, bench.home / "scratch", blob),
    }


def _minute(folder: Path, scratch: Path, blob: str) -> dict[str, int]:
    """Return the files and the median row group after the batches of a minute, when the run ends."""
    shutil.rmtree(folder)
    day = _day(folder, 1)
    listed: dict[Path, HistoryFile] = {}
    for number in range(_FILES_OF_A_MINUTE):
        file = _write(day, number * _ROWS_OF_A_BATCH, _ROWS_OF_A_BATCH, _ROWS_OF_A_BATCH, blob, 100)
        listed[file] = describe(file)
        _compact(listed, scratch, over=False)
    _compact(listed, scratch, over=False, ending=True)
    abouts = list(map(parquet.read_metadata, listed))
    groups = [about.row_group(number).num_rows for about in abouts for number in range(about.num_row_groups)]
    return {"minute_files": len(listed), "minute_group_rows": round(statistics.median(groups))}


def _day(folder: Path, date: int) -> Path:
    day = folder / f"date=2026-01-{date:02}"
    day.mkdir(parents=True, exist_ok=True)
    return day


def _write(day: Path, first: int, count: int, nodes: int, blob: str, payload_bytes: int) -> Path:
    """Write a batch's file with `count` rows, one node after the other."""
    sequences = range(first, first + count)
    starts = [(sequence * 7_919) % (len(blob) - payload_bytes) for sequence in sequences]
    columns = [
        [f"node{sequence * 37 % nodes:06}.example.net" for sequence in sequences],
        sequences,
        [_DAY_US + sequence for sequence in sequences],
        ["registration"] * count,
        [payload_bytes] * count,
        [f'"{blob[start : start + payload_bytes - 2]}"' for start in starts],
        [None] * count,
        [None] * count,
    ]
    file = day / f"{first}-{first + count}.parquet"
    arrays = [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
    with open_writer(file) as writer:
        writer.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA))
    return file


def _compact(listed: dict[Path, HistoryFile], scratch: Path, *, over: bool, ending: bool = False) -> int:
    """Compact a day's files as far as they are due; return the number of rows written again."""
    rows = 0
    for planned in list(plan_merges(listed.values(), 0, over=over, ending=ending)):
        merged = merge(planned, scratch)
        for part in planned.parts:
            del listed[part.path]
            part.path.unlink()
        listed.update({file.path: file for file in merged})
        rows += sum(file.rows for file in merged)
    return rows


def _look_ups(home: Path, folder: Path, nodes: int) -> dict[str, int]:
    """Return the milliseconds to find a node's newest row of the last day, and all its rows."""
    files = sorted(folder.glob("date=*/*.parquet"))
    names = ", ".join(f"'{relative_name(file)}'" for file in files)
    taken: dict[str, list[float]] = {"node_snapshots": [], "node_snapshot_history": []}
    with duckdb.connect() as connection:
        connection.execute(
            f"""
            CREATE TABLE latest AS
            SELECT '{SITE}' AS name, '{_STREAM}' AS stream, node, max(sequence) AS sequence,
                '{relative_name(files[-1])}' AS file
            FROM read_parquet('{files[-1]}') GROUP BY node
            """
        )
        newest = snapshots_query(str(home), [relative_name(files[-1])], "FROM latest")
        connection.execute(f"CREATE VIEW node_snapshots AS {newest}")
        connection.execute(
            f"CREATE VIEW node_snapshot_history AS {history_query(str(home), f'SELECT unnest([{names}]) AS file')}"
        )
        for number in range(_LOOK_UPS):
            node = f"node{number * 1_001 % nodes:06}.example.net"
            for view, seconds in taken.items():
                started = time.perf_counter()
                connection.execute(f"SELECT * FROM {view} WHERE node = ?", [node]).fetchall()
                seconds.append(time.perf_counter() - started)
    newest_ms, history_ms = (round(1_000 * statistics.median(seconds)) for seconds in taken.values())
    return {"newest_ms": newest_ms, "history_ms": history_ms}
