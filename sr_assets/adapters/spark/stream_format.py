"""The format `jetstream`: the options of `spark.read`, `spark.readStream` and `df.write`, its columns, and messages as rows.

Add an option to its tuple, to `StreamOptions` and to the table in `docs/spark.md`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

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

from sr_assets.adapters.connection_file import PackedConnection, pack_cluster
from sr_assets.domain.clusters import ClusterSettings, domain_api
from sr_assets.domain.errors import ConfigurationError, did_you_mean
from sr_assets.domain.messages import Message, header_map
from sr_assets.domain.positions import parse_rfc3339_ns
from sr_assets.domain.subjects import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa


_CONNECTION: Final = ("url", "stream", "credentials_file", "tls_ca", "tls_cert", "tls_key", "domain")
BATCH_OPTIONS: Final = (*_CONNECTION, "start", "end", "filter_subject", "partitions", "push_filters")
STREAMING_OPTIONS: Final = (*_CONNECTION, "start", "filter_subject", "partitions", "max_messages_per_trigger")
WRITE_OPTIONS: Final = _CONNECTION
#: Spark passes its own options of a streaming query on to the sink.
STREAMING_WRITE_OPTIONS: Final = (
    *_CONNECTION,
    "checkpointlocation",
    "asyncprogresstrackingenabled",
    "asyncprogresstrackingcheckpointintervalms",
)


_TOKEN: Final = re.compile(r"[^\s.]+")
_STREAM: Final = re.compile(r"[^\s.*>/\\]+")
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


class Bound(NamedTuple):
    """A sequence, or a stored time in unix ns: the first message at or after it."""

    sequence: int | None = None
    time_ns: int | None = None


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The parsed options. `packed` has the connection with the content of its files, for tasks on other machines."""

    packed: PackedConnection
    stream: str
    start: Bound | None = None
    end: Bound | None = None
    filter_subject: str | None = None
    partitions: int | None = None
    max_messages: int | None = None
    push_filters: bool = False


def parse_options(options: Mapping[str, str], accepted: tuple[str, ...]) -> StreamOptions:
    """Parse the options of a query that accepts only some.

    Raises ConfigurationError in one line for an unknown, missing or invalid option.
    """
    given = {name: str(value) for name, value in options.items()}
    for name in given:
        if name not in accepted:
            hint = did_you_mean(name, accepted)
            raise ConfigurationError(f"option {name} is unknown here; {hint}the options are: {', '.join(accepted)}")
    for name in ("url", "stream"):
        if not given.get(name):
            raise ConfigurationError(f"option {name} is missing; set it with .option({name!r}, …)")
    if not _STREAM.fullmatch(given["stream"]):
        raise ConfigurationError(f"option stream: {given['stream']!r} is not the name of a stream")
    if not all(map(_TOKEN.fullmatch, given.get("filter_subject", "a").split("."))):
        raise ConfigurationError(f"option filter_subject: {given['filter_subject']!r} is not a subject")
    start, end = (_bound(name, given.get(name)) for name in ("start", "end"))
    return StreamOptions(
        pack_cluster(_cluster(given)),
        given["stream"],
        start,
        end,
        given.get("filter_subject"),
        _count("partitions", given),
        _count("max_messages_per_trigger", given),
        _flag("push_filters", given),
    )


def _cluster(given: Mapping[str, str]) -> ClusterSettings:
    from sr_assets.settings import load_cluster

    url = given["url"]
    tls = {"ca": given.get("tls_ca"), "cert": given.get("tls_cert"), "key": given.get("tls_key")}
    cluster = load_cluster(url, tls, named="option url")
    if (cluster.user or cluster.token) and "${" not in url:
        raise ConfigurationError(
            "option url contains a login, which Spark's plans show; use credentials_file, or ${NAME} for an environment"
            " variable"
        )
    if "credentials_file" in given:
        cluster = replace(cluster, credentials=given["credentials_file"])
    return replace(cluster, api_prefix=domain_api(given["domain"])) if "domain" in given else cluster


def _bound(name: str, text: str | None) -> Bound | None:
    if text is None:
        return None
    if text.isascii() and text.isdigit():
        return Bound(sequence=int(text))
    try:
        return Bound(time_ns=parse_rfc3339_ns(text))
    except ValueError:
        raise ConfigurationError(
            f"option {name}: {text!r} is neither a sequence nor a time; use 1042 or 2026-03-15T13:48:10Z"
        ) from None


def _flag(name: str, given: Mapping[str, str]) -> bool:
    text = given.get(name, "false").lower()
    if text not in {"true", "false"}:
        raise ConfigurationError(f"option {name}: {given[name]!r} is neither true nor false")
    return text == "true"


def _count(name: str, given: Mapping[str, str]) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ConfigurationError(f"option {name}: {text!r} is not a positive number")
    return int(text)


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
