"""The Spark data source `jetstream`: a range of a stream → partitions → Arrow record batches; it also makes the sink.

Here: the options, the three schemas of rows, the reader. Not here: the writer (`spark.sink`), the protocol (`wire`), which
range to read and what follows from missing sequences (the stages). The readers import inside their methods: they run in
Spark's Python workers, which must start quickly and keep nothing between tasks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceReader, InputPartition

from sr_assets.adapters.connection_file import open_connection
from sr_assets.domain.subjects import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import pyarrow as pa

    from sr_assets.domain.messages import Message
    from sr_assets.domain.senders import SenderExtractor

FORMAT = "jetstream"
#: One row per message: source sequence, stored time in unix ns, subject, header block as it is on the wire, payload.
MESSAGE_SCHEMA = "sequence long, stored_ns long, subject string, headers binary, payload binary"
#: One row per message, reduced to what the rules look at; `sender` is null when there is none.
SIGHTING_SCHEMA = "sequence long, stored_ns long, sender string, payload_bytes long, forced boolean"
#: One row per message of an advisory stream: an `advisory` with the columns of `domain.received.Advisory`, an
#: `observation` or `nothing`. `reason`, `field`, `subject` and `excerpt` (of an observation: all of it) are those of a
#: rejected message.
ADVISORY_SCHEMA = (
    "sequence long, stored_ns long, kind string, payload_bytes long, replicator string, name string, stream string,"
    " node string, epoch_ns long, transition long, event_ns long, event_code byte, seen_ns long, origin string, event_id string,"
    " age_seconds double, previous string, late boolean, returned boolean, outage_seconds double, reason string, field"
    " string, subject string, excerpt string"
)
_EXCERPT_LETTERS = 200


def encode_extractor(extractor: SenderExtractor, force_path: tuple[str, ...] | None) -> str:
    """Return the option `inspect` for a way to find the sender, with the path of the force field if there is one."""
    return json.dumps({"kind": type(extractor).__name__, "text": extractor.text, "force": force_path})


def decode_extractor(text: str) -> tuple[SenderExtractor, tuple[str, ...] | None]:
    """Read the option `inspect`."""
    from sr_assets.domain.senders import HeaderName, JsonField, SubjectToken

    option = json.loads(text)
    force_path = None if option["force"] is None else tuple(option["force"])
    extractor: SenderExtractor
    match option["kind"]:
        case "JsonField":
            extractor = JsonField(option["text"])
        case "HeaderName":
            extractor = HeaderName(option["text"])
        case _:
            extractor = SubjectToken(int(option["text"]))
    return extractor, force_path


class JetStreamDataSource(DataSource):
    """`spark.read.format("jetstream")` and `df.write.format("jetstream")`.

    Options to read:

    - `connection`: path of a file made by `write_connection`
    - `stream`: the stream's name
    - `first`, `next`: the half-open range of sequences; the stream's last one is not before its end
    - `direct`: `true` to read by batched direct get (nats-server 2.11+, stream with `allow_direct`), else a pull
      consumer is used
    - `filter`: a subject filter; without one every subject
    - `partitions`: into how many equal ranges to cut, 1 by default; rows are in sequence order within each
    - `batch_bytes`: about how many bytes one request asks for, 8 MiB by default
    - `headers_only`: `true` to fetch no payloads where that can be avoided; for `inspect` with what stands elsewhere
    - `inspect`: made by `encode_extractor`; then the rows are `SIGHTING_SCHEMA` and no payload leaves the reader
    - `advisories`: `true` to read each message as an advisory; then the rows are `ADVISORY_SCHEMA`. Without either they
      are `MESSAGE_SCHEMA`

    Options to write are described at `spark.sink.JetStreamWriter`. Sequences that the source does not hold are left out;
    they are no error here.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Return the schema of the rows, which depends on the options `inspect` and `advisories`."""
        if "advisories" in self.options:
            return ADVISORY_SCHEMA
        return SIGHTING_SCHEMA if "inspect" in self.options else MESSAGE_SCHEMA

    def reader(self, schema: Any) -> DataSourceReader:  # noqa: ARG002
        """Return the batch reader."""
        return JetStreamReader(self.options)

    def writer(self, schema: Any, overwrite: bool) -> DataSourceArrowWriter:  # noqa: ARG002
        """Return the batch writer."""
        from sr_assets.adapters.spark.sink import JetStreamWriter

        return JetStreamWriter(self.options)


@dataclass
class RangePartition(InputPartition):
    """The sequences one task reads: from `first` up to, and without, `next`."""

    first: int
    next: int


class JetStreamReader(DataSourceReader):
    """Reads a range; a task that runs twice reads the same rows, because reading consumes nothing."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Keep the options; nothing is opened before a task runs."""
        self._options = dict(options)

    def partitions(self) -> list[RangePartition]:
        """Cut the range into its tasks."""
        from sr_assets.domain.positions import SequenceRange

        whole = SequenceRange(int(self._options["first"]), int(self._options["next"]))
        return [RangePartition(part.first, part.next) for part in whole.split(int(self._options.get("partitions", 1)))]

    def read(self, partition: RangePartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        """Yield the Arrow batches of one partition, in sequence order."""
        from sr_assets.adapters.garbage import gc_paused
        from sr_assets.adapters.wire import BATCH_BYTES, read_confirmed
        from sr_assets.domain.positions import SequenceRange

        options, to_batch = self._options, self._to_batch()
        with gc_paused(), open_connection(options["connection"], "sr-assets reader") as connection:
            for messages in read_confirmed(
                connection,
                options["stream"],
                SequenceRange(partition.first, partition.next),
                filter_subject=options.get("filter"),
                max_bytes=int(options.get("batch_bytes", BATCH_BYTES)),
                direct=options.get("direct") == "true",
                held=True,
                headers_only=options.get("headers_only") == "true",
            ):
                yield to_batch(messages)

    def empty(self) -> pa.RecordBatch:
        """Return the rows of a range without messages."""
        return self._to_batch()([])

    def _to_batch(self) -> Callable[[list[Message]], pa.RecordBatch]:
        """Return how messages become rows."""
        if "advisories" in self._options:
            return read_advisories
        return _sightings(self._options["inspect"]) if "inspect" in self._options else _messages


def read_here(options: Mapping[str, str]) -> pa.Table:
    """Read a range in this process, with the options and the rows of a Spark read. Raises WireError."""
    import pyarrow as pa

    reader = JetStreamReader(options)
    batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    return pa.Table.from_batches([reader.empty(), *batches])


def _messages(messages: list[Message]) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays(
        [
            pa.array([m.sequence for m in messages], pa.int64()),
            pa.array([m.stored_ns for m in messages], pa.int64()),
            pa.array([printable(m.subject) for m in messages], pa.string()),
            pa.array([m.headers for m in messages], pa.binary()),
            pa.array([m.payload for m in messages], pa.binary()),
        ],
        names=["sequence", "stored_ns", "subject", "headers", "payload"],
    )


def _sightings(option: str) -> Any:
    import pyarrow as pa

    from sr_assets.domain.senders import inspect

    extractor, force_path = decode_extractor(option)

    def to_batch(messages: list[Message]) -> pa.RecordBatch:
        inspected = [inspect(extractor, force_path, m.subject, m.headers, m.payload) for m in messages]
        return pa.RecordBatch.from_arrays(
            [
                pa.array([m.sequence for m in messages], pa.int64()),
                pa.array([m.stored_ns for m in messages], pa.int64()),
                pa.array([sender for sender, _ in inspected], pa.string()),
                pa.array([m.payload_bytes for m in messages], pa.int64()),
                pa.array([forced for _, forced in inspected], pa.bool_()),
            ],
            names=["sequence", "stored_ns", "sender", "payload_bytes", "forced"],
        )

    return to_batch


def advisory_schema() -> pa.Schema:
    """Return `ADVISORY_SCHEMA` as an Arrow schema."""
    import pyarrow as pa

    types = {
        "long": pa.int64(),
        "string": pa.string(),
        "byte": pa.int8(),
        "double": pa.float64(),
        "boolean": pa.bool_(),
    }
    columns = [column.split() for column in ADVISORY_SCHEMA.split(",")]
    return pa.schema([(name, types[kind]) for name, kind in columns])


def read_advisories(messages: list[Message]) -> pa.RecordBatch:
    """Return the messages of an advisory stream as rows, one each, with the columns of `ADVISORY_SCHEMA`."""
    import pyarrow as pa

    from sr_assets.domain.received import Advisory, Observation, read_message

    # All but the warning, in the order of the schema's columns.
    count = len(Advisory._fields) - 1
    unset = (None,) * count
    rows = []
    for message in messages:
        content = read_message(message.payload, message.stored_ns)
        if isinstance(content, Advisory):
            kind, body = "advisory", content[:count]
            rest = _rejected(message, content.warning, "event_time") if content.warning else (None,) * 4
        elif isinstance(content, Observation):
            kind, body = "observation", unset
            rest = (None, None, None, message.payload.decode())
        else:
            kind, body = "nothing", unset
            rest = _rejected(message, content.reason, content.field or None)
        rows.append((message.sequence, message.stored_ns, kind, len(message.payload), *body, *rest))
    schema = advisory_schema()
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _rejected(message: Message, reason: str, field: str | None) -> tuple[str | None, ...]:
    """Return the columns of a rejected message: reason, field, subject, and the beginning of its payload."""
    begins = message.payload[: 4 * _EXCERPT_LETTERS].decode(errors="replace")[:_EXCERPT_LETTERS]
    return str(reason), field, printable(message.subject), begins
