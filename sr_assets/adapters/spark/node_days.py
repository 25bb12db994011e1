"""The daily tables in Spark: nodes' histories as status intervals of days, their availability, and their inventory.

A task gets whole nodes, so that tasks exchange no data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from sr_assets.adapters.arrow_rows import arrow_schema, rows_of
from sr_assets.adapters.spark.tasks import Work, run_tasks
from sr_assets.domain.days import Day
from sr_assets.domain.tracking.rules import Status

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import SparkSession

    from sr_assets.adapters.published.node_histories import History

#: A node's status in a history.
UP, TIMEOUT, RETIRED = range(len(Status))


@dataclass(frozen=True, slots=True)
class StatusIntervals:
    """Status intervals by node and in order: `node` (its row), `day`, from `from_ns` to `next_ns`, which may be equal.

    `stretch` numbers the time from the end of one up status to the next, uniquely across nodes. `changed`: the interval
    starts with a transition; `outage`: with a transition that starts an outage.
    """

    node: NDArray[np.int64]
    day: NDArray[np.int64]
    from_ns: NDArray[np.int64]
    next_ns: NDArray[np.int64]
    status: NDArray[np.int8]
    stretch: NDArray[np.int64]
    changed: NDArray[np.bool_]
    outage: NDArray[np.bool_]

    @classmethod
    def cut(cls, nodes: pa.RecordBatch, bounds: NDArray[np.int64]) -> Self:
        """Split the histories of nodes at `bounds`: the starts of days, and the end of the last one.

        `nodes` are `published.node_histories.History`.
        """
        node, at_ns, status, changed = _points(nodes, bounds)
        until_ns = np.minimum(column(nodes, "until_ns"), bounds[-1])[node]
        first = np.diff(node, prepend=-1) > 0
        last = np.roll(first, -1)
        next_ns = np.where(last, until_ns, np.minimum(np.roll(at_ns, -1), until_ns))
        outage = changed & (status != UP) & (first | (np.roll(status, 1) == UP))
        stretch = np.cumsum(first | (status == UP))
        # A change at midnight belongs to the starting day.
        day = np.searchsorted(bounds, at_ns, "right") - 1
        days = np.maximum(np.searchsorted(bounds, next_ns, "left") - day, 1)
        days[at_ns >= until_ns] = 0
        which, further = expand(days)
        begins = further == 0
        day = day[which] + further
        return cls(
            node[which],
            day,
            np.maximum(at_ns[which], bounds[day]),
            np.minimum(next_ns[which], bounds[day + 1]),
            status[which],
            stretch[which],
            changed[which] & begins,
            outage[which] & begins,
        )


def _points(
    nodes: pa.RecordBatch, bounds: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int8], NDArray[np.bool_]]:
    """Return node, time, status and whether it is a change: each node's initial status, then its changes."""
    known = nodes.column("status").is_valid().to_numpy(zero_copy_only=False)
    counts, at_ns = items(nodes.column("at_ns"))
    _, after = items(nodes.column("after"))
    changes, _ = expand(counts)
    before = np.flatnonzero(known)
    node = np.concatenate([before, changes])
    # Stable sort: a node's initial status precedes its changes.
    order = np.argsort(node, kind="stable")
    began_ns = np.maximum(column(nodes, "first_ns"), bounds[0])[before]
    status = nodes.column("status").fill_null(0).to_numpy()[before]
    return (
        node[order],
        np.concatenate([began_ns, at_ns])[order],
        np.concatenate([status, after])[order],
        order >= len(before),
    )


def column(rows: pa.RecordBatch, name: str) -> NDArray[Any]:
    """Return a column without nulls."""
    values: NDArray[Any] = rows.column(name).to_numpy()
    return values


def items(lists: pa.ListArray) -> tuple[NDArray[np.int32], pa.Array]:
    """Return the length of each list, and all items concatenated."""
    return lists.value_lengths().to_numpy(), lists.flatten()


def expand(counts: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the index of each count repeated `count` times, and 0, 1, 2 … within each."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)


def bounds_of(days: Sequence[Day]) -> NDArray[np.int64]:
    """Return the starts of consecutive days, and the end of the last one."""
    return np.array([*(day.first_ns for day in days), days[-1].next_ns], np.int64)


def compute(session: SparkSession | None, nodes: pa.Table, work: Work) -> pa.Table:
    """Return the results of work on nodes, unordered; without a session or nodes, of this process."""
    if session is None or not nodes.num_rows:
        batches = work.run(iter(nodes.combine_chunks().to_batches()))
        return pa.Table.from_batches(batches, arrow_schema(work.schema))
    return run_tasks(session, nodes, work)


@dataclass(frozen=True, slots=True)
class _MeasureWork:
    """Measures a task's nodes on days that start at `bounds`; `spans` are the streams' blind spans."""

    schema: ClassVar[str] = (
        "key int, day int, up_ns long, timeout_ns long, retired_ns long, blind_ns long, transitions int, outages int,"
        " longest_ns long"
    )
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
            yield rows_of(self.schema, measured)

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
    return compute(session, history.nodes, _MeasureWork(bounds_of(days), history.spans))


@dataclass(frozen=True, slots=True)
class _CountWork:
    """Counts the values of nodes on days that start at `bounds`; `unknown` are the values of an unobserved node."""

    schema: ClassVar[str] = "stream int, day int, value_number int, nodes long, came long, went long"
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
            yield rows_of(self.schema, [stream, day - 1, value, *numbers])

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
    return compute(session, nodes, _CountWork(bounds_of(days), np.array(unknown, np.int32)))
