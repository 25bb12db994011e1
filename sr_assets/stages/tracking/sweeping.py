"""The sweep of a stream's nodes whose deadline has passed, and the deadlines after a change of the policy.

Nodes are swept in portions with a transaction each, so that a fleet that falls silent at once needs little memory, and
a killed run repeats no committed portion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.tracking.columns import deadlines
from sr_assets.domain.tracking.rows import NODE_SCHEMA
from sr_assets.domain.tracking.sweep import sweep_nodes
from sr_assets.stages.progress import LongWork
from sr_assets.stages.tracking.transitions import add_transitions

if TYPE_CHECKING:
    from sr_assets.adapters.state.records import StreamState
    from sr_assets.adapters.state.store import SiteState
    from sr_assets.domain.tracking.rules import Policy
    from sr_assets.settings import StreamSettings
    from sr_assets.stages.report import StreamReport

#: Number of nodes swept in one transaction.
SWEPT_AT_ONCE: Final = 20_000


def sweep_due(
    store: SiteState, stream: StreamSettings, policy: Policy, report: StreamReport, at_once: int = SWEPT_AT_ONCE
) -> bool:
    """Sweep the nodes whose deadline is before the committed watermark; return whether there were any.

    Queries no server. States and transitions are committed in portions of `at_once` nodes, in the order of the deadlines.
    """
    state = store.load_stream(stream.stream)
    if state is None or state.watermark_ns is None:
        return False
    nodes = store.nodes(stream.stream)
    blind, swept = BlindSpans(tuple(nodes.blind_spans())), 0
    with LongWork(f"{stream.label}: sweeping silent nodes", nodes.count_due(state.watermark_ns)) as progress:
        # A swept node is no longer due: its deadline is recomputed.
        while (due := nodes.due(state.watermark_ns, at_once)).num_rows:
            states, transitions = sweep_nodes(policy, due, state.watermark_ns, blind)
            with store.transaction():
                nodes.merge(states)
                add_transitions(store, stream, state, transitions, report)
            reach(Point.SWEPT)
            swept += due.num_rows
            progress.reached(swept)
    report.swept += swept
    return swept > 0


def follow_policy(store: SiteState, stream: StreamSettings, policy: Policy, state: StreamState) -> None:
    """Recompute every deadline if the durations differ from those of the stored deadlines."""
    text = f"{policy.interval_ns}/{policy.warning_ns}"
    if state.policy == text:
        return
    nodes = store.nodes(stream.stream)
    blind = BlindSpans(tuple(nodes.blind_spans()))
    waiting = nodes.not_retired() if state.policy else NODE_SCHEMA.empty_table()
    deadline = deadlines(policy, blind, waiting["status"], waiting["seen_ns"].to_numpy())
    state.policy = text
    with store.transaction():
        store.save_stream(state)
        if waiting.num_rows:
            nodes.merge(waiting.drop(["deadline_ns"]).append_column("deadline_ns", deadline))
