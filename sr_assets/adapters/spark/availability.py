"""The availability of nodes by day, exact to the nanosecond; Spark computes that of many nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from sr_assets.adapters.spark.schemas import rows_of
from sr_assets.adapters.spark.status_intervals import (
    RETIRED,
    TIMEOUT,
    UP,
    StatusIntervals,
    bounds_of,
    column,
    compute,
)
from sr_assets.domain.days import Day

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import SparkSession

    from sr_assets.adapters.published.node_histories import History

_MEASURED: Final = (
    "key int, day int, up_ns long, timeout_ns long, retired_ns long, blind_ns long, transitions int, outages int,"
    " longest_ns long"
)


@dataclass(frozen=True, slots=True)
class _MeasureJob:
    """Measures a task's nodes on days that start at `bounds`; `spans` are the streams' blind spans."""

    bounds: NDArray[np.int64]
    spans: pa.Table

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield a row for each node and day on which it was known."""
        for nodes in batches:
            pieces = StatusIntervals.cut(nodes, self.bounds)
            if not len(pieces.node):
                continue
            blind_ns = self._blind_ns(column(nodes, "stream")[pieces.node], pieces)
            ns = pieces.next_ns - pieces.from_ns - blind_ns
            # Intervals are ordered: those of a node's day are adjacent, and within them those of a stretch.
            of_day = _begins(pieces.node, pieces.day)
            of_stretch = _begins(pieces.stretch, pieces.day)
            down_ns = np.add.reduceat(np.where(pieces.status == UP, 0, ns), of_stretch)
            measured = [
                column(nodes, "key")[pieces.node[of_day]],
                pieces.day[of_day],
                *(np.add.reduceat(np.where(pieces.status == code, ns, 0), of_day) for code in (UP, TIMEOUT, RETIRED)),
                np.add.reduceat(blind_ns, of_day),
                np.add.reduceat(pieces.changed, of_day, dtype=np.int64),
                np.add.reduceat(pieces.outage, of_day, dtype=np.int64),
                np.maximum.reduceat(down_ns, np.searchsorted(of_stretch, of_day)),
            ]
            yield rows_of(_MEASURED, measured)

    def _blind_ns(self, streams: NDArray[np.int32], pieces: StatusIntervals) -> NDArray[np.int64]:
        """Return the blind time of each interval's stream."""
        blind_ns = np.zeros(len(streams), np.int64)
        of_stream = self.spans["stream"].to_numpy()
        for stream in np.unique(of_stream):
            first_ns, next_ns = (self.spans[name].to_numpy()[of_stream == stream] for name in ("first_ns", "next_ns"))
            here = streams == stream
            until, since = (_covered(first_ns, next_ns, at[here]) for at in (pieces.next_ns, pieces.from_ns))
            blind_ns[here] = until - since
        return blind_ns


def _covered(first_ns: NDArray[np.int64], next_ns: NDArray[np.int64], at_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the time before each instant inside spans, which are ascending and disjoint."""
    before = np.concatenate([[0], np.cumsum(next_ns - first_ns)])
    last = np.searchsorted(first_ns, at_ns, "right") - 1
    # Exclude the part of the last started span after the instant.
    rest = np.where(last >= 0, np.maximum(next_ns[last] - at_ns, 0), 0)
    covered: NDArray[np.int64] = before[last + 1] - rest
    return covered


def _begins(*columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where a row differs from the previous one."""
    differs = np.logical_or.reduce([np.diff(each, prepend=each[0] - 1) != 0 for each in columns])
    return np.flatnonzero(differs)


def measure_days(session: SparkSession | None, history: History, days: Sequence[Day]) -> pa.Table:
    """Return a row for each node and day on which it was known, unordered. `days` are consecutive.

    Without a session, this process computes them.
    Columns: key, day (an index into `days`), up_ns, timeout_ns, retired_ns, blind_ns (their sum is the time of the day
    since the node's first sighting, up to the watermark), transitions, outages (stretches not up that started on the
    day) and longest_ns (the longest part of a stretch not up, without blind time).
    """
    return compute(session, history.nodes, "", _MeasureJob(bounds_of(days), history.spans), _MEASURED)
