"""The driver's side of cluster jobs: their input, and the results in their rows.

A range's rows, and a batch's receipts and staged files, return as a job's rows: exactly one attempt's per task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, SparkSession

from sr_assets.adapters.connection_file import PackedConnection, pack_connection
from sr_assets.adapters.copying.plan import CopyPlan
from sr_assets.adapters.copying.receipt import Receipt
from sr_assets.adapters.spark.cluster import count_cores, watched
from sr_assets.adapters.spark.jobs import COPIED_SCHEMA, TRIED_SCHEMA, CopyJob, ReadJob, TryJob, take_result
from sr_assets.adapters.spark.schemas import arrow_schema
from sr_assets.adapters.spark.shipping import task_of
from sr_assets.adapters.spark.source import JetStreamReader, schema_of

if TYPE_CHECKING:
    import pyarrow as pa

from sr_assets.adapters.spark.shipping import Job

#: Tasks per core that test every link, so that each executor gets one.
_TRIES_A_CORE = 2


def read_remotely(session: SparkSession, options: Mapping[str, str]) -> pa.Table:
    """Read a range on the cluster, with the options and rows of a Spark read."""
    partitions, schema = tuple(JetStreamReader(options).partitions()), schema_of(options)
    job = ReadJob(dict(options), partitions, pack_connection(options["connection"]))
    rows = _run(session, session.range(0, len(partitions), 1, len(partitions)), job, schema)
    return rows.cast(arrow_schema(schema))


def copy_remotely(session: SparkSession, frame: DataFrame, plan: CopyPlan) -> Receipt:
    """Copy the messages in `rows` on the cluster; the staged files are written to the plan's folder here."""
    # The lease is a file of this machine; on a cluster, the fence decides.
    job = CopyJob(replace(plan, leases=()), pack_connection(plan.source_connection), pack_connection(plan.connection))
    rows = _run(session, frame, job, COPIED_SCHEMA)
    return take_result(rows, Path(plan.staging) if plan.staging else None)


def try_remotely(session: SparkSession, links: Mapping[str, PackedConnection]) -> Iterator[tuple[str, str, str | None]]:
    """Test links from each executor; yield executor, link and error (None for success)."""
    count = 1
    if links:
        count = count_cores(session) * _TRIES_A_CORE
    tried = _run(session, session.range(0, count, 1, count), TryJob(dict(links)), TRIED_SCHEMA)
    seen = set()
    for row in tried.to_pylist():
        line = (row["executor"], row["link"], row["error"])
        if line[:2] not in seen:
            seen.add(line[:2])
            yield line


def _run(session: SparkSession, frame: DataFrame, job: Job, schema: str) -> pa.Table:
    with watched(session):
        return frame.mapInArrow(task_of(job), schema).toArrow()
