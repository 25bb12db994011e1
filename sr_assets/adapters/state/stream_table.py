"""The bases of the classes that hold the statements on one stream's rows of a table in `state.duckdb`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from sr_assets.adapters.state.connection import StateConnection


class StreamTable:
    """One stream's rows of a table, over an open connection."""

    def __init__(self, connection: StateConnection, stream: str) -> None:
        self._connection = connection
        self._stream = stream

    def _value(self, query: str, *values: object) -> Any:
        """Return the single value of a query whose first parameter is the stream."""
        return self._connection.rows(query, [self._stream, *values])[0][0]


class EventTable(StreamTable):
    """One stream's rows of a table of events that are published in order of time: `events` is the table's name."""

    events: ClassVar[str]

    def unpublished(self) -> list[dict[str, Any]]:
        """Return the events to publish, in order of time."""
        return self._events("outbox AND published_ns IS NULL")

    def count_unpublished(self) -> int:
        """Return the number of events to publish."""
        return int(
            self._value(f"SELECT count(*) FROM {self.events} WHERE stream = ? AND outbox AND published_ns IS NULL")
        )

    def mark_published(self, event_ids: list[str], at_ns: int) -> None:
        """Record the publication of events; call it inside a transaction."""
        self._connection.execute(
            f"UPDATE {self.events} SET published_ns = ? WHERE stream = ? AND event_id IN (SELECT unnest(?::VARCHAR[]))",
            [at_ns, self._stream, event_ids],
        )

    def newest(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest events, newest first."""
        return self._events("true", f"event_ns DESC, event LIMIT {limit}")

    def _events(self, condition: str, order: str = "event_ns, event DESC") -> list[dict[str, Any]]:
        cursor = self._connection.execute(
            f"SELECT * FROM {self.events} WHERE stream = ? AND {condition} ORDER BY {order}", [self._stream]
        )
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
