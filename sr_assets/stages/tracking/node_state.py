"""Stage `node_state`: folding the fleet's messages per sender, and sweeping. It needs only the source.

One transaction commits a batch's node states, transitions, counters, gaps, due copies (the copy queue) and the new
position.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sr_assets.adapters import times
from sr_assets.adapters.arrow_rows import arrow_schema
from sr_assets.adapters.crash_points import Point, reach
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.progress_lines import LongWork
from sr_assets.adapters.published.actions import Origin, record_action
from sr_assets.adapters.range_rows import Sightings
from sr_assets.adapters.state.node_table import Nodes
from sr_assets.adapters.state.operator_requests import Answer, Request, answer_request, take_requests
from sr_assets.adapters.state.orders import request_checkpoint
from sr_assets.adapters.state.records import Intent, StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.adapters.state.stream_tables import Counter
from sr_assets.domain.advisories import event_id
from sr_assets.domain.blindness import CLOCK_AHEAD, BlindSpans, find_blind_spans
from sr_assets.domain.durations import duration
from sr_assets.domain.positions import SequenceRange, format_rfc3339_ns
from sr_assets.domain.senders import needs_payload
from sr_assets.domain.tracking.announcements import NodeEvent, NodeReport
from sr_assets.domain.tracking.columns import credible_times, deadlines, fold_batch, limits_of, sweep_nodes
from sr_assets.domain.tracking.rows import NODE_SCHEMA, folded_table, node_row, node_table, transition_row
from sr_assets.domain.tracking.rules import NODE_COLUMNS, NodeState, Policy, Status, retire, unretire
from sr_assets.settings import StreamSettings
from sr_assets.stages.clock import Clock
from sr_assets.stages.report import StreamReport
from sr_assets.stages.site import Site
from sr_assets.stages.source.fold_stage import FoldStage, ReadBatch
from sr_assets.stages.source.holes import Hole
from sr_assets.stages.source.position import advance, clock_warning, warn_of_blind_time
from sr_assets.stages.source.source_reading import next_range, save_gaps, too_old_before
from sr_assets.stages.tracking.announcing import decide_announcements
from sr_assets.stages.tracking.batch_rows import (
    add_transitions,
    amounts_of,
    batch_decisions,
    count_decisions,
    due_copies,
    reasons_of,
)

logger = logging.getLogger(__name__)
#: Number of nodes swept in one transaction.
SWEPT_AT_ONCE: Final = 20_000


def forget_old_nodes(nodes: Nodes, stream: StreamSettings, now_ns: int) -> int:
    """Delete a tracked stream's retired nodes beyond their retention, inside the caller's transaction.

    Return the highest transition counter among them, or 0.
    """
    blocks = stream.node_classes.blocks if stream.node_classes else ()
    kept_ns = {block.name: block.retired_retention_ns for block in blocks if block.retired_retention_ns is not None}
    highest = [nodes.forget_retired(now_ns - kept, of=name) for name, kept in kept_ns.items()]
    if stream.retired_retention_ns is not None:
        highest.append(nodes.forget_retired(now_ns - stream.retired_retention_ns, without=tuple(kept_ns)))
    if stream.purge_after_ns is not None:
        highest.append(nodes.purge_retired(now_ns - stream.purge_after_ns))
    return max(highest, default=0)


def follow_policy(store: SiteState, stream: StreamSettings, policy: Policy, state: StreamState) -> None:
    """Recompute every class and deadline if the policy's durations or the classes have changed."""
    classes = stream.node_classes
    text = f"{policy.interval_ns}/{policy.warning_ns}" + (f"/{classes.text}" if classes else "")
    if state.policy == text:
        return
    nodes = store.nodes(stream.stream)
    blind = BlindSpans(tuple(nodes.blind_spans()))
    known = nodes.table() if state.policy else NODE_SCHEMA.empty_table()
    names = pa.nulls(known.num_rows, pa.string())
    if classes is not None:
        before = zip(known["node"].to_pylist(), known["class"].to_pylist(), strict=True)
        names = pa.array([classes.classifier.reclassify(*each) for each in before], pa.string())
    limits = limits_of(policy, None if classes is None else classes.policies, names)
    deadline = deadlines(limits, blind, known["status"], known["seen_ns"].to_numpy())
    state.policy = text
    with store.transaction():
        store.save_stream(state)
        if known.num_rows:
            rest = known.drop(["deadline_ns", "class"])
            nodes.merge(rest.append_column("deadline_ns", deadline).append_column("class", names))


