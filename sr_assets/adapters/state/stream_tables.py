"""The bases of all classes on one stream's rows in `state.duckdb`, and the small ones: counters, gaps, partitions, hops.

The transaction that commits the counted work also adds to a counter, so counters survive every crash and never
decrease. Reading and copying commit concurrently, therefore each row has one writer.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, Final, NamedTuple, TypedDict

import pyarrow as pa

from sr_assets.adapters.state.cached_connection import StateConnection
from sr_assets.domain.hops import SLOT_NS, Hop, bucket_of
from sr_assets.domain.positions import CLOCK_TOLERANCE_NS, DAY_NS, SECOND_NS, SequenceRange

#: Label of the seconds and errors of copying; those of reading have none.
COPYING: Final = "copying"
#: Limit of new rows of a stream in one run; the last row of the reason counts further gaps.
MOST_GAP_ROWS: Final = 1_000
#: Reasons that remove single messages between existing ones.
_SPARSE: Final = frozenset({"filtered", "per_subject_limit"})
#: Heartbeats that arrived earlier are deleted; one is overdue after so many of its usual spacings.
_HEARTBEATS_NS: Final = 3600 * SECOND_NS
_OVERDUE_SPACINGS: Final = 3
#: Tolerated delay of a run.
_GRACE_NS: Final = 60 * SECOND_NS
#: Latencies are counted for the last hour.
_SLOTS: Final = 12
_MOST_LATENCY_ROWS: Final = 10_000


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
        return self._events("true", f"event_ns DESC, event LIMIT {limit}")

    def _events(self, condition: str, order: str = "event_ns, event DESC") -> list[dict[str, Any]]:
        cursor = self._connection.execute(
            f"SELECT * FROM {self.events} WHERE stream = ? AND {condition} ORDER BY {order}", [self._stream]
        )
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


class Counter(StrEnum):
    """Names of the counters. An advisory's label is its event; `COPYING` labels seconds, errors and connections of copying.

    `RECALLED_MESSAGES` counts messages that were copied and then lost in the target: `copied_messages` decreased by
    them. `IMPOSSIBLE_HOPS` counts the values of `Choria-SR-Source` in measured copies that are no possible hop.
    `FORGED_COPIES` counts messages of the target that claim to be copies and differ from their originals.
    `REFUSED_METADATA` counts copied registrations whose content is unreadable or too large, so that they have no metadata.
    `REFUSED_SENDERS` counts messages of senders that are no node because the stream has as many as it may have.
    `PROCESSED_MESSAGES` took `PROCESSING_SECONDS`. `SPARK_MESSAGES` were read by Spark's tasks, or
    copied with the label `COPYING`; `LOCAL_MESSAGES` by the runs' own processes.
    """

    SEEN_BYTES = "seen_bytes"
    SKIPPED_BYTES = "skipped_bytes"
    FORCED_MESSAGES = "forced_messages"
    PROCESSED_MESSAGES = "processed_messages"
    PROCESSING_SECONDS = "processing_seconds"
    SPARK_MESSAGES = "spark_messages"
    LOCAL_MESSAGES = "local_messages"
    RECALLED_MESSAGES = "recalled_messages"
    IMPOSSIBLE_HOPS = "impossible_hops"
    FORGED_COPIES = "forged_copies"
    REFUSED_METADATA = "refused_metadata"
    REFUSED_SENDERS = "refused_senders"
    ERRORS = "errors"
    CONNECTION_ERRORS = "connection_errors"
    CONNECTIONS_CLOSED = "connections_closed"
    RECONNECTIONS = "reconnections"
    ADVISORIES = "advisories"
    ADVISORY_ERRORS = "advisory_errors"


def engine_counter(*, in_spark: bool) -> Counter:
    """Return the counter of messages that were processed by Spark, or in the run's own process."""
    return Counter.SPARK_MESSAGES if in_spark else Counter.LOCAL_MESSAGES


