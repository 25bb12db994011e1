"""Reading a stream with `spark.read` and `spark.readStream`: offsets are sequences; a filter of the query narrows the read."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from sr_assets.adapters import times
from sr_assets.adapters.connection_file import open_connection, unpacked
from sr_assets.adapters.spark.stream_format import Bound, StreamOptions, check_columns, to_batch
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.positions import SequenceRange, first_stored_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from sr_assets.adapters.nats.stream_info import StreamInfo
    from sr_assets.adapters.wire import Connection
    from sr_assets.domain.messages import Message

#: A server's clock may step back by less than this between two messages without hiding one from a filter by time.
_STEP_BACK_NS: Final = 60 * 10**9
_END: Final = 1 << 63
#: Without the option `partitions`, a task reads at least this many messages.
_TASK_MESSAGES: Final = 50_000
#: A new leader may not know the last messages yet.
_OLD_ANSWERS_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Pushed:
    """The half-open range of sequences, the bounds by time, and a subject filter; each may include more rows."""

    first: int = 1
    next: int = _END
    since: Bound | None = None
    until: Bound | None = None
    subject: str | None = None


def pushed(filters: Iterable[Filter]) -> Pushed:
    """Return what a read may leave out by the filters, which all apply."""
    narrowed = Pushed()
    for each in filters:
        match each:
            case EqualTo(("subject",), str(subject)) if _is_literal(subject):
                narrowed = replace(narrowed, subject=subject)
            case StringStartsWith(("subject",), str(prefix)) if not narrowed.subject and _is_literal(prefix[:-1]):
                narrowed = replace(narrowed, subject=f"{prefix}>" if prefix.endswith(".") else None)
            case EqualTo(("sequence",), int(value)):
                narrowed = _narrowed(narrowed, value, value + 1)
            case GreaterThan(("sequence",), int(value)):
                narrowed = _narrowed(narrowed, value + 1, _END)
            case GreaterThanOrEqual(("sequence",), int(value)):
                narrowed = _narrowed(narrowed, value, _END)
            case LessThan(("sequence",), int(value)):
                narrowed = _narrowed(narrowed, 1, value)
            case LessThanOrEqual(("sequence",), int(value)):
                narrowed = _narrowed(narrowed, 1, value + 1)
            case GreaterThan(("stored_at",), datetime() as time) | GreaterThanOrEqual(
                ("stored_at",), datetime() as time
            ):
                narrowed = replace(narrowed, since=Bound(time_ns=_unix_ns(time) - _STEP_BACK_NS))
            case LessThan(("stored_at",), datetime() as time) | LessThanOrEqual(("stored_at",), datetime() as time):
                narrowed = replace(narrowed, until=Bound(time_ns=_unix_ns(time) + _STEP_BACK_NS))
    return narrowed


def _narrowed(narrowed: Pushed, first: int, after: int) -> Pushed:
    return replace(narrowed, first=max(narrowed.first, first), next=min(narrowed.next, after))


def _is_literal(subject: str) -> bool:
    """Return whether a text is a subject without wildcards, which the server accepts as a filter."""
    tokens = subject.split(".")
    return all(token and not set(token) & set("*> \t\r\n") for token in tokens)


def _unix_ns(time: Any) -> int:
    """Return a time in unix ns; Spark's times without a zone are UTC."""
    moment = time if time.tzinfo else time.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1e6) * 1000


@dataclass
class SequencePartition(InputPartition):
    """The half-open range of sequences of one task; `direct`: by batched direct get."""

    first: int
    next: int
    direct: bool