def apply_requests(
    store: SiteState, stream: StreamSettings, state: StreamState, report: StreamReport, folder: Path
) -> bool:
    """Apply the requests about a stream, each in one transaction with its answer; return whether there were any.

    An applied request has a row in `operator_actions`, however its command has ended. Call it after a step that reached the
    end of the source: an unread message would revive the node. `state` has the watermark of that step, `folder` is the site's.
    """
    requests = take_requests(folder, stream.stream)
    answered = store.answered_requests(stream.stream)
    for request in requests:
        answer = answered.find(request.id)
        if answer is None:
            with store.transaction():
                store.save_stream(state)
                answer = _apply(store, stream, state, report, request)
                answered.add(request.id, answer, open_ids=[each.id for each in requests])
            reach(Point.ANSWERING)
        if answer.done:
            _record(folder.parent.parent, request, answer)
        answer_request(folder, request, answer)
    return bool(requests)


def _record(home: Path, request: Request, answer: Answer) -> None:
    by = Origin(request.at, request.user, request.host) if request.at else None
    detail = "; ".join(filter(None, (answer.line, request.reason)))
    # A run that was killed before it answered may have recorded the action.
    row = record_action(home, request.action, request.node, detail, by=by, again=True)
    logger.info("%s: %s by %s on %s", request.node, request.action, row["user"], row["host"], extra=row)


def _apply(
    store: SiteState, stream: StreamSettings, state: StreamState, report: StreamReport, request: Request
) -> Answer:
    """Apply a request inside the caller's transaction."""
    nodes, node = store.nodes(stream.stream), request.node
    known = nodes.state(node)
    if known is None or state.watermark_ns is None:
        return Answer(False, f"{stream.label}: node {node!r} is unknown; `sr-assets nodes` lists the nodes")
    before, node_class = known
    policy = stream.policy_of(node_class)
    blind, now_ns = BlindSpans(tuple(nodes.blind_spans())), state.watermark_ns
    if request.action == "retire":
        if before.status is Status.RETIRED:
            return Answer(False, _already_retired(stream, node, before))
        after, transitions = retire(policy, before, now_ns, blind)
        rows = [transition_row(node, transition, node_class) for transition in transitions]
        nodes.merge(node_table([node_row(policy, node, after, blind, node_class)]))
        add_transitions(store, stream, state, folded_table(rows), report)
        return Answer(True, f"{stream.label}: retired {node}, which was {before.status}")
    if before.status is not Status.RETIRED:
        line = f"{stream.label}: node {node!r} is not retired but {before.status}; `sr-assets retire` retires it"
        return Answer(False, line)
    restored = unretire(policy, before, now_ns, blind)
    if restored is None:
        return Answer(False, _too_silent(stream, policy, node, before, now_ns))
    nodes.merge(node_table([node_row(policy, node, restored, blind, node_class)]))
    at_ns = restored.status_since_ns
    store.outbox(stream.stream).undo(node, restored.transition, at_ns)
    undone = NodeReport(NodeEvent.UNRETIRED, at_ns, None, restored.status is Status.UP)
    undone_id = event_id(stream.replicator, stream.name, stream.stream, node, undone.event, at_ns)
    publish = stream.advisory is not None and stream.announces(node_class)
    store.undecided(stream.stream).report([(undone_id, node, undone)], state.epoch_ns, now_ns, publish=publish)
    return Answer(True, f"{stream.label}: restored {node} as {restored.status}")


def _already_retired(stream: StreamSettings, node: str, state: NodeState) -> str:
    since = format_rfc3339_ns(state.status_since_ns)
    return f"{stream.label}: node {node!r} is already retired since {since}; `sr-assets unretire` undoes it"


def _too_silent(stream: StreamSettings, policy: Policy, node: str, state: NodeState, now_ns: int) -> str:
    silence, interval = duration((now_ns - state.seen_ns) / 1e9), duration(policy.interval_ns / 1e9)
    return (
        f"{stream.label}: node {node!r} stays retired: it has been silent for {silence}, longer than inspect_duration"
        f" ({interval}); its next message brings it back"
    )


