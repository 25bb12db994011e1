"""One batch of a stream: read, fold, publish, commit.

Here: what is done for a range once its intent is committed, and everything the commit changes. Not here: which range
(`replica`), the rules (`domain.tracking`), the writing and its repair (`adapters.copying`).
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.copying.copier import CopyPlan, Parked, Receipt
from sr_assets.adapters.spark.session import spark_error
from sr_assets.adapters.spark.sink import await_writers
from sr_assets.adapters.spark.source import FORMAT, encode_extractor
from sr_assets.adapters.state.store import gap_row
from sr_assets.domain.blindness import NO_BLIND_SPANS
from sr_assets.domain.errors import RunError, TransientError
from sr_assets.domain.positions import SequenceRange, merge_ranges, missing
from sr_assets.domain.tracking import NO_SENDER, NODE_COLUMNS, Reason, untracked
from sr_assets.stages.replication.target import prepare_target
from sr_assets.stages.source.position import advance
from sr_assets.stages.source.reading import gap_rows, read_with_spark, reads_direct
from sr_assets.stages.tracking.fold import FOLDED_SCHEMA, fold_batch
from sr_assets.stages.tracking.node_snapshots import staging_folder
from sr_assets.stages.tracking.node_state import add_transitions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from sr_assets.adapters.nats.cluster import StreamInfo
    from sr_assets.adapters.state.store import Intent, StreamState
    from sr_assets.settings import StreamSettings
    from sr_assets.stages.site import Site, StreamReport

_COPIED = frozenset({Reason.NEW, Reason.FORCED, Reason.SIZE, Reason.INTERVAL, Reason.NO_SENDER, Reason.ALL})


class Batch:
    """One batch, from its intent to its commit; done again after a crash with the very same intent."""

    def __init__(
        self, site: Site, stream: StreamSettings, source: StreamInfo, state: StreamState, intent: Intent
    ) -> None:
        self._site, self._stream, self._source, self._state, self._intent = site, stream, source, state, intent
        self._covered = SequenceRange(intent.first, intent.next)
        self._present = SequenceRange(intent.available, intent.next)
        # Not the intent's: a writer that outlived the run which began this batch must not go on beside ours.
        self._attempt = uuid.uuid4().hex
        self._writers = (site.folder / "writers" / stream.asset_prefix[1]).resolve()
        self._receipt_file: Path = self._writers / "receipt.json"

    def run(self, report: StreamReport) -> int:
        """Read, decide, publish and commit; returns the number of messages."""
        # From here on, whatever an earlier run left running may not write any more.
        self._writers.mkdir(parents=True, exist_ok=True)
        batch_file = self._writers / "batch"
        draft = batch_file.with_name(".batch")
        draft.write_text(self._attempt)
        draft.replace(batch_file)
        # To join the session interrupts it; what cannot be interrupted sees that its batch was given up.
        self._site.spark()
        await_writers(self._writers)
        if self._intent.resend:
            return self._run_resend(report)
        return self._run_tracked(report) if self._stream.tracked else self._run_plain(report)

    def _run_resend(self, report: StreamReport) -> int:
        """Send again what the target has lost; what the source does not have any more either is a gap."""
        resends = self._site.state.copy_log(self._stream.stream).resends(until=self._intent.next)
        sequences = [sequence for one in resends for sequence in range(one.covered.first, one.covered.next)]
        receipt = self._write(lambda spark: spark.createDataFrame(pa.table({"sequence": sequences})).coalesce(1))
        stood = {sequence for one in resends if one.stood for sequence in range(one.covered.first, one.covered.next)}
        lost = [SequenceRange(one, one + 1) for first, after in receipt.missing for one in range(first, after)]
        now_ns = self._site.now_ns()
        merged = merge_ranges(one for one in lost if one.first in stood)
        gaps = [gap_row(self._stream.stream, one, len(one), "lost", now_ns) for one in merged]
        self._commit_resend(receipt, gaps, [parked for parked in receipt.parked if parked.sequence in stood])
        report.resent += receipt.copied - receipt.found
        report.gap_messages += sum(gap["messages"] for gap in gaps)
        return len(sequences)

    def _run_plain(self, report: StreamReport) -> int:
        """Copy everything in the range: nothing to decide, so it is read once, by the writers."""
        receipt = Receipt()
        if len(self._present):
            present, workers = self._present, self._stream.workers
            receipt = self._write(
                lambda spark: spark.range(present.first, present.next, 1, workers).withColumnRenamed("id", "sequence")
            )
        absent = [SequenceRange(first, after) for first, after in receipt.missing]
        seen = len(self._present) - sum(map(len, absent))
        decided = seen - receipt.too_old
        reasons = {Reason.ALL.value: decided, Reason.TOO_OLD.value: receipt.too_old}
        self._commit(
            report,
            receipt,
            absent,
            reasons,
            receipt.last_stored_ns,
            pa.table({"sender": []}),
            FOLDED_SCHEMA.empty_table(),
        )
        return seen

    def _run_tracked(self, report: StreamReport) -> int:
        """Read who was seen, fold per sender, copy what is due."""
        sightings = self._read_sightings()
        reach(Point.READ)
        folded = self._fold(sightings)
        decisions = self._decisions(sightings, folded)
        due = decisions.filter(pc.is_in(decisions["reason"], pa.array([reason.value for reason in _COPIED])))
        receipt = self._write(lambda spark: self._copies(spark, due)) if due.num_rows else Receipt()
        absent = missing(self._present, sightings["sequence"].to_pylist())
        gone = [SequenceRange(first, after) for first, after in receipt.missing]
        reasons = {row["values"]: row["counts"] for row in pc.value_counts(decisions["reason"]).to_pylist()}
        last_ns = sightings["stored_ns"][-1].as_py() if sightings.num_rows else None
        self._commit(report, receipt, merge_ranges([*absent, *gone]), reasons, last_ns, sightings, folded)
        return sightings.num_rows

    def _read_sightings(self) -> pa.Table:
        """Return one row per message in sequence order: sequence, stored_ns, sender, payload_bytes, forced."""
        if not len(self._present):
            return pa.table(
                {"sequence": pa.array([], pa.int64()), "stored_ns": [], "sender": [], "payload_bytes": [], "forced": []}
            )
        stream = self._stream
        assert stream.extractor is not None  # a tracked stream has one: settings see to it
        inspect = encode_extractor(stream.extractor, stream.force_path)
        return read_with_spark(self._site, stream, self._source, self._present, inspect=inspect)

    def _fold(self, sightings: pa.Table) -> pa.Table:
        policy = self._stream.policy
        assert policy is not None
        rows = self._site.state.fold_input(self._stream.stream, sightings)
        try:
            return fold_batch(self._site.spark, rows, policy, self._intent.cutoff_ns, NO_BLIND_SPANS)
        except Exception as error:
            raise spark_error(error) from error

    def _decisions(self, sightings: pa.Table, folded: pa.Table) -> pa.Table:
        """Return one row per message: sequence, node (null when there is no sender), reason."""
        decided = folded.filter(pc.is_valid(folded["reason"]))
        tracked = pa.table({"sequence": decided["decided"], "node": decided["sender"], "reason": decided["reason"]})
        strangers = sightings.filter(pc.is_null(sightings["sender"]))
        reasons = [
            untracked(ns, self._intent.cutoff_ns, NO_SENDER).reason.value for ns in strangers["stored_ns"].to_pylist()
        ]
        nodes = pa.nulls(strangers.num_rows, pa.string())
        others = pa.table({"sequence": strangers["sequence"], "node": nodes, "reason": pa.array(reasons, pa.string())})
        return pa.concat_tables([tracked, others.cast(tracked.schema)])

    def _copies(self, spark: SparkSession, due: pa.Table) -> DataFrame:
        """Return the rows for the writers, spread so that each keeps what `order` promises."""
        frame = spark.createDataFrame(due.select(["sequence", "node"]).sort_by("sequence"))
        workers = self._stream.workers
        if workers == 1:
            return frame.coalesce(1)
        return frame.repartition(workers, "node") if self._stream.order == "sender" else frame.repartition(workers)

    def _write(self, rows: Callable[[SparkSession], DataFrame]) -> Receipt:
        """Let Spark's writers copy what the rows name; returns their receipt.

        Raises RunError when the target refuses: the intent stays open.
        """
        stream, intent = self._stream, self._intent
        target = prepare_target(stream, self._source, self._site.cluster(stream.target))
        if target.created_ns != intent.target_created_ns:
            raise TransientError(f"target stream {stream.target_stream} was made again while a batch was under way")
        plan = CopyPlan(
            connection=self._site.connection_file(stream.target),
            stream=stream.target_stream,
            subjects=target.subjects,
            source_connection=self._site.connection_file(stream.source),
            source_stream=stream.stream,
            direct=reads_direct(self._source),
            filter=stream.filter_subject,
            replicator=stream.replicator,
            name=stream.name,
            created_ns=intent.created_ns,
            resend=self._state.starts,
            prefix=stream.prefix,
            remove=stream.remove,
            first=intent.first,
            next=intent.next,
            since=intent.target_sequence,
            # A tracked stream's messages were weighed by the fold: what is too old is not among the rows.
            cutoff_ns=None if stream.tracked or intent.resend else intent.cutoff_ns,
            on_poison=stream.on_poison,
            folder=str(self._writers),
            batch=self._attempt,
            receipt=str(self._receipt_file),
            staging=str(staging_folder(self._site, stream, self._covered))
            if stream.tracked and not intent.resend
            else None,
        )
        self._receipt_file.unlink(missing_ok=True)
        try:
            rows(self._site.spark()).write.format(FORMAT).mode("append").options(**plan.encode()).save()
        except Exception as error:
            raise spark_error(error) from error
        receipt = Receipt.read(self._receipt_file)
        reach(Point.PUBLISHED)
        if receipt.failure:
            raise RunError(receipt.failure)
        return receipt

    def _commit(
        self,
        report: StreamReport,
        receipt: Receipt,
        absent: list[SequenceRange],
        reasons: dict[str, int],
        last_stored_ns: int | None,
        sightings: pa.Table,
        folded: pa.Table,
    ) -> None:
        """Commit everything the batch changed, in one transaction, with the position that says so."""
        site, stream, state, intent = self._site, self._stream, self._state, self._intent
        late = 0
        if stream.tracked and state.watermark_ns is not None and sightings.num_rows:
            late = pc.sum(pc.less(sightings["stored_ns"], state.watermark_ns)).as_py() or 0
        lost = sum(after - first for first, after in receipt.missing) if stream.tracked else 0
        gaps = gap_rows(site, stream, self._source, self._covered, self._present.first, absent)
        state.created_ns = intent.created_ns
        state.next_sequence = intent.next
        state.seen_messages += sum(reasons.values()) - lost
        state.copied_messages += receipt.copied
        state.copied_bytes += receipt.copied_bytes
        state.skipped_messages += reasons.get(Reason.SAMPLED.value, 0)
        state.too_old_messages += reasons.get(Reason.TOO_OLD.value, 0)
        state.no_sender_messages += reasons.get(Reason.NO_SENDER.value, 0)
        state.parked_messages += len(receipt.parked)
        state.gap_messages += sum(gap["messages"] for gap in gaps)
        state.late_sightings += late
        if last_stored_ns is not None:
            state.last_stored_ns = max(last_stored_ns, state.last_stored_ns or 0)
        self._note_places(receipt)
        advance(stream, state, self._source, level=intent.next > self._source.last_sequence)
        # What a transition calls late is measured from the info that planned the batch, also when it is done again.
        state.planned_ns = intent.planned_ns
        state.as_of_ns = site.now_ns()
        with site.state.transaction():
            site.state.save_stream(state)
            site.state.copy_log(stream.stream).add(receipt.copied_ranges, site.now_ns())
            self._commit_nodes(folded, report)
            self._commit_rows("gaps", gaps)
            self._commit_rows("parked", [self._parked_row(parked) for parked in receipt.parked])
            if stream.tracked:
                site.state.stage(stream.stream, intent.first, intent.next)
            site.state.clear_intent(stream.stream)
            reach(Point.COMMITTING)
        reach(Point.COMMITTED)
        site.changed()
        self._report(report, receipt, reasons, gaps)

    def _commit_resend(self, receipt: Receipt, gaps: list[dict[str, Any]], parked: list[Parked]) -> None:
        """Commit what was sent again: no position moves, and nothing is counted a second time."""
        site, stream, state = self._site, self._stream, self._state
        self._note_places(receipt)
        state.gap_messages += sum(gap["messages"] for gap in gaps)
        state.as_of_ns = site.now_ns()
        copy_log = site.state.copy_log(stream.stream)
        with site.state.transaction():
            site.state.save_stream(state)
            copy_log.add(receipt.copied_ranges, site.now_ns())
            copy_log.settle_resends(self._intent.next)
            self._commit_rows("gaps", gaps)
            self._commit_rows("parked", [self._parked_row(one) for one in parked])
            site.state.clear_intent(stream.stream, resend=True)
            waiting = site.state.open_intent(stream.stream)
            if waiting is not None and waiting.waits:
                since = max(waiting.target_sequence, receipt.target_sequence)
                more = bool(copy_log.resends(1))
                site.state.save_intent(replace(waiting, target_sequence=since, waits=more))
        site.changed()

    def _note_places(self, receipt: Receipt) -> None:
        """Remember the last copy and where it stands."""
        if receipt.target_sequence:
            self._state.target_sequence, self._state.target_holds = receipt.target_sequence, receipt.target_holds
            self._state.target_created_ns = self._intent.target_created_ns

    def _commit_nodes(self, folded: pa.Table, report: StreamReport) -> None:
        if not folded.num_rows:
            return
        states = folded.filter(pc.is_valid(folded["seen_ns"])).select(["sender", *NODE_COLUMNS, "deadline_ns"])
        self._site.state.merge_nodes(self._stream.stream, states.rename_columns(["node", *NODE_COLUMNS, "deadline_ns"]))
        add_transitions(self._site, self._stream, self._state, folded, report)

    def _commit_rows(self, table: str, rows: list[dict[str, Any]]) -> None:
        if rows:
            self._site.state.add_rows(table, pa.Table.from_pylist(rows))

    def _parked_row(self, parked: Parked) -> dict[str, Any]:
        fields = ("sequence", "stored_ns", "subject", "payload_bytes", "reason")
        row = {field: getattr(parked, field) for field in fields}
        return {"stream": self._stream.stream, **row, "parked_ns": self._site.now_ns()}

    def _report(
        self, report: StreamReport, receipt: Receipt, reasons: dict[str, int], gaps: list[dict[str, Any]]
    ) -> None:
        report.state = self._state
        report.first = self._intent.first if report.first is None else report.first
        report.next = self._intent.next
        report.batches += 1
        report.reasons.update(reasons)
        report.copied += receipt.copied
        report.copied_bytes += receipt.copied_bytes
        report.found += receipt.found
        report.parked += len(receipt.parked)
        report.disordered += receipt.disordered
        report.gap_messages += sum(gap["messages"] for gap in gaps if gap["reason"] != "filtered")
        report.lag_messages = self._state.lag_messages
