"""Applying the requests of `retire` and `unretire` to a stream's nodes, at its watermark."""

import logging
from pathlib import Path

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.published.actions import Origin, record_action
from sr_assets.adapters.state.operator_requests import Answer, Request, answer_request, take_requests
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.advisories import event_id
from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.durations import duration
from sr_assets.domain.positions import format_rfc3339_ns
from sr_assets.domain.tracking.announcements import NodeEvent, NodeReport
from sr_assets.domain.tracking.by_hand import retire, unretire
from sr_assets.domain.tracking.rows import folded_table, node_row, node_table, transition_row
from sr_assets.domain.tracking.rules import NodeState, Policy, Status
from sr_assets.settings import StreamSettings
from sr_assets.stages.report import StreamReport
from sr_assets.stages.tracking.batch_rows import add_transitions

logger = logging.getLogger(__name__)


def apply_requests(
    store: SiteState, stream: StreamSettings, state: StreamState, report: StreamReport, folder: Path
) -> bool:
    """Apply the requests about a stream, each in one transaction with its answer; return whether there were any.

    An applied request has a row in `operator_actions`, however its command has ended. Call it after a step that reached the
    end of the source: an unread message would revive the node. `state` has the watermark of that step, `folder` is the site's.
    """
    requests = list(take_requests(folder, stream.stream))
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
