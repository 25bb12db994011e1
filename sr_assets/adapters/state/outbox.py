"""Transitions in `state.duckdb`: the history of every node, and the outbox of those that wait to be published.

Not here: which transitions there are (`stages.tracking`), what an advisory looks like (`domain.advisories`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import duckdb
    import pyarrow as pa


class Outbox:
    """One stream's transitions, and among them those that are not published yet."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, stream: str) -> None:
        """Take the connection and the stream's name."""
        self._connection = connection
        self._stream = stream

    def waiting(self, limit: int, *, without: Iterable[str] = ()) -> list[dict[str, Any]]:
        """Return the next transitions to publish in the order in which they happened, but for those of some nodes.

        Of one node they come in the order of `transition`.
        """
        cursor = self._connection.execute(
            """
            SELECT * FROM transitions
            WHERE stream = ? AND outbox AND published_ns IS NULL AND NOT list_contains(?::VARCHAR[], node)
            ORDER BY event_ns, node, transition LIMIT ?
            """,
            [self._stream, list(without), limit],
        )
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def count(self) -> int:
        """Return how many transitions are kept."""
        rows = self._connection.execute("SELECT count(*) FROM transitions WHERE stream = ?", [self._stream]).fetchall()
        return int(rows[0][0])

    def size(self) -> int:
        """Return how many transitions wait to be published."""
        rows = self._connection.execute(
            "SELECT count(*) FROM transitions WHERE stream = ? AND outbox AND published_ns IS NULL", [self._stream]
        ).fetchall()
        return int(rows[0][0])

    def recorded(self, transitions: pa.Table) -> pa.Table:
        """Return those of some transitions, columns event_id and event_ns among theirs, that are here: their event_id."""
        self._connection.register("looked_for", transitions)
        try:
            return self._connection.sql(
                """
                SELECT event_id FROM transitions WHERE stream = ?
                    AND event_ns BETWEEN (SELECT min(event_ns) FROM looked_for) AND (SELECT max(event_ns) FROM looked_for)
                    AND event_id IN (SELECT event_id FROM looked_for)
                """,
                params=[self._stream],
            ).to_arrow_table()
        finally:
            self._connection.unregister("looked_for")

    def mark_published(self, event_ids: Sequence[str], at_ns: int) -> None:
        """Note that transitions were acknowledged; called inside a transaction."""
        self._connection.execute(
            "UPDATE transitions SET published_ns = ? WHERE event_id IN (SELECT unnest(?::VARCHAR[]))",
            [at_ns, list(event_ids)],
        )

    def newest(self, limit: int) -> list[tuple[str, str, int, bool]]:
        """Return the newest transitions, the newest first: event, node, event time in unix ns, late."""
        return self._connection.execute(
            "SELECT event, node, event_ns, late FROM transitions WHERE stream = ? ORDER BY event_ns DESC, node LIMIT ?",
            [self._stream, limit],
        ).fetchall()
