"""The status intervals of nodes: their histories, split at status changes and at day boundaries; the input of the daily
tables.

A task gets whole nodes, so that tasks exchange no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import pyarrow as pa

from sr_assets.adapters.spark.schemas import arrow_schema
from sr_assets.adapters.spark.shipping import Job, task_of
from sr_assets.domain.days import Day
from sr_assets.domain.tracking.rules import Status

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import SparkSession


#: A node's status in a history.
UP, TIMEOUT, RETIRED = range(len(Status))
_NODES: Final = (
    "key INT, stream INT, first_ns BIGINT, until_ns BIGINT, status TINYINT, at_ns ARRAY<BIGINT>, after ARRAY<TINYINT>"
)


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


def compute(session: SparkSession | None, nodes: pa.Table, more: str, job: Job, schema: str) -> pa.Table:
    """Return the rows of a job on nodes, unordered; `more` are its columns in addition to a history's.

    Without a session, this process does the job.
    """
    if session is None:
        return pa.Table.from_batches(job.run(iter(nodes.combine_chunks().to_batches())), arrow_schema(schema))
    columns = ", ".join(filter(None, (_NODES, more)))
    frame = session.createDataFrame(nodes) if nodes.num_rows else session.createDataFrame([], columns)
    return frame.mapInArrow(task_of(job), schema).toArrow()
