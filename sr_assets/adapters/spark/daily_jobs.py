"""The daily tables in Spark: executors read the published files, compute whole nodes, and write a file for each day.

No row passes the driver, which lists the files and moves the finished ones into place. The executors need the files of the home.
"""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sr_assets.adapters import times
from sr_assets.adapters.private import make_shared_folder
from sr_assets.adapters.published.catalog import COLUMN_TYPES
from sr_assets.adapters.published.daily_rows import PORTION_ROWS, DailyRows, InventoryRows, NodesWork
from sr_assets.adapters.published.daily_tables import DailyTable
from sr_assets.adapters.published.fleet_file import history_files
from sr_assets.adapters.published.node_histories import INPUTS
from sr_assets.adapters.published.tables import TABLES, VIEWS
from sr_assets.adapters.spark.fleet_tables import escaped, frame_of, read_files, read_history, schema_of
from sr_assets.adapters.spark.jobs import try_links
from sr_assets.adapters.spark.tasks import in_groups
from sr_assets.domain.days import date_at
from sr_assets.domain.positions import DAY_NS

if TYPE_CHECKING:
    import duckdb
    from pyspark.sql import DataFrame, SparkSession

_MESSAGE: Final = {
    name: kind
    for name, kind in COLUMN_TYPES["node_snapshot_history"].items()
    if name in ("node", "sequence", "stored_at", "payload", "metadata", "name", "stream", "date")
}
#: Each node's newest message of each day, and its newest one before the first day.
_NEWEST: Final = """
    SELECT newest.* FROM (
        SELECT max(struct(stored_at, sequence, coalesce(metadata, payload) AS metadata, CAST(NULL AS STRING) AS payload,
            date, name, stream, node)) AS newest
        FROM {{messages}} WHERE unix_micros(stored_at) >= {oldest_us} AND unix_micros(stored_at) < {next_us}
        GROUP BY name, stream, node, size(filter(array({firsts}), first -> unix_micros(stored_at) >= first)))
    """
_DRAFT: Final = ".spark-"


def lacks_home(session: SparkSession, home: Path, cores: int) -> str | None:
    """Return why the executors of a session with so many cores cannot work with the files of a home, or None."""
    with tempfile.TemporaryDirectory(prefix=_DRAFT, dir=home) as folder:
        nonce = uuid.uuid4().hex
        Path(folder, "nonce").write_text(nonce)
        for executor, _, error in try_links(session, {}, cores, folder):
            if error is not None:
                return f"executor on {executor}: {error}"
        try:
            row = session.read.text(escaped(f"{folder}/nonce")).head()
        except Exception as error:  # noqa: BLE001  Spark's, of several kinds
            return str(error).splitlines()[0]
    return None if row and row[0] == nonce else "Spark's server has other files there"


def write_in_spark(
    session: SparkSession, connection: duckdb.DuckDBPyConnection, home: Path, rows: DailyRows, draft: Path
) -> dict[date, Path]:
    """Write the rows of all days by a session's executors; return the file of each day that has rows.

    `connection` has the published tables of the home open, so that their files stay. Raises what PySpark raises.
    """
    sources = _sources(session, connection, home, rows)
    frames = [frame.selectExpr(f"{number} AS source", *columns) for number, (frame, columns) in enumerate(sources)]
    united = functools.reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), frames)
    buckets = f"pmod(hash(node), {_bucket_count(connection, rows)}) AS bucket"
    computed = in_groups(united.selectExpr("*", buckets), "bucket", NodesWork(rows, schema_of(rows.kinds)))
    table, folder = rows.table, draft / "rows"
    # The column `date` remains in the files, which DuckDB reads without the names of folders.
    by_day = session.sql(rows.total, rows=computed).selectExpr("*", "date AS day")
    (
        by_day.repartition(len(rows.days), "day")
        .sortWithinPartitions("day", *table.order)
        .write.option("compression", "zstd")
        .option("maxRecordsPerFile", 0)
        .partitionBy("day")
        .parquet(f"file:{folder}")
    )
    return {date.fromisoformat(file.parent.name.removeprefix("day=")): file for file in folder.glob("day=*/*.parquet")}


def _sources(
    session: SparkSession, connection: duckdb.DuckDBPyConnection, home: Path, rows: DailyRows
) -> Iterator[tuple[DataFrame, Sequence[str]]]:
    """Yield a frame for each input of a table's rows, with the needed columns."""
    reported = not all(rows.streams["own"].to_pylist())
    for name, columns in rows.inputs.items():
        if name.startswith("global_") and not reported:
            yield read_files(session, home, [], schema_of(TABLES[name].kinds)), columns
        elif name in TABLES or name in VIEWS:
            yield frame_of(session, connection, home, name), columns
        else:
            assert isinstance(rows, InventoryRows)
            yield _newest_messages(session, connection, home, rows), columns


def _newest_messages(
    session: SparkSession, connection: duckdb.DuckDBPyConnection, home: Path, rows: InventoryRows
) -> DataFrame:
    days, oldest_ns = rows.days, rows.oldest_ns(rows.days)
    files = history_files(connection, home, (date_at(oldest_ns), date_at(days[-1].next_ns - 1)))
    messages = read_history(session, home, files, _MESSAGE)
    bounds = {"oldest_us": oldest_ns // 1000, "next_us": days[-1].next_ns // 1000}
    firsts = ", ".join(f"{day.first_ns // 1000}L" for day in days)
    return session.sql(_NEWEST.format(**bounds, firsts=firsts), messages=messages)


def _bucket_count(connection: duckdb.DuckDBPyConnection, rows: DailyRows) -> int:
    """Return the number of groups of nodes; a group fits into the memory of a task."""
    held = 0
    for name in INPUTS:
        ((count,),) = connection.execute(f"SELECT count(*) FROM {name}").fetchall()
        # Each node has rows of the days; each transition is one row.
        held += count * len(rows.days) * rows.rows_per_node if name.endswith("_availability") else count
    return max(1, math.ceil(held / PORTION_ROWS))


@contextlib.contextmanager
def draft_folder(home: Path, table: DailyTable) -> Iterator[Path]:
    """Yield a new folder next to a table's files, and delete it after the block; also delete a killed run's after a day."""
    folder = home / table.folder
    make_shared_folder(folder)
    for left in folder.glob(f"{_DRAFT}*"):
        if left.stat().st_mtime_ns < times.time_ns() - DAY_NS:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_DRAFT, dir=folder, ignore_cleanup_errors=True) as draft:
        yield Path(draft)
