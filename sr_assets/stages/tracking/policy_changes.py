"""The nodes of a stream after its durations or classes have changed in the configuration."""

import pyarrow as pa

from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.tracking.class_policies import Limits
from sr_assets.domain.tracking.columns import deadlines
from sr_assets.domain.tracking.rows import NODE_SCHEMA
from sr_assets.domain.tracking.rules import Policy
from sr_assets.settings import StreamSettings


def follow_policy(store: SiteState, stream: StreamSettings, policy: Policy, state: StreamState) -> None:
    """Recompute every class and deadline if the policy's durations or the classes have changed."""
    classes = stream.node_classes
    text = f"{policy.interval_ns}/{policy.warning_ns}" + (f"/{classes.text}" if classes else "")
    if state.policy == text:
        return
    nodes = store.nodes(stream.stream)
    blind = BlindSpans(tuple(nodes.blind_spans()))
    known = nodes.table() if state.policy else NODE_SCHEMA.empty_table()
    limits: Policy | Limits = policy
    names = pa.nulls(known.num_rows, pa.string())
    if classes is not None:
        before = zip(known["node"].to_pylist(), known["class"].to_pylist(), strict=True)
        names = pa.array([classes.classifier.reclassify(*each) for each in before], pa.string())
        limits = classes.policies.limits(classes.policies.codes(names))
    deadline = deadlines(limits, blind, known["status"], known["seen_ns"].to_numpy())
    state.policy = text
    with store.transaction():
        store.save_stream(state)
        if known.num_rows:
            rest = known.drop(["deadline_ns", "class"])
            nodes.merge(rest.append_column("deadline_ns", deadline).append_column("class", names))
