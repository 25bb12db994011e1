"""The nodes of a stream in `state.duckdb`, and the stream's blind spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.state.stream_tables import StreamTable
from sr_assets.adapters.state.transitions import Transitions
from sr_assets.domain.tracking.rows import state_of
from sr_assets.domain.tracking.rules import NODE_COLUMNS, NodeState

if TYPE_CHECKING:
    import pyarrow as pa

_COLUMNS: Final = ", ".join(NODE_COLUMNS)
# A node that `retired_retention` has deleted remains in its transitions.
_PURGED: Final = """
CREATE OR REPLACE TEMP TABLE purged AS
SELECT node, max(transition) AS transition FROM transitions WHERE stream = $stream GROUP BY node
HAVING max(event_ns) < $before_ns AND arg_max(event, transition) = 'expire' AND NOT bool_or(outbox AND published_ns IS NULL)
    AND count(due_ns) = 0
    AND node NOT IN (
        SELECT node FROM nodes WHERE stream = $stream AND (status <> 'retired' OR retired_at_ns >= $before_ns))
UNION
SELECT node, transition FROM nodes WHERE stream = $stream AND status = 'retired' AND retired_at_ns < $before_ns
    AND node NOT IN (SELECT node FROM transitions WHERE stream = $stream)
"""


class Nodes(StreamTable):
    """One stream's nodes. Call the methods that change them inside a transaction."""

    def fold_input(self, sightings: pa.Table) -> pa.Table:
        """Return the input of the fold: the sightings with a sender, and the stored nodes among the senders.

        Columns: sender, sighting (its sequence; 0 for a node), stored_ns, payload_bytes, forced, then `NODE_COLUMNS`
        (null for sightings), and class if the sightings have it.
        """
        import pyarrow as pa

        more = ", class" if "class" in sightings.column_names else ""
        self._connection.register("sightings", sightings)
        try:
            known = self._connection.sql(
                f"""
                SELECT node AS sender, 0::BIGINT AS sighting, 0::BIGINT AS stored_ns, 0::BIGINT AS payload_bytes,
                    false AS forced, {_COLUMNS}{more}
                FROM nodes WHERE stream = ? AND node IN (SELECT sender FROM sightings)
                """,
                params=[self._stream],
            ).to_arrow_table()
        finally:
            self._connection.unregister("sightings")
        # A union in DuckDB takes longer.
        seen = sightings.filter(sightings["sender"].is_valid()).rename_columns({"sequence": "sighting"})
        return pa.concat_tables([known, seen], promote_options="default")

    def size(self) -> int:
        """Return the number of nodes, including retired ones."""
        return sum(self.counts().values())

    def unknown(self, sightings: pa.Table) -> pa.ChunkedArray:
        """Return the senders of sightings that are no node yet, in the order of their first message."""
        self._connection.register("sightings", sightings)
        try:
            rows = self._connection.sql(
                """
                SELECT sender FROM sightings WHERE sender IS NOT NULL
                    AND sender NOT IN (SELECT node FROM nodes WHERE stream = ?)
                GROUP BY sender ORDER BY min(sequence)
                """,
                params=[self._stream],
            ).to_arrow_table()
        finally:
            self._connection.unregister("sightings")
        return rows["sender"]

    def due(self, watermark_ns: int, most: int) -> pa.Table:
        """Return at most `most` nodes whose deadline is before the watermark, by deadline: node, `NODE_COLUMNS`, class."""
        return self._connection.sql(
            f"""
            SELECT node, {_COLUMNS}, class FROM nodes WHERE stream = ? AND deadline_ns < ? ORDER BY deadline_ns, node LIMIT ?
            """,
            params=[self._stream, watermark_ns, most],
        ).to_arrow_table()

    def count_due(self, watermark_ns: int) -> int:
        """Return the number of nodes whose deadline is before the watermark."""
        return int(self._value("SELECT count(*) FROM nodes WHERE stream = ? AND deadline_ns < ?", watermark_ns))

    def table(self) -> pa.Table:
        """Return every node, including retired ones, as `NODE_SCHEMA`."""
        return self._connection.sql(
            f"SELECT node, {_COLUMNS}, deadline_ns, class FROM nodes WHERE stream = ?", params=[self._stream]
        ).to_arrow_table()

    def all_states(self) -> list[tuple[Any, ...]]:
        """Return every node, including retired ones: node, class, then `NODE_COLUMNS`."""
        return self._connection.execute(
            f"SELECT node, class, {_COLUMNS} FROM nodes WHERE stream = ?", [self._stream]
        ).fetchall()

    def state(self, node: str) -> tuple[NodeState, str | None] | None:
        """Return the state of a node and its class, or None if it is unknown."""
        query = f"SELECT class, {_COLUMNS} FROM nodes WHERE stream = ? AND node = ?"
        rows = self._connection.execute(query, [self._stream, node]).fetchall()
        return (state_of(rows[0][1:]), rows[0][0]) if rows else None

    def merge(self, nodes: pa.Table) -> None:
        """Write the states of nodes, rows of `NODE_SCHEMA`."""
        self._connection.register("merged", nodes)
        try:
            # DuckDB's MERGE or UPDATE of 100,000 nodes takes 4 s; DELETE and INSERT take 0.1 s.
            self._connection.execute(
                "DELETE FROM nodes WHERE stream = ? AND node IN (SELECT node FROM merged)", [self._stream]
            )
            self._connection.execute("INSERT INTO nodes BY NAME SELECT ? AS stream, * FROM merged", [self._stream])
        finally:
            self._connection.unregister("merged")

    def forget_retired(self, before_ns: int, *, of: str | None = None, without: Sequence[str] = ()) -> int:
        """Delete the nodes that retired before a time; return the highest transition counter among them, or 0.

        Only those of the class `of`, or those of no class in `without`.
        """
        condition = """
            stream = $stream AND status = 'retired' AND retired_at_ns < $before_ns
            AND coalesce(class = $of, $of IS NULL) AND NOT coalesce(list_contains($without::VARCHAR[], class), false)
            """
        values = {"stream": self._stream, "before_ns": before_ns, "of": of, "without": list(without)}
        query = f"SELECT coalesce(max(transition), 0) FROM nodes WHERE {condition}"
        ((highest,),) = self._connection.execute(query, values).fetchall()
        if highest:
            self._connection.execute(f"DELETE FROM nodes WHERE {condition}", values)
        return int(highest)

    def purge_retired(self, before_ns: int) -> int:
        """Delete all rows of the nodes that retired before a time; return the highest transition counter among them, or 0.

        A node with an unpublished or undecided transition stays until then.
        """
        values = {"stream": self._stream, "before_ns": before_ns}
        self._connection.execute(_PURGED, values)
        ((highest,),) = self._connection.execute("SELECT coalesce(max(transition), 0) FROM purged").fetchall()
        query = "SELECT max(event_ns) FROM transitions WHERE stream = ? AND node IN (SELECT node FROM purged)"
        if (forgotten_ns := self._value(query)) is not None:
            Transitions(self._connection, self._stream).note_forgotten(forgotten_ns)
        for table in ("nodes", "transitions", "snapshots", "flapping_nodes", "node_events"):
            query = f"DELETE FROM {table} WHERE stream = ? AND node IN (SELECT node FROM purged)"
            self._connection.execute(query, [self._stream])
        return int(highest)

    def forget_all(self) -> int:
        """Delete the nodes and blind spans of a stream that is no longer tracked.

        Return the highest transition counter, or 0.
        """
        highest = self._value("SELECT coalesce(max(transition), 0) FROM nodes WHERE stream = ?")
        for table in ("nodes", "blind_spans"):
            self._connection.execute(f"DELETE FROM {table} WHERE stream = ?", [self._stream])
        return int(highest)

    def next_deadline(self) -> int | None:
        """Return the earliest deadline in unix ns, or None: of a node, or of an announcement that waits."""
        # Three queries, because most commits change the nodes alone.
        times = (
            self.first_deadline(),
            self._value("SELECT min(due_ns) FROM transitions WHERE stream = ?"),
            self._value("SELECT min(settles_ns) FROM flapping_nodes WHERE stream = ?"),
        )
        return min((ns for ns in times if ns is not None), default=None)

    def any(self) -> bool:
        """Return whether any node exists, retired or not."""
        return bool(self._connection.execute("SELECT 1 FROM nodes WHERE stream = ? LIMIT 1", [self._stream]).fetchall())

    def counts(self) -> dict[str, int]:
        """Return the number of nodes by status, without statuses that no node has."""
        return {status: count for status, count, _ in self._by_status()}

    def first_deadline(self) -> int | None:
        """Return the earliest deadline of a node in unix ns, or None."""
        return min((first_ns for _, _, first_ns in self._by_status() if first_ns is not None), default=None)

    def _by_status(self) -> list[tuple[str, int, int | None]]:
        query = "SELECT status, count(*), min(deadline_ns) FROM nodes WHERE stream = ? GROUP BY status"
        return self._connection.rows(query, [self._stream])

    def class_counts(self) -> dict[str, int]:
        """Return the number of nodes that are not retired by class, without those of no class."""
        query = """
            SELECT class, count(*) FROM nodes
            WHERE stream = ? AND status <> 'retired' AND class IS NOT NULL GROUP BY class
            """
        return dict(self._connection.execute(query, [self._stream]).fetchall())

    def count(self) -> int:
        """Return the number of nodes that are not retired."""
        return sum(count for status, count in self.counts().items() if status != "retired")

    def oldest_seen(self) -> int | None:
        """Return the last sighting, in unix ns, of the longest silent node that is not retired."""
        seen_ns: int | None = self._value("SELECT min(seen_ns) FROM nodes WHERE stream = ? AND status <> 'retired'")
        return seen_ns

    def blind_spans(self) -> list[tuple[int, int]]:
        """Return the blind spans in order, each as (first ns, next ns)."""
        return self._connection.rows(
            "SELECT first_ns, next_ns FROM blind_spans WHERE stream = ? ORDER BY first_ns", [self._stream]
        )

    def save_blind_spans(self, spans: Iterable[tuple[int, int]]) -> None:
        """Replace the blind spans. The history keeps each span, even one that is later dropped or merged."""
        spans = [(first_ns, next_ns) for first_ns, next_ns in spans]
        if spans == self.blind_spans():
            return
        self._connection.execute("DELETE FROM blind_spans WHERE stream = ?", [self._stream])
        rows = [[self._stream, *span] for span in spans]
        if rows:
            self._connection.executemany("INSERT INTO blind_spans VALUES (?, ?, ?)", rows)
            self._connection.execute(
                """
                INSERT INTO blind_history SELECT stream, first_ns, next_ns FROM blind_spans AS span
                WHERE stream = $stream AND NOT EXISTS (
                    FROM blind_history AS past WHERE past.stream = $stream
                        AND past.first_ns = span.first_ns AND past.next_ns = span.next_ns)
                """,
                {"stream": self._stream},
            )
