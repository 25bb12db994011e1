"""Publishing rows with `df.write` and `df.writeStream`: each row is acknowledged by the stream, and has an id.

An id names the row's content, not only its place: a repeated task may get its rows in another order, or without some of them.
Ids that it sends again are dropped by the stream within the duplicate window.
"""

from __future__ import annotations

import uuid
from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from sr_assets.adapters import times
from sr_assets.adapters.connection_file import open_connection, unpacked
from sr_assets.adapters.wire import Outgoing, Publisher, WireError
from sr_assets.domain.backoff import backoff_seconds
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.messages import MESSAGE_ID_HEADER, encode_headers
from sr_assets.domain.subjects import matcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa
    from pyspark import TaskContext
    from pyspark.sql.types import StructType

    from sr_assets.adapters.spark.stream_format import StreamOptions

_TYPES: Final = {"subject": "string", "payload": "binary", "headers": "map<string,array<string>>"}
_MESSAGE_ID: Final = MESSAGE_ID_HEADER.decode()
#: A task sends its rows again after a lost connection, this often in a row.
_TRIES: Final = 5
#: Equal rows are counted within this many rows of a task, which bounds the memory: some 100 bytes a row.
_COUNTED: Final = 1 << 20
#: Spark's names of a micro-batch's query and number.
_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"


class _Publishing:
    """The work that batch and streaming writers share; picklable."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        types = {field.name: field.dataType.simpleString() for field in schema.fields}
        if _TYPES | types != _TYPES or not {"subject", "payload"} <= types.keys():
            columns = ", ".join(f"{name} {kind}" for name, kind in types.items())
            raise ConfigurationError(
                f"the columns are {columns}; select subject string, payload binary and, if needed, headers"
                " map<string,array<string>>"
            )
        self._options, self._write = options, uuid.uuid4().hex

    def _publish(self, batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Publish a task's rows in order. Raises RunError with the first refused row, WireError without a connection."""
        from pyspark import TaskContext

        context = TaskContext.get()
        prefix = f"{self._named(context)}/{context.partitionId() if context else 0}"
        with unpacked(self._options.packed) as file:
            takes, ids = self._subjects(file), _Ids(prefix)
            for batch in batches:
                self._send(file, [self._outgoing(row, ids, takes) for row in enumerate(batch.to_pylist())])
        return WriterCommitMessage()

    def _named(self, context: TaskContext | None) -> str:  # noqa: ARG002  another writer needs it
        """Return the first part of the ids; each `save()` has its own."""
        return self._write

    def _subjects(self, file: str) -> Callable[[str], object]:
        stream = self._options.stream
        with open_connection(file, "sr-assets spark") as connection:
            config: dict[str, Any] = connection.request_api(f"STREAM.INFO.{stream}")["config"]
        return matcher(config.get("subjects") or ())

    def _outgoing(self, row: tuple[int, dict[str, Any]], ids: _Ids, takes: Callable[[str], object]) -> Outgoing:
        number, values = row
        subject, payload = values["subject"], values["payload"] or b""
        headers = {
            name: [text or "" for text in texts or ()] for name, texts in dict(values.get("headers") or ()).items()
        }
        if subject is None or "" in subject.split(".") or not takes(subject):
            raise RunError(f"subject {subject!r}: stream {self._options.stream} does not take it")
        try:
            if _MESSAGE_ID not in headers:
                headers[_MESSAGE_ID] = [ids.new(subject.encode(), encode_headers(headers), payload)]
            return Outgoing(number, subject, encode_headers(headers), payload)
        except ValueError as error:
            raise RunError(f"subject {subject!r}: {error}") from None

    def _send(self, file: str, rows: list[Outgoing]) -> None:
        """Publish rows and wait for all acknowledgements; a row that was stored before is a duplicate."""
        waiting = {each.sequence: each for each in rows}
        failures = 0
        while waiting:
            before = len(waiting)
            try:
                with open_connection(file, "sr-assets spark") as connection:
                    publisher = Publisher(connection, stream=self._options.stream)
                    for ack in publisher.publish_all(list(waiting.values())):
                        if ack.target_sequence is None:
                            subject = waiting[ack.sequence].subject
                            raise RunError(f"subject {subject!r}: {ack.error} ({ack.error_code})")
                        del waiting[ack.sequence]
            except WireError:
                failures = failures + 1 if len(waiting) == before else 1
                if failures >= _TRIES:
                    raise
                times.sleep(backoff_seconds(failures, first_seconds=0.2, longest_seconds=5.0))


class _Ids:
    """The ids of a task's rows: equal rows have different ones."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._rows = prefix, 0
        self._equal: Counter[bytes] = Counter()

    def new(self, *parts: bytes) -> str:
        """Return the id of the next row."""
        block, place = divmod(self._rows, _COUNTED)
        if not place:
            self._equal.clear()
        self._rows += 1
        digest = blake2b(digest_size=12)
        for part in parts:
            digest.update(len(part).to_bytes(8) + part)
        content = digest.digest()
        self._equal[content] += 1
        return f"{self._prefix}/{block}/{content.hex()}/{self._equal[content]}"


class StreamBatchWriter(_Publishing, DataSourceArrowWriter):
    """The writer of `df.write`; only mode `append`, because a stream keeps its messages."""

    def __init__(self, options: StreamOptions, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise ConfigurationError("mode overwrite: a stream keeps its messages; use mode('append')")
        super().__init__(options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Publish the rows of a task."""
        return self._publish(iterator)


class StreamStreamWriter(_Publishing, DataSourceStreamArrowWriter):
    """The writer of `df.writeStream`: a micro-batch that a restarted query repeats has the same ids."""

    def _named(self, context: TaskContext | None) -> str:
        """Return the query and the number of the micro-batch."""
        assert context is not None
        return f"{context.getLocalProperty(_QUERY)}/{context.getLocalProperty(_BATCH)}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Publish the rows of a task."""
        return self._publish(iterator)
