"""The rows of a replay: read once by parallel tasks and kept on the executors' disks, then surveyed and folded by tasks.

A small range is read and folded by the same work in the process of its caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import numpy as np
import pyarrow as pa

from sr_assets.adapters.arrow_rows import arrow_schema, rows_of
from sr_assets.adapters.connection_file import pack_connection
from sr_assets.adapters.range_rows import RangeRead
from sr_assets.adapters.spark.jobs import ReadWork
from sr_assets.adapters.spark.tasks import in_tasks
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.tracking.replaying import REPLAYED, STRETCH, RangeRules, fold_range, survey_part

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

    from sr_assets.adapters.spark.run_session import SparkConnection

#: Sightings of a task that folds: their senders' states are in memory with a part of them.
_FOLDED_MESSAGES: Final = 500_000
#: Rows of the results that the caller gets together.
_PORTION_ROWS: Final = 1_000_000
_SURVEYED: Final = ("sequence", "stored_ns")

#: Called with the number of messages that were read so far.
Reached = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class SurveyWork:
    """Surveys the parts of a range that begin at `firsts`; the other fields are the arguments of `survey_part`."""

    schema: ClassVar[str] = STRETCH
    firsts: NDArray[np.int64]
    before_ns: tuple[int, ...]
    until_ns: int
    lost: NDArray[np.int64] | None

    def run(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the stretches of each part; its rows are in one task, in order."""
        sequence, stored_ns = (np.concatenate(columns) for columns in _columns(rows))
        part = np.searchsorted(self.firsts, sequence, side="right") - 1
        for number in np.unique(part).tolist():
            chosen = part == number
            columns = (sequence[chosen], stored_ns[chosen], self.before_ns[number], self.until_ns, self.lost)
            yield rows_of(self.schema, survey_part(number, *columns))


def _columns(rows: Iterator[pa.RecordBatch]) -> tuple[list[Any], list[Any]]:
    none = np.zeros(0, np.int64)
    columns = ([none], [none])
    for batch in rows:
        for held, name in zip(columns, _SURVEYED, strict=True):
            held.append(batch.column(name).to_numpy())
    return columns


@dataclass(frozen=True, slots=True)
class FoldWork:
    """Folds all sightings of a task's senders, in order of sequence."""

    schema: ClassVar[str] = REPLAYED
    rules: RangeRules

    def run(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the transitions, the copies and the senders."""
        wanted = arrow_schema(self.schema)
        for table in fold_range(rows, self.rules):
            missing = {
                field.name: pa.nulls(table.num_rows, field.type)
                for field in wanted
                if field.name not in table.schema.names
            }
            columns = {**{name: table[name] for name in table.schema.names}, **missing}
            yield from pa.table({name: columns[name] for name in wanted.names}).cast(wanted).to_batches()


class RangeRows(Protocol):
    """The sightings of a range, read once."""

    def survey(self, work: SurveyWork) -> pa.Table:
        """Return the stretches of all parts, in order of sequence."""

    def fold(self, work: FoldWork) -> Iterator[pa.Table]:
        """Yield the results in portions; all rows of a node are in one."""


class _HeldRows:
    """Sightings in this process, a table for each part."""

    def __init__(self, parts: Sequence[pa.Table]) -> None:
        self._parts = parts

    def survey(self, work: SurveyWork) -> pa.Table:
        batches = [batch for part in self._parts for batch in work.run(iter(part.to_batches()))]
        return pa.Table.from_batches(batches, arrow_schema(work.schema))

    def fold(self, work: FoldWork) -> Iterator[pa.Table]:
        batches = (batch for part in self._parts for batch in part.to_batches())
        yield pa.Table.from_batches(work.run(batches), arrow_schema(work.schema))


class _SparkRows:
    """Sightings on the disks of a session's executors, a partition for each part."""

    def __init__(self, spark: SparkConnection, rows: DataFrame, messages: int) -> None:
        self._spark, self._rows, self._messages = spark, rows, messages

    def survey(self, work: SurveyWork) -> pa.Table:
        with self._spark.use():
            stretches = in_tasks(self._rows.select(*_SURVEYED), work).toArrow()
        return stretches.cast(arrow_schema(work.schema)).sort_by("first")

    def fold(self, work: FoldWork) -> Iterator[pa.Table]:
        # Many senders in a task: `fold_batch` decides on a sighting of each at the same time. The sort can exceed the memory,
        # so a task takes any number of sightings, which a group of `applyInArrow` could not.
        tasks = max(self._spark.cores(), -(-self._messages // _FOLDED_MESSAGES))
        with self._spark.use():
            by_sender = self._rows.repartition(tasks, "sender").sortWithinPartitions("sequence")
            results = _on_disk(in_tasks(by_sender, work))
            try:
                portions = max(1, -(-results.count() // _PORTION_ROWS))
                for number in range(portions):
                    portion = results.where(f"pmod(hash(node), {portions}) = {number}") if portions > 1 else results
                    yield portion.toArrow().cast(arrow_schema(work.schema))
            finally:
                results.unpersist()


def _on_disk(frame: DataFrame) -> DataFrame:
    from pyspark.storagelevel import StorageLevel

    return frame.persist(StorageLevel.DISK_ONLY)


@contextlib.contextmanager
def rows_here(read: RangeRead, parts: Sequence[SequenceRange], reached: Reached) -> Iterator[RangeRows]:
    """Read the parts of a range in this process, and hold their sightings until the end of the block."""
    tables, done = list[pa.Table](), 0
    for part in parts:
        tables.append(read.table(part))
        done += len(part)
        reached(done)
    yield _HeldRows(tables)


@contextlib.contextmanager
def rows_in_spark(
    spark: SparkConnection, read: RangeRead, parts: Sequence[SequenceRange], reached: Reached
) -> Iterator[RangeRows]:
    """Read the parts of a range, one by each task, at the first use; keep their sightings until the end of the block."""
    work = ReadWork(read, tuple(parts), pack_connection(read.connection) if spark.remote else None)
    messages = sum(map(len, parts))
    with spark.use() as session:
        rows = _on_disk(in_tasks(session.range(0, len(parts), 1, len(parts)), work))
    with _progress(session, lambda share: reached(int(share * messages))):
        try:
            yield _SparkRows(spark, rows, messages)
        finally:
            with contextlib.suppress(Exception):  # its engine may be lost
                rows.unpersist()


@contextlib.contextmanager
def _progress(session: SparkSession, reached: Callable[[float], object]) -> Iterator[None]:
    """Report the share of the tasks of the first operation that have ended; only Connect sessions report any."""
    from sr_assets.adapters.spark.connect import is_remote

    if not is_remote(session):
        yield
        return

    operations = set[str | None]()

    def note(stages: Any, inflight_tasks: int, operation_id: str | None, done: bool) -> None:  # noqa: ARG001  pyspark's
        operations.add(operation_id)
        if stages and len(operations) == 1:
            total = sum(stage.num_tasks for stage in stages)
            reached(sum(stage.num_completed_tasks for stage in stages) / max(1, total))

    # Any function will do; the type is a class.
    handler: Any = note
    session.registerProgressHandler(handler)
    try:
        yield
    finally:
        session.removeProgressHandler(handler)
