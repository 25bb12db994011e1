"""All tables of `state.duckdb`: columns, kinds, and what the states of earlier builds lack. Add a table here.

Times are unix nanoseconds. Tables have no keys or indexes: scanning a column is fast enough, and DuckDB updates indexed rows
slowly.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

#: The number in table `about`.
SCHEMA_VERSION: Final = 1


class Kind(Enum):
    """What the rows of a table are about, and with what they are deleted.

    `SITE`: the whole state. `CURRENT`: a stream, until its state is replaced. `HISTORY`: a stream, until they are too old or the
    stream is forgotten. `GLOBAL`: the nodes of all sites, as feeds report them.
    """

    SITE = "site"
    CURRENT = "current"
    HISTORY = "history"
    GLOBAL = "global"


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the state.

    Somebody waits for the rows of a table of `events`. Earlier builds lack a `later` table, or the columns `added` to it;
    `earlier` is the statement that makes the rows of a table that they lack.
    """

    name: str
    kind: Kind
    columns: str
    events: bool = False
    later: bool = False
    added: tuple[str, ...] = ()
    earlier: str = ""

    @property
    def ddl(self) -> str:
        """The statement that creates the table if it is missing."""
        return f"CREATE TABLE IF NOT EXISTS {self.name} ({self.columns});"

    def definition(self, column: str) -> str:
        """Return the definition of a column: its name, type and default."""
        return next(text for text in map(str.strip, self.columns.split(",")) if text.split()[0] == column)


