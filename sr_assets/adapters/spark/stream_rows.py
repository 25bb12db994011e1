"""The columns of the format `jetstream`, and messages as their Arrow rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from sr_assets.domain.errors import ConfigurationError
from sr_assets.domain.messages import header_map
from sr_assets.domain.subjects import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from sr_assets.domain.messages import Message

STREAM_SCHEMA: Final = (
    "sequence bigint, stored_at timestamp, subject string, headers map<string, array<string>>, payload binary"
)
_HEADERS: Final = MapType(StringType(), ArrayType(StringType()))
_TYPES: Final[Mapping[str, DataType]] = {
    "sequence": LongType(),
    "stored_at": TimestampType(),
    "subject": StringType(),
    "headers": _HEADERS,
    "payload": BinaryType(),
}


def check_columns(schema: StructType) -> tuple[str, ...]:
    """Return the columns of a read. A schema with fewer columns reads less: without `payload`, only headers.

    Raises ConfigurationError for another column or type.
    """
    for field in schema.fields:
        wanted = _TYPES.get(field.name)
        if wanted is None or wanted.simpleString() != field.dataType.simpleString():
            raise ConfigurationError(
                f"column {field.name} {field.dataType.simpleString()} is unknown; the columns are: {STREAM_SCHEMA}"
            )
    return tuple(field.name for field in schema.fields)


def to_batch(columns: Sequence[str], messages: Sequence[Message]) -> pa.RecordBatch:
    """Return messages as rows with these columns."""
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([_array(column, messages) for column in columns], names=list(columns))


def _array(column: str, messages: Sequence[Message]) -> pa.Array[Any]:
    import pyarrow as pa

    match column:
        case "sequence":
            return pa.array([message.sequence for message in messages], pa.int64())
        case "stored_at":
            # Spark's timestamps have microseconds.
            return pa.array([message.stored_ns // 1000 for message in messages], pa.timestamp("us", tz="UTC"))
        case "subject":
            return pa.array([printable(message.subject) for message in messages], pa.string())
        case "headers":
            headers = [header_map(message.headers) for message in messages]
            rows = [None if values is None else list(values.items()) for values in headers]
            return pa.array(rows, pa.map_(pa.string(), pa.list_(pa.string())))
    return pa.array([message.payload for message in messages], pa.binary())
