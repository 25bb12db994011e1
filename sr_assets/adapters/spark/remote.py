"""The jobs of a cluster's executors, and the driver's side of them: their input, and the results in their rows.

A job contains its connections and returns all results as rows. It leaves no data on the machine, and needs only Python
with pyspark, pyarrow, numpy and orjson there.

A range's rows, and a batch's receipts and staged files, return as a job's rows: exactly one attempt's per task.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import DataFrame, SparkSession

from sr_assets.adapters import times
from sr_assets.adapters.connection_file import PackedConnection, open_connection, pack_connection, unpacked
from sr_assets.adapters.copying.copy_plan import CopyPlan
from sr_assets.adapters.copying.fence import WritePermit
from sr_assets.adapters.copying.receipt import Receipt
from sr_assets.adapters.spark import schemas
from sr_assets.adapters.spark.data_source import JetStreamReader, RangePartition, schema_of
from sr_assets.adapters.spark.remote_session import count_cores, watched
from sr_assets.adapters.spark.schemas import arrow_schema
from sr_assets.adapters.spark.shipping import Job, task_of
from sr_assets.adapters.wire import WireError
from sr_assets.domain.errors import RunError, SrAssetsError
from sr_assets.domain.subjects import printable

if TYPE_CHECKING:
    import pyarrow as pa


#: One row of a writer's result: a piece of the file `name`, or its receipt if `name` is RECEIPT.
COPIED_SCHEMA: Final = "part long, name string, content binary"
#: One row for each link that an executor tested; `error` is null for success.
TRIED_SCHEMA: Final = "executor string, link string, error string"
RECEIPT: Final = "receipt"
_PIECE_BYTES: Final = 1 << 20
#: All files of a batch, which has at most about 640 MiB of payloads; what exceeds it comes from no writer.
_MOST_BYTES: Final = 4 << 30
_MODULES: Final = ("pyarrow", "numpy", "orjson")
#: Minimum duration of a probing task, so that the next one goes to another executor.
_STAY_SECONDS: Final = 1.0
#: Tasks per core that test every link, so that each executor gets one.
_TRIES_A_CORE = 2


@dataclass(frozen=True, slots=True)
class ReadJob:
    """Reads the ranges whose numbers are a task's rows, with the options of the data source."""

    options: dict[str, str]
    partitions: tuple[RangePartition, ...]
    connection: PackedConnection

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the messages' rows."""
        from sr_assets.adapters.spark.data_source import JetStreamReader

        with _named(), unpacked(self.connection) as file:
            reader = JetStreamReader({**self.options, "connection": file})
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    yield from reader.read(self.partitions[number])


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Copies the messages in a task's rows, behind the fence of its plan; yields COPIED_SCHEMA."""

    plan: CopyPlan
    source: PackedConnection
    target: PackedConnection

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the receipt, and the staged files in pieces."""
        from pyspark import TaskContext

        from sr_assets.adapters.copying.copier import write_copies
        from sr_assets.adapters.spark.sink import nodes_by_sequence

        rows, context = nodes_by_sequence(batches), TaskContext.get()
        part = context.partitionId() if context else 0
        if not rows:
            return
        with (
            tempfile.TemporaryDirectory(prefix="sr-assets-") as folder,
            unpacked(self.source) as source,
            unpacked(self.target) as target,
        ):
            staging = Path(folder, "staged")
            plan = replace(
                self.plan,
                connection=target,
                source_connection=source,
                folder=folder,
                staging=str(staging) if self.plan.staging else None,
            )
            Path(folder, "batch").write_text(plan.batch)
            with _named(), WritePermit(plan, part):
                receipt = write_copies(plan, rows, part)
            yield _copied(part, RECEIPT, receipt.encode().encode())
            for file in sorted(staging.rglob("*.parquet")):
                with file.open("rb") as content:
                    for piece in iter(lambda: content.read(_PIECE_BYTES), b""):
                        yield _copied(part, str(file.relative_to(staging)), piece)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Name the executor in a connection error, because this machine may reach the same server."""
    try:
        yield
    except WireError as error:
        raise type(error)(f"executor on {socket.gethostname()}: {error}") from None


def _copied(part: int, name: str, content: bytes) -> pa.RecordBatch:
    return schemas.rows_of(COPIED_SCHEMA, ([part], [name], [content]))


def take_result(rows: pa.Table, staging: Path | None) -> Receipt:
    """Add up the receipts in COPIED_SCHEMA, and write the files there, each completely or not at all.

    Raises RunError for a file that no writer names so, or for a second one of a part and a date: an executor is not
    trusted with this machine's disk.
    """
    if rows["content"].nbytes > _MOST_BYTES:
        raise RunError(
            f"the tasks of the cluster returned {rows['content'].nbytes} bytes of files; check the executors"
        )
    total = Receipt()
    drafts: dict[Path, Path] = {}
    columns = (rows[name].to_pylist() for name in ("part", "name", "content"))
    written: set[object] = set()
    for (part, name), pieces in itertools.groupby(zip(*columns, strict=True), key=lambda row: row[:2]):
        if (part, name) in written or not (name == RECEIPT or name in _staged_names(part, name or "")):
            raise RunError(
                f"a task of the cluster returned the file {printable(name or '')[:100]!r}; check the executors"
            )
        written.add((part, name))
        if name == RECEIPT:
            for _, _, content in pieces:
                total.add(Receipt.decode(content))
        elif staging is not None:
            file = staging / name
            file.parent.mkdir(parents=True, exist_ok=True)
            drafts[file] = file.with_name(f".{file.name}")
            with drafts[file].open("wb") as output:
                output.writelines(content for _, _, content in pieces)
    for file, draft in drafts.items():
        draft.replace(file)
    return total


def _staged_names(part: int, name: str) -> set[str]:
    """Return the only name that a part's file may have, if `name` names a date."""
    try:
        return {f"date={date.fromisoformat(name[5:15])}/{part}.parquet"}
    except ValueError:
        return set()


@dataclass(frozen=True, slots=True)
class TryJob:
    """Tests whether an executor has the modules of a task and reaches each server; yields TRIED_SCHEMA."""

    links: Mapping[str, PackedConnection]

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield a row for each link, and one without a link name for the modules."""
        began = times.monotonic()
        for _ in batches:
            tried = [("", _missing_modules()), *((label, _try_link(link)) for label, link in self.links.items())]
            executor = f"{socket.gethostname()} ({Path.cwd().name}, pid {os.getppid()})"
            columns = ([executor] * len(tried), *zip(*tried, strict=True))
            yield schemas.rows_of(TRIED_SCHEMA, columns)
        if self.links:
            times.sleep(max(0.0, began + _STAY_SECONDS - times.monotonic()))


def _missing_modules() -> str | None:
    """Return one line about a module that a worker's Python lacks."""
    import importlib

    for module in _MODULES:
        try:
            importlib.import_module(module)
        except ImportError as error:
            return (
                f"its Python {platform.python_version()} ({sys.executable}) lacks {module} ({error}); install it there"
            )
    return None


def _try_link(link: PackedConnection) -> str | None:
    try:
        with unpacked(link) as file, open_connection(file, "sr-assets check"):
            return None
    except SrAssetsError as error:
        return str(error)


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