class Counters(StreamTable):
    """One stream's counters. Call `add` inside a transaction."""

    def add(self, amounts: Mapping[Counter, float], label: str = "") -> None:
        """Add positive amounts to counters with a label; ignore the others."""
        rows = [(counter.value, float(amount)) for counter, amount in amounts.items() if amount > 0]
        if not rows:
            return
        names, more = (list(column) for column in zip(*rows, strict=True))
        # A MERGE takes twice as long to plan, and nearly every counter exists.
        ((updated,),) = self._connection.execute(
            """
            UPDATE counters SET total = total + (?::DOUBLE[])[list_position(?::VARCHAR[], counter)]
            WHERE stream = ? AND label = ? AND list_contains(?::VARCHAR[], counter)
            """,
            [more, names, self._stream, label, names],
        ).fetchall()
        if updated < len(rows):
            self._connection.execute(
                """
                INSERT INTO counters (stream, counter, label, total) SELECT $stream, counter, $label, more
                FROM (SELECT unnest($names::VARCHAR[]) AS counter, unnest($more::DOUBLE[]) AS more) AS added
                WHERE counter NOT IN (SELECT counter FROM counters WHERE stream = $stream AND label = $label)
                """,
                {"stream": self._stream, "label": label, "names": names, "more": more},
            )

    def totals(self) -> dict[str, dict[str, float]]:
        """Return every counter by name and label, without counters that were never incremented."""
        totals: dict[str, dict[str, float]] = collections.defaultdict(dict)
        query = "SELECT counter, label, total FROM counters WHERE stream = ?"
        for counter, label, total in self._connection.rows(query, [self._stream]):
            totals[counter][label] = total
        return dict(totals)


class Gap(TypedDict):
    """A row of table `gaps`."""

    stream: str
    first_sequence: int
    last_sequence: int
    messages: int
    reason: str
    noticed_ns: int


def gap_row(stream: str, hole: SequenceRange, messages: int, reason: str, noticed_ns: int) -> Gap:
    """Return a row of table `gaps`: `messages` are missing in a range of source sequences."""
    return Gap(
        stream=stream,
        first_sequence=hole.first,
        last_sequence=hole.next - 1,
        messages=messages,
        reason=reason,
        noticed_ns=noticed_ns,
    )


class Gaps(StreamTable):
    """One stream's gaps."""

    def add(self, gaps: Iterable[Gap], *, apart: int = 0, most: int = MOST_GAP_ROWS) -> int:
        """Add gaps in source order as at most `most` rows; return the number of new rows.

        Call it inside a transaction. A gap extends the last row of its reason if it follows that row and was noticed on
        the same UTC day. For a reason that removes many single messages, up to `apart` existing messages may separate
        the two.
        """
        rows: dict[str, list[Gap]] = {}
        stored: dict[str, Gap | None] = {}
        added = 0
        for gap in gaps:
            reason = gap["reason"]
            if reason not in rows:
                stored[reason] = self._last(reason)
                rows[reason] = [last] if (last := stored[reason]) is not None else []
            of_reason = rows[reason]
            allowed = apart if reason in _SPARSE else 0
            if of_reason and (added >= most or _follows(of_reason[-1], gap, allowed)):
                of_reason[-1] = _merged(of_reason[-1], gap)
            else:
                of_reason.append(gap)
                added += 1
        for reason, of_reason in rows.items():
            self._replace(stored[reason], of_reason)
        return added

    def _last(self, reason: str) -> Gap | None:
        rows = self._connection.execute(
            """
            SELECT first_sequence, last_sequence, messages, noticed_ns FROM gaps WHERE stream = ? AND reason = ?
            ORDER BY noticed_ns DESC, last_sequence DESC LIMIT 1
            """,
            [self._stream, reason],
        ).fetchall()
        if not rows:
            return None
        first, last, messages, noticed_ns = rows[0]
        return gap_row(self._stream, SequenceRange(first, last + 1), messages, reason, noticed_ns)

    def _replace(self, last: Gap | None, rows: list[Gap]) -> None:
        """Write rows; the first one replaces the previous last row."""
        if last is not None:
            self._connection.execute(
                "DELETE FROM gaps WHERE stream = ? AND reason = ? AND noticed_ns = ? AND last_sequence = ?",
                [last["stream"], last["reason"], last["noticed_ns"], last["last_sequence"]],
            )
        self._connection.register("added", pa.Table.from_pylist([dict(row) for row in rows]))
        try:
            self._connection.execute("INSERT INTO gaps BY NAME SELECT * FROM added")
        finally:
            self._connection.unregister("added")


