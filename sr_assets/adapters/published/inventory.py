"""The queries on the table `inventory_daily`."""

from datetime import date
from pathlib import Path
from typing import Final

from sr_assets.adapters.published.fleet_reader import Rows
from sr_assets.adapters.published.queries import ask, day_parameters
from sr_assets.domain.days import Day

#: Properties with several values per node.
SEVERAL: Final = frozenset({"class", "agent"})


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
