"""Transitions in `state.duckdb` on whose announcement the rules of operators have not decided finally."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, Final

import pyarrow as pa

from sr_assets.adapters.state.stream_table import StreamTable
from sr_assets.domain.tracking.announcements import NodeAnnouncements, Recorded
from sr_assets.domain.tracking.rules import Event, Status

_DECISIONS: Final = pa.schema(
    [
        ("event_id", pa.string()),
        ("suppressed_by", pa.string()),
        ("suppressed_until_ns", pa.int64()),
        ("held_by", pa.string()),
        ("held_until_ns", pa.int64()),
        ("due_ns", pa.int64()),
        ("announced", pa.bool_()),
    ]
)


class Undecided(StreamTable):
    """One stream's transitions with a `due_ns`: when the rules look at them next, once the watermark is after it."""

    def next_due(self) -> int | None:
        """Return the earliest time at which the rules have to decide, in unix ns, or None."""
        due_ns: int | None = self._value("SELECT min(due_ns) FROM transitions WHERE stream = ?")
        return due_ns

    def due(self, until_ns: int, most: int) -> list[NodeAnnouncements]:
        """Return at most `most` nodes with a transition that is due before a time, those due first."""
        return self._nodes(
            """
            SELECT node FROM transitions WHERE stream = $stream AND due_ns < $until_ns
            GROUP BY node ORDER BY min(due_ns), node LIMIT $most
            """,
            until_ns=until_ns,
            most=most,
        )

    def suppressed(self) -> list[NodeAnnouncements]:
        """Return the nodes with a transition that a maintenance window delays."""
        return self._nodes("SELECT node FROM transitions WHERE stream = $stream AND suppressed_until_ns IS NOT NULL")

    def _nodes(self, nodes: str, **values: int) -> list[NodeAnnouncements]:
        rows = self._connection.execute(
            f"""
            WITH chosen AS ({nodes})
            SELECT t.node, n.status, told.event, t.event_id, t.event, t.event_ns, t.previous, t.suppressed_by,
                t.suppressed_until_ns, t.held_by, t.held_until_ns
            FROM transitions AS t LEFT JOIN nodes AS n USING (stream, node) LEFT JOIN (
                SELECT node, arg_max(event, transition) AS event FROM transitions
                WHERE stream = $stream AND withheld IS NOT TRUE AND node IN (FROM chosen) GROUP BY node) AS told USING (node)
            WHERE t.stream = $stream AND t.due_ns IS NOT NULL AND t.node IN (FROM chosen)
            ORDER BY t.node, t.transition
            """,
            {"stream": self._stream, **values},
        ).fetchall()
        return list(_nodes(rows))

    def move_holds(self, outage: str, until_ns: int | None) -> None:
        """Set the end of an outage's holds, if it has changed; None: they end now. Call it inside a transaction."""
        self._connection.execute(
            """
            UPDATE transitions SET held_until_ns = coalesce($until_ns, event_ns),
                due_ns = least(suppressed_until_ns, coalesce($until_ns, event_ns))
            WHERE stream = $stream AND held_by = $outage AND held_until_ns <> coalesce($until_ns, event_ns)
            """,
            {"stream": self._stream, "outage": outage, "until_ns": until_ns},
        )

    def held_by(self) -> list[str]:
        """Return the outages that hold a transition."""
        query = "SELECT DISTINCT held_by FROM transitions WHERE stream = ? AND held_until_ns IS NOT NULL"
        return [row[0] for row in self._connection.execute(query, [self._stream]).fetchall()]

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
                    d.held_until_ns AS held_until_ns, d.due_ns AS due_ns,
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
        "due_ns": transition.waits_until_ns,
        "announced": transition.announced,
    }
