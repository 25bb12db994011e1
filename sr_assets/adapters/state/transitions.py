"""Transitions in `state.duckdb`: the history of every node, the outbox of unpublished ones, and those not yet decided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from sr_assets.adapters.state.stream_tables import EventTable, StreamTable
from sr_assets.domain.tracking.announcements import Flap, NodeAnnouncements, NodeReport, Recorded, Rules
from sr_assets.domain.tracking.rules import Event, Status

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

_DECISIONS: Final = pa.schema(
    [
        ("event_id", pa.string()),
        ("suppressed_by", pa.string()),
        ("suppressed_until_ns", pa.int64()),
        ("held_by", pa.string()),
        ("held_until_ns", pa.int64()),
        ("waits_ns", pa.int64()),
        ("due_ns", pa.int64()),
        ("announced", pa.bool_()),
    ]
)


class Transitions(StreamTable):
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

    def raise_epoch(self, epoch_ns: int) -> None:
        """Give the unpublished transitions of earlier epochs this one; call it inside a transaction."""
        self._connection.execute(
            "UPDATE transitions SET epoch = $2 WHERE stream = $1 AND outbox AND published_ns IS NULL AND epoch < $2",
            [self._stream, epoch_ns],
        )

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


class Undecided(EventTable):
    """One stream's transitions with a `due_ns`: when the rules look at them next, once the watermark is after it."""

    events = "node_events"

    def unpublished(self) -> list[dict[str, Any]]:
        """Return the events to publish, in order of time, each with the columns `last_…` of the node's last transition."""
        cursor = self._connection.execute(
            """
            SELECT e.*, t.event AS last_event, t.event_ns AS last_ns, t.seen_ns AS last_seen_ns, t.previous AS last_previous,
                t.transition AS last_transition
            FROM node_events AS e LEFT JOIN transitions AS t
                ON t.stream = e.stream AND t.node = e.node AND t.event_ns <= e.event_ns
            WHERE e.stream = ? AND e.outbox AND e.published_ns IS NULL
            QUALIFY row_number() OVER (PARTITION BY e.event_id ORDER BY t.transition DESC NULLS LAST) = 1
            ORDER BY e.event_ns, e.event DESC
            """,
            [self._stream],
        )
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def any(self) -> bool:
        """Return whether any transition waits for a decision, or any node flaps."""
        query = """
            SELECT EXISTS (FROM transitions WHERE stream = $1 AND due_ns IS NOT NULL)
                OR EXISTS (FROM flapping_nodes WHERE stream = $1)
            """
        return bool(self._value(query))

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of held transitions, suppressed transitions and flapping nodes now."""
        query = """
            SELECT count(held_until_ns), count(suppressed_until_ns),
                (SELECT count(*) FROM flapping_nodes WHERE stream = $1)
            FROM transitions WHERE stream = $1 AND due_ns IS NOT NULL
            """
        ((held, suppressed, flapping),) = self._connection.execute(query, [self._stream]).fetchall()
        return held, suppressed, flapping

    def due(self, until_ns: int, rules: Rules, most: int) -> list[NodeAnnouncements]:
        """Return at most `most` nodes with a transition or a flapping that is due before a time, those due first."""
        nodes = self._nodes(
            """
            SELECT node FROM (
                SELECT node, due_ns FROM transitions WHERE stream = $stream
                UNION ALL SELECT node, settles_ns FROM flapping_nodes WHERE stream = $stream)
            WHERE due_ns < $until_ns GROUP BY node ORDER BY min(due_ns), node LIMIT $most
            """,
            until_ns=until_ns,
            most=most,
        )
        self._add_flapping(nodes, until_ns)
        if rules.flapping is not None:
            self._add_recent(nodes, rules.flapping.within_ns)
        return nodes

    def _add_flapping(self, nodes: list[NodeAnnouncements], until_ns: int) -> None:
        """Add the flapping of nodes; add the due flapping nodes without a transition."""
        by_name = {node.node: node for node in nodes}
        for name, last_ns, transitions, up in self._connection.execute(
            """
            SELECT f.node, f.last_ns, f.transitions, coalesce(n.status = 'up', false)
            FROM flapping_nodes AS f LEFT JOIN nodes AS n USING (stream, node)
            WHERE f.stream = ? AND (f.settles_ns < ? OR list_contains(?::VARCHAR[], f.node))
            """,
            [self._stream, until_ns, list(by_name)],
        ).fetchall():
            if name not in by_name:
                by_name[name] = NodeAnnouncements(name, up, told_up=up)
                nodes.append(by_name[name])
            by_name[name].flap = Flap(last_ns, transitions)

    def _add_recent(self, nodes: list[NodeAnnouncements], within_ns: int) -> None:
        """Add the times of the nodes' last transitions that the rules have seen."""
        by_name = {node.node: node for node in nodes if node.unseen}
        values = {
            "stream": self._stream,
            "nodes": list(by_name),
            "firsts": [node.unseen[0].event_ns for node in by_name.values()],
            "within_ns": within_ns,
        }
        for name, event_ns in self._connection.execute(
            """
            SELECT t.node, t.event_ns FROM transitions AS t
            JOIN (SELECT unnest($nodes::VARCHAR[]) AS node, unnest($firsts::BIGINT[]) AS first_ns) AS f USING (node)
            WHERE t.stream = $stream AND t.event <> 'new' AND t.event_ns BETWEEN f.first_ns - $within_ns AND f.first_ns
                AND NOT coalesce(t.due_ns = t.event_ns, false)
            ORDER BY t.event_ns
            """,
            values,
        ).fetchall():
            by_name[name].recent.append(event_ns)

    def save_flapping(self, nodes: Iterable[NodeAnnouncements], rules: Rules) -> None:
        """Write the flapping of nodes; call it inside a transaction."""
        changed = list(nodes)
        names = [node.node for node in changed]
        flaps = [(node.node, node.flap, node.settles_ns(rules)) for node in changed if node.flap]
        query = "DELETE FROM flapping_nodes WHERE stream = ? AND list_contains(?::VARCHAR[], node)"
        self._connection.execute(query, [self._stream, names])
        if flaps:
            self._connection.executemany(
                "INSERT INTO flapping_nodes VALUES (?, ?, ?, ?, ?)",
                [[self._stream, name, flap.last_ns, flap.transitions, settles_ns] for name, flap, settles_ns in flaps],
            )

    def report(self, rows: Iterable[tuple[str, str, NodeReport]], epoch_ns: int, at_ns: int, *, publish: bool) -> None:
        """Add events of nodes, each with its id and node, in a transaction. A repeated id is not added again."""
        for event_id, node, report in rows:
            self._connection.execute(
                """
                INSERT INTO node_events SELECT $stream, $id, $node, $event, $event_ns, $transitions, $up, $epoch_ns, $at_ns,
                    $publish, NULL
                WHERE NOT EXISTS (FROM node_events WHERE stream = $stream AND event_id = $id)
                """,
                {
                    **report._asdict(),
                    "event": report.event.value,
                    "stream": self._stream,
                    "id": event_id,
                    "node": node,
                    "epoch_ns": epoch_ns,
                    "at_ns": at_ns,
                    "publish": publish,
                },
            )

    def forget_before(self, time_ns: int) -> None:
        """Delete the published events of nodes before a time."""
        self._connection.execute(
            "DELETE FROM node_events WHERE stream = ? AND event_ns < ? AND NOT (outbox AND published_ns IS NULL)",
            [self._stream, time_ns],
        )

    def suppressed(self) -> list[NodeAnnouncements]:
        """Return the nodes with a transition that a maintenance window delays."""
        return self._nodes("SELECT node FROM transitions WHERE stream = $stream AND suppressed_until_ns IS NOT NULL")

    def _nodes(self, nodes: str, **values: int) -> list[NodeAnnouncements]:
        rows = self._connection.execute(
            f"""
            WITH chosen AS ({nodes})
            SELECT t.node, n.status, if(up.event_ns >= told.event_ns, NULL, told.event), t.event_id, t.event, t.event_ns,
                t.previous, t.suppressed_by, t.suppressed_until_ns, t.held_by, t.held_until_ns, t.waits_ns, t.class
            FROM transitions AS t LEFT JOIN nodes AS n USING (stream, node) LEFT JOIN (
                SELECT node, arg_max(event, transition) AS event, arg_max(event_ns, transition) AS event_ns FROM transitions
                WHERE stream = $stream AND withheld IS NOT TRUE AND node IN (FROM chosen) GROUP BY node) AS told USING (node)
            LEFT JOIN (
                SELECT node, max(event_ns) AS event_ns FROM node_events
                WHERE stream = $stream AND up AND event <> 'flapping' GROUP BY node) AS up USING (node)
            WHERE t.stream = $stream AND t.due_ns IS NOT NULL AND t.node IN (FROM chosen)
            ORDER BY t.node, t.transition
            """,
            {"stream": self._stream, **values},
        ).fetchall()
        return list(_nodes(rows))

    def move_holds(self, outage: str, node_class: str | None, until_ns: int | None) -> None:
        """Set the end of an outage's holds of a class, if it has changed; None: they end now.

        Call it inside a transaction.
        """
        self._connection.execute(
            """
            UPDATE transitions SET held_until_ns = coalesce($until_ns, event_ns),
                due_ns = least(suppressed_until_ns, coalesce($until_ns, event_ns))
            WHERE stream = $stream AND held_by = $outage AND class IS NOT DISTINCT FROM $class
                AND held_until_ns <> coalesce($until_ns, event_ns)
            """,
            {"stream": self._stream, "outage": outage, "class": node_class, "until_ns": until_ns},
        )

    def held_by(self) -> list[tuple[str, str | None]]:
        """Return the outages that hold a transition, with the transitions' classes."""
        query = "SELECT DISTINCT held_by, class FROM transitions WHERE stream = ? AND held_until_ns IS NOT NULL"
        return self._connection.execute(query, [self._stream]).fetchall()

    def save(self, transitions: Iterable[Recorded], at_ns: int | None, *, publish: bool) -> None:
        """Write the decisions on transitions, made at the watermark `at_ns`; call it inside a transaction.

        `publish`: announced transitions enter the outbox.
        """
        decisions = pa.Table.from_pylist([_decision(each) for each in transitions], _DECISIONS)
        self._connection.register("decisions", decisions)
        try:
            # DuckDB updates many rows slowly.
            rows = self._connection.sql(
                """
                SELECT t.* REPLACE (
                    d.suppressed_by AS suppressed_by, d.suppressed_until_ns AS suppressed_until_ns, d.held_by AS held_by,
                    d.held_until_ns AS held_until_ns, d.waits_ns AS waits_ns, d.due_ns AS due_ns,
                    NOT d.announced AS withheld, if(d.announced, $at_ns::BIGINT, NULL) AS announced_ns,
                    d.announced AND $publish AS outbox)
                FROM transitions AS t JOIN decisions AS d USING (event_id) WHERE t.stream = $stream
                """,
                params={"stream": self._stream, "at_ns": at_ns, "publish": publish},
            ).to_arrow_table()
            self._connection.execute(
                "DELETE FROM transitions WHERE stream = ? AND event_id IN (SELECT event_id FROM decisions)",
                [self._stream],
            )
        finally:
            self._connection.unregister("decisions")
        self._connection.register("decided", rows)
        try:
            self._connection.execute("INSERT INTO transitions BY NAME SELECT * FROM decided")
        finally:
            self._connection.unregister("decided")


def _nodes(rows: list[tuple[Any, ...]]) -> Iterator[NodeAnnouncements]:
    for (node, status, told), own in groupby(rows, key=lambda row: row[:3]):
        announcements = NodeAnnouncements(node, status == Status.UP, told not in (Event.TIMEOUT, Event.EXPIRE))
        for _, _, _, event_id, event, event_ns, previous, *delays in own:
            transition = Recorded(event_id, Event(event), event_ns, *delays)
            if transition.waits_until_ns is not None:
                announcements.delayed.append(transition)
                continue
            if not announcements.unseen:
                announcements.up = previous == Status.UP
            announcements.unseen.append(transition)
        yield announcements


def _decision(transition: Recorded) -> dict[str, object]:
    return {
        "event_id": transition.event_id,
        "suppressed_by": transition.suppressed_by,
        "suppressed_until_ns": transition.suppressed_until_ns,
        "held_by": transition.held_by,
        "held_until_ns": transition.held_until_ns,
        "waits_ns": transition.waits_ns,
        "due_ns": transition.waits_until_ns,
        "announced": transition.announced,
    }
