"""The fold of `domain.tracking` over one batch, in Spark: partitioned by sender, in sequence order within each.

Here: rows in, rows out, and the function that Spark's workers run. Not here: the rules themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from sr_assets.adapters.state import NODE_COLUMNS
from sr_assets.domain.tracking import NodeState, Policy, Sighting, Status, deadline_ns, sight, splay_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

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
_DECISION: Final = slice(1, 3)
_STATE: Final = slice(3, 4 + len(NODE_COLUMNS))
_EVENT: Final = slice(4 + len(NODE_COLUMNS), len(FOLDED_SCHEMA))
_BLANK: Final = (None,) * len(FOLDED_SCHEMA)
_ROWS: Final = 8_000


def state_values(state: NodeState) -> tuple[Any, ...]:
    """Return a state's values in the order of `NODE_COLUMNS`."""
    return tuple(getattr(state, column) for column in NODE_COLUMNS)


def state_of(values: Iterable[Any]) -> NodeState:
    """Make a state of values in the order of `NODE_COLUMNS`."""
    state = dict(zip(NODE_COLUMNS, values, strict=True))
    return NodeState(**{**state, "status": Status(state["status"])})


def fold_batch(spark: SparkSession, rows: pa.Table, policy: Policy, cutoff_ns: int | None) -> pa.Table:
    """Fold a batch's sightings into decisions, states and transitions.

    `rows` come from `SiteState.fold_input`: one per sighting and one per known node, columns sender, turn, stored_ns,
    payload_bytes, forced and `NODE_COLUMNS`. Returns `FOLDED_SCHEMA`, in no order.
    """
    if rows.num_rows == 0:
        return FOLDED_SCHEMA.empty_table()
    frame = spark.createDataFrame(rows).repartition("sender").sortWithinPartitions("sender", "turn")
    fields = ", ".join(f"{field.name} {_SPARK_TYPES[field.type]}" for field in FOLDED_SCHEMA)
    return frame.mapInArrow(fold_partition(policy, cutoff_ns), fields).toArrow().cast(FOLDED_SCHEMA)


_SPARK_TYPES: Final = {pa.string(): "string", pa.int64(): "long", pa.bool_(): "boolean"}


def fold_partition(
    policy: Policy, cutoff_ns: int | None
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that folds the rows of whole senders, each sender's together and in order."""

    def fold(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        output: list[tuple[Any, ...]] = []
        sender: str | None = None
        state: NodeState | None = None
        splay = 0
        for batch in batches:
            columns = [
                batch.column(name).to_pylist()
                for name in ("sender", "turn", "stored_ns", "payload_bytes", "forced", *NODE_COLUMNS)
            ]
            for name, turn, stored_ns, payload_bytes, forced, *known in zip(*columns, strict=True):
                if name != sender:
                    if state is not None:
                        output.append(_state_row(sender, state, policy))
                    sender, state, splay = name, None, splay_ns(name, policy.interval_ns)
                if turn == 0:
                    state = state_of(known)
                    continue
                state, decision, transitions = sight(
                    policy, splay, state, Sighting(turn, stored_ns, payload_bytes, forced), cutoff_ns
                )
                output.append((name, turn, decision.reason.value, *_BLANK[3:]))
                output.extend(transition_row(name, transition) for transition in transitions)
            if len(output) >= _ROWS:
                yield _batch(output)
                output = []
        if state is not None:
            output.append(_state_row(sender, state, policy))
        if output:
            yield _batch(output)

    return fold


def _state_row(sender: str | None, state: NodeState, policy: Policy) -> tuple[Any, ...]:
    return (sender, None, None, *state_values(state), deadline_ns(policy, state), *_BLANK[_EVENT])


def transition_row(sender: str, transition: Transition) -> tuple[Any, ...]:
    """Return a transition as a row of `FOLDED_SCHEMA`."""
    previous = None if transition.previous is None else transition.previous.value
    return (
        sender,
        *_BLANK[1 : _STATE.stop],
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


def _batch(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    arrays = [
        pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), FOLDED_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=FOLDED_SCHEMA)


def folded_table(rows: list[tuple[Any, ...]]) -> pa.Table:
    """Return rows as a table of `FOLDED_SCHEMA`."""
    return pa.Table.from_batches([_batch(rows)]) if rows else FOLDED_SCHEMA.empty_table()