class NodeStage(FoldStage):
    """The stage of one tracked stream in one run."""

    def __init__(self, stream: StreamSettings, site: Site, report: StreamReport) -> None:
        super().__init__(stream, site, report, "messages")
        self._site = site
        # settings require both of a tracked stream
        assert stream.policy is not None
        assert stream.extractor is not None
        self._stream, self._policy, self._cores = stream, stream.policy, site.spark.cores
        classifier = stream.node_classes.classifier if stream.node_classes else None
        self._sightings = Sightings(stream.extractor, stream.force_path, classifier.rules if classifier else None)
        self._payloads = needs_payload(stream.extractor, stream.force_path, classifier)
        self._left_open: Intent | None = None
        self._warned_of_limit = False
        self._folder = site.folder

    def _prepare(self, state: StreamState, *, first: bool) -> None:
        if first:
            follow_policy(self._store, self._stream, self._policy, state)
        # Sweep up to the committed watermark before reading again.
        self.sweep_due()

    def _plan(self, state: StreamState, source: StreamInfo, end: int) -> SequenceRange | None:
        # The open batch of a stream that was not tracked yet is folded first.
        intent = self._store.open_intent(self._stream.stream)
        self._left_open = intent if intent is not None and not intent.folded else None
        if self._left_open is not None:
            return SequenceRange(self._left_open.first, self._left_open.next)
        cluster, position = self._clusters.connect(self._stream.source), state.next_sequence
        return next_range(self._stream, position, source, end, cluster, payloads=self._payloads, cores=self._cores)

    def _note_caught_up(self, state: StreamState, source: StreamInfo) -> bool:
        """Advance the watermark without a message; commit it if a node is due, else at the end of the run."""
        by_clock = self._advance(state, source, caught_up=source.last_sequence < state.next_sequence)
        nodes = self._store.nodes(self._stream.stream)
        if state.hole_open and by_clock:
            self._close_hole(state, source.ts_ns)
        due_ns = nodes.next_deadline()
        if due_ns is not None and state.watermark_ns is not None and due_ns < state.watermark_ns:
            with self._store.transaction():
                self._store.save_stream(state)
        self._report.state = state
        return False

    def _close_hole(self, state: StreamState, until_ns: int | None) -> None:
        """Make the hole at the end of the last batch blind until a time: no message from inside it can arrive."""
        nodes = self._store.nodes(self._stream.stream)
        spans, state.hole_open = find_blind_spans(
            [], [], [], before_ns=state.last_stored_ns, after_hole=True, until_ns=until_ns
        )
        warn_of_blind_time(self._stream, spans)
        with self._store.transaction():
            self._store.save_stream(state)
            nodes.save_blind_spans(BlindSpans(tuple(nodes.blind_spans())).add(spans).spans)

    def _read(self, source: StreamInfo, present: SequenceRange) -> pa.Table:
        """Return one row per message: sequence, stored_ns, sender, payload_bytes, forced, and class if there are any."""
        return self._reader.read(self._stream, source, present, self._sightings, payloads=self._payloads)

    def _no_rows(self) -> pa.Table:
        return arrow_schema(self._sightings.schema).empty_table()

    def _commit(self, state: StreamState, source: StreamInfo, batch: ReadBatch) -> None:
        stream, store, report = self._stream, self._store, self._report
        left_open, covered = self._left_open, batch.covered
        report.take_published(state)
        cutoff_ns = left_open.cutoff_ns if left_open else too_old_before(stream.max_age_ns, source)
        rows, refused = self._within_limit(batch.rows)
        sightings, ahead = self._credible(state, source, rows)
        blind, hole_open = self._blind_spans(state, source, batch, sightings, ahead)
        folded = self._fold(state, sightings, cutoff_ns, blind)
        decisions = batch_decisions(sightings, folded, cutoff_ns)
        reasons, due = reasons_of(decisions), due_copies(decisions)
        count_decisions(state, reasons, batch.gaps, sightings)
        self._move_on(state, batch)
        # A batch that lost all its messages leaves this time for the next one.
        state.last_stored_ns = _latest(sightings, _stored_before(state, source, covered))
        state.hole_open = hole_open
        self._advance(state, source, caught_up=covered.next > source.last_sequence)
        state.as_of_ns = self._clock.now_ns()
        with store.transaction():
            if stream.guard is not None:
                store.guard(stream.stream).add(sightings)
            store.save_stream(state)
            if due.num_rows:
                store.copy_queue(stream.stream).append(due, state.created_ns, state.starts)
            self._save_nodes(state, folded)
            store.nodes(stream.stream).save_blind_spans(blind.spans)
            save_gaps(store, stream, batch.gaps, report)
            amounts = amounts_of(decisions, times.monotonic() - batch.began)
            amounts |= {Counter.REFUSED_SENDERS: refused, batch.engine: batch.rows.num_rows}
            store.counters(stream.stream).add(amounts)
            if left_open is not None:
                store.save_intent(replace(left_open, folded=True, starts=state.starts))
            reach(Point.FOLDING)
        reach(Point.FOLDED)
        report.reasons.update(reasons)

    def _advance(self, state: StreamState, source: StreamInfo, *, caught_up: bool) -> bool:
        before = state.ahead_clocks
        by_clock = advance(state, source, warning_ns=self._stream.shortest_warning_ns, caught_up=caught_up)
        if state.ahead_clocks > before:
            self._note_clock(source, source.ts_ns)
        elif by_clock:
            self._report.wrong_clock = None
        return by_clock

    def _note_clock(self, source: StreamInfo, ahead_ns: int | None) -> None:
        if ahead_ns is not None and self._report.wrong_clock is None:
            self._report.wrong_clock = clock_warning(self._stream, source, ahead_ns)
            logger.warning("%s", self._report.wrong_clock)

    def _within_limit(self, rows: pa.Table) -> tuple[pa.Table, int]:
        """Return a batch's messages, without the senders that would exceed `max_nodes`, and the number of their messages.

        Whoever may publish chooses the names of senders, and each is a row for ever and an announcement.
        """
        nodes, most = self._store.nodes(self._stream.stream), self._stream.max_nodes
        room = most - nodes.size()
        if room >= rows.num_rows:
            return rows, 0
        refused = nodes.unknown(rows)[max(0, room) :]
        is_refused = pc.is_in(rows["sender"], refused.combine_chunks())
        count = pc.sum(is_refused).as_py() or 0
        if not count:
            return rows, 0
        if not self._warned_of_limit:
            self._warned_of_limit = True
            text = (
                "%s: the stream has max_nodes (%d) nodes; the messages of %d further senders, such as %s, are copied as if they"
                " had none; raise max_nodes, or `retire` nodes and set purge_after"
            )
            logger.error(text, self._stream.label, most, len(refused), refused[0].as_py())
        senders = pc.if_else(is_refused, pa.scalar(None, pa.string()), rows["sender"])
        # A message without a sender that is forced is a heartbeat.
        forced = pc.and_(rows["forced"], pc.invert(is_refused))
        for name, column in (("sender", senders), ("forced", forced)):
            rows = rows.set_column(rows.column_names.index(name), name, column)
        return rows, count

    def _credible(
        self, state: StreamState, source: StreamInfo, rows: pa.Table
    ) -> tuple[pa.Table, npt.NDArray[np.bool_]]:
        """Return a batch's messages with credible times, and which of them had another one."""
        stored_ns = rows["stored_ns"].to_numpy()
        times_ns, ahead = credible_times(stored_ns, state.last_stored_ns, self._clock.own_ns())
        if ahead.any():
            self._note_clock(source, int(stored_ns.max()))
            rows = rows.set_column(rows.column_names.index("stored_ns"), "stored_ns", pa.array(times_ns))
        return rows, ahead

    def _blind_spans(
        self,
        state: StreamState,
        source: StreamInfo,
        batch: ReadBatch,
        sightings: pa.Table,
        ahead: npt.NDArray[np.bool_],
    ) -> tuple[BlindSpans, bool]:
        """Return the stream's blind spans including a batch's, and whether its last hole is still open.

        It is unknown when the messages in `ahead` were stored, so they hide silence like lost ones.
        """
        covered, overtaken = batch.covered, SequenceRange(batch.covered.first, batch.available)
        holes = [*([Hole(overtaken, "overtaken")] if len(overtaken) else ()), *batch.holes]
        holes += [
            Hole(SequenceRange(sequence, sequence + 1), CLOCK_AHEAD)
            for sequence in sightings["sequence"].to_numpy()[ahead].tolist()
        ]
        timed = sightings.filter(pa.array(~ahead))
        nodes = self._store.nodes(self._stream.stream)
        known = BlindSpans(tuple(nodes.blind_spans()))
        if not holes and not state.hole_open:
            return known, False
        # The clock sets the watermark only if this batch processes all messages that the info covers.
        later = replace(state, last_stored_ns=_latest(sightings, state.last_stored_ns))
        later.next_sequence = covered.next
        by_clock = self._advance(later, source, caught_up=covered.next > source.last_sequence)
        spans, hole_open = find_blind_spans(
            holes,
            timed["sequence"].to_pylist(),
            timed["stored_ns"].to_pylist(),
            before_ns=_stored_before(state, source, covered),
            after_hole=state.hole_open,
            until_ns=source.ts_ns if by_clock else None,
        )
        guarded_ns = self._store.guard(self._stream.stream).oldest_before_ns()
        needed = (nodes.oldest_seen(), guarded_ns, state.watermark_ns, state.last_stored_ns)
        oldest_ns = min((ns for ns in needed if ns is not None), default=0)
        warn_of_blind_time(self._stream, spans)
        return known.forget_before(oldest_ns).add(spans), hole_open

    def _fold(self, state: StreamState, sightings: pa.Table, cutoff_ns: int | None, blind: BlindSpans) -> pa.Table:
        rows = self._store.nodes(self._stream.stream).fold_input(sightings)
        # After a hole at the end, as a rolled-back source leaves it, only older messages are read again. Messages with an
        # incredible time also leave one, but are new.
        is_new = (state.mark_ns or 0) > (state.last_stored_ns or 0)
        read_until_ns = state.last_stored_ns if state.hole_open and not is_new else None
        classes = self._stream.node_classes.policies if self._stream.node_classes else None
        return fold_batch(rows, self._policy, cutoff_ns, blind, state.forgotten_transition + 1, read_until_ns, classes)

    def _save_nodes(self, state: StreamState, folded: pa.Table) -> None:
        if not folded.num_rows:
            return
        states = folded.filter(pc.is_valid(folded["seen_ns"])).select(["sender", *NODE_COLUMNS, "deadline_ns", "class"])
        self._store.nodes(self._stream.stream).merge(states.rename_columns(NODE_SCHEMA.names))
        add_transitions(self._store, self._stream, state, folded, self._report)

    def sweep_due(self) -> bool:
        """Sweep this stream's nodes with `sweep_due`; return whether there were any."""
        return sweep_due(self._store, self._stream, self._policy, self._report)

    def apply_requests(self) -> bool:
        """Apply the operators' requests after a step that reached the end of the source; return whether there were any."""
        state = self._report.state
        if state is None or not self.caught_up:
            return False
        applied = apply_requests(self._store, self._stream, state, self._report, self._folder)
        if applied:
            # The interval of checkpoints is too long for a change that an operator has seen answered.
            request_checkpoint(self._site.settings, self._site.name)
        return applied


