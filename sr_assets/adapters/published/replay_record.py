"""A replay next to the record: the published transitions and copies of a range, and the differences with their reasons.

Both sides are temporary tables of one connection, which DuckDB moves to disk if they exceed the memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import duckdb
import pyarrow as pa
from pyarrow import parquet

from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.adapters.published.node_histories import AFTER, STATUS_CODE
from sr_assets.adapters.published.tables import at, literal
from sr_assets.domain.blindness import BlindSpans, Span
from sr_assets.domain.tracking.replaying import COPY
from sr_assets.domain.tracking.rules import Event

if TYPE_CHECKING:
    from sr_assets.domain.days import Day

#: Nodes with a row for each day that are measured together.
_DAY_ROWS: Final = 400_000
_LATEST_NS: Final = (1 << 63) - 1
_EMPTY: Final = """
    CREATE TEMP TABLE recorded (node VARCHAR, event VARCHAR, event_ns BIGINT, seen_ns BIGINT, previous VARCHAR, class VARCHAR,
        undone_ns BIGINT, detected_ns BIGINT, following_ns BIGINT, ended_ns BIGINT);
    CREATE TEMP TABLE recorded_copies (node VARCHAR, sequence BIGINT, stored_ns BIGINT);
    CREATE TEMP TABLE parked (sequence BIGINT);
    CREATE TEMP TABLE replayed (node VARCHAR, event VARCHAR, event_ns BIGINT, previous VARCHAR, sequence BIGINT);
    CREATE TEMP TABLE replayed_nodes (node VARCHAR, status VARCHAR, first_ns BIGINT, seen_ns BIGINT, copies BIGINT);
    CREATE TEMP TABLE replayed_sums (messages BIGINT, copies BIGINT);
    CREATE TEMP TABLE reasons (node VARCHAR, since_ns BIGINT, until_ns BIGINT, reason VARCHAR)
    """
# `following`: the node's next transition; `ended`: the next end of its silence.
_RECORDED: Final = """
    INSERT INTO recorded SELECT node, event, event_ns, epoch_ns(seen), previous, class, epoch_ns(undone_at),
        epoch_ns(detected_at), lead(event_ns) OVER following,
        min(event_ns) FILTER (event IN ('new', 'recover')) OVER (following ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING)
    FROM node_advisories WHERE name = $name AND stream = $stream AND event_ns < $until_ns
    WINDOW following AS (PARTITION BY node ORDER BY epoch, transition)
    """
_COPIES: Final = """
    INSERT INTO recorded_copies SELECT node, sequence, epoch_ns(stored_at) FROM node_snapshot_history
    WHERE name = $name AND stream = $stream AND date >= make_timestamptz($since_ns // 1000)::DATE - 1
        AND epoch_ns(stored_at) >= $since_ns AND epoch_ns(stored_at) < $until_ns
    """
# A silence that ended at another length than the limit of the node's class, or before it could be noticed. The blind time is
# subtracted later.
_UNUSUAL: Final = """
    SELECT node, event, event_ns, seen_ns, previous, class, coalesce(undone_ns, ended_ns) AS until_ns, following_ns,
        detected_ns
    FROM recorded JOIN limits USING (event, class_key) WHERE abs(event_ns - seen_ns - limit_ns) > 1000
        OR (event = 'timeout' AND following_ns <= event_ns)
    """
# A hole is known once a message after it was read; a sweep before that has counted its time as silence.
_LATE_HOLES: Final = """
    INSERT INTO reasons SELECT DISTINCT node, event_ns, coalesce(undone_ns, ended_ns, $latest_ns), 'late_hole'
    FROM recorded JOIN spans ON spans.since_ns < event_ns AND spans.until_ns > greatest(detected_ns, seen_ns)
    WHERE event IN ('timeout', 'expire')
    """
# The purge deletes the whole history of a node that was retired for long enough.
_PURGED: Final = """
    INSERT INTO reasons SELECT node, 0, max(event_ns), 'purged' FROM replayed
    WHERE event = 'expire' AND event_ns < $before_ns GROUP BY node
    HAVING NOT EXISTS (FROM recorded WHERE recorded.node = replayed.node AND recorded.event_ns <= max(replayed.event_ns))
    """
_REFUSED: Final = """
    INSERT INTO reasons SELECT node, 0, $latest_ns, 'max_nodes' FROM replayed_nodes ANTI JOIN recorded USING (node)
    """
# For a node that was known before the range, the copies are known from its first recorded copy or its return on.
_CERTAIN: Final = """
    CREATE TEMP TABLE certain AS SELECT node, min(at_ns) AS certain_ns FROM (
        SELECT node, stored_ns AS at_ns FROM recorded_copies
        UNION ALL SELECT node, event_ns FROM replayed WHERE event = 'new'
        UNION ALL SELECT node, event_ns FROM recorded WHERE event = 'new' AND event_ns >= $begin_ns) GROUP BY node
    """
_DIFFERENCES: Final = f"""
    CREATE TEMP TABLE differences AS
    WITH sides AS (
        SELECT node, event, event_ns, NULL::BIGINT AS sequence, true AS in_record FROM recorded
            WHERE event_ns >= $since_ns
        UNION ALL SELECT node, event, event_ns, NULL, false FROM replayed WHERE event <> '{COPY}'
    ), unequal AS (
        SELECT node, event, event_ns, sequence, count(*) FILTER (in_record) > count(*) FILTER (NOT in_record) AS in_record
        FROM sides GROUP BY node, event, event_ns, sequence
        HAVING count(*) FILTER (in_record) <> count(*) FILTER (NOT in_record)
        UNION ALL
        SELECT coalesce(p.node, r.node), '{COPY}', coalesce(p.event_ns, r.stored_ns), sequence, r.sequence IS NOT NULL
        FROM (SELECT node, event_ns, sequence FROM replayed WHERE event = '{COPY}') AS p
        FULL JOIN (SELECT node, stored_ns, sequence FROM recorded_copies WHERE stored_ns >= $since_ns) AS r USING (sequence)
        LEFT JOIN certain AS c ON c.node = coalesce(p.node, r.node)
        WHERE (p.sequence IS NULL OR r.sequence IS NULL)
            AND ($all_copies OR coalesce(p.event_ns, r.stored_ns) >= coalesce(c.certain_ns, $latest_ns))
    )
    SELECT u.node, u.event, u.event_ns, u.sequence, u.in_record, min(w.reason) AS reason FROM unequal AS u
    LEFT JOIN reasons AS w ON (w.node IS NULL OR w.node = u.node) AND u.event_ns >= w.since_ns
        AND (u.event_ns <= w.until_ns OR u.event = '{COPY}')
    GROUP BY ALL
    """
_HISTORIES: Final = f"""
    SELECT key::INTEGER AS key, 0::INTEGER AS stream, greatest(first_ns, $since_ns) AS first_ns, $until_ns AS until_ns,
        if(c.node IS NULL, {STATUS_CODE.format("status")}, c.before)::TINYINT AS status,
        coalesce(c.at_ns, []) AS at_ns, coalesce(c.after, []) AS after
    FROM keys LEFT JOIN (
        SELECT node, arg_min_null({STATUS_CODE.format("previous")}, (event_ns, place)) AS before,
            list(event_ns ORDER BY event_ns, place) AS at_ns,
            list(({AFTER})::TINYINT ORDER BY event_ns, place) AS after
        FROM (SELECT *, rowid AS place FROM replayed) SEMI JOIN (FROM keys WHERE key >= $first AND key < $next) USING (node)
        WHERE event <> 'copy' GROUP BY node) AS c USING (node)
    WHERE key >= $first AND key < $next
    """
_KEYS: Final = "CREATE TEMP TABLE keys AS SELECT row_number() OVER (ORDER BY node) AS key, * FROM replayed_nodes"
_AVAILABILITY: Final = pa.schema(
    [
        ("date", pa.date32()),
        ("node", pa.string()),
        ("up_seconds", pa.float64()),
        ("timeout_seconds", pa.float64()),
        ("retired_seconds", pa.float64()),
    ]
)


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """What is published about a stream that was tracked: until when, since when, and its blind spans.

    All messages before the sequence `next_sequence` and the time `known_ns` are recorded; silence only until the watermark.
    `restarted_ns` is the time of the last restart, if there was any. `queued` copies were not made yet, `too_old` messages were
    not copied because of their age.
    """

    watermark_ns: int
    known_ns: int
    next_sequence: int
    begin_ns: int
    restarted_ns: int | None
    spans: BlindSpans
    queued: int
    too_old: int


class Comparison:
    """The record and the replay of a range of one stream, over an open connection."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, name: str, stream: str, *, is_published: bool) -> None:
        self._connection, self._is_published = connection, is_published
        self._key = {"name": name, "stream": stream}
        for statement in _EMPTY.split(";"):
            connection.execute(statement)

    def stream_record(self) -> StreamRecord | None:
        """Return what is published about the stream, or None if no message of it was tracked."""
        if not self._is_published:
            return None
        rows = self._connection.execute(
            """
            WITH t AS (
                SELECT min(event_ns) AS first_ns, min(epoch) AS first_epoch, max(epoch) AS epoch FROM node_advisories
                WHERE name = $name AND stream = $stream
            ), n AS (
                SELECT min(epoch_ns(first_seen)) AS first_ns, max(epoch_ns(last_seen)) AS last_ns FROM node_availability
                WHERE name = $name AND stream = $stream
            )
            SELECT epoch_ns(watermark), greatest(epoch_ns(watermark), last_ns + 1000), next_sequence,
                least(t.first_ns, n.first_ns), if(epoch > first_epoch, epoch, NULL), queued_messages,
                too_old_messages
            FROM replication, t, n WHERE name = $name AND stream = $stream
            """,
            self._key,
        ).fetchall()
        if not rows or None in rows[0][:4]:
            return None
        watermark_ns, known_ns, next_sequence, begin_ns, restarted_ns, queued, too_old = rows[0]
        query = "SELECT since_ns, until_ns FROM blind_spans WHERE name = $name AND stream = $stream"
        spans = BlindSpans(tuple(self._connection.execute(query, self._key).fetchall()))
        return StreamRecord(
            watermark_ns, known_ns, next_sequence, begin_ns, restarted_ns, spans, queued or 0, too_old or 0
        )

    def read_record(self, begin_ns: int, until_ns: int) -> None:
        """Copy the recorded transitions until a time, and the copies of a range that begins before the replay's."""
        self._connection.execute(_RECORDED, {**self._key, "until_ns": until_ns})
        self._connection.execute(_COPIES, {**self._key, "since_ns": begin_ns, "until_ns": until_ns})
        query = "INSERT INTO parked SELECT sequence FROM parked_messages WHERE name = $name AND stream = $stream"
        self._connection.execute(query, self._key)

    def first_copies(self) -> pa.ChunkedArray:
        """Return the sequence of each node's first recorded copy, ascending."""
        query = "SELECT min(sequence) AS sequence FROM recorded_copies GROUP BY node ORDER BY sequence"
        return self._connection.sql(query).to_arrow_table()["sequence"]

    def add(self, portion: pa.Table) -> None:
        """Add rows of `domain.tracking.replaying.REPLAYED`."""
        self._connection.register("portion", portion)
        try:
            self._connection.execute(
                "INSERT INTO replayed SELECT node, event, event_ns, previous, sequence FROM portion WHERE event IS NOT NULL"
            )
            self._connection.execute(
                """
                INSERT INTO replayed_nodes SELECT node, previous, first_ns, seen_ns, copies FROM portion
                WHERE event IS NULL AND node IS NOT NULL
                """
            )
            self._connection.execute(
                "INSERT INTO replayed_sums SELECT messages, copies FROM portion WHERE node IS NULL"
            )
        finally:
            self._connection.unregister("portion")

    def totals(self, since_ns: int) -> dict[str, int]:
        """Return the numbers of messages, nodes with a message in the range, copies, and nodes by status at its end."""
        ((messages, nodes, copies, silent, retired, recorded_silent, recorded_copies),) = self._connection.execute(
            """
            SELECT (SELECT coalesce(sum(messages), 0) FROM replayed_sums),
                count(*) FILTER (seen_ns >= $since_ns),
                (SELECT coalesce(sum(copies), 0) FROM replayed_sums) + coalesce(sum(copies), 0),
                count(*) FILTER (status = 'timeout'), count(*) FILTER (status = 'retired'),
                (SELECT count(*) FROM recorded WHERE event = 'timeout' AND following_ns IS NULL),
                (SELECT count(*) FROM recorded_copies WHERE stored_ns >= $since_ns)
            FROM replayed_nodes
            """,
            {"since_ns": since_ns},
        ).fetchall()
        return {
            "messages": int(messages),
            "nodes": int(nodes),
            "copies": int(copies),
            "silent": silent,
            "retired": retired,
            "recorded_silent": recorded_silent,
            "recorded_copies": recorded_copies,
        }

    def count_events(self, since_ns: int, days: Sequence[Day]) -> list[tuple[Day, str, int, int]]:
        """Return day, kind and numbers of the replayed and the recorded transitions of the range, in order."""
        numbers = pa.table({"day": range(len(days)), "first_ns": [day.first_ns for day in days]})
        self._connection.register("days", numbers)
        try:
            rows = self._connection.execute(
                f"""
                SELECT day, event, count(*) FILTER (replay), count(*) FILTER (NOT replay) FROM (
                    SELECT event, event_ns, true AS replay FROM replayed WHERE event <> '{COPY}'
                    UNION ALL SELECT event, event_ns, false FROM recorded WHERE event_ns >= $since_ns
                ) AS events ASOF JOIN days ON events.event_ns >= days.first_ns GROUP BY ALL ORDER BY ALL
                """,
                {"since_ns": since_ns},
            ).fetchall()
        finally:
            self._connection.unregister("days")
        return [(days[day], event, replayed, recorded) for day, event, replayed, recorded in rows]

    def note_reason(self, reason: str, spans: Iterable[Span], node: str | None = None) -> None:
        """Note why differences of a node, or of all nodes, in spans of time are legitimate."""
        for since_ns, until_ns in spans:
            self._connection.execute("INSERT INTO reasons VALUES (?, ?, ?, ?)", [node, since_ns, until_ns, reason])

    def note_unusual_silences(self, limits: dict[tuple[Event, str | None], int], spans: BlindSpans) -> None:
        """Note the recorded silences that did not last as long as `limits` say, by event and class.

        A command retired the node, other durations applied then, or its message was stored after the sweep.
        """
        known = [
            {"event": event.value, "class_key": node_class or "", "limit_ns": limit_ns}
            for (event, node_class), limit_ns in limits.items()
        ]
        self._connection.register("limits", pa.Table.from_pylist(known))
        try:
            query = _UNUSUAL.replace("FROM recorded", "FROM (SELECT *, coalesce(class, '') AS class_key FROM recorded)")
            rows = self._connection.execute(query).fetchall()
        finally:
            self._connection.unregister("limits")
        for node, event, event_ns, seen_ns, previous, node_class, until_ns, following_ns, detected_ns in rows:
            limit_ns = limits[Event(event), node_class]
            then = BlindSpans(tuple(span for span in spans.spans if span[1] <= detected_ns))
            # The tables have microseconds.
            usual = any(abs(known.exceeds_at_ns(seen_ns, limit_ns) - event_ns) <= 1000 for known in (spans, then))
            if event == Event.TIMEOUT and following_ns is not None and following_ns <= event_ns:
                self.note_reason("late_message", [(event_ns, event_ns + limit_ns)], node)
            elif not usual:
                by_hand = event == Event.EXPIRE and (previous == "up" or event_ns - seen_ns < limit_ns)
                since_ns = event_ns if by_hand else seen_ns
                reason = "retired_by_hand" if by_hand else "other_durations"
                self.note_reason(reason, [(since_ns, _LATEST_NS if until_ns is None else until_ns)], node)

    def note_late_holes(self, spans: BlindSpans) -> None:
        """Note the recorded silences whose blind spans became known later."""
        since_ns, until_ns = zip(*spans.spans, strict=True) if spans.spans else ((), ())
        bounds = {"since_ns": pa.array(since_ns, pa.int64()), "until_ns": pa.array(until_ns, pa.int64())}
        self._connection.register("spans", pa.table(bounds))
        try:
            self._connection.execute(_LATE_HOLES, {"latest_ns": _LATEST_NS})
        finally:
            self._connection.unregister("spans")

    def note_purged(self, before_ns: int) -> None:
        """Note the nodes that retired before a time and have no record until then."""
        self._connection.execute(_PURGED, {"before_ns": before_ns})

    def note_refused(self) -> None:
        """Note the nodes without any record, because there were `max_nodes` nodes."""
        self._connection.execute(_REFUSED, {"latest_ns": _LATEST_NS})

    def find_differences(
        self, since_ns: int, begin_ns: int, *, all_copies: bool, queued: int, too_old_copies: bool
    ) -> None:
        """Compare both sides from `since_ns` on, with the reasons noted before; `begin_ns` is where the replay began.

        Unless `all_copies`, those of a node that was known before count from its first recorded copy on. The newest `queued`
        copies may not be recorded yet. `too_old_copies`: messages were not copied because of their age, which depends on the
        time of the run.
        """
        self._connection.execute(_CERTAIN, {"begin_ns": begin_ns})
        values = {"since_ns": since_ns, "all_copies": all_copies, "latest_ns": _LATEST_NS}
        self._connection.execute(_DIFFERENCES, values)
        self._connection.execute(
            f"""
            UPDATE differences SET reason = 'parked' WHERE event = '{COPY}' AND NOT in_record AND reason IS NULL
                AND sequence IN (FROM parked)
            """
        )
        if too_old_copies:
            self._connection.execute(
                f"UPDATE differences SET reason = 'max_age' WHERE event = '{COPY}' AND reason IS NULL"
            )
        self._connection.execute(
            f"""
            UPDATE differences SET reason = 'queued' WHERE sequence IN (
                SELECT sequence FROM differences WHERE event = '{COPY}' AND NOT in_record AND reason IS NULL
                ORDER BY sequence DESC LIMIT {queued})
            """
        )

    def differences(self, *, explained: bool, most: int) -> list[dict[str, Any]]:
        """Return the differences with or without a reason, by time: node, event, event_time, sequence, only_in, reason."""
        cursor = self._connection.execute(
            f"""
            SELECT node, event, {at("event_ns")} AS event_time, sequence, if(in_record, 'recorded', 'replayed') AS only_in, reason
            FROM differences WHERE (reason IS NOT NULL) = $explained ORDER BY event_ns, node, event, sequence LIMIT {most}
            """,
            {"explained": explained},
        )
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def count_differences(self) -> dict[str | None, int]:
        """Return the number of differences by reason; None: without a reason."""
        return dict(
            self._connection.execute("SELECT reason, count(*) FROM differences GROUP BY ALL ORDER BY ALL").fetchall()
        )

    def write_transitions(self, file: Path) -> None:
        """Write the replayed transitions as Parquet, by time: node, event, event_time."""
        self._connection.execute(
            f"""
            COPY (SELECT node, event, {at("event_ns")} AS event_time FROM replayed WHERE event <> '{COPY}'
                ORDER BY event_ns, node, rowid) TO {literal(str(file))} (FORMAT parquet)
            """
        )

    def write_availability(
        self, file: Path, days: Sequence[Day], since_ns: int, until_ns: int, measure: Callable[[pa.Table], pa.Table]
    ) -> None:
        """Write the seconds of each node and day of the replay as Parquet, in portions of nodes.

        `measure` computes the rows of `daily_rows.measure_days`.
        """
        self._connection.execute(_KEYS)
        ((nodes,),) = self._connection.execute("SELECT count(*) FROM keys").fetchall()
        step = max(1, _DAY_ROWS // len(days))
        dates = pa.array([day.date for day in days], pa.date32())
        with parquet.ParquetWriter(file, _AVAILABILITY) as writer:
            for first in range(1, nodes + 1, step):
                bounds = {"first": first, "next": first + step, "since_ns": since_ns, "until_ns": until_ns}
                measured = measure(self._connection.sql(_HISTORIES, params=bounds).to_arrow_table())
                self._connection.register("measured", measured)
                rows = self._connection.sql(
                    """
                    SELECT day, node, up_ns / 1e9 AS up_seconds, timeout_ns / 1e9 AS timeout_seconds,
                        retired_ns / 1e9 AS retired_seconds
                    FROM measured JOIN keys USING (key) ORDER BY day, node
                    """
                ).to_arrow_table()
                self._connection.unregister("measured")
                date = dates.take(rows["day"].combine_chunks())
                writer.write_table(rows.drop(["day"]).add_column(0, "date", date).cast(_AVAILABILITY))


@contextlib.contextmanager
def open_comparison(home: Path, name: str, stream: str, folder: Path) -> Iterator[Comparison]:
    """Open the published tables of a home, if there are any, for a comparison; `folder` takes what exceeds the memory."""
    published = (home / "fleet.duckdb").exists()
    with open_fleet(home) if published else contextlib.closing(duckdb.connect()) as connection:
        connection.execute(f"SET temp_directory = {literal(str(folder))}")
        connection.execute("SET enable_progress_bar = false")
        connection.execute("SET TimeZone = 'UTC'")
        yield Comparison(connection, name, stream, is_published=published)
