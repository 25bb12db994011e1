"""The writers of one batch of copies, in Spark or in this process, and their plans."""

from __future__ import annotations

import shutil
import uuid
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.copying.plan import CopyPlan
from sr_assets.adapters.copying.receipt import Receipt
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.spark.remote import copy_remotely
from sr_assets.adapters.spark.sink import await_writers, write_copies, writers_at_work
from sr_assets.adapters.spark.source import FORMAT
from sr_assets.adapters.state.records import Intent, StreamState
from sr_assets.domain.errors import RunError, TransientError
from sr_assets.domain.positions import SequenceRange, missing
from sr_assets.stages.replication.by_lane import refuse_omitted
from sr_assets.stages.replication.fencing import fenced, settle_fence
from sr_assets.stages.source.reading import average_bytes
from sr_assets.stages.tracking.node_snapshots import staging_folder

if TYPE_CHECKING:
    from sr_assets.stages.replication.context import CopyContext


class Writers:
    """The writers of one attempt at a batch, or at the part of it that `covered` names.

    `mark` is the `source_mark` of their staged files.
    """

    def __init__(
        self,
        context: CopyContext,
        source: StreamInfo,
        state: StreamState,
        intent: Intent,
        target: StreamInfo,
        mark: str,
        covered: SequenceRange | None = None,
    ) -> None:
        self._covered = covered or SequenceRange(intent.first, intent.next)
        self._context, self._source, self._state = context, source, state
        self._stream, self._intent, self._target, self._mark = context.stream, intent, target, mark
        decided = intent.folded or intent.resend
        self._lanes = () if decided else context.store.partitions(context.stream.stream).at(intent.first)
        # Without lanes, a plain range has one writer.
        alone = (context.stream.writers if decided else context.stream.workers) == 1
        self._batches = context.stream.allow_batched == "auto" and alone and not context.clusters.leadership.is_new
        # Not the intent's id: a writer that outlived the run of this batch must not continue next to ours.
        self._attempt = uuid.uuid4().hex

    def take_over(self) -> None:
        """End the writers of an earlier attempt: tasks of an earlier run may no longer write."""
        writers = self._context.writers
        writers.mkdir(parents=True, exist_ok=True)
        batch_file = writers / "batch"
        draft = batch_file.with_name(".batch")
        draft.write_text(self._attempt)
        draft.replace(batch_file)
        if writers_at_work(writers):
            # Joining the session interrupts them; an uninterruptible task notices that another batch has started.
            self._context.spark.session()
            await_writers(writers)
        settle_fence(writers, self._context.clusters.connect(self._stream.target))

    def write(self, rows: pa.Table | SequenceRange) -> Receipt:
        """Copy the messages in `rows` (sequence, for a tracked stream also node): many in Spark, a few in this process.

        Raises RunError if the target refuses, or a message belongs to no partition.
        """
        context, stream, target = self._context, self._stream, self._target
        if target.created_ns != self._intent.target_created_ns:
            raise TransientError(f"target stream {stream.target_stream} was recreated during a batch")
        receipt_file = context.writers / "receipt.json"
        # A message that ends its process must not end Spark's, which tells nothing about it.
        alone = self._intent.part == 1 and not context.spark.remote
        in_spark = not alone and context.spark.needed(len(rows), len(rows) * average_bytes(self._source))
        by_lane = in_spark and len(self._lanes) > 1 and isinstance(rows, SequenceRange)
        plan = self._plan(str(receipt_file), by_lane=by_lane)
        if context.spark.remote:
            cluster = context.clusters.connect(stream.target)
            with context.spark.use() as session, fenced(plan, context.writers, cluster, stream.writers) as behind:
                receipt = copy_remotely(session, self._spread(session, rows), behind)
        elif in_spark:
            receipt_file.unlink(missing_ok=True)
            with context.spark.use() as session:
                self._spread(session, rows).write.format(FORMAT).mode("append").options(**plan.encode()).save()
            receipt = Receipt.read(receipt_file)
        else:
            receipt = write_copies(plan, _nodes_by_sequence(rows))
        reach(Point.PUBLISHED)
        if receipt.failure:
            raise RunError(receipt.failure)
        if plan.by_lane and isinstance(rows, SequenceRange):
            self._complete(receipt, rows)
        return receipt

    def _complete(self, receipt: Receipt, present: SequenceRange) -> None:
        """Fill in the range's messages that no lane has read: the source has lost them, or they belong to no lane.

        An earlier attempt may have copied some before they were lost.
        """
        held = sorted(sequence for first, after in receipt.held for sequence in range(first, after))
        absent = missing(present, held)
        receipt.held = []
        if not absent:
            return
        refuse_omitted(self._stream, self._context.clusters.connect(self._stream.source), present, absent)
        if self._target.last_sequence > self._intent.target_sequence or self._intent.adopted_next:
            sequences = [sequence for hole in absent for sequence in range(hole.first, hole.next)]
            made = self.settle(pa.table({"sequence": sequences}))
            receipt.copied, receipt.copied_bytes = (
                receipt.copied + made.copied,
                receipt.copied_bytes + made.copied_bytes,
            )
            receipt.found += made.found
            receipt.missing = made.missing
        else:
            receipt.missing = [(hole.first, hole.next) for hole in absent]

    def settle(self, rows: pa.Table | SequenceRange, *, staged: bool = True) -> Receipt:
        """Account for the copies of `rows` that an earlier attempt has made; make no others."""
        return write_copies(self._plan("", staged=staged), _nodes_by_sequence(rows), made=True)

    def _spread(self, spark: SparkSession, rows: pa.Table | SequenceRange) -> DataFrame:
        """Return the rows for Spark's writers, partitioned to keep the configured `order`."""
        if isinstance(rows, SequenceRange):
            lanes, tasks = len(self._lanes), self._stream.workers
            if lanes > 1:
                rows, tasks = SequenceRange(0, lanes), min(lanes, self._context.spark.cores())
            return spark.range(rows.first, rows.next, 1, tasks).withColumnRenamed("id", "sequence")
        workers = self._stream.writers
        frame = spark.createDataFrame(rows)
        if workers == 1 or self._intent.resend:
            return frame.coalesce(1)
        return frame.repartition(workers, "node") if self._stream.order == "sender" else frame.repartition(workers)

    def _plan(self, receipt_file: str, *, by_lane: bool = False, staged: bool = True) -> CopyPlan:
        """Return the plan of the writers, and delete the staged files of an earlier attempt."""
        context, stream, intent, state = self._context, self._stream, self._intent, self._state
        # The message that proves the source unchanged: the last one read for decided messages, else the source's last
        # one when the batch was planned.
        decided = (intent.folded or intent.resend) and state.mark_sequence is not None
        covered = self._covered
        staging = staging_folder(context.folder, stream, covered, self._mark)
        if stream.tracked and not intent.resend:
            # It may have had more writers, each with its own file.
            shutil.rmtree(staging, ignore_errors=True)
        return CopyPlan(
            connection=context.files.path(stream.target),
            stream=self._target.stream,
            subjects=self._target.subjects,
            source_connection=context.files.path(stream.source),
            source_stream=stream.stream,
            direct=self._source.supports_batched_direct_get,
            filter=None if intent.folded else stream.filter_subject,
            replicator=stream.replicator,
            name=stream.name,
            created_ns=intent.created_ns,
            resend=intent.starts,
            source_sequence=state.mark_sequence if decided else intent.source_sequence,
            source_ns=state.mark_ns if decided else intent.source_ns,
            prefix=stream.prefix,
            remove=stream.remove,
            first=covered.first,
            next=covered.next,
            whole=intent.whole,
            since=intent.target_sequence,
            adopted=(intent.adopted_first, intent.adopted_next),
            # The fold has decided on a tracked stream's messages, so none of the rows is too old.
            cutoff_ns=None if intent.folded or intent.resend else intent.cutoff_ns,
            on_poison=stream.on_poison,
            # Several writers would find each other's messages between theirs.
            batched=self._batches and not by_lane,
            lanes=self._lanes,
            by_lane=by_lane,
            folder=str(context.writers),
            batch=self._attempt,
            receipt=receipt_file,
            staging=str(staging) if staged and stream.tracked and not intent.resend else None,
            metadata_bytes=stream.max_metadata,
            leases=tuple(map(str, context.clusters.leadership.lease_folders)),
            vanished_ms=context.clusters.leadership.vanished_ms,
        )


def _nodes_by_sequence(rows: pa.Table | SequenceRange) -> dict[int, str | None]:
    """Return the rows as one writer needs them: source sequence → node."""
    if isinstance(rows, SequenceRange):
        return dict.fromkeys(range(rows.first, rows.next))
    nodes = rows["node"].to_pylist() if "node" in rows.column_names else [None] * len(rows)
    return dict(zip(rows["sequence"].to_pylist(), nodes, strict=True))