def _stored_before(state: StreamState, source: StreamInfo, covered: SequenceRange) -> int | None:
    """Return the highest stored time before a batch, or None.

    Before the first message that is ever read, it is that of the first message that the source held when the batch was
    planned: the source may lose that one and its successors before they are read.
    """
    if state.last_stored_ns is not None or source.first_sequence < covered.first:
        return state.last_stored_ns
    return Clock.credible_ns(source.first_stored_ns)


def _latest(sightings: pa.Table, before_ns: int | None) -> int | None:
    """Return the highest stored time so far, including a batch."""
    batch_ns = pc.max(sightings["stored_ns"]).as_py() if sightings.num_rows else None
    return max((ns for ns in (batch_ns, before_ns) if ns is not None), default=None)


def sweep_due(
    store: SiteState, stream: StreamSettings, policy: Policy, report: StreamReport, at_once: int = SWEPT_AT_ONCE
) -> bool:
    """Sweep the nodes whose deadline is before the committed watermark, and decide on due announcements.

    Return whether there was any work. Queries no server. Each portion of `at_once` nodes, in the order of the deadlines,
    is one transaction: a fleet that falls silent needs little memory, and a killed run repeats no committed portion.
    """
    state = store.load_stream(stream.stream)
    if state is None or state.watermark_ns is None:
        return False
    nodes = store.nodes(stream.stream)
    first_ns = nodes.first_deadline()
    if first_ns is None or first_ns >= state.watermark_ns:
        return decide_announcements(store, stream, state)
    blind, swept = BlindSpans(tuple(nodes.blind_spans())), 0
    classes = stream.node_classes.policies if stream.node_classes else None
    with LongWork(f"{stream.label}: sweeping silent nodes", nodes.count_due(state.watermark_ns)) as progress:
        # A swept node is no longer due: its deadline is recomputed.
        while (due := nodes.due(state.watermark_ns, at_once)).num_rows:
            states, transitions = sweep_nodes(policy, due, state.watermark_ns, blind, classes)
            with store.transaction():
                nodes.merge(states)
                add_transitions(store, stream, state, transitions, report)
            reach(Point.SWEPT)
            swept += due.num_rows
            progress.reached(swept)
    report.swept += swept
    return decide_announcements(store, stream, state) or swept > 0
