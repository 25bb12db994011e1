"""The inventory of nodes by day: values, their nodes, and the nodes that gained or lost them; Spark counts many nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from sr_assets.adapters.spark.schemas import rows_of
from sr_assets.adapters.spark.status_intervals import (
    RETIRED,
    StatusIntervals,
    bounds_of,
    column,
    compute,
    expand,
    items,
)
from sr_assets.domain.days import Day

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import SparkSession


_OBSERVED: Final = "observed_day ARRAY<INT>, holds_until_ns ARRAY<BIGINT>, held ARRAY<ARRAY<INT>>"
_COUNTED: Final = "stream int, day int, value_number int, nodes long, came long, went long"


@dataclass(frozen=True, slots=True)
class _CountJob:
    """Counts the values of nodes on days that start at `bounds`; `unknown` are the values of an unobserved node."""

    bounds: NDArray[np.int64]
    unknown: NDArray[np.int32]

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield a row for each stream, day and value of these nodes on the day or the previous day."""
        days = len(self.bounds) - 1
        for nodes in batches:
            node, day, value = self._held(nodes)
            # Each is a number that ends in the day, with one more day than there are: a persisting value is followed by
            # the next number.
            values = np.int64(value.max(initial=0) + 1)
            held = np.sort((node * values + value) * (days + 1) + day)
            of_node, day = np.divmod(held, days + 1)
            node, value = np.divmod(of_node, values)
            group = (column(nodes, "stream")[node] * values + value) * days + day
            present = day > 0
            came = present & (np.diff(held, prepend=-1) != 1)
            went = (day < days - 1) & (np.diff(held, append=-1) != 1)
            groups, index = np.unique(np.concatenate([group[present], group[went] + 1]), return_inverse=True)
            now, gone = np.split(index, [np.count_nonzero(present)])
            numbers = [np.bincount(each, minlength=len(groups)) for each in (now, now[came[present]], gone)]
            of_stream, day = np.divmod(groups, days)
            stream, value = np.divmod(of_stream, values)
            yield rows_of(_COUNTED, [stream, day - 1, value, *numbers])

    def _held(self, nodes: pa.RecordBatch) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return node, day and number of each value on days on which the node was not retired throughout."""
        pieces = StatusIntervals.cut(nodes, self.bounds)
        counts, observed_day = items(nodes.column("observed_day"))
        _, until_ns = items(nodes.column("holds_until_ns"))
        _, held = items(nodes.column("held"))
        lengths, values = items(held)
        # After the observations comes the value without an observation: the last one, -1.
        lengths, values = np.append(lengths, len(self.unknown)), np.append(values, self.unknown)
        until_ns = np.append(until_ns, self.bounds[-1])
        newest = np.full((nodes.num_rows, len(self.bounds)), -1)
        newest[expand(counts)[0], observed_day.to_numpy() + 1] = np.arange(len(observed_day))
        newest = np.maximum.accumulate(newest, axis=1)
        member = np.zeros((nodes.num_rows, len(self.bounds) - 1), np.bool_)
        there = (pieces.status != RETIRED) & (pieces.from_ns < pieces.next_ns)
        member[pieces.node[there], pieces.day[there]] = True
        node, day = np.nonzero(member)
        which = newest[node, day + 1]
        which = np.where(until_ns[which] >= self.bounds[day], which, -1)
        row, further = expand(lengths[which])
        first = np.cumsum(lengths) - lengths
        return node[row], day[row], values[first[which][row] + further]


def count_values(
    session: SparkSession | None, nodes: pa.Table, days: Sequence[Day], unknown: Sequence[int]
) -> pa.Table:
    """Return the number of nodes per value on each day except the first, which is only compared with.

    `nodes` are the observations of `published.inventory` for a history's nodes on these days, `unknown` the values of
    an unobserved node. Without a session, this process counts. Columns: stream, day (0: the second of `days`),
    value_number, nodes, came, went; partial sums, unordered.
    """
    job = _CountJob(bounds_of(days), np.array(unknown, np.int32))
    return compute(session, nodes, _OBSERVED, job, _COUNTED)
