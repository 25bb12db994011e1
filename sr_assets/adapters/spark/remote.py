"""Jobs on a cluster that shares nothing with us, from this side: what goes there, and what comes back.

A range's rows, and a batch's receipts and staged files, come back as rows of a job: of each task exactly one attempt's. Not
here: the work on the executors (`spark.jobs`), the session (`spark.cluster`), the fence of a batch (the stages).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from sr_assets.adapters.connection_file import pack_connection
from sr_assets.adapters.spark.cluster import watched
from sr_assets.adapters.spark.jobs import COPIED_SCHEMA, TRIED_SCHEMA, CopyJob, ReadJob, TryJob, take_result
from sr_assets.adapters.spark.shipping import task_of
from sr_assets.adapters.spark.source import JetStreamDataSource, JetStreamReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from sr_assets.adapters.connection_file import PackedConnection
    from sr_assets.adapters.copying.plan import CopyPlan
    from sr_assets.adapters.copying.receipt import Receipt
    from sr_assets.adapters.spark.shipping import Job

#: So many tasks for each core try every link, so that no executor is left out.
_TRIES_A_CORE = 2


def read_remotely(session: SparkSession, options: Mapping[str, str]) -> pa.Table:
    """Read a range on the cluster, with the options and the rows of a Spark read."""
    reader = JetStreamReader(options)
    partitions = tuple(reader.partitions())
    job = ReadJob(dict(options), partitions, pack_connection(options["connection"]))
    rows = _run(
        session, session.range(0, len(partitions), 1, len(partitions)), job, JetStreamDataSource(dict(options)).schema()
    )
    return rows.cast(reader.empty().schema)


def copy_remotely(session: SparkSession, frame: DataFrame, plan: CopyPlan) -> Receipt:
    """Copy what the rows name on the cluster; the staged files are written to the plan's folder here."""
    job = CopyJob(plan, pack_connection(plan.source_connection), pack_connection(plan.connection))
    rows = _run(session, frame, job, COPIED_SCHEMA)
    return take_result(rows, Path(plan.staging) if plan.staging else None)


def try_remotely(session: SparkSession, links: Mapping[str, PackedConnection]) -> Iterator[tuple[str, str, str | None]]:
    """Try links from each executor; yields the executor, the link and the error, None where it works."""
    count = 1
    if links:
        cores = session.range(0, 1000).selectExpr("spark_partition_id() AS part").distinct().count()
        count = cores * _TRIES_A_CORE
    tried = _run(session, session.range(0, count, 1, count), TryJob(dict(links)), TRIED_SCHEMA)
    seen = set()
    for row in tried.to_pylist():
        line = (row["executor"], row["link"], row["error"])
        if line[:2] not in seen:
            seen.add(line[:2])
            yield line


def _run(session: SparkSession, frame: DataFrame, job: Job, schema: str) -> pa.Table:
    with contextlib.ExitStack() as stack:
        stack.enter_context(watched(session))
        return frame.mapInArrow(task_of(job), schema).toArrow()
