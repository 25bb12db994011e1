"""The rows of the daily tables: computed for some nodes from their published records, in the run's process or in Spark's tasks.

Nodes' histories become status intervals of days, in numpy. DuckDB does the rest in the connection of the histories. A
computation gets whole nodes, so that tasks exchange no data. Add a property of the inventory here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sr_assets.adapters.published.daily_tables import AVAILABILITY, INVENTORY, DailyTable, cast
from sr_assets.adapters.published.node_histories import INPUTS, RETIRED, TIMEOUT, UP, Histories, with_tables
from sr_assets.adapters.published.tables import kinds_of, literal
from sr_assets.domain.blindness import Span, merge_spans
from sr_assets.domain.days import Day, date_at
from sr_assets.domain.errors import RunError
from sr_assets.domain.senders import parse_path
from sr_assets.domain.tracking.maintenance import Window

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The rows of the inventory that some nodes contribute: of each date, stream, property and value; NULL: any property.
_COUNTED: Final = """
    date DATE, name VARCHAR, stream VARCHAR, property VARCHAR, value VARCHAR, nodes BIGINT, came BIGINT, went BIGINT,
    final BOOLEAN
    """
#: Approximate rows in memory at a time: changes, and a row for each node and day.
PORTION_ROWS: Final = 400_000
#: Approximate number of rows that one node's properties on a day correspond to.
_PROPERTY_ROWS: Final = 4
#: Value number that every node of a day has.
_ANY_VALUE: Final = 0
_MEASURED: Final = """
    CREATE OR REPLACE TEMP TABLE measured (key INTEGER, day INTEGER, up_ns BIGINT, timeout_ns BIGINT, retired_ns BIGINT,
        blind_ns BIGINT, transitions BIGINT, outages BIGINT, longest_ns BIGINT)
    """
_MAINTAINED: Final = """
    CREATE OR REPLACE TEMP TABLE maintained AS
    SELECT key, day, sum(greatest(0, least(to_ns, until_ns, day_next_ns) - greatest(from_ns, first_ns, day_first_ns))) AS ns
    FROM maintained_nodes JOIN maintained_spans USING (windows) JOIN node_keys USING (key) JOIN streams USING (number)
        JOIN calendar ON to_ns > day_first_ns AND from_ns < day_next_ns
    GROUP BY key, day
    """
_AVAILABILITY: Final = """
    SELECT date, replicator, name, stream, node, up_ns / 1e9 AS up_seconds, timeout_ns / 1e9 AS timeout_seconds,
        retired_ns / 1e9 AS retired_seconds, blind_ns / 1e9 AS blind_seconds, transitions, outages,
        longest_ns / 1e9 AS longest_outage_seconds, until_ns >= day_next_ns AS final,
        coalesce(maintained.ns, 0) / 1e9 AS maintenance_seconds
    FROM measured JOIN calendar USING (day) JOIN node_keys USING (key) JOIN streams USING (number)
        LEFT JOIN maintained USING (key, day)
    ORDER BY key
    """
# Each node's newest message of each day; its newest one before the first day counts as day -1.
_NEWEST: Final = """
    CREATE OR REPLACE TEMP TABLE newest AS
    WITH candidates AS (
        SELECT key, epoch_us(stored_at) AS at_us, sequence FROM node_snapshot_history AS h
        JOIN streams AS s ON s.name = h.name AND s.stream = h.stream
        JOIN node_keys AS k ON k.number = s.number AND k.node = h.node
        JOIN progress ON progress.number = k.number
        WHERE h.date {dates} AND at_us < {next_us} AND at_us >= {first_us} - held_us
    )
    SELECT key, day, max(row(at_us, sequence)) AS message FROM candidates
    ASOF JOIN (SELECT day, day_first_ns // 1000 AS first_us FROM calendar UNION ALL SELECT -1, {oldest_us} - 1) AS days
        ON candidates.at_us >= days.first_us GROUP BY key, day
    """
# DuckDB misestimates the files: messages are the large side of the join and must be its probe side.
_IN_THIS_ORDER: Final = "SET disabled_optimizers = 'join_order,build_side_probe_side'"
_FOUND: Final = """
    CREATE OR REPLACE TEMP TABLE found AS
    SELECT key, day, at_us, held_us, {values} AS found FROM (
        SELECT key, day, epoch_us(stored_at) AS at_us, held_us, list_transform(
            json_extract(coalesce(h.metadata, h.payload), [{pointers}]), lambda one: nullif(one, 'null')) AS p
        FROM node_snapshot_history AS h JOIN (
            SELECT * FROM newest JOIN node_keys USING (key) JOIN streams USING (number) JOIN progress USING (number)) AS newest
            ON h.name = newest.name AND h.stream = newest.stream AND h.node = newest.node
                AND row(epoch_us(h.stored_at), h.sequence) = newest.message
        WHERE h.date {dates})
    """
# An unknown property is a value too: NULL.
_VALUES: Final = f"""
    CREATE OR REPLACE TEMP TABLE found_values AS
    SELECT ({_ANY_VALUE} + row_number() OVER (ORDER BY property, value))::INTEGER AS value_number, property, value FROM (
        SELECT one.property, one.value FROM (SELECT DISTINCT unnest(found) AS one FROM found)
        UNION SELECT unnest($names::VARCHAR[]), NULL)
    """
# A repeated message in the history counts once.
_OBSERVED: Final = f"""
    CREATE OR REPLACE TEMP TABLE observed AS
    SELECT key, day, (at_us + held_us) * 1000 AS until_ns, list_append(list(DISTINCT value_number), {_ANY_VALUE}) AS held
    FROM (SELECT key, day, at_us, held_us, unnest(found) AS one FROM found) AS single
    JOIN found_values AS v ON v.property = single.one.property AND v.value IS NOT DISTINCT FROM single.one.value
    GROUP BY key, day, at_us, held_us
    """
# A list item for each day with a message of the node, in order: observed_day (-1: before the days), holds_until_ns, held.
_WITH_OBSERVED: Final = """
    SELECT part.*, coalesce(observed_day, []) AS observed_day, coalesce(holds_until_ns, []) AS holds_until_ns,
        coalesce(held, []) AS held
    FROM part LEFT JOIN (
        SELECT key, list(day ORDER BY day) AS observed_day, list(until_ns ORDER BY day) AS holds_until_ns,
            list(held ORDER BY day) AS held
        FROM observed WHERE key IN (SELECT key FROM part) GROUP BY key) USING (key)
    """
_COUNTS: Final = """
    CREATE OR REPLACE TEMP TABLE counts (number INTEGER, day INTEGER, value_number INTEGER, nodes BIGINT, came BIGINT,
        went BIGINT)
    """
_INVENTORY: Final = """
    SELECT date, name, stream, property, value, sum(nodes) AS nodes, sum(came) AS came, sum(went) AS went,
        coalesce(known_ns >= day_next_ns, false) AS final
    FROM counts JOIN calendar USING (day) JOIN streams USING (number) JOIN progress USING (number)
        LEFT JOIN found_values USING (value_number)
    GROUP BY ALL
    """


@dataclass(frozen=True, slots=True)
class _Property:
    """A property: JSON pointers to its locations in a message, and the SQL for the list of its values."""

    pointers: tuple[str, ...]
    values: str = "[{at} ->> '$']"


_FIXED: Final = {
    "class": _Property(
        ("/classes",),
        "CASE json_type({at}) WHEN 'ARRAY' THEN json_extract_string({at}, '$[*]') ELSE [{at} ->> '$'] END",
    ),
    "agent": _Property(
        ("/agents",),
        """
        list_transform(from_json({at}, '[{{"name": "VARCHAR", "version": "VARCHAR"}}]'),
            lambda one: nullif(concat_ws(' ', one.name, one.version), ''))
        """,
    ),
    "agent_version": _Property(("/build_info/version",)),
    "os_family": _Property(("/facts/os/family", "/facts/osfamily", "/os/family", "/osfamily")),
}


def _properties(facts: Sequence[str]) -> dict[str, _Property]:
    pointers = {fact: "".join(f"/{_escaped(part)}" for part in parse_path(fact)) for fact in facts}
    return _FIXED | {f"facts.{fact}": _Property((f"/facts{at}", at)) for fact, at in pointers.items()}


def _escaped(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1")


def _values(name: str, prop: _Property, pointers: Sequence[str]) -> str:
    """Return the SQL of a property's values in a message, whose elements at `pointers` are in the list `p`."""
    elements = ", ".join(f"p[{pointers.index(pointer) + 1}]" for pointer in prop.pointers)
    values = f"coalesce(nullif(list_distinct({prop.values.format(at=f'coalesce({elements})')}), []), [NULL::VARCHAR])"
    return f"list_transform({values}, lambda value: {{'property': {literal(name)}, 'value': value}})"


@dataclass(frozen=True, slots=True)
class StatusIntervals:
    """Status intervals by node and in order: `node` (its row), `day`, from `from_ns` to `next_ns`, which may be equal.

    `stretch` numbers the time from the end of one up status to the next, uniquely across nodes. `changed`: the interval
    starts with a transition; `outage`: with a transition that starts an outage.
    """

    node: NDArray[np.int64]
    day: NDArray[np.int64]
    from_ns: NDArray[np.int64]
    next_ns: NDArray[np.int64]
    status: NDArray[np.int8]
    stretch: NDArray[np.int64]
    changed: NDArray[np.bool_]
    outage: NDArray[np.bool_]

    @classmethod
    def cut(cls, nodes: pa.RecordBatch, bounds: NDArray[np.int64]) -> Self:
        """Split the histories of nodes at `bounds`: the starts of days, and the end of the last one.

        `nodes` are those of `Histories.portions`.
        """
        node, at_ns, status, changed = _points(nodes, bounds)
        until_ns = np.minimum(_column(nodes, "until_ns"), bounds[-1])[node]
        first = np.diff(node, prepend=-1) > 0
        last = np.roll(first, -1)
        next_ns = np.where(last, until_ns, np.minimum(np.roll(at_ns, -1), until_ns))
        outage = changed & (status != UP) & (first | (np.roll(status, 1) == UP))
        stretch = np.cumsum(first | (status == UP))
        # A change at midnight belongs to the starting day.
        day = np.searchsorted(bounds, at_ns, "right") - 1
        days = np.maximum(np.searchsorted(bounds, next_ns, "left") - day, 1)
        days[at_ns >= until_ns] = 0
        which, further = _expand(days)
        begins = further == 0
        day = day[which] + further
        return cls(
            node[which],
            day,
            np.maximum(at_ns[which], bounds[day]),
            np.minimum(next_ns[which], bounds[day + 1]),
            status[which],
            stretch[which],
            changed[which] & begins,
            outage[which] & begins,
        )


def _points(
    nodes: pa.RecordBatch, bounds: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int8], NDArray[np.bool_]]:
    """Return node, time, status and whether it is a change: each node's initial status, then its changes."""
    known = nodes.column("status").is_valid().to_numpy(zero_copy_only=False)
    counts, at_ns = _items(nodes.column("at_ns"))
    _, after = _items(nodes.column("after"))
    changes, _ = _expand(counts)
    before = np.flatnonzero(known)
    node = np.concatenate([before, changes])
    # Stable sort: a node's initial status precedes its changes.
    order = np.argsort(node, kind="stable")
    began_ns = np.maximum(_column(nodes, "first_ns"), bounds[0])[before]
    status = nodes.column("status").fill_null(0).to_numpy()[before]
    return (
        node[order],
        np.concatenate([began_ns, at_ns])[order],
        np.concatenate([status, after])[order],
        order >= len(before),
    )


