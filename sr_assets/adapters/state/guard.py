"""The outage guard's rows in `state.duckdb`: how far it has watched, later sightings, and the site events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import pyarrow as pa

from sr_assets.adapters.state.stream_tables import EventTable
from sr_assets.domain.tracking.outage_guard import Watched
from sr_assets.domain.tracking.outages import Guard, Outage, SiteEvent, SiteReport

#: The nodes that are up at `$from_ns`, or held then, with a number and their last sighting before. The order of numbers is
#: of no importance.
_MEMBERS: Final = """
CREATE OR REPLACE TEMP TABLE members AS
SELECT node, row_number() OVER () AS number, seen_ns, NOT up AS held FROM (
    SELECT n.node, CASE WHEN later.node IS NULL THEN n.status = 'up' ELSE coalesce(later.previous = 'up', false) END AS up,
        CASE WHEN pending.node IS NULL THEN n.seen_ns ELSE pending.before_ns END AS seen_ns,
        coalesce(held.node IS NOT NULL, false) AS held
    FROM nodes AS n
    LEFT JOIN (
        SELECT node, arg_min(previous, transition) AS previous FROM transitions
        WHERE stream = $stream AND event_ns >= $from_ns GROUP BY node) AS later USING (node)
    LEFT JOIN (
        SELECT node, arg_min(before_ns, seen_ns) AS before_ns FROM guard_sightings WHERE stream = $stream GROUP BY node
    ) AS pending USING (node)
    LEFT JOIN (
        SELECT DISTINCT node FROM transitions
        WHERE stream = $stream AND event = 'timeout' AND event_ns >= $began_ns AND event_ns < $from_ns
            AND $from_ns < $held_until_ns
    ) AS held USING (node)
    WHERE n.stream = $stream)
WHERE seen_ns IS NOT NULL AND (up OR held)
"""
#: The same numbers, and further ones of the nodes that were sighted.
_NUMBERS: Final = """
CREATE OR REPLACE TEMP TABLE numbered AS
SELECT node, number FROM members UNION ALL
SELECT node, (SELECT count(*) FROM members) + row_number() OVER () FROM (
    SELECT DISTINCT node FROM guard_sightings WHERE stream = ? AND seen_ns < ?) ANTI JOIN members USING (node)
