"""What is asked of `inventory_daily`: the values of a property by day, those of the newest day; whether its rows add up.

Not here: its files (`daily`), what is asked of every daily table (`daily_queries`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sr_assets.adapters.published.daily_queries import bounds
from sr_assets.adapters.published.inventory import SEVERAL
from sr_assets.adapters.published.queries import ask

if TYPE_CHECKING:
    from datetime import date
    from pathlib import Path

    from sr_assets.adapters.published.reading import Rows
    from sr_assets.domain.days import Day


def values_by_day(home: Path, name: str, since: date, most: int) -> Rows:
    """Return date, value and nodes of the values of a property that most nodes had since a date; at most so many values."""
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
    """Return a day's values with nodes, came and went: of each property the `most` that most nodes had."""
    sql = """
        SELECT property, value, sum(nodes)::BIGINT AS nodes, sum(came)::BIGINT AS came, sum(went)::BIGINT AS went
        FROM inventory_daily WHERE date = $date GROUP BY property, value
        QUALIFY row_number() OVER (PARTITION BY property ORDER BY sum(nodes) DESC, value) <= $most
        ORDER BY property, nodes DESC, value
        """
    return ask(home, sql, {"date": when, "most": most})


def wrong_sums(home: Path, day: Day) -> int:
    """Return how many properties of a day do not add up, at each stream.

    A node has one value of a property, if only that nothing is known, or several where a node may have several.
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
    """Return how many nodes with a copied message stored on a day, before the watermark, were not counted."""
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
    return int(ask(home, sql, bounds(day)).values[0][0])