def _follows(last: Gap, gap: Gap, apart: int) -> bool:
    between = gap["first_sequence"] - last["last_sequence"] - 1
    return 0 <= between <= apart and last["noticed_ns"] // DAY_NS == gap["noticed_ns"] // DAY_NS


def _merged(last: Gap, gap: Gap) -> Gap:
    return {
        **gap,
        "first_sequence": min(last["first_sequence"], gap["first_sequence"]),
        "last_sequence": max(last["last_sequence"], gap["last_sequence"]),
        "messages": last["messages"] + gap["messages"],
    }


class Lane(NamedTuple):
    """A partition's filter, the messages that it has not processed yet (None: not counted), and the sequence at which its
    lane begins: earlier messages are read and copied without lanes. `starts` is the source's restart.
    """

    subject: str
    lag_messages: int | None
    begins: int
    starts: int


class Partitions(StreamTable):
    """One stream's partitions, in order of their numbers."""

    def lanes(self) -> list[Lane]:
        query = 'SELECT subject, lag_messages, begins, starts FROM partitions WHERE stream = ? ORDER BY "partition"'
        return [Lane(*row) for row in self._connection.rows(query, [self._stream])]

    def at(self, sequence: int) -> tuple[str, ...]:
        """Return the filters of the lanes that take a sequence, or none before they begin."""
        return tuple(lane.subject for lane in self.lanes() if sequence >= lane.begins)

    def begins(self) -> int:
        """Return the sequence at which the lanes begin."""
        return int(self._value("SELECT coalesce(max(begins), 0) FROM partitions WHERE stream = ?"))

    def replace(self, lanes: Sequence[Lane]) -> None:
        """Store other partitions; call it inside a transaction."""
        self._connection.execute("DELETE FROM partitions WHERE stream = ?", [self._stream])
        rows = [(self._stream, number, *lane) for number, lane in enumerate(lanes)]
        if rows:
            self._connection.executemany("INSERT INTO partitions VALUES (?, ?, ?, ?, ?, ?)", rows)


class Heartbeats(StreamTable):
    """One stream's heartbeats."""

    def silent(self, name: str, now_ns: int) -> dict[str, int]:
        """Return the age in ns of each subject's last heartbeat, for overdue subjects only.

        The hop at the stream's own source, of entry `name`, decides. A heartbeat is overdue after three mean intervals
        of the last hour, and never within a minute.
        """
        rows = self._connection.execute(
            """
            SELECT subject, ? - max(stored_ns), (max(stored_ns) - min(stored_ns)) // (count(*) - 1) FROM heartbeats
            WHERE stream = ? AND hop_stream = stream AND hop_name = ? GROUP BY subject HAVING count(*) > 1
            """,
            [now_ns, self._stream, name],
        ).fetchall()
        return {subject: age for subject, age, spacing in rows if age > max(_OVERDUE_SPACINGS * spacing, _GRACE_NS)}

    def add(self, hops: Sequence[Hop], now_ns: int, own: str = "") -> int:
        """Add hops that arrived within the last hour, delete the others, and return how many of too many were ignored.

        The times of hops are no clock: a publisher may have written them, and subjects and names too. The hour after
        `now_ns` counts as well, because the clocks of servers differ. The hops of the entry `own` come first. Call it inside a
        transaction.
        """
        first, last = now_ns - _HEARTBEATS_NS, now_ns + CLOCK_TOLERANCE_NS
        recent = sorted((hop for hop in hops if first <= hop.arrived_ns <= last), key=lambda hop: hop.name != own)
        if not hops:
            return 0
        self._connection.execute(
            "DELETE FROM heartbeats WHERE stream = ? AND arrived_ns NOT BETWEEN ? AND ?", [self._stream, first, last]
        )
        known = "SELECT DISTINCT hop_name, hop_stream, subject FROM heartbeats WHERE stream = ?"
        rows = self._connection.execute(known, [self._stream]).fetchall()
        subjects = set[Hashable](subject for *_, subject in rows)
        places = set[Hashable]((name, stream) for name, stream, _ in rows)
        admitted = [hop for hop in recent if admit(hop.subject, subjects) and admit((hop.name, hop.stream), places)]
        if admitted:
            columns = [list(column) for column in zip(*admitted, strict=True)]
            kinds = ("VARCHAR",) * 4 + ("BIGINT",) * 3
            self._connection.execute(
                f"INSERT INTO heartbeats SELECT ?::VARCHAR, {', '.join(f'unnest(?::{kind}[])' for kind in kinds)}",
                [self._stream, *columns],
            )
        return len(recent) - len(admitted)


