"""The fold of `domain.tracking` over one batch: by sender, in sequence order within each; in Spark when it is large.

Here: rows in, rows out, and the function that folds them, here as in Spark's workers. Not here: the rules themselves.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from sr_assets.adapters.state import NODE_COLUMNS
from sr_assets.domain.tracking import NodeState, Policy, Sighting, Status, deadline_ns, sight, splay_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import SparkSession

    from sr_assets.domain.tracking import Transition

#: What `fold_batch` returns, one of three kinds a row. A decision: sender, sequence, reason. A node's state after its
#: last sighting: sender and the columns of a node, `deadline_ns` among them. A transition: sender, `event` and the
#: columns that follow it.
FOLDED_SCHEMA: Final = pa.schema(
    [
        ("sender", pa.string()),
        ("decided", pa.int64()),
        ("reason", pa.string()),
        *((name, pa.string() if name == "status" else pa.int64()) for name in NODE_COLUMNS),
        ("deadline_ns", pa.int64()),
        ("event", pa.string()),
        ("event_ns", pa.int64()),
        ("event_seen_ns", pa.int64()),
        ("event_age_ns", pa.int64()),
        ("event_sequence", pa.int64()),
        ("event_previous", pa.string()),
        ("event_transition", pa.int64()),
        ("event_returned", pa.bool_()),
        ("event_outage_ns", pa.int64()),
    ]
)
_DECISION: Final = ("sender", "decided", "reason")
_STATE: Final = ("sender", *NODE_COLUMNS, "deadline_ns")
_TRANSITION: Final = ("sender", *FOLDED_SCHEMA.names[len(_DECISION) + len(NODE_COLUMNS) + 1 :])
_ROWS: Final = 8_000
#: Up to so many rows, a batch of the default size and the nodes it speaks of, Spark's exchange costs more than the fold.
_ROWS_AT_HOME: Final = 100_000

#: A state's values in the order of `NODE_COLUMNS`.
state_values: Final = attrgetter(*NODE_COLUMNS)
_STATUS: Final = {status.value: status for status in Status}
_STATUS_AT: Final = NODE_COLUMNS.index("status")


def state_of(values: Sequence[Any]) -> NodeState:
    """Make a state of values in the order of `NODE_COLUMNS`, which is that of `NodeState`."""
    return NodeState(*values[:_STATUS_AT], _STATUS[values[_STATUS_AT]], *values[_STATUS_AT + 1 :])


def fold_batch(spark: Callable[[], SparkSession], rows: pa.Table, policy: Policy, cutoff_ns: int | None) -> pa.Table:
    """Fold a batch's sightings into decisions, states and transitions: a large one in Spark, by sender, others here.

    `rows` come from `SiteState.fold_input`: one per sighting and one per known node, columns sender, turn, stored_ns,
    payload_bytes, forced and `NODE_COLUMNS`. Returns `FOLDED_SCHEMA`, in no order.
    """
    if rows.num_rows <= _ROWS_AT_HOME:
        ordered = rows.sort_by([("sender", "ascending"), ("turn", "ascending")])
        return pa.Table.from_batches(fold_partition(policy, cutoff_ns)(iter(ordered.to_batches())), FOLDED_SCHEMA)
    frame = spark().createDataFrame(rows).repartition("sender").sortWithinPartitions("sender", "turn")
    fields = ", ".join(f"{field.name} {_SPARK_TYPES[field.type]}" for field in FOLDED_SCHEMA)
    return frame.mapInArrow(fold_partition(policy, cutoff_ns), fields).toArrow().cast(FOLDED_SCHEMA)


_SPARK_TYPES: Final = {pa.string(): "string", pa.int64(): "long", pa.bool_(): "boolean"}


def fold_partition(
    policy: Policy, cutoff_ns: int | None
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that folds the rows of whole senders, each sender's together and in order."""

    def fold(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        decisions: list[tuple[Any, ...]] = []
        states: list[tuple[Any, ...]] = []
        transitions: list[tuple[Any, ...]] = []
        sender: str | None = None
        state: NodeState | None = None
        splay = 0
        for batch in batches:
            names = ("sender", "turn", "stored_ns", "payload_bytes", "forced", *NODE_COLUMNS)
            columns = [batch.column(name).to_pylist() for name in names]
            for name, turn, stored_ns, payload_bytes, forced, *known in zip(*columns, strict=True):
                if name != sender:
                    if state is not None:
                        states.append((sender, *state_values(state), deadline_ns(policy, state)))
                    sender, state, splay = name, None, splay_ns(name, policy.interval_ns)
                if turn == 0:
                    state = state_of(known)
                    continue
                state, decision, events = sight(
                    policy, splay, state, Sighting(turn, stored_ns, payload_bytes, forced), cutoff_ns
                )
                decisions.append((name, turn, decision.reason.value))
                if events:
                    transitions.extend(transition_row(name, event) for event in events)
            if len(decisions) >= _ROWS:
                yield from _batches(decisions, states, transitions)
                decisions, states, transitions = [], [], []
        if state is not None:
            states.append((sender, *state_values(state), deadline_ns(policy, state)))
        yield from _batches(decisions, states, transitions)

    return fold


def transition_row(sender: str, transition: Transition) -> tuple[Any, ...]:
    """Return a transition as `folded_table` takes it."""
    previous = None if transition.previous is None else transition.previous.value
    return (
        sender,
        transition.event.value,
        transition.event_ns,
        transition.seen_ns,
        transition.age_ns,
        transition.sequence,
        previous,
        transition.transition,
        transition.returned,
        transition.outage_ns,
    )


def folded_table(transitions: list[tuple[Any, ...]]) -> pa.Table:
    """Return transitions, rows of `transition_row`, as a table of `FOLDED_SCHEMA`."""
    return pa.Table.from_batches(_batches([], [], transitions), FOLDED_SCHEMA)


def _batches(*kinds: list[tuple[Any, ...]]) -> Iterator[pa.RecordBatch]:
    """Yield decisions, states and transitions as rows of `FOLDED_SCHEMA`: what is not a kind's own stays null."""
    for names, rows in zip((_DECISION, _STATE, _TRANSITION), kinds, strict=True):
        if rows:
            values = dict(zip(names, zip(*rows, strict=True), strict=True))
            arrays = [
                pa.array(values[field.name], field.type) if field.name in values else pa.nulls(len(rows), field.type)
                for field in FOLDED_SCHEMA
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=FOLDED_SCHEMA)
