"""The Spark sink `jetstream`: references to source messages become copies in a target, acknowledged, staged, accounted.

Payloads never pass through the JVM: a row contains a sequence, and the task fetches and publishes that message.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from sr_assets.adapters.copying.copier import write_copies
from sr_assets.adapters.copying.copy_plan import CopyPlan
from sr_assets.adapters.copying.receipt import Receipt
from sr_assets.domain.errors import RunError, cannot_write


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

        rows, context = nodes_by_sequence(iterator), TaskContext.get()
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


def nodes_by_sequence(batches: Iterator[pa.RecordBatch]) -> dict[int, str | None]:
    """Return a task's rows as one writer needs them: source sequence → node."""
    rows: dict[int, str | None] = {}
    for batch in batches:
        nodes = batch.column("node").to_pylist() if "node" in batch.schema.names else itertools.repeat(None)
        rows.update(zip(batch.column("sequence").to_pylist(), nodes, strict=False))
    return rows