"""


class GuardRows(EventTable):
    """One stream's rows of the outage guard. Call the methods that change them inside a transaction."""

    events = "site_events"

    def watched_ns(self) -> int | None:
        """Return the time before which the guard has watched, or None if it has not begun."""
        rows = self._connection.rows("SELECT watched_ns FROM guards WHERE stream = ?", [self._stream])
        return rows[0][0] if rows else None

    def begin(self, from_ns: int) -> None:
        self._connection.execute("INSERT INTO guards VALUES (?, ?)", [self._stream, from_ns])

    def end(self) -> None:
        """Forget all but the site events: the stream has no guard any longer."""
        for table in ("guards", "guard_sightings"):
            self._connection.execute(f"DELETE FROM {table} WHERE stream = ?", [self._stream])

    def add(self, sightings: pa.Table) -> None:
        """Add a batch's sightings, before its node states and its progress are saved."""
        if self.watched_ns() is None:
            query = """
                SELECT CASE WHEN EXISTS (FROM nodes WHERE stream = $1)
                    THEN (SELECT max(watermark_ns) FROM streams WHERE stream = $1) END
                """
            self.begin(self._value(query) or 0)
        self._connection.register("sightings", sightings)
        try:
            self._connection.execute(
                """
                INSERT INTO guard_sightings
                SELECT $stream, sender, stored_ns, seen_ns
                FROM sightings LEFT JOIN nodes ON nodes.stream = $stream AND nodes.node = sender
                WHERE sender IS NOT NULL AND (seen_ns IS NULL OR stored_ns > seen_ns)
                """,
                {"stream": self._stream},
            )
        finally:
            self._connection.unregister("sightings")

    def quiet(self, from_ns: int, until_ns: int) -> bool:
        """Return whether no node timed out from one time until another."""
        query = (
            "SELECT count(*) FROM transitions WHERE stream = ? AND event = 'timeout' AND event_ns >= ? AND event_ns < ?"
        )
        return not self._value(query, from_ns, until_ns)

    def watched(self, guard: Guard, outage: Outage | None, from_ns: int, until_ns: int) -> Watched:
        """Return the nodes and their sightings and exits from one time until another."""
        held_until_ns = outage.began_ns + guard.hold_ns if outage else 0
        began_ns = outage.began_ns if outage else until_ns
        values = {"stream": self._stream, "from_ns": from_ns, "began_ns": began_ns, "held_until_ns": held_until_ns}
        self._connection.execute(_MEMBERS, values)
        self._connection.execute(_NUMBERS, [self._stream, until_ns])
        members = self._arrays("SELECT number, seen_ns, held FROM members")
        sighted = self._arrays(
            "SELECT number, greatest(seen_ns, ?) AS ns FROM guard_sightings JOIN numbered USING (node)"
            " WHERE stream = ? AND seen_ns < ? ORDER BY ns, number",
            from_ns,
            self._stream,
            until_ns,
        )
        left = self._arrays(
            "SELECT number, event_ns, event = 'expire' FROM transitions JOIN numbered USING (node) WHERE stream = ?"
            " AND (event = 'timeout' OR event = 'expire' AND previous = 'up') AND event_ns >= ? AND event_ns < ?"
            " ORDER BY event_ns, node",
            self._stream,
            from_ns,
            until_ns,
        )
        (classes,) = self._connection.execute(
            "SELECT list(class ORDER BY number) FROM numbered LEFT JOIN nodes ON nodes.stream = ? AND nodes.node = numbered.node",
            [self._stream],
        ).fetchall()[0]
        quiet_ns = np.array([guard.quiet_of(node_class) for node_class in classes or ()], np.int64)
        return Watched(quiet_ns, *members, *sighted, *left)

    def move(self, until_ns: int) -> None:
        """Note that the guard has watched until a time; forget earlier sightings."""
        rest = self._connection.execute(
            """
            SELECT node, seen_ns, greatest(before_ns, latest_ns) FROM guard_sightings LEFT JOIN (
                SELECT node, max(seen_ns) AS latest_ns FROM guard_sightings
                WHERE stream = $stream AND seen_ns < $until_ns GROUP BY node) USING (node)
            WHERE stream = $stream AND seen_ns >= $until_ns
            """,
            {"stream": self._stream, "until_ns": until_ns},
        ).fetchall()
        self.end()
        self.begin(until_ns)
        if rest:
            self._connection.executemany(
                "INSERT INTO guard_sightings VALUES (?, ?, ?, ?)", [[self._stream, *row] for row in rest]
            )

    def oldest_before_ns(self) -> int | None:
        """Return the earliest last sighting before a sighting that the guard has not watched yet."""
        before_ns: int | None = self._value("SELECT min(before_ns) FROM guard_sightings WHERE stream = ?")
        return before_ns

    def outages(self) -> list[Outage]:
        """Return the outages with their stored events, in order; the last one may run."""
        outages: dict[str, Outage] = {}
        for outage, event, event_ns, since_ns in self._connection.rows(
            "SELECT outage, event, event_ns, since_ns FROM site_events WHERE stream = ? ORDER BY event_ns, event <> 'restored'",
            [self._stream],
        ):
            first = outages.get(outage) or Outage(outage, event_ns, since_ns)
            ended_ns = event_ns if event == SiteEvent.RESTORED else None
            outages[outage] = Outage(
                outage, first.began_ns, first.since_ns, first.dark or event == SiteEvent.DARK, ended_ns
            )
        return list(outages.values())

    def last(self) -> tuple[str, int] | None:
        """Return the event and the time of the last outage's begin or rise that still runs, or None without one."""
        ((event, event_ns),) = self._connection.rows(
            "SELECT arg_max(event, (event_ns, event <> 'restored')), max(event_ns) FROM site_events WHERE stream = ?",
            [self._stream],
        )
        return None if event in (None, SiteEvent.RESTORED) else (event, event_ns)

    def report(
        self, reports: Iterable[tuple[str, str, SiteReport]], *, epoch_ns: int, detected_ns: int, publish: bool
    ) -> None:
        """Add site events, each with its id and its outage's. A repeated id is not added again."""
        for event_id, outage, report in reports:
            self._connection.execute(
                """
                INSERT INTO site_events
                SELECT $stream, $id, $outage, $event, $event_ns, $nodes, $silent, $since_ns, $epoch_ns, $detected_ns,
                    $publish, NULL
                WHERE NOT EXISTS (FROM site_events WHERE stream = $stream AND event_id = $id)
                """,
                {
                    "stream": self._stream,
                    "id": event_id,
                    "outage": outage,
                    "event": report.event.value,
                    "event_ns": report.event_ns,
                    "nodes": report.nodes,
                    "silent": report.silent,
                    "since_ns": report.since_ns,
                    "epoch_ns": epoch_ns,
                    "detected_ns": detected_ns,
                    "publish": publish,
                },
            )

    def forget_before(self, time_ns: int) -> None:
        """Delete the events of outages that ended before a time, except unpublished ones."""
        self._connection.execute(
            """
            DELETE FROM site_events WHERE stream = $stream AND NOT (outbox AND published_ns IS NULL) AND outage IN (
                SELECT outage FROM site_events WHERE stream = $stream AND event = 'restored' AND event_ns < $time_ns)
            """,
            {"stream": self._stream, "time_ns": time_ns},
        )

    def last_event(self) -> dict[str, Any]:
        """Return the last site event; there must be one."""
        return self._events("true")[-1]

    def _arrays(self, query: str, *values: object) -> tuple[Any, ...]:
        table: pa.Table = self._connection.sql(query, params=list(values)).to_arrow_table()
        return tuple(column.to_numpy() for column in table.itercolumns())
