"""The Spark data source `jetstream`: a range of a stream as partitions of Arrow record batches; it also creates the
sink.

The readers import inside their methods: they run in Spark's Python workers, which must start quickly and keep no state
between tasks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
)

from sr_assets.adapters.connection_file import open_connection
from sr_assets.adapters.spark import stream_format
from sr_assets.adapters.spark.schemas import arrow_schema, rows_of
from sr_assets.adapters.spark.stream_format import STREAM_SCHEMA, parse_options
from sr_assets.domain.classes import Classifier, ClassRule, decode_rules, encode_rules
from sr_assets.domain.messages import Message
from sr_assets.domain.senders import SenderExtractor
from sr_assets.domain.subjects import printable

if TYPE_CHECKING:
    import pyarrow as pa

    from sr_assets.domain.received import SitePaths

FORMAT = "jetstream"
#: One row per message: source sequence, stored time in unix ns, subject, unchanged header block, payload.
MESSAGE_SCHEMA = "sequence long, stored_ns long, subject string, headers binary, payload binary"
#: One row per message with the inputs of the rules; `sender` is null if there is none.
SIGHTING_SCHEMA = "sequence long, stored_ns long, sender string, payload_bytes long, forced boolean"
#: The same of a stream with classes; `class` is null if the message has none.
CLASSED_SCHEMA = f"{SIGHTING_SCHEMA}, class string"
#: One row per message of an advisory stream: an `advisory` with the columns of `domain.received.Advisory`, an
#: `observation` or a `site_event` with the site's, or `nothing`. `reason`, `field`, `subject` and `excerpt` (the whole
#: payload of an observation or a site event) belong to rejected messages.
ADVISORY_SCHEMA = (
    "sequence long, stored_ns long, kind string, payload_bytes long, replicator string, name string, stream string,"
    " node string, epoch_ns long, transition long, event_ns long, event_code byte, seen_ns long, origin string, event_id string,"
    " age_seconds double, previous string, late boolean, returned boolean, outage_seconds double, reason string, field"
    " string, subject string, excerpt string"
)
_EXCERPT_LETTERS = 200


def encode_extractor(
    extractor: SenderExtractor, force_path: tuple[str, ...] | None, rules: Iterable[ClassRule] | None = None
) -> str:
    """Return the option `inspect` for a sender extractor, with the path of the force field and the rules of classes, if any."""
    option = {"kind": type(extractor).__name__, "text": extractor.text, "force": force_path}
    return json.dumps(option if rules is None else {**option, "classes": encode_rules(rules)})


def decode_classes(text: str) -> Classifier | None:
    """Return the classifier of the option `inspect`, or None without classes."""
    option = json.loads(text)
    return decode_rules(option["classes"]) if "classes" in option else None


def decode_extractor(text: str) -> tuple[SenderExtractor, tuple[str, ...] | None]:
    """Parse the option `inspect`."""
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


def schema_of(options: Mapping[str, str]) -> str:
    """Return the schema of a read's rows, which depends on the options `inspect` and `advisories`."""
    if "advisories" in options:
        return ADVISORY_SCHEMA
    if "inspect" not in options:
        return MESSAGE_SCHEMA
    return SIGHTING_SCHEMA if "classes" not in json.loads(options["inspect"]) else CLASSED_SCHEMA