class _Reading:
    """The work that batch and streaming readers share; picklable, opens connections only inside its methods."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self._options = options
        self._columns = check_columns(schema)
        self._filter = options.filter_subject

    def _info(self, connection: Connection) -> StreamInfo:
        from sr_assets.adapters.nats.stream_info import parse_stream_info

        answer = connection.request_api(f"STREAM.INFO.{self._options.stream}")
        version = tuple(map(int, connection.server_version.partition("-")[0].split(".")))
        return parse_stream_info(answer, version)  # type: ignore[arg-type]  # three numbers

    def _sequence(self, bound: Bound | None, connection: Connection, info: StreamInfo, default: int) -> int:
        """Return the first sequence of a bound."""
        from sr_assets.adapters.wire import next_message

        if bound is None:
            return default
        if bound.sequence is not None:
            return bound.sequence
        assert bound.time_ns is not None
        return first_stored_at(
            bound.time_ns,
            SequenceRange(max(1, info.first_sequence), info.last_sequence + 1),
            lambda sequence: next_message(connection, info.stream, sequence),
        )

    def _tasks(self, messages: int) -> int:
        return self._options.partitions or max(1, min(os.cpu_count() or 1, -(-messages // _TASK_MESSAGES)))

    def _rows(self, partition: SequencePartition) -> Iterator[pa.RecordBatch]:
        from sr_assets.adapters.garbage import gc_paused
        from sr_assets.adapters.wire import read_confirmed

        columns = self._columns
        if partition.first >= partition.next:
            return
        with gc_paused(), self._connect() as connection:
            for messages in read_confirmed(
                connection,
                self._options.stream,
                SequenceRange(partition.first, partition.next),
                filter_subject=self._filter,
                direct=partition.direct,
                held=True,
                headers_only="payload" not in columns,
            ):
                yield self._batch(messages)

    def _batch(self, messages: Sequence[Message]) -> pa.RecordBatch:
        return to_batch(self._columns, messages)

    @contextmanager
    def _connect(self) -> Iterator[Connection]:
        with unpacked(self._options.packed) as file, open_connection(file, "sr-assets spark") as connection:
            yield connection


class StreamBatchReader(_Reading, DataSourceReader):
    """The reader of `spark.read`: the messages of a stream at the time of the query's planning."""

    _pushed = Pushed()

    def partitions(self) -> Sequence[InputPartition]:
        """Split the range into its tasks."""
        options, narrowed = self._options, self._pushed
        with self._connect() as connection:
            info = self._info(connection)
            first = self._sequence(options.start, connection, info, max(1, info.first_sequence))
            after = self._sequence(options.end, connection, info, info.last_sequence + 1)
            if options.start and options.end and first > after:
                raise ConfigurationError(f"options start and end: start is sequence {first}, after end {after}")
            since = self._sequence(narrowed.since, connection, info, first)
            until = self._sequence(narrowed.until, connection, info, after)
            first, after = max(first, narrowed.first, since), min(after, narrowed.next, until, info.last_sequence + 1)
        # Without the sequences that the stream has deleted at its start.
        first = min(max(first, info.first_sequence, 1), max(first, after))
        present, direct = SequenceRange(first, max(first, after)), info.supports_batched_direct_get
        parts = present.split(self._tasks(len(present))) if present else [present]
        return [SequencePartition(part.first, part.next, direct) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task in sequence order."""
        assert isinstance(partition, SequencePartition)
        return self._rows(partition)


class NarrowedBatchReader(StreamBatchReader):
    """A batch reader that the filters of the query narrow, for one query: Spark keeps one reader for all queries of a `load`."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802  Spark's name
        """Narrow the range and the subjects; Spark still applies each filter, because times and patterns are wider."""
        self._pushed = pushed(filters)
        self._filter = self._filter or self._pushed.subject
        yield from filters


class StreamStreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of `spark.readStream`.

    An offset is the next sequence, the first sequence of the query (`initial`), the created time of the stream, and the
    number of tasks of the batch that ends there: a repeated batch has the same tasks, whose rows get the same ids.
    """

    #: The owner of the offsets in messages, and what to do if its stream is another one.
    _owner = "this query's checkpoint"
    _remedy = "use another checkpointLocation"

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._initial: dict[str, Any] | None = None
        # The end of a query with the trigger `availableNow`.
        self._target: int | None = None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  Spark's name
        """Read no message that is stored from now on."""
        with self._connect() as connection:
            self._target = self._info(connection).last_sequence + 1

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name
        """Return the offset of the option `start`, or of the next new message; always the same one.

        Spark asks several times for it, until the first batch is committed.
        """
        if self._initial is None:
            with self._connect() as connection:
                info = self._info(connection)
                first = self._sequence(self._options.start, connection, info, info.last_sequence + 1)
            self._initial = {"next": first, "initial": first, "created_ns": info.created_ns}
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  Spark's name
        """Return the limit of the option `max_messages_per_trigger`."""
        limit = self._options.max_messages
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802  Spark's name
        """Return the end of the next batch. Raises RunError if the offset belongs to another stream, or is after its end."""
        with self._connect() as connection:
            info = self._checked(connection, start)
        after = info.last_sequence + 1
        if isinstance(limit, ReadMaxRows):
            # Deleted messages at the start are not counted.
            after = min(after, max(start["next"], info.first_sequence) + limit.max_rows)
        after = min(after, self._target or after)
        if after <= start["next"]:
            return start
        return {**start, "next": after, "tasks": self._tasks(after - max(start["next"], info.first_sequence))}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Split a batch into its tasks."""
        first = start["next"]
        if start.get("initial") != end.get("initial", start.get("initial")):
            # A query that is restarted before its first batch is committed has another start, but the end of that batch.
            first = end["initial"]
        with self._connect() as connection:
            direct = self._checked(connection, {**start, "next": first}).supports_batched_direct_get
        covered = SequenceRange(max(first, 1), max(end["next"], 1))
        parts = covered.split(end.get("tasks") or self._tasks(len(covered))) if covered else []
        return [SequencePartition(part.first, part.next, direct) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task in sequence order."""
        assert isinstance(partition, SequencePartition)
        return self._rows(partition)

    def _checked(self, connection: Connection, start: dict[str, Any]) -> StreamInfo:
        info = self._info(connection)
        stream = f"stream {info.stream} on {connection.address}"
        if start.get("created_ns") != info.created_ns:
            raise RunError(
                f"{stream} is not the stream of {self._owner}: it was recreated, or {self._owner} belongs to another"
                f" stream; {self._remedy}"
            )
        # The option `start` may name a sequence that does not exist yet.
        if start["next"] != start.get("initial") and info.last_sequence:
            deadline = times.monotonic() + _OLD_ANSWERS_SECONDS
            while start["next"] > info.last_sequence + 1:
                if times.monotonic() > deadline:
                    raise RunError(
                        f"{stream} ends at {info.last_sequence}, before the position {start['next']} of {self._owner}: it was"
                        f" rolled back; {self._remedy}"
                    )
                times.sleep(0.2)
                info = self._info(connection)
        return info
