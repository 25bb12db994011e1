"""A range of a stream as rows, read by a task of Spark or by the run's own process: sightings, or advisories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa

from sr_assets.adapters.arrow_rows import arrow_schema, rows_of
from sr_assets.adapters.connection_file import open_connection
from sr_assets.adapters.garbage import gc_paused
from sr_assets.adapters.wire import BATCH_BYTES, read_confirmed
from sr_assets.domain.classes import Classifier, ClassRule
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.received import Advisory, NodeNotice, Observation, SiteNotice, SitePath, SitePaths
from sr_assets.domain.senders import SenderExtractor, inspect, inspect_class
from sr_assets.domain.subjects import lane_check, printable

ToRows = Callable[[list[Message]], pa.RecordBatch]

#: One row per message with the inputs of the rules; `sender` is null if there is none.
_SIGHTING_SCHEMA: Final = "sequence long, stored_ns long, sender string, payload_bytes long, forced boolean"
_EXCERPT_LETTERS: Final = 200


class RowKind(Protocol):
    """What a message's row contains; it is pickled for tasks."""

    @property
    def schema(self) -> str:
        """The schema of the rows, in Spark's syntax; their first column is `sequence`."""

    def converter(self) -> ToRows:
        """Return the function that converts messages to rows."""


@dataclass(frozen=True, slots=True)
class Sightings:
    """The inputs of the rules: `sequence`, `stored_ns`, `sender`, `payload_bytes`, `forced`, and `class` if there are rules of
    classes. `sender` and `class` may be null; payloads are left out.
    """

    extractor: SenderExtractor
    force_path: tuple[str, ...] | None = None
    rules: tuple[ClassRule, ...] | None = None

    @property
    def schema(self) -> str:
        return _SIGHTING_SCHEMA if self.rules is None else f"{_SIGHTING_SCHEMA}, class string"

    def converter(self) -> ToRows:
        """Return the function that converts messages to rows."""
        extractor, force_path, schema = self.extractor, self.force_path, self.schema
        classifier = None if self.rules is None else Classifier(self.rules)

        def convert(messages: list[Message]) -> pa.RecordBatch:
            inspected: list[tuple[object, ...]]
            if classifier is None:
                inspected = [inspect(extractor, force_path, m.subject, m.headers, m.payload) for m in messages]
            else:
                inspected = [
                    inspect_class(extractor, force_path, classifier, m.subject, m.headers, m.payload) for m in messages
                ]
            columns: list[list[object]] = [
                [message.sequence for message in messages],
                [message.stored_ns for message in messages],
                [each[0] for each in inspected],
                [message.payload_bytes for message in messages],
                [each[1] for each in inspected],
            ]
            if classifier is not None:
                columns.append([each[2] for each in inspected])
            return rows_of(schema, columns)

        return convert


@dataclass(frozen=True, slots=True)
class Advisories:
    """The messages of an advisory stream; `paths` decide who may speak for a site.

    `kind` is an `advisory` with the columns of `domain.received.Advisory`, an `observation` or a `site_event` with the site's,
    or `nothing`. `reason`, `field`, `subject` and `excerpt` (the whole payload of an observation or a site event) belong to
    rejected messages.
    """

    paths: tuple[SitePath, ...] = ()
    schema: str = (
        "sequence long, stored_ns long, kind string, payload_bytes long, replicator string, name string, stream string,"
        " node string, epoch_ns long, transition long, event_ns long, event_code byte, seen_ns long, origin string, event_id"
        " string, age_seconds double, previous string, late boolean, returned boolean, outage_seconds double, reason string,"
        " field string, subject string, excerpt string"
    )

    def converter(self) -> ToRows:
        """Return the function that converts messages to rows."""
        paths, schema = SitePaths(self.paths), self.schema
        # All columns of an advisory except the warning, in the order of the schema's columns.
        count = len(Advisory._fields) - 1
        unset = (None,) * count

        def convert(messages: list[Message]) -> pa.RecordBatch:
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
            return rows_of(schema, zip(*rows, strict=True) if rows else [()] * len(arrow_schema(schema)))

        return convert


def _rejected(message: Message, reason: str, field: str | None) -> tuple[str | None, ...]:
    """Return the columns of a rejected message: reason, field, subject, and the beginning of its payload."""
    begins = message.payload[: 4 * _EXCERPT_LETTERS].decode(errors="replace")[:_EXCERPT_LETTERS]
    return str(reason), field, printable(message.subject), begins


@dataclass(frozen=True, slots=True)
class RangeRead:
    """A read of ranges of a stream; repeated, it returns the same rows, because reading consumes nothing.

    - `connection`: the path of a file of `write_connection`
    - `kind`: the content of the rows
    - `direct`: read by batched direct gets (nats-server 2.11+, stream with `allow_direct`), else by a pull consumer
    - `filter_subject`: None for every subject
    - `lanes`: the filters of the stream's partitions; a message that matches none is an error
    - `headers_only`: the server need not send payloads
    - `batch_bytes`: the approximate bytes of a request
    """

    connection: str
    stream: str
    kind: RowKind
    direct: bool
    filter_subject: str | None = None
    lanes: tuple[str, ...] = ()
    headers_only: bool = False
    batch_bytes: int = BATCH_BYTES

    def batches(self, wanted: SequenceRange) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a range, in sequence order; sequences that the source lacks are omitted. Raises WireError.

        The stream's last sequence must not be before the end of the range.
        """
        convert, check = self.kind.converter(), lane_check(self.stream, self.lanes)
        with gc_paused(), open_connection(self.connection, "sr-assets reader") as connection:
            for messages in read_confirmed(
                connection,
                self.stream,
                wanted,
                filter_subject=self.filter_subject,
                max_bytes=self.batch_bytes,
                direct=self.direct,
                held=True,
                headers_only=self.headers_only,
            ):
                check(messages)
                yield convert(messages)

    def table(self, wanted: SequenceRange) -> pa.Table:
        """Return the rows of a range, read in this process. Raises WireError."""
        return pa.Table.from_batches(self.batches(wanted), arrow_schema(self.kind.schema))
