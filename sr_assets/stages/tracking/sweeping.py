"""The sweep of a stream's nodes whose deadline has passed: `domain.tracking.sweep` for many nodes at once.

Nodes are swept in portions with a transaction each, so that a fleet that falls silent at once needs little memory, and
a killed run repeats no committed portion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.tracking import Event, Status
from sr_assets.stages.progress import LongWork
from sr_assets.stages.tracking.columns import BlindColumns, deadlines
from sr_assets.stages.tracking.fold import folded_rows
from sr_assets.stages.tracking.node_rows import NODE_SCHEMA
from sr_assets.stages.tracking.transitions import add_transitions

if TYPE_CHECKING:
    from sr_assets.adapters.state.store import SiteState
    from sr_assets.domain.tracking import Policy
    from sr_assets.settings import StreamSettings
    from sr_assets.stages.report import StreamReport
    from sr_assets.stages.tracking.columns import Flags, Integers

#: Number of nodes swept in one transaction.
SWEPT_AT_ONCE: Final = 20_000


def sweep_due(
    store: SiteState, stream: StreamSettings, policy: Policy, report: StreamReport, at_once: int = SWEPT_AT_ONCE
) -> bool:
    """Sweep the nodes whose deadline is before the committed watermark; return whether there were any. No server is
    queried.

    States and transitions are committed in portions of `at_once` nodes, in the order of the deadlines.
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


def sweep_nodes(policy: Policy, due: pa.Table, now_ns: int, blind: BlindSpans) -> tuple[pa.Table, pa.Table]:
    """Sweep nodes until `now_ns`; columns node and `NODE_COLUMNS`.

    Return their states as `NODE_SCHEMA`, and their transitions as `FOLDED_SCHEMA`, ordered per node.
    """
    asked = BlindColumns(blind)
    seen, since, number, retired = (
        due[name].to_numpy() for name in ("seen_ns", "status_since_ns", "transition", "times_retired")
    )
    silence = asked.silence_ns(seen, np.maximum(seen, now_ns))
    up, timeout = (pc.equal(due["status"], status.value).to_numpy() for status in (Status.UP, Status.TIMEOUT))
    timed_out = up & (silence > policy.warning_ns)
    expired = (timeout | timed_out) & (silence > policy.interval_ns)
    out_ns = asked.exceeds_at_ns(seen, policy.warning_ns)
    since = np.where(timed_out, out_ns, since)
    # With a policy shortened since, the interval may have ended before the timeout was noticed.
    end_ns = np.maximum(asked.exceeds_at_ns(seen, policy.interval_ns), since)
    ended = pa.array(expired)
    status = pc.if_else(
        ended,
        Status.RETIRED.value,
        pc.if_else(pa.array(timed_out), Status.TIMEOUT.value, due["status"].combine_chunks()),
    )
    states = {
        **{name: due[name] for name in ("node", "first_seen_ns", "seen_ns", "sequence")},
        "copied_ns": pc.if_else(ended, None, due["copied_ns"].combine_chunks()),
        "copied_bytes": pc.if_else(ended, None, due["copied_bytes"].combine_chunks()),
        "status": status,
        "status_since_ns": np.where(expired, end_ns, since),
        "retired_at_ns": pc.if_else(ended, pa.array(end_ns), due["retired_at_ns"].combine_chunks()),
        "times_retired": retired + expired,
        "transition": number + timed_out + expired,
        "deadline_ns": deadlines(policy, blind, status, seen),
    }
    timeouts = _transitions(due, timed_out, Event.TIMEOUT, Status.UP, out_ns, number + 1)
    ends = _transitions(due, expired, Event.EXPIRE, Status.TIMEOUT, end_ns, number + timed_out + 1)
    by_node = np.argsort(np.concatenate([np.flatnonzero(timed_out), np.flatnonzero(expired)]), kind="stable")
    return pa.table(states, schema=NODE_SCHEMA), pa.concat_tables([timeouts, ends]).take(by_node)


def _transitions(
    due: pa.Table, which: Flags, event: Event, previous: Status, at_ns: Integers, number: Integers
) -> pa.Table:
    """Return the same transition for each node in `which`; `at_ns` and `number` are the columns of all nodes."""
    nodes, count = due.filter(pa.array(which)), int(which.sum())
    return folded_rows(
        {
            "sender": nodes["node"],
            "event": [event.value] * count,
            "event_ns": at_ns[which],
            "event_seen_ns": nodes["seen_ns"],
            "event_age_ns": at_ns[which] - nodes["seen_ns"].to_numpy(),
            "event_sequence": nodes["sequence"],
            "event_previous": [previous.value] * count,
            "event_transition": number[which],
            "event_returned": [False] * count,
        }
    )
