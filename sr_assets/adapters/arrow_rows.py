"""Arrow rows of schemas in Spark's syntax, such as `sequence long, node string`."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


@functools.cache
def arrow_schema(schema: str) -> pa.Schema:
    # Here, because Spark's workers must start quickly.
    import pyarrow as pa

    types = {
        "binary": pa.binary(),
        "boolean": pa.bool_(),
        "byte": pa.int8(),
        "double": pa.float64(),
        "int": pa.int32(),
        "long": pa.int64(),
        "string": pa.string(),
    }
    columns = [column.split() for column in schema.split(",")]
    return pa.schema([(name, types[kind]) for name, kind in columns])


def rows_of(schema: str, columns: Iterable[Any]) -> pa.RecordBatch:
    """Return columns, each a sequence or an array, as rows of a schema."""
    import pyarrow as pa

    arrow = arrow_schema(schema)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, arrow, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow)
