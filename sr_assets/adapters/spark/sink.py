"""The Spark sink `jetstream`: references to source messages become copies in a target, acknowledged, staged, accounted.

Payloads never pass through the JVM: a row contains a sequence, and the task fetches and publishes that message.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from sr_assets.adapters.copying.copier import Copier
from sr_assets.adapters.copying.copy_plan import CopyPlan
from sr_assets.adapters.copying.receipt import Receipt
from sr_assets.adapters.garbage import gc_paused
from sr_assets.adapters.locking import lock
from sr_assets.domain.errors import RunError, cannot_write

_LOCK_SECONDS: Final = 60.0
_LANES_AT_ONCE: Final = 16


@dataclass
class ReceiptMessage(WriterCommitMessage):
    """A task's receipt on its way to the driver."""

    receipt: Receipt


class JetStreamWriter(DataSourceArrowWriter):
    """Copies the messages in its rows; one task is one writer, in source order.

    Rows: `sequence` (long), and with `staging` `node` (string, null for untracked senders). Option: `plan`, an encoded
    `CopyPlan`.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._plan = CopyPlan.decode(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> ReceiptMessage:
        """Copy one partition's messages and return its receipt.

        Raises WireError if a connection is lost, RunError if rows cannot be staged; Spark then retries the task.
        """
        from pyspark import TaskContext

        rows, context = rows_of(iterator), TaskContext.get()
        return ReceiptMessage(write_copies(self._plan, rows, context.partitionId() if context else 0))

    def commit(self, messages: list[ReceiptMessage | None]) -> None:  # type: ignore[override]
        """Write the receipt of all tasks, atomically."""
        total = Receipt()
        for message in messages:
            if message is not None:
                total.add(message.receipt)
        try:
            total.write(Path(self._plan.receipt))
        except OSError as error:
            raise RunError(cannot_write(self._plan.receipt, error)) from None


def rows_of(batches: Iterator[pa.RecordBatch]) -> dict[int, str | None]:
    """Return a task's rows as one writer needs them: source sequence → node."""
    rows: dict[int, str | None] = {}
    for batch in batches:
        nodes = batch.column("node").to_pylist() if "node" in batch.schema.names else itertools.repeat(None)
        rows.update(zip(batch.column("sequence").to_pylist(), nodes, strict=False))
    return rows


def write_copies(plan: CopyPlan, rows: Mapping[int, str | None], partition: int = 0, *, made: bool = False) -> Receipt:
    """Copy the messages in `rows` (source sequence → node) as one writer: in a task, or in the run itself.

    With `by_lane` of the plan, `rows` are lanes, each with a writer of its own.

    `made`: only account for the copies of an earlier attempt. Raises WireError if a connection is lost, RunError if
    rows cannot be staged.
    """
    if not rows:
        return Receipt()
    if not plan.by_lane:
        return _write(plan, rows, partition, made=made)
    total = Receipt()
    # A task gets several lanes if they outnumber the cores; each active one has two connections.
    with ThreadPoolExecutor(min(len(rows), _LANES_AT_ONCE)) as pool:
        for receipt in pool.map(lambda lane: _write(replace(plan, filter=plan.lanes[lane]), None, lane), sorted(rows)):
            total.add(receipt)
    return total


def _write(plan: CopyPlan, rows: Mapping[int, str | None] | None, partition: int, *, made: bool = False) -> Receipt:
    with _writer_lock(Path(plan.folder) / f"writer-{partition}.lock"), gc_paused():
        try:
            copier = Copier(plan, rows, partition)
            return copier.settle() if made else copier.run()
        except OSError as error:
            # About a staged file or our own files; a connection has its own error.
            raise RunError(cannot_write(plan.staging or plan.folder, error)) from None


def writers_at_work(folder: Path) -> bool:
    """Return whether an earlier writer is active in a stream's folder."""
    for file in folder.glob("writer-*.lock"):
        with file.open("a") as handle:
            if not lock(handle):
                return True
    return False


def await_writers(folder: Path) -> None:
    """Wait until no earlier writer is active in a stream's folder; raises RunError after a minute."""
    for file in folder.glob("writer-*.lock"):
        with _writer_lock(file):
            pass


@contextlib.contextmanager
def _writer_lock(file: Path) -> Iterator[None]:
    """Hold a writer's lock, which the kernel releases at its holder's end; raises RunError after a minute."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+") as handle:
        if not lock(handle, _LOCK_SECONDS):
            raise RunError(f"an earlier writer still holds {file}; run `sr-assets spark stop`")
        yield
