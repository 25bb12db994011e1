"""Transitions in `state.duckdb`: the history of every node, and the outbox of unpublished transitions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.state.stream_table import StreamTable

if TYPE_CHECKING:
    import pyarrow as pa

#: Transitions that may be deleted: the last one of a node dates its status.
_FORGETTABLE: Final = """
    stream = $stream AND event_ns < $before_ns AND NOT (outbox AND published_ns IS NULL) AND due_ns IS NULL
        AND NOT EXISTS (
            FROM nodes WHERE nodes.stream = $stream AND nodes.node = transitions.node
                AND nodes.transition = transitions.transition)
"""
#: Stored advisories of this stream that are not known as published.
_UNKNOWN: Final = """
    stream = ? AND event_ns > coalesce((SELECT max(event_ns) FROM forgotten_events AS gone WHERE gone.stream = ?), 0)
        AND event_id NOT IN (SELECT event_id FROM transitions WHERE published_ns IS NOT NULL)
"""


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

    def count_new(self, since_ns: int) -> int:
        """Return the number of nodes with a transition `new` after a time."""
        query = "SELECT count(DISTINCT node) FROM transitions WHERE stream = ? AND event = 'new' AND event_ns > ?"
        return int(self._value(query, since_ns))

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

    def earliest_ns(self) -> int | None:
        """Return the time of the earliest unpublished transition in unix ns, or None without one."""
        earliest_ns: int | None = self._value(
            "SELECT min(event_ns) FROM transitions WHERE stream = ? AND outbox AND published_ns IS NULL"
        )
        return earliest_ns

    def waiting_since_ns(self) -> int | None:
        """Return when the oldest unpublished transition was detected in unix ns, or None without one."""
        since_ns: int | None = self._value(
            "SELECT min(detected_ns) FROM transitions WHERE stream = ? AND outbox AND published_ns IS NULL"
        )
        return since_ns

    def note_waiting(self) -> None:
        """Remember the unpublished transitions of an earlier run; this connection alone holds the list."""
        self._connection.execute("CREATE TEMP TABLE IF NOT EXISTS waiting (stream VARCHAR, event_id VARCHAR)")
        self._connection.execute("DELETE FROM waiting WHERE stream = ?", [self._stream])
        self._connection.execute(
            "INSERT INTO waiting SELECT stream, event_id FROM transitions"
            " WHERE stream = ? AND outbox AND published_ns IS NULL",
            [self._stream],
        )

    def forget_before(self, before_ns: int) -> None:
        """Delete the transitions before a time that are published, decided, and not the last one of a stored node.

        Call it inside a transaction.
        """
        values = {"stream": self._stream, "before_ns": before_ns}
        query = f"SELECT max(event_ns) FROM transitions WHERE {_FORGETTABLE}"
        ((forgotten_ns,),) = self._connection.execute(query, values).fetchall()
        if forgotten_ns is not None:
            self._connection.execute(f"DELETE FROM transitions WHERE {_FORGETTABLE}", values)
            self.note_forgotten(forgotten_ns)

    def note_forgotten(self, event_ns: int) -> None:
        """Note that transitions up to an event time (unix ns) were deleted; call it in the transaction that deletes them."""
        before_ns = self._value("SELECT max(event_ns) FROM forgotten_events WHERE stream = ?") or 0
        if event_ns > before_ns:
            self._connection.execute("DELETE FROM forgotten_events WHERE stream = ?", [self._stream])
            self._connection.execute("INSERT INTO forgotten_events VALUES (?, ?)", [self._stream, event_ns])

    def forget_stored(self) -> None:
        """Begin a new list of advisories that are stored in JetStream; this connection alone holds it."""
        self._connection.execute(
            "CREATE TEMP TABLE IF NOT EXISTS stored (stream VARCHAR, event_id VARCHAR, stored_ns BIGINT, event_ns BIGINT)"
        )
        self._connection.execute("DELETE FROM stored WHERE stream = ?", [self._stream])

    def note_stored(self, advisories: Sequence[tuple[str, int, int | None]]) -> None:
        """Add stored advisories: id, stored time, and the event's time if it is known to be this stream's (unix ns)."""
        columns = [list(column) for column in zip(*advisories, strict=True)]
        if columns:
            self._connection.execute(
                "INSERT INTO stored SELECT ?, unnest(?::VARCHAR[]), unnest(?::BIGINT[]), unnest(?::BIGINT[])",
                [self._stream, *columns],
            )

    def later_stored(self) -> int:
        """Return the number of this stream's stored advisories that no earlier run of this state knew.

        An advisory of an event that this state may have deleted does not count.
        """
        query = f"SELECT count(*) FROM stored WHERE {_UNKNOWN} AND event_id NOT IN (SELECT event_id FROM waiting)"
        # Not remembered: it depends on tables of this connection alone.
        return int(self._connection.execute(query, [self._stream] * 2).fetchall()[0][0])

    def count_stored(self, dropped_before_ns: int, now_ns: int) -> bool:
        """Mark unpublished transitions as published at the time of their stored advisory; return whether others are left.

        Those before `dropped_before_ns` were stored too, and deleted since; they count as published at `now_ns`. Call it
        inside a transaction.
        """
        waiting = "stream = ? AND outbox AND published_ns IS NULL"
        self._connection.execute(
            f"""
            UPDATE transitions SET published_ns = stored.stored_ns FROM stored
            WHERE stored.stream = transitions.stream AND stored.event_id = transitions.event_id
                AND transitions.{waiting}
            """,
            [self._stream],
        )
        self._connection.execute(
            f"UPDATE transitions SET published_ns = ? WHERE {waiting} AND event_ns < ?",
            [now_ns, self._stream, dropped_before_ns],
        )
        query = f"SELECT count(*) FROM stored WHERE {_UNKNOWN}"
        return self._connection.execute(query, [self._stream] * 2).fetchall() != [(0,)]

    def undo(self, node: str, transition: int, at_ns: int) -> None:
        """Record that `unretire` has undone a node's `expire` at a time; call it inside a transaction.

        If the rules of operators have not announced it yet, they never do.
        """
        self._connection.execute(
            """
            UPDATE transitions SET undone_ns = ?, due_ns = NULL, suppressed_until_ns = NULL, held_until_ns = NULL,
                waits_ns = NULL
            WHERE stream = ? AND node = ? AND transition = ? AND event = 'expire'
            """,
            [at_ns, self._stream, node, transition],
        )

    def newest(self, limit: int) -> list[tuple[str, str, int, bool, str | None]]:
        """Return the newest transitions, newest first: event, node, event time in unix ns, late, why it is not announced."""
        return self._connection.execute(
            """
            SELECT event, node, event_ns, late, CASE WHEN announced_ns IS NULL THEN coalesce(
                'held by ' || held_by, 'suppressed by ' || suppressed_by, if(withheld, 'withheld', NULL)) END
            FROM transitions WHERE stream = ? ORDER BY event_ns DESC, node LIMIT ?
            """,
            [self._stream, limit],
        ).fetchall()
