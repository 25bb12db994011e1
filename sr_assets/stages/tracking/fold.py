"""The fold of `domain.tracking` over one batch, by sender and in sequence order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from sr_assets.domain.tracking import NODE_COLUMNS
from sr_assets.stages.tracking.columns import ColumnFold, Sightings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from pyspark.sql import SparkSession

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
#: Maximum rows of a fold in this process: for 150,000 rows Spark's exchange takes 2.6 s, the fold 0.1 s.
_ROWS_AT_HOME: Final = 1_000_000


def fold_batch(
    spark: Callable[[], AbstractContextManager[SparkSession]],
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
    including this batch's; `first_transition` and `read_until_ns` are the arguments of `domain.tracking.sight`. Returns
    `FOLDED_SCHEMA`, unordered.
    """
    fold = _Fold(policy, cutoff_ns, blind, first_transition, read_until_ns)
    if rows.num_rows <= _ROWS_AT_HOME:
        return fold.table(rows)
    fields = ", ".join(f"{field.name} {_SPARK_TYPES[field.type]}" for field in FOLDED_SCHEMA)
    with spark() as session:
        frame = session.createDataFrame(rows).repartition("sender")
        return frame.mapInArrow(fold.partition, fields).toArrow().cast(FOLDED_SCHEMA)


_SPARK_TYPES: Final = {pa.string(): "string", pa.int64(): "long", pa.bool_(): "boolean"}


@dataclass(frozen=True, slots=True)
class _Fold:
    """The parameters of a fold, sent to Spark's workers unchanged."""

    policy: Policy
    cutoff_ns: int | None
    blind: BlindSpans
    first_transition: int
    read_until_ns: int | None

    def partition(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Fold a partition, which has all rows of its senders."""
        if rows := list(batches):
            yield from self.table(pa.Table.from_batches(rows)).to_batches()

    def table(self, rows: pa.Table) -> pa.Table:
        """Fold all rows of some senders; a known sender without a sighting stays unchanged."""
        names = rows["sender"].combine_chunks().dictionary_encode()
        indexes, sequences = names.indices.to_numpy(), rows["sighting"].to_numpy()
        fold = ColumnFold(
            self.policy, names.dictionary, self.blind, self.cutoff_ns, self.first_transition, self.read_until_ns
        )
        fold.know(indexes[sequences == 0], rows.filter(pa.array(sequences == 0)))
        columns = (rows[name].to_numpy() for name in ("stored_ns", "payload_bytes", "forced"))
        order = np.lexsort((sequences, indexes))
        seen = Sightings(indexes, sequences, *columns).take(order[sequences[order] > 0])
        reasons = fold.see(seen)
        decisions = {
            "sender": names.dictionary.take(pa.array(seen.sender)),
            "decided": seen.sequence,
            "reason": reasons,
        }
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