def admit(key: Hashable, known: set[Hashable], most: int = 100) -> bool:
    """Return whether a key that a publisher may have chosen is known or one of the first `most`; it is known then."""
    if key not in known and len(known) >= most:
        return False
    known.add(key)
    return True


class Latencies(StreamTable):
    """The latency of one stream's copies."""

    def add(self, hops: Sequence[Hop], now_ns: int, own: str = "") -> int:
        """Add hops, delete all that did not arrive within the last hour, and return how many of too many were ignored.

        The hops of the entry `own` come first. Call it inside a transaction.

        The times of hops are no clock: a publisher may have written them. The hour after `now_ns` counts too, because the
        clocks of servers differ.
        """
        if not hops:
            return 0
        last = now_ns // SLOT_NS
        known = "SELECT DISTINCT hop_name, hop_stream FROM latencies WHERE stream = ? AND slot BETWEEN ? AND ?"
        between = [last - _SLOTS + 1, last + _SLOTS]
        places = set[Hashable](self._connection.execute(known, [self._stream, *between]).fetchall())
        ordered = sorted(hops, key=lambda hop: hop.name != own)
        admitted = [hop for hop in ordered if admit((hop.name, hop.stream), places)]
        counts = collections.Counter(
            (hop.name, hop.stream, hop.arrived_ns // SLOT_NS, bucket_of(hop.arrived_ns - hop.stored_ns))
            for hop in admitted
        )
        if counts:
            columns = [list(column) for column in zip(*counts, strict=True)]
            # Adding rows takes 1.5 ms, merging them with the stored ones 20.
            self._connection.execute(
                """
                INSERT INTO latencies
                SELECT ?::VARCHAR, unnest(?::VARCHAR[]), unnest(?::VARCHAR[]), unnest(?::BIGINT[]), unnest(?::INTEGER[]),
                    unnest(?::BIGINT[])
                """,
                [self._stream, *columns, list(counts.values())],
            )
        self._connection.execute(
            "DELETE FROM latencies WHERE stream = ? AND slot NOT BETWEEN ? AND ?",
            [self._stream, *between],
        )
        if self._value("SELECT count(*) FROM latencies WHERE stream = ?") > _MOST_LATENCY_ROWS:
            self._merge()
        return len(hops) - len(admitted)

    def _merge(self) -> None:
        """Merge the rows of equal hop, slot and bucket."""
        query = """
            SELECT stream, hop_name, hop_stream, slot, bucket, sum(copies)::BIGINT AS copies FROM latencies
            WHERE stream = ? GROUP BY ALL
            """
        self._connection.register("merged", self._connection.sql(query, params=[self._stream]).to_arrow_table())
        try:
            self._connection.execute("DELETE FROM latencies WHERE stream = ?", [self._stream])
            self._connection.execute("INSERT INTO latencies BY NAME SELECT * FROM merged")
        finally:
            self._connection.unregister("merged")
