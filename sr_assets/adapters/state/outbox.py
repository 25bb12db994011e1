"""Transitions in `state.duckdb`: the history of every node, and the outbox of unpublished transitions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sr_assets.adapters.state.stream_table import StreamTable

if TYPE_CHECKING:
    import pyarrow as pa


class Outbox(StreamTable):
    """One stream's transitions, published and unpublished."""

    def unpublished(self, limit: int, *, without: Iterable[str] = ()) -> list[dict[str, Any]]:
        """Return the next transitions to publish in order of time, without those of some nodes.

        The transitions of one node are in the order of `transition`.
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
        """Return the number of stored transitions."""
        return int(self._value("SELECT count(*) FROM transitions WHERE stream = ?"))

    def size(self) -> int:
        """Return the number of unpublished transitions."""
        return int(self._value("SELECT count(*) FROM transitions WHERE stream = ? AND outbox AND published_ns IS NULL"))

    def recorded(self, transitions: pa.Table) -> pa.Table:
        """Return the event_id of each given transition that is already stored; `transitions` has event_id and event_ns."""
        self._connection.register("candidates", transitions)
        try:
            return self._connection.sql(
                """
                SELECT event_id FROM transitions WHERE stream = ?
                    AND event_ns BETWEEN (SELECT min(event_ns) FROM candidates) AND (SELECT max(event_ns) FROM candidates)
                    AND event_id IN (SELECT event_id FROM candidates)
                """,
                params=[self._stream],
            ).to_arrow_table()
        finally:
            self._connection.unregister("candidates")

    def mark_published(self, event_ids: Sequence[str], at_ns: int) -> None:
        """Record the acknowledgement of transitions; call it inside a transaction."""
        self._connection.execute(
            "UPDATE transitions SET published_ns = ? WHERE event_id IN (SELECT unnest(?::VARCHAR[]))",
            [at_ns, list(event_ids)],
        )

    def newest(self, limit: int) -> list[tuple[str, str, int, bool]]:
        """Return the newest transitions, newest first: event, node, event time in unix ns, late."""
        return self._connection.execute(
            "SELECT event, node, event_ns, late FROM transitions WHERE stream = ? ORDER BY event_ns DESC, node LIMIT ?",
            [self._stream, limit],
        ).fetchall()
