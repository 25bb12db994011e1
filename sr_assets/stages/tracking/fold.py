"""The fold of `domain.tracking` over one batch, by sender and in sequence order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from sr_assets.domain.tracking import NODE_COLUMNS
from sr_assets.stages.tracking.columns import ColumnFold, Sightings

if TYPE_CHECKING:
    from sr_assets.domain.blindness import BlindSpans
    from sr_assets.domain.tracking import Policy, Transition

#: The rows of `fold_batch`, of three kinds. A decision: sender, sequence, reason. A node's state after its last
#: sighting: sender and the columns of a node, including `deadline_ns`. A transition: sender, `event` and the columns
#: after it.
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
_TRANSITION: Final = ("sender", *(name for name in FOLDED_SCHEMA.names if name.startswith("event")))


def fold_batch(
    rows: pa.Table,
    policy: Policy,
    cutoff_ns: int | None,
    blind: BlindSpans,
    first_transition: int = 1,
    read_until_ns: int | None = None,
) -> pa.Table:
    """Fold a batch's sightings into decisions, states and transitions.

    `rows` come from `SiteState.fold_input`: one per sighting and one per known node, with columns sender, sighting (its
    sequence; 0 for a known node), stored_ns, payload_bytes, forced and `NODE_COLUMNS`. `blind` has the stream's spans,
    including this batch's; `first_transition` and `read_until_ns` are the arguments of `domain.tracking.sight`. A known
    sender without a sighting stays unchanged. Returns `FOLDED_SCHEMA`, unordered.
    """
    names = rows["sender"].combine_chunks().dictionary_encode()
    indexes, sequences = names.indices.to_numpy(), rows["sighting"].to_numpy()
    fold = ColumnFold(policy, names.dictionary, blind, cutoff_ns, first_transition, read_until_ns)
    fold.know(indexes[sequences == 0], rows.filter(pa.array(sequences == 0)))
    columns = (rows[name].to_numpy() for name in ("stored_ns", "payload_bytes", "forced"))
    order = np.lexsort((sequences, indexes))
    seen = Sightings(indexes, sequences, *columns).take(order[sequences[order] > 0])
    reasons = fold.see(seen)
    decisions = {"sender": names.dictionary.take(pa.array(seen.sender)), "decided": seen.sequence, "reason": reasons}
    transitions = [transition_row(names.dictionary[at].as_py(), event) for at, event in fold.transitions]
    return pa.concat_tables([folded_rows(decisions), folded_rows(fold.states()), folded_table(transitions)])


def transition_row(sender: str, transition: Transition) -> tuple[Any, ...]:
    """Return a transition as a row for `folded_table`."""
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
    columns = zip(*transitions, strict=True) if transitions else [()] * len(_TRANSITION)
    return folded_rows(dict(zip(_TRANSITION, columns, strict=True)))


def folded_rows(values: dict[str, Any]) -> pa.Table:
    """Return the columns of one kind of rows as `FOLDED_SCHEMA`, with nulls in the other columns."""
    nulls = {field.name: pa.nulls(len(values["sender"]), field.type) for field in FOLDED_SCHEMA}
    return pa.table({**nulls, **values}, schema=FOLDED_SCHEMA)
