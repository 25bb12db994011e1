"""Arrow rows of node states, decisions and transitions."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

import pyarrow as pa

from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.tracking.rules import NODE_COLUMNS, NodeState, Policy, Status, Transition, deadline_ns

_STATE_FIELDS: Final = tuple((name, pa.string() if name == "status" else pa.int64()) for name in NODE_COLUMNS)
#: A node's state with its sweep deadline and its class.
NODE_SCHEMA: Final = pa.schema(
    [("node", pa.string()), *_STATE_FIELDS, ("deadline_ns", pa.int64()), ("class", pa.string())]
)
#: The rows of `fold_batch`, of three kinds. A decision: sender, sequence, reason. A node's state after its last
#: sighting: sender and the columns of a node, including `deadline_ns` and `class`. A transition: sender, `event` and the
#: columns after it, and the class of the node.
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
        ("class", pa.string()),
    ]
)
_TRANSITION: Final = ("sender", *(name for name in FOLDED_SCHEMA.names if name.startswith("event")), "class")
#: A state's values in the order of `NODE_COLUMNS`.
state_values: Final = attrgetter(*NODE_COLUMNS)
_STATUS: Final = {status.value: status for status in Status}
_STATUS_AT: Final = NODE_COLUMNS.index("status")


def state_of(values: Sequence[Any]) -> NodeState:
    """Return the state with values in the order of `NODE_COLUMNS`, which is the order of `NodeState`."""
    fields = list(values)
    fields[_STATUS_AT] = _STATUS[fields[_STATUS_AT]]
    return NodeState(*fields)


def node_row(
    policy: Policy, node: str, state: NodeState, blind: BlindSpans, node_class: str | None = None
) -> tuple[Any, ...]:
    """Return a node's state, with its deadline and its class, as a row for `node_table`; `policy` is that of the class."""
    return node, *state_values(state), deadline_ns(policy, state, blind), node_class


def node_table(rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    """Return node states, rows of `node_row`, as a table of `NODE_SCHEMA`."""
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, NODE_SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=NODE_SCHEMA)


def transition_row(sender: str, transition: Transition, node_class: str | None = None) -> tuple[Any, ...]:
    """Return a transition, of a node of a class, as a row for `folded_table`."""
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
        node_class,
    )


def folded_table(transitions: list[tuple[Any, ...]]) -> pa.Table:
    """Return transitions, rows of `transition_row`, as a table of `FOLDED_SCHEMA`."""
    columns = zip(*transitions, strict=True) if transitions else [()] * len(_TRANSITION)
    return folded_rows(dict(zip(_TRANSITION, columns, strict=True)))


def folded_rows(values: dict[str, Any]) -> pa.Table:
    """Return the columns of one kind of rows as `FOLDED_SCHEMA`, with nulls in the other columns."""
    nulls = {field.name: pa.nulls(len(values["sender"]), field.type) for field in FOLDED_SCHEMA}
    return pa.table({**nulls, **values}, schema=FOLDED_SCHEMA)
