"""The table `inventory_daily`: the properties of nodes' messages, the rows that Spark counted, and the queries on it.

Add a property here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Final

import duckdb
import pyarrow as pa

from sr_assets.adapters.published.daily_tables import INVENTORY
from sr_assets.adapters.published.fleet_reader import Rows
from sr_assets.adapters.published.queries import ask, day_parameters
from sr_assets.adapters.published.tables import literal
from sr_assets.domain.days import Day, date_at
from sr_assets.domain.errors import RunError
from sr_assets.domain.senders import parse_path

if TYPE_CHECKING:
    from sr_assets.adapters.published.node_histories import Histories

#: Properties with several values per node.
SEVERAL: Final = frozenset({"class", "agent"})
#: Value number that every node of a day has.
ANY_VALUE: Final = 0
# Each node's newest message of each day; its newest one before the first day counts as day -1.
_NEWEST: Final = """
    CREATE OR REPLACE TEMP TABLE newest AS
    WITH candidates AS (
        SELECT key, epoch_us(stored_at) AS at_us, sequence FROM node_snapshot_history AS h
        JOIN streams AS s ON s.name = h.name AND s.stream = h.stream
        JOIN node_keys AS k ON k.number = s.number AND k.node = h.node
        JOIN holding ON holding.number = k.number
        WHERE h.date {dates} AND at_us < {next_us} AND at_us >= {first_us} - held_us
    )
    SELECT key, day, max(row(at_us, sequence)) AS message FROM candidates
    ASOF JOIN calendar ON candidates.at_us >= calendar.first_us GROUP BY key, day
    """
# DuckDB misestimates the files: messages are the large side of the join and must be its probe side.
_IN_THIS_ORDER: Final = "SET disabled_optimizers = 'join_order,build_side_probe_side'"
_FOUND: Final = """
    CREATE OR REPLACE TEMP TABLE found AS
    SELECT key, day, at_us, held_us, {values} AS found FROM (
        SELECT key, day, epoch_us(stored_at) AS at_us, held_us, list_transform(
            json_extract(coalesce(h.metadata, h.payload), [{pointers}]), lambda one: nullif(one, 'null')) AS p
        FROM node_snapshot_history AS h JOIN (
            SELECT * FROM newest JOIN node_keys USING (key) JOIN streams USING (number) JOIN holding USING (number)) AS newest
            ON h.name = newest.name AND h.stream = newest.stream AND h.node = newest.node
                AND row(epoch_us(h.stored_at), h.sequence) = newest.message
        WHERE h.date {dates})
    """
# An unknown property is a value too: NULL.
_VALUES: Final = f"""
    CREATE OR REPLACE TEMP TABLE found_values AS
    SELECT ({ANY_VALUE} + row_number() OVER (ORDER BY property, value))::INTEGER AS value_number, property, value FROM (
        SELECT one.property, one.value FROM (SELECT DISTINCT unnest(found) AS one FROM found)
        UNION SELECT unnest($names::VARCHAR[]), NULL)
    """
# A repeated message in the history counts once.
_OBSERVED: Final = f"""
    CREATE OR REPLACE TEMP TABLE observed AS
    SELECT key, day, (at_us + held_us) * 1000 AS until_ns, list_append(list(DISTINCT value_number), {ANY_VALUE}) AS held
    FROM (SELECT key, day, at_us, held_us, unnest(found) AS one FROM found) AS single
    JOIN found_values AS v ON v.property = single.one.property AND v.value IS NOT DISTINCT FROM single.one.value
    GROUP BY key, day, at_us, held_us
    """
_WITH_OBSERVED: Final = """
    SELECT part.*, coalesce(observed_day, []) AS observed_day, coalesce(holds_until_ns, []) AS holds_until_ns,
        coalesce(held, []) AS held
    FROM part LEFT JOIN (
        SELECT key, list(day ORDER BY day) AS observed_day, list(until_ns ORDER BY day) AS holds_until_ns,
            list(held ORDER BY day) AS held
        FROM observed WHERE key IN (SELECT key FROM part) GROUP BY key) USING (key)
    """
_COUNTED: Final = """
    SELECT stream AS number, day, value_number, sum(nodes) AS nodes, sum(came) AS came, sum(went) AS went
    FROM counted GROUP BY ALL
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