def _column(rows: pa.RecordBatch, name: str) -> NDArray[Any]:
    """Return a column without nulls."""
    values: NDArray[Any] = rows.column(name).to_numpy()
    return values


def _items(lists: pa.ListArray) -> tuple[NDArray[np.int32], pa.Array]:
    """Return the length of each list, and all items concatenated."""
    return lists.value_lengths().to_numpy(), lists.flatten()


def _expand(counts: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the index of each count repeated `count` times, and 0, 1, 2 … within each."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)


def _bounds_of(days: Sequence[Day]) -> NDArray[np.int64]:
    """Return the starts of consecutive days, and the end of the last one."""
    return np.array([*(day.first_ns for day in days), days[-1].next_ns], np.int64)


def _batch(rows: pa.Table) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([each.combine_chunks() for each in rows.columns], rows.schema.names)


def measure_days(nodes: pa.Table, spans: pa.Table, days: Sequence[Day]) -> pa.Table:
    """Return a row for each of some nodes and day on which it was known, in this order. `days` are consecutive.

    `nodes` are those of `Histories.portions`, `spans` the streams' blind spans. Columns: key, day (an index into `days`), up_ns,
    timeout_ns, retired_ns, blind_ns (their sum is the time of the day since the node's first sighting, up to the watermark),
    transitions, outages (stretches not up that started on the day) and longest_ns (the longest part of a stretch not up, without
    blind time).
    """
    rows = _batch(nodes)
    pieces = StatusIntervals.cut(rows, _bounds_of(days))
    blind_ns = _blind_ns(_column(rows, "stream")[pieces.node], pieces, spans)
    ns = pieces.next_ns - pieces.from_ns - blind_ns
    # Intervals are ordered: those of a node's day are adjacent, and within them those of a stretch.
    of_day = _begins(pieces.node, pieces.day)
    of_stretch = _begins(pieces.stretch, pieces.day)
    down_ns = np.where(pieces.status == UP, 0, ns)
    columns = {
        "key": _column(rows, "key")[pieces.node[of_day]],
        "day": pieces.day[of_day],
        **{
            f"{name}_ns": _sums(np.where(pieces.status == code, ns, 0), of_day)
            for name, code in (("up", UP), ("timeout", TIMEOUT), ("retired", RETIRED))
        },
        "blind_ns": _sums(blind_ns, of_day),
        "transitions": _sums(pieces.changed, of_day),
        "outages": _sums(pieces.outage, of_day),
        "longest_ns": np.maximum.reduceat(_sums(down_ns, of_stretch), np.searchsorted(of_stretch, of_day)),
    }
    return pa.table(columns)


def _blind_ns(streams: NDArray[np.int32], pieces: StatusIntervals, spans: pa.Table) -> NDArray[np.int64]:
    """Return the blind time of each interval's stream."""
    blind_ns = np.zeros(len(streams), np.int64)
    of_stream = spans["stream"].to_numpy()
    for stream in np.unique(of_stream):
        first_ns, next_ns = (spans[name].to_numpy()[of_stream == stream] for name in ("first_ns", "next_ns"))
        here = streams == stream
        until, since = (_covered(first_ns, next_ns, at[here]) for at in (pieces.next_ns, pieces.from_ns))
        blind_ns[here] = until - since
    return blind_ns


def _covered(first_ns: NDArray[np.int64], next_ns: NDArray[np.int64], at_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the time before each instant inside spans, which are ascending and disjoint."""
    before = np.concatenate([[0], np.cumsum(next_ns - first_ns)])
    last = np.searchsorted(first_ns, at_ns, "right") - 1
    # Exclude the part of the last started span after the instant.
    rest = np.where(last >= 0, np.maximum(next_ns[last] - at_ns, 0), 0)
    covered: NDArray[np.int64] = before[last + 1] - rest
    return covered


def _begins(*columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where a row differs from the previous one."""
    differs = np.logical_or.reduce([np.diff(each, prepend=-1) != 0 for each in columns])
    return np.flatnonzero(differs)


def _sums(values: NDArray[Any], begins: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of each part, which begins there."""
    sums: NDArray[np.int64] = np.add.reduceat(values, begins, dtype=np.int64)
    return sums


def _count_values(nodes: pa.Table, days: Sequence[Day], unknown: NDArray[np.int32]) -> pa.Table:
    """Return the number of nodes per stream, day and value on the day or the previous one, except for the first day.

    `nodes` have the columns of `_WITH_OBSERVED`, `unknown` are the values of an unobserved node. Columns: number (the stream),
    day (an index into `days`), value_number, nodes, came, went.
    """
    rows, count = _batch(nodes), len(days)
    node, day, value = _held(rows, _bounds_of(days), unknown)
    # Each is a number that ends in the day, with one more day than there are: a persisting value is followed by the next number.
    values = np.int64(value.max(initial=0) + 1)
    held = np.sort((node * values + value) * (count + 1) + day)
    of_node, day = np.divmod(held, count + 1)
    node, value = np.divmod(of_node, values)
    group = (_column(rows, "stream")[node] * values + value) * count + day
    present = day > 0
    came = present & (np.diff(held, prepend=-1) != 1)
    went = (day < count - 1) & (np.diff(held, append=-1) != 1)
    groups, index = np.unique(np.concatenate([group[present], group[went] + 1]), return_inverse=True)
    now, gone = np.split(index, [np.count_nonzero(present)])
    numbers = [np.bincount(each, minlength=len(groups)) for each in (now, now[came[present]], gone)]
    of_stream, day = np.divmod(groups, count)
    stream, value = np.divmod(of_stream, values)
    return pa.table([stream, day, value, *numbers], ["number", "day", "value_number", "nodes", "came", "went"])


def _held(
    nodes: pa.RecordBatch, bounds: NDArray[np.int64], unknown: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return node, day and number of each value on days on which the node was not retired throughout."""
    pieces = StatusIntervals.cut(nodes, bounds)
    counts, observed_day = _items(nodes.column("observed_day"))
    _, until_ns = _items(nodes.column("holds_until_ns"))
    _, held = _items(nodes.column("held"))
    lengths, values = _items(held)
    # After the observations comes the value without an observation: the last one, -1.
    lengths, values = np.append(lengths, len(unknown)), np.append(values, unknown)
    until_ns = np.append(until_ns, bounds[-1])
    newest = np.full((nodes.num_rows, len(bounds)), -1)
    newest[_expand(counts)[0], observed_day.to_numpy() + 1] = np.arange(len(observed_day))
    newest = np.maximum.accumulate(newest, axis=1)
    member = np.zeros((nodes.num_rows, len(bounds) - 1), np.bool_)
    there = (pieces.status != RETIRED) & (pieces.from_ns < pieces.next_ns)
    member[pieces.node[there], pieces.day[there]] = True
    node, day = np.nonzero(member)
    which = newest[node, day + 1]
    which = np.where(until_ns[which] >= bounds[day], which, -1)
    row, further = _expand(lengths[which])
    first = np.cumsum(lengths) - lengths
    return node[row], day[row], values[first[which][row] + further]


class DailyRows(ABC):
    """The computation of the rows of a daily table from `inputs`, the columns of published tables; it is picklable.

    `columns` are those of the rows that some nodes contribute, as DuckDB declares them, and `total` is the query of the table's
    rows from all of them, `{rows}`, for DuckDB and Spark. `rows_per_node` is the approximate number of rows of a node and day.
    `streams` are those of `read_streams`, and `days` are consecutive; the first `days_before` have no rows.
    """

    table: ClassVar[DailyTable]
    inputs: ClassVar[Mapping[str, Sequence[str]]]
    columns: ClassVar[str]
    total: ClassVar[str]
    rows_per_node: ClassVar[int]
    days_before: ClassVar[int]
    streams: pa.Table
    days: Sequence[Day]

    @property
    def kinds(self) -> dict[str, str]:
        """Type of each of `columns` by name, in order."""
        return kinds_of(self.columns)

    @abstractmethod
    def compute(self, histories: Histories, days: Sequence[Day]) -> str:
        """Compute the rows of nodes on some of the days; return the query of the result in the connection of the histories."""


@dataclass(frozen=True)
class AvailabilityRows(DailyRows):
    """A row for each node and day on which it was known.

    `spans` are the blind spans of streams, and `windows` the maintenance windows by number of the stream, each with its time in
    the days.
    """

    table = AVAILABILITY
    inputs = INPUTS
    columns = AVAILABILITY.columns
    total = "SELECT * FROM {rows}"
    rows_per_node = 1
    days_before = 0
    streams: pa.Table
    days: Sequence[Day]
    spans: pa.Table
    windows: Mapping[int, Sequence[tuple[Window, Sequence[Span]]]]

    def compute(self, histories: Histories, days: Sequence[Day]) -> str:
        """Measure the nodes."""
        connection = histories.connection
        _number_days(connection, days)
        connection.execute(_MEASURED)
        for nodes in histories.portions(days, PORTION_ROWS):
            with with_tables(connection, part=measure_days(nodes, self.spans, days)):
                connection.execute("INSERT INTO measured BY NAME FROM part")
        nodes, spans = self._maintained(histories)
        with with_tables(connection, maintained_nodes=nodes, maintained_spans=spans):
            connection.execute(_MAINTAINED)
        return _AVAILABILITY

    def _maintained(self, histories: Histories) -> tuple[pa.Table, pa.Table]:
        """Return the nodes that windows are about, and the times of each combination of windows (`windows`)."""
        numbers: dict[tuple[Window, ...], int] = {}
        keys, times = [], []
        for number, windows in self.windows.items():
            for key, node, node_class in histories.nodes_of(number):
                matching = [(window, spans) for window, spans in windows if window.matches(node, node_class)]
                combination = tuple(window for window, _ in matching)
                if combination and combination not in numbers:
                    numbers[combination] = len(numbers)
                    covered = merge_spans(span for _, spans in matching for span in spans)
                    times += [(numbers[combination], *span) for span in covered]
                if combination:
                    keys.append((key, numbers[combination]))
        return _integers(keys, "key", "windows"), _integers(times, "windows", "from_ns", "to_ns")


@dataclass(frozen=True)
class InventoryRows(DailyRows):
    """Partial counts of nodes per value of each property; a day is compared with the previous day.

    `progress` has for each stream its number, held_us (how long a message is valid), and known_ns (until when the stream's
    messages are copied). `facts` are the counted facts.
    """

    table = INVENTORY
    inputs = INPUTS | {
        "node_snapshot_history": ("name", "stream", "node", "date", "stored_at", "sequence", "payload", "metadata")
    }
    columns = _COUNTED
    total = """
        SELECT date, name, stream, property, value, nodes, came, went, all_nodes, final FROM (
            SELECT *,
                coalesce(max(CASE WHEN property IS NULL THEN nodes END) OVER (PARTITION BY date, name, stream), 0) AS all_nodes
            FROM (SELECT date, name, stream, property, value, sum(nodes) AS nodes, sum(came) AS came, sum(went) AS went, final
                FROM {rows} GROUP BY date, name, stream, property, value, final) AS sums
        ) AS counted WHERE property IS NOT NULL ORDER BY date, name, stream, property, nodes DESC, value
        """
    rows_per_node = _PROPERTY_ROWS
    days_before = 1
    streams: pa.Table
    days: Sequence[Day]
    progress: pa.Table
    facts: Sequence[str]

    def oldest_ns(self, days: Sequence[Day]) -> int:
        """Return the earliest time of a message that is valid on the days."""
        return days[0].first_ns - 1000 * max(self.progress["held_us"].to_pylist(), default=0)

    def compute(self, histories: Histories, days: Sequence[Day]) -> str:
        """Count the nodes. Raises RunError if the history cannot be read."""
        connection = histories.connection
        _number_days(connection, days)
        with with_tables(connection, given=self.progress):
            connection.execute("CREATE OR REPLACE TEMP TABLE progress AS FROM given")
        try:
            unknown = self._observe(connection, days)
        except duckdb.IOException as error:
            # Compaction may replace files during the query.
            reason = str(error).splitlines()[0]
            raise RunError(
                f"inventory: the history cannot be read: {reason}; the next attempt is within the hour"
            ) from None
        connection.execute(_COUNTS)
        for nodes in histories.portions(days, max(1, PORTION_ROWS // _PROPERTY_ROWS)):
            with with_tables(connection, part=nodes):
                observed = connection.sql(_WITH_OBSERVED).to_arrow_table()
            with with_tables(connection, part=_count_values(observed, days, unknown)):
                connection.execute("INSERT INTO counts BY NAME FROM part")
        return _INVENTORY

    def _observe(self, connection: duckdb.DuckDBPyConnection, days: Sequence[Day]) -> NDArray[np.int32]:
        """Read the values in each node's newest message of each of the days, into the table `observed`.

        Returns the value numbers of a node without known values: _ANY_VALUE and the NULL of each property.
        """
        properties = _properties(self.facts)
        pointers = list(dict.fromkeys(pointer for prop in properties.values() for pointer in prop.pointers))
        oldest_ns = self.oldest_ns(days)
        bounds = {
            "first_us": days[0].first_ns // 1000,
            "next_us": days[-1].next_ns // 1000,
            "oldest_us": oldest_ns // 1000,
            # The files are partitioned by UTC days.
            "dates": f"BETWEEN DATE '{date_at(oldest_ns)}' AND DATE '{date_at(days[-1].next_ns - 1)}'",
        }
        values = ", ".join(_values(name, prop, pointers) for name, prop in properties.items())
        listed = ", ".join(literal(pointer) for pointer in pointers)
        connection.execute(_NEWEST.format(**bounds))
        connection.execute(_IN_THIS_ORDER)
        connection.execute(_FOUND.format(**bounds, values=f"flatten([{values}])", pointers=listed))
        connection.execute("RESET disabled_optimizers")
        connection.execute(_VALUES, {"names": list(properties)})
        connection.execute(_OBSERVED)
        unknown = connection.execute("SELECT value_number FROM found_values WHERE value IS NULL").fetchall()
        return np.array([_ANY_VALUE, *(number for (number,) in unknown)], np.int32)


@dataclass(frozen=True, slots=True)
class NodesWork:
    """Computes the rows of a group's nodes in a task of Spark, from the inputs of `rows`, numbered by `source`.

    It is here, because an executor has fewer packages than this host: duckdb, and those of every task.
    """

    rows: DailyRows
    schema: str

    def run(self, group: pa.Table) -> pa.Table:
        """Return the rows."""
        with duckdb.connect(config={"threads": 1}) as connection:
            for number, (name, columns) in enumerate(self.rows.inputs.items()):
                connection.register(name, group.filter(pc.equal(group["source"], number)).select(columns))
            query = self.rows.compute(Histories(connection, self.rows.streams), self.rows.days)
            return connection.sql(cast(query, self.rows.kinds)).to_arrow_table()


def _number_days(connection: duckdb.DuckDBPyConnection, days: Sequence[Day]) -> None:
    """Create the table `calendar`: day (an index into `days`), date, day_first_ns, day_next_ns."""
    rows = [(number, day.date, day.first_ns, day.next_ns) for number, day in enumerate(days)]
    names = ("day", "date", "day_first_ns", "day_next_ns")
    with with_tables(connection, given=pa.table(dict(zip(names, zip(*rows, strict=True), strict=True)))):
        connection.execute("CREATE OR REPLACE TEMP TABLE calendar AS SELECT * REPLACE (day::INTEGER AS day) FROM given")


def _integers(rows: Sequence[tuple[int, ...]], *names: str) -> pa.Table:
    return pa.table({name: pa.array([row[n] for row in rows], pa.int64()) for n, name in enumerate(names)})