_ALL: Final = (
    Table("about", Kind.SITE, "schema_version INTEGER"),
    # The numbers of the last commits; the highest one is the state's. The last commit of a state without it is as late as
    # its newest row.
    Table(
        "commits",
        Kind.SITE,
        "number BIGINT",
        later=True,
        earlier="INSERT INTO commits SELECT max(as_of_ns) FROM streams HAVING max(as_of_ns) IS NOT NULL",
    ),
    Table(
        "streams",
        Kind.CURRENT,
        """
        stream VARCHAR, created_ns BIGINT, next_sequence BIGINT, epoch_ns BIGINT DEFAULT 0, watermark_ns BIGINT,
        planned_ns BIGINT, last_stored_ns BIGINT, mark_sequence BIGINT, mark_ns BIGINT,
        hole_open BOOLEAN DEFAULT false, source_last_sequence BIGINT,
        lag_messages BIGINT, lag_ns BIGINT, progress_ns BIGINT, alive_ns BIGINT, alive_due_ns BIGINT, started VARCHAR,
        starts BIGINT, reset_starts BIGINT DEFAULT 0, forgotten_transition BIGINT DEFAULT 0,
        policy VARCHAR, advisories_stored BOOLEAN DEFAULT false, seen_messages BIGINT DEFAULT 0,
        skipped_messages BIGINT DEFAULT 0, too_old_messages BIGINT DEFAULT 0, no_sender_messages BIGINT DEFAULT 0,
        gap_messages BIGINT DEFAULT 0, late_sightings BIGINT DEFAULT 0, ahead_clocks BIGINT DEFAULT 0,
        last_error VARCHAR, last_error_since_ns BIGINT, as_of_ns BIGINT
        """,
    ),
    Table(
        "copying",
        Kind.CURRENT,
        """
        stream VARCHAR, created_ns BIGINT, starts BIGINT, target_stream VARCHAR, target_created_ns BIGINT,
        target_sequence BIGINT, target_holds BIGINT, target_checked BIGINT, copied_messages BIGINT, copied_bytes BIGINT,
        parked_messages BIGINT, lost_messages BIGINT, error VARCHAR, error_since_ns BIGINT,
        target_looked BIGINT DEFAULT 0, target_looked_ns BIGINT DEFAULT 0, target_adopted BIGINT DEFAULT 0
        """,
    ),
    Table(
        "intents",
        Kind.CURRENT,
        """
        stream VARCHAR, first BIGINT, available BIGINT, next BIGINT, planned_ns BIGINT, cutoff_ns BIGINT,
        created_ns BIGINT, target_created_ns BIGINT, target_sequence BIGINT, resend BOOLEAN, waits BOOLEAN,
        folded BOOLEAN DEFAULT false, target_stream VARCHAR, starts BIGINT DEFAULT 0, source_sequence BIGINT,
        source_ns BIGINT, adopted_first BIGINT DEFAULT 0, adopted_next BIGINT DEFAULT 0,
        whole_first BIGINT DEFAULT 0, part BIGINT DEFAULT 0, begun BIGINT DEFAULT 1
        """,
        added=("whole_first", "part", "begun"),
    ),
    # The streams whose open intent's last attempt ended in order, with an error or at the end of its run.
    Table("ended_attempts", Kind.CURRENT, "stream VARCHAR", later=True),
    Table(
        "nodes",
        Kind.CURRENT,
        """
        stream VARCHAR, node VARCHAR, first_seen_ns BIGINT, seen_ns BIGINT, sequence BIGINT, copied_ns BIGINT,
        copied_bytes BIGINT, status VARCHAR, status_since_ns BIGINT, retired_at_ns BIGINT, times_retired BIGINT,
        transition BIGINT, deadline_ns BIGINT, class VARCHAR
        """,
        added=("class",),
    ),
    Table("blind_spans", Kind.CURRENT, "stream VARCHAR, first_ns BIGINT, next_ns BIGINT"),
    Table("blind_history", Kind.HISTORY, "stream VARCHAR, first_ns BIGINT, next_ns BIGINT"),
    Table(
        "transitions",
        Kind.HISTORY,
        """
        event_id VARCHAR, stream VARCHAR, node VARCHAR, event VARCHAR, event_ns BIGINT, detected_ns BIGINT,
        seen_ns BIGINT, age_ns BIGINT, sequence BIGINT, previous VARCHAR, transition BIGINT, late BOOLEAN,
        returned BOOLEAN, outage_ns BIGINT, published_ns BIGINT, outbox BOOLEAN, epoch BIGINT DEFAULT 0,
        undone_ns BIGINT, class VARCHAR, suppressed_by VARCHAR, suppressed_until_ns BIGINT, held_by VARCHAR,
        held_until_ns BIGINT, waits_ns BIGINT, due_ns BIGINT, withheld BOOLEAN, announced_ns BIGINT
        """,
        events=True,
        added=(
            "undone_ns",
            "class",
            "suppressed_by",
            "suppressed_until_ns",
            "held_by",
            "held_until_ns",
            "waits_ns",
            "due_ns",
            "withheld",
            "announced_ns",
        ),
    ),
    # The latest event of a stream's published transitions that this state has deleted. A state without it may have deleted
    # any event before its newest row.
    Table(
        "forgotten_events",
        Kind.HISTORY,
        "stream VARCHAR, event_ns BIGINT",
        later=True,
        earlier="INSERT INTO forgotten_events SELECT stream, as_of_ns FROM streams WHERE as_of_ns IS NOT NULL",
    ),
    Table(
        "gaps",
        Kind.HISTORY,
        """
        stream VARCHAR, first_sequence BIGINT, last_sequence BIGINT, messages BIGINT, reason VARCHAR, noticed_ns BIGINT
        """,
    ),
    Table(
        "parked",
        Kind.HISTORY,
        """
        stream VARCHAR, sequence BIGINT, stored_ns BIGINT, subject VARCHAR, payload_bytes BIGINT, reason VARCHAR,
        parked_ns BIGINT
        """,
    ),
    Table("snapshots", Kind.CURRENT, "stream VARCHAR, node VARCHAR, sequence BIGINT, file VARCHAR"),
    Table("staged", Kind.CURRENT, "stream VARCHAR, first BIGINT, next BIGINT, mark VARCHAR DEFAULT ''"),
    Table(
        "history",
        Kind.CURRENT,
        """
        stream VARCHAR, file VARCHAR, level TINYINT, replaced BOOLEAN, rows BIGINT, first_hour BIGINT, last_hour BIGINT
        """,
        added=("rows", "first_hour", "last_hour"),
    ),
    Table(
        "copies",
        Kind.CURRENT,
        "stream VARCHAR, committed_ns BIGINT, target_sequences BIGINT[], sequences BIGINT[], lengths BIGINT[]",
    ),
    Table("resends", Kind.CURRENT, "stream VARCHAR, first BIGINT, next BIGINT, stood BOOLEAN"),
    Table(
        "copy_queue",
        Kind.CURRENT,
        "stream VARCHAR, starts BIGINT, created_ns BIGINT, sequence BIGINT, node VARCHAR, payload_bytes BIGINT",
    ),
    Table("counters", Kind.CURRENT, "stream VARCHAR, counter VARCHAR, label VARCHAR, total DOUBLE"),
    Table(
        "heartbeats",
        Kind.HISTORY,
        """
        stream VARCHAR, hop_name VARCHAR, hop_stream VARCHAR, subject VARCHAR, originator VARCHAR, sent_ns BIGINT,
        stored_ns BIGINT, arrived_ns BIGINT
        """,
    ),
    Table(
        "latencies",
        Kind.HISTORY,
        "stream VARCHAR, hop_name VARCHAR, hop_stream VARCHAR, slot BIGINT, bucket INTEGER, copies BIGINT",
        later=True,
    ),
    Table("answered_requests", Kind.HISTORY, "stream VARCHAR, id VARCHAR, done BOOLEAN, line VARCHAR", later=True),
    Table("guards", Kind.CURRENT, "stream VARCHAR, watched_ns BIGINT", later=True),
    Table(
        "guard_sightings",
        Kind.CURRENT,
        "stream VARCHAR, node VARCHAR, seen_ns BIGINT, before_ns BIGINT",
        later=True,
    ),
    Table(
        "site_events",
        Kind.HISTORY,
        """
        stream VARCHAR, event_id VARCHAR, outage VARCHAR, event VARCHAR, event_ns BIGINT, nodes BIGINT, silent BIGINT,
        since_ns BIGINT, epoch BIGINT, detected_ns BIGINT, outbox BOOLEAN, published_ns BIGINT
        """,
        events=True,
        later=True,
    ),
    Table(
        "flapping_nodes",
        Kind.CURRENT,
        "stream VARCHAR, node VARCHAR, last_ns BIGINT, transitions BIGINT, settles_ns BIGINT",
        later=True,
    ),
    Table(
        "node_events",
        Kind.HISTORY,
        """
        stream VARCHAR, event_id VARCHAR, node VARCHAR, event VARCHAR, event_ns BIGINT, transitions BIGINT, up BOOLEAN,
        epoch BIGINT, detected_ns BIGINT, outbox BOOLEAN, published_ns BIGINT
        """,
        events=True,
        later=True,
    ),
    Table(
        "partitions",
        Kind.CURRENT,
        'stream VARCHAR, "partition" BIGINT, subject VARCHAR, lag_messages BIGINT, begins BIGINT, starts BIGINT',
        later=True,
    ),
    Table(
        "global_nodes",
        Kind.GLOBAL,
        """
        feed VARCHAR, replicator VARCHAR, name VARCHAR, stream VARCHAR, node VARCHAR, epoch_ns BIGINT DEFAULT 0,
        transition BIGINT, event_ns BIGINT, event_code TINYINT, seen_ns BIGINT, origin VARCHAR, received_ns BIGINT
        """,
        events=True,
    ),
    Table(
        "global_history",
        Kind.GLOBAL,
        """
        feed VARCHAR, event_id VARCHAR, replicator VARCHAR, name VARCHAR, stream VARCHAR, node VARCHAR,
        event_code TINYINT, event_ns BIGINT, received_ns BIGINT, seen_ns BIGINT, age_seconds DOUBLE, previous VARCHAR,
        epoch_ns BIGINT DEFAULT 0, transition BIGINT, late BOOLEAN, returned BOOLEAN, outage_seconds DOUBLE,
        origin VARCHAR
        """,
        events=True,
    ),
    Table(
        "global_sites",
        Kind.GLOBAL,
        """
        feed VARCHAR, replicator VARCHAR, name VARCHAR, stream VARCHAR, advised_ns BIGINT, observed_ns BIGINT,
        next_within_ns BIGINT, watermark_ns BIGINT, position BIGINT, lag_messages BIGINT, nodes BIGINT,
        outage VARCHAR, outage_ns BIGINT
        """,
        events=True,
        added=("outage", "outage_ns"),
    ),
    Table(
        "global_rejects",
        Kind.GLOBAL,
        """
        feed VARCHAR, sequence BIGINT, received_ns BIGINT, subject VARCHAR, payload_bytes BIGINT, reason VARCHAR,
        field VARCHAR, excerpt VARCHAR
        """,
        events=True,
    ),
)
TABLES: Final = {table.name: table for table in _ALL}
CURRENT_TABLES: Final = tuple(table.name for table in _ALL if table.kind is Kind.CURRENT)
HISTORY_TABLES: Final = tuple(table.name for table in _ALL if table.kind is Kind.HISTORY)
EVENT_TABLES: Final = frozenset(table.name for table in _ALL if table.events)