class JetStreamDataSource(DataSource):
    """The format `jetstream`. With the option `url`, the public one of `docs/spark.md`, for reading, streaming and writing.

    Otherwise the platform's own reads and copies. Their options for reading:
    - `connection`: path of a file of `write_connection`
    - `stream`: the stream's name
    - `first`, `next`: the half-open range of sequences; the stream's last one is not before its end
    - `direct`: `true` to read by batched direct get (nats-server 2.11+, stream with `allow_direct`), else a pull
      consumer is used
    - `filter`: a subject filter; default every subject
    - `lanes`: the filters of the stream's partitions, as JSON; a message that matches none is an error
    - `partitions`: number of equal ranges, default 1; rows are in sequence order within each
    - `batch_bytes`: approximate bytes per request, default 8 MiB
    - `headers_only`: `true` to avoid fetching payloads; for `inspect` by header or subject
    - `inspect`: a value of `encode_extractor`; the rows are then `SIGHTING_SCHEMA` or `CLASSED_SCHEMA`, without payloads
    - `advisories`: a value of `encode_paths`, to parse advisories; the rows are then `ADVISORY_SCHEMA`

    The default rows are `MESSAGE_SCHEMA`. `spark.sink.JetStreamWriter` describes the options for writing.

    Sequences that the source lacks are omitted without an error.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> str:
        """Return the schema of the rows."""
        return schema_of(self.options) if self._is_own else STREAM_SCHEMA

    def reader(self, schema: Any) -> DataSourceReader:
        """Return the batch reader."""
        if self._is_own:
            return JetStreamReader(self.options)
        from sr_assets.adapters.spark.stream_reader import NarrowedBatchReader, StreamBatchReader

        options = parse_options(self.options, stream_format.BATCH_OPTIONS)
        return (NarrowedBatchReader if options.push_filters else StreamBatchReader)(options, schema)

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        """Return the streaming reader."""
        from sr_assets.adapters.spark.stream_reader import StreamStreamReader

        return StreamStreamReader(parse_options(self.options, stream_format.STREAMING_OPTIONS), schema)

    def writer(self, schema: Any, overwrite: bool) -> DataSourceArrowWriter:
        """Return the batch writer."""
        if self._is_own:
            from sr_assets.adapters.spark.sink import JetStreamWriter

            return JetStreamWriter(self.options)
        from sr_assets.adapters.spark.stream_writer import StreamBatchWriter

        return StreamBatchWriter(parse_options(self.options, stream_format.WRITE_OPTIONS), schema, overwrite=overwrite)

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802, ARG002  Spark's
        """Return the streaming writer."""
        from sr_assets.adapters.spark.stream_writer import StreamStreamWriter

        return StreamStreamWriter(parse_options(self.options, stream_format.STREAMING_WRITE_OPTIONS), schema)

    @property
    def _is_own(self) -> bool:
        return "connection" in self.options or "plan" in self.options


@dataclass
class RangePartition(InputPartition):
    """The sequences of one task, half-open."""

    first: int
    next: int


class JetStreamReader(DataSourceReader):
    """Reads a range; a repeated task reads the same rows, because reading consumes nothing."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)

    def partitions(self) -> list[RangePartition]:
        """Split the range into its tasks."""
        from sr_assets.domain.positions import SequenceRange

        whole = SequenceRange(int(self._options["first"]), int(self._options["next"]))
        return [RangePartition(part.first, part.next) for part in whole.split(int(self._options.get("partitions", 1)))]

    def read(self, partition: RangePartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        """Yield the Arrow batches of one partition, in sequence order."""
        from sr_assets.adapters.garbage import gc_paused
        from sr_assets.adapters.wire import BATCH_BYTES, read_confirmed
        from sr_assets.domain.positions import SequenceRange
        from sr_assets.domain.subjects import lane_check

        options, to_batch = self._options, self._to_batch()
        check = lane_check(options["stream"], json.loads(options.get("lanes", "[]")))
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
                check(messages)
                yield to_batch(messages)

    def _to_batch(self) -> Callable[[list[Message]], pa.RecordBatch]:
        """Return the function that converts messages to rows."""
        if "advisories" in self._options:
            from sr_assets.domain.received import SitePaths

            paths = SitePaths.decode(self._options["advisories"])
            return lambda messages: read_advisories(messages, paths)
        return _sightings(self._options["inspect"]) if "inspect" in self._options else _messages


def read_here(options: Mapping[str, str]) -> pa.Table:
    """Read a range in this process, with the options and rows of a Spark read. Raises WireError."""
    import pyarrow as pa

    reader = JetStreamReader(options)
    batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    return pa.Table.from_batches(batches, arrow_schema(schema_of(options)))


def _messages(messages: list[Message]) -> pa.RecordBatch:
    columns = (
        [message.sequence for message in messages],
        [message.stored_ns for message in messages],
        [printable(message.subject) for message in messages],
        [message.headers for message in messages],
        [message.payload for message in messages],
    )
    return rows_of(MESSAGE_SCHEMA, columns)


def _sightings(option: str) -> Callable[[list[Message]], pa.RecordBatch]:
    from sr_assets.domain.senders import inspect, inspect_class

    extractor, force_path = decode_extractor(option)
    classifier = decode_classes(option)
    if classifier is not None:
        rules = classifier

        def to_classed_batch(messages: list[Message]) -> pa.RecordBatch:
            inspected = [inspect_class(extractor, force_path, rules, m.subject, m.headers, m.payload) for m in messages]
            columns = (
                [message.sequence for message in messages],
                [message.stored_ns for message in messages],
                [sender for sender, _, _ in inspected],
                [message.payload_bytes for message in messages],
                [forced for _, forced, _ in inspected],
                [node_class for _, _, node_class in inspected],
            )
            return rows_of(CLASSED_SCHEMA, columns)

        return to_classed_batch

    def to_batch(messages: list[Message]) -> pa.RecordBatch:
        inspected = [inspect(extractor, force_path, m.subject, m.headers, m.payload) for m in messages]
        columns = (
            [message.sequence for message in messages],
            [message.stored_ns for message in messages],
            [sender for sender, _ in inspected],
            [message.payload_bytes for message in messages],
            [forced for _, forced in inspected],
        )
        return rows_of(SIGHTING_SCHEMA, columns)

    return to_batch


def read_advisories(messages: list[Message], paths: SitePaths | None = None) -> pa.RecordBatch:
    """Return the messages of an advisory stream as rows of `ADVISORY_SCHEMA`; `paths` decide who may speak for a site."""
    from sr_assets.domain import received
    from sr_assets.domain.received import Advisory, NodeNotice, Observation, SiteNotice

    paths = paths or received.SitePaths(())

    # All except the warning, in the order of the schema's columns.
    count = len(Advisory._fields) - 1
    unset = (None,) * count
    rows = []
    for message in messages:
        content = paths.read(message)
        if isinstance(content, NodeNotice):
            content = content.state
        if isinstance(content, Advisory):
            kind, body = "advisory", content[:count]
            rest = _rejected(message, content.warning, "event_time") if content.warning else (None,) * 4
        elif isinstance(content, Observation | SiteNotice):
            kind = "observation" if isinstance(content, Observation) else "site_event"
            body = (*content[:3], *unset[3:])
            rest = (None, None, None, message.payload.decode())
        else:
            kind, body = "nothing", unset
            rest = _rejected(message, content.reason, content.field or None)
        rows.append((message.sequence, message.stored_ns, kind, len(message.payload), *body, *rest))
    return rows_of(ADVISORY_SCHEMA, zip(*rows, strict=True) if rows else [()] * len(arrow_schema(ADVISORY_SCHEMA)))


def _rejected(message: Message, reason: str, field: str | None) -> tuple[str | None, ...]:
    """Return the columns of a rejected message: reason, field, subject, and the beginning of its payload."""
    begins = message.payload[: 4 * _EXCERPT_LETTERS].decode(errors="replace")[:_EXCERPT_LETTERS]
    return str(reason), field, printable(message.subject), begins
