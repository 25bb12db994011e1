"""The sweep of many nodes in one step, as `rules.sweep` defines it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sr_assets.domain.tracking.columns import BlindColumns, deadlines
from sr_assets.domain.tracking.rows import NODE_SCHEMA, folded_rows
from sr_assets.domain.tracking.rules import Event, Status

if TYPE_CHECKING:
    from sr_assets.domain.blindness import BlindSpans
    from sr_assets.domain.tracking.class_policies import ClassPolicies
    from sr_assets.domain.tracking.columns import Flags, Integers
    from sr_assets.domain.tracking.rules import Policy


def sweep_nodes(
    policy: Policy, due: pa.Table, now_ns: int, blind: BlindSpans, classes: ClassPolicies | None = None
) -> tuple[pa.Table, pa.Table]:
    """Sweep nodes until `now_ns`; columns node, `NODE_COLUMNS` and class. `classes` are the stream's, if it has any.

    Return their states as `NODE_SCHEMA`, and their transitions as `FOLDED_SCHEMA`, ordered per node.
    """
    spans = BlindColumns(blind)
    limits = policy if classes is None else classes.limits(classes.codes(due["class"]))
    seen, since, number, retired = (
        due[name].to_numpy() for name in ("seen_ns", "status_since_ns", "transition", "times_retired")
    )
    silence = spans.silence_ns(seen, np.maximum(seen, now_ns))
    up, timeout = (pc.equal(due["status"], status.value).to_numpy() for status in (Status.UP, Status.TIMEOUT))
    timed_out = up & (silence > limits.warning_ns)
    expired = (timeout | timed_out) & (silence > limits.interval_ns)
    out_ns = spans.exceeds_at_ns(seen, limits.warning_ns)
    since = np.where(timed_out, out_ns, since)
    # With a policy shortened since, the interval may have ended before the timeout was noticed.
    end_ns = np.maximum(spans.exceeds_at_ns(seen, limits.interval_ns), since)
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
        "deadline_ns": deadlines(limits, blind, status, seen),
        "class": due["class"],
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
            "class": nodes["class"],
        }
    )
