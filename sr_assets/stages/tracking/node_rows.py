"""Node states as rows with their sweep deadlines, and the effect of a changed policy on the deadlines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.tracking import NODE_COLUMNS, deadline_ns
from sr_assets.stages.tracking.columns import deadlines, state_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sr_assets.adapters.state.records import StreamState
    from sr_assets.adapters.state.store import SiteState
    from sr_assets.domain.tracking import NodeState, Policy
    from sr_assets.settings import StreamSettings

NODE_SCHEMA: Final = pa.schema(
    [
        ("node", pa.string()),
        *((name, pa.string() if name == "status" else pa.int64()) for name in NODE_COLUMNS),
        ("deadline_ns", pa.int64()),
    ]
)


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


def node_row(policy: Policy, node: str, state: NodeState, blind: BlindSpans) -> tuple[Any, ...]:
    """Return a node's state, with its deadline, as a row for `node_table`."""
    return node, *state_values(state), deadline_ns(policy, state, blind)


def node_table(rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    """Return node states, rows of `node_row`, as a table of `NODE_SCHEMA`."""
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, NODE_SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=NODE_SCHEMA)
