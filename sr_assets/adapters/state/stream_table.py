"""The base of the classes that hold the statements on one stream's rows of a table in `state.duckdb`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import duckdb


class StreamTable:
    """One stream's rows of a table, over an open connection."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, stream: str) -> None:
        self._connection = connection
        self._stream = stream

    def _value(self, query: str, *values: object) -> Any:
        """Return the single value of a query whose first parameter is the stream."""
        return self._connection.execute(query, [self._stream, *values]).fetchall()[0][0]