def observe(
    histories: Histories, days: Sequence[Day], facts: Sequence[str], held_ns: Mapping[tuple[str, str], int]
) -> list[int]:
    """Read the values in each node's newest message of each of some consecutive days, into the table `observed`.

    Returns the value numbers of a node without known values: ANY_VALUE and the NULL of each property. `held_ns` maps
    name and stream to the validity of a message. Raises RunError if the history cannot be read.
    """
    properties = _properties(facts)
    pointers = list(dict.fromkeys(pointer for prop in properties.values() for pointer in prop.pointers))
    first_us, next_us = days[0].first_ns // 1000, days[-1].next_ns // 1000
    oldest_ns = days[0].first_ns - max(held_ns.values(), default=0)
    # The files are partitioned by UTC days.
    dates = f"BETWEEN DATE '{date_at(oldest_ns)}' AND DATE '{date_at(days[-1].next_ns - 1)}'"
    calendar = pa.table(
        {
            "day": pa.array([-1, *range(len(days))], pa.int32()),
            "first_us": pa.array([oldest_ns // 1000 - 1, *(day.first_ns // 1000 for day in days)], pa.int64()),
        }
    )
    values = ", ".join(_values(name, prop, pointers) for name, prop in properties.items())
    listed = ", ".join(literal(pointer) for pointer in pointers)
    try:
        with histories.with_tables(calendar=calendar, holding=_holding(histories, held_ns)) as connection:
            connection.execute(_NEWEST.format(dates=dates, first_us=first_us, next_us=next_us))
            connection.execute(_IN_THIS_ORDER)
            connection.execute(_FOUND.format(dates=dates, values=f"flatten([{values}])", pointers=listed))
            connection.execute("RESET disabled_optimizers")
            connection.execute(_VALUES, {"names": list(properties)})
            connection.execute(_OBSERVED)
            unknown = connection.execute("SELECT value_number FROM found_values WHERE value IS NULL").fetchall()
    except duckdb.IOException as error:
        # Compaction may replace files during the query.
        reason = str(error).splitlines()[0]
        raise RunError(
            f"inventory: the history cannot be read: {reason}; the next attempt is within the hour"
        ) from None
    return [ANY_VALUE, *(number for (number,) in unknown)]


def observed(histories: Histories, nodes: pa.Table) -> pa.Table:
    """Return nodes with the values that `observe` found: a list item for each day with a message of the node.

    In day order: observed_day (an index into the observed days; -1: before them), holds_until_ns, and held, the numbers
    of the values.
    """
    with histories.with_tables(part=nodes) as connection:
        return connection.sql(_WITH_OBSERVED).to_arrow_table()


def write_inventory(histories: Histories, days: Sequence[Day], counted: pa.Table, mode: int) -> dict[date, int]:
    """Replace the rows of some days, in files of permissions `mode`; return the number of rows by date.

    `counted` has any number of rows, which are summed, for each stream, day (an index into `days`) and value_number:
    nodes, came, went. Raises RunError if they cannot be written.
    """
    queries = {
        day.date: f"""
            WITH of_day AS (FROM ({_COUNTED}) WHERE day = {number}),
            everybody AS (SELECT number, nodes AS all_nodes FROM of_day WHERE value_number = {ANY_VALUE}),
            clocks AS ({INVENTORY.clocks})
            SELECT DATE '{day.date}', name, stream, property, value, nodes, came, went, coalesce(all_nodes, 0),
                coalesce(epoch_ns(known_until) >= {day.next_ns}, false)
            FROM of_day JOIN found_values USING (value_number) JOIN streams USING (number)
            LEFT JOIN everybody USING (number) LEFT JOIN clocks USING (name, stream)
            ORDER BY name, stream, property, nodes DESC, value
            """
        for number, day in enumerate(days)
    }
    with histories.with_tables(counted=counted) as connection:
        return INVENTORY.write_days(connection, histories.home, queries, mode)


def _holding(histories: Histories, held_ns: Mapping[tuple[str, str], int]) -> pa.Table:
    streams = histories.connection.execute("SELECT name, stream, number FROM streams").fetchall()
    return pa.table(
        {
            "number": pa.array([number for *_, number in streams], pa.int32()),
            "held_us": pa.array([held_ns.get((name, stream), 0) // 1000 for name, stream, _ in streams], pa.int64()),
        }
    )


def _values(name: str, prop: _Property, pointers: Sequence[str]) -> str:
    """Return the SQL of a property's values in a message, whose elements at `pointers` are in the list `p`."""
    elements = ", ".join(f"p[{pointers.index(pointer) + 1}]" for pointer in prop.pointers)
    values = f"coalesce(nullif(list_distinct({prop.values.format(at=f'coalesce({elements})')}), []), [NULL::VARCHAR])"
    return f"list_transform({values}, lambda value: {{'property': {literal(name)}, 'value': value}})"


def values_by_day(home: Path, name: str, since: date, most: int) -> Rows:
    """Return date, value and nodes for the `most` most frequent values of a property since a date."""
    sql = """
        WITH found AS (
            SELECT date, value, sum(nodes)::BIGINT AS nodes FROM inventory_daily
            WHERE property = $name AND value IS NOT NULL AND date >= $since GROUP BY ALL),
        often AS (SELECT value FROM found GROUP BY value ORDER BY sum(nodes) DESC, value LIMIT $most)
        SELECT date, value, coalesce(nodes, 0) AS nodes
        FROM (SELECT DISTINCT date FROM found) CROSS JOIN often LEFT JOIN found USING (date, value)
        ORDER BY date, value
        """
    return ask(home, sql, {"name": name, "since": since, "most": most})


def values_of_day(home: Path, when: date, most: int) -> Rows:
    """Return a day's values with nodes, came and went: of each property the `most` most frequent."""
    sql = """
        SELECT property, value, sum(nodes)::BIGINT AS nodes, sum(came)::BIGINT AS came, sum(went)::BIGINT AS went
        FROM inventory_daily WHERE date = $date GROUP BY property, value
        QUALIFY row_number() OVER (PARTITION BY property ORDER BY sum(nodes) DESC, value) <= $most
        ORDER BY property, nodes DESC, value
        """
    return ask(home, sql, {"date": when, "most": most})


def wrong_sums(home: Path, day: Day) -> int:
    """Return the number of properties that do not add up on a day, counted per stream.

    A node has one value of a property, possibly unknown, or several where the property allows that.
    """
    sql = """
        SELECT count(*) FROM (
            SELECT sum(nodes) AS nodes, max(nodes) AS largest, min(all_nodes) AS fewest, max(all_nodes) AS all_nodes,
                list_contains($several, property) AS several
            FROM inventory_daily WHERE date = $date GROUP BY name, stream, property)
        WHERE fewest <> all_nodes OR largest > all_nodes OR nodes < all_nodes OR (nodes > all_nodes AND NOT several)
        """
    return int(ask(home, sql, {"date": day.date, "several": sorted(SEVERAL)}).values[0][0])


def missing_nodes(home: Path, day: Day) -> int:
    """Return the number of nodes that were not counted although a message of the day, before the watermark, was copied."""
    sql = """
        WITH stored AS (
            SELECT name, stream, count(DISTINCT node) AS nodes FROM node_snapshot_history JOIN (
                SELECT name, stream, watermark FROM replication) USING (name, stream)
            WHERE date BETWEEN make_timestamptz($first_us)::DATE AND make_timestamptz($next_us)::DATE
                AND epoch_us(stored_at) >= $first_us AND epoch_us(stored_at) < $next_us AND stored_at < watermark GROUP BY ALL),
        counted AS (SELECT name, stream, max(all_nodes) AS nodes FROM inventory_daily WHERE date = $date GROUP BY ALL)
        SELECT coalesce(sum(greatest(0, stored.nodes - coalesce(counted.nodes, 0))), 0)
        FROM stored LEFT JOIN counted USING (name, stream)
        """
    return int(ask(home, sql, day_parameters(day)).values[0][0])
