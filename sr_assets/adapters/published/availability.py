"""The queries on the table `availability_daily`."""

from datetime import date
from pathlib import Path
from typing import Final, Literal

from sr_assets.adapters.published.fleet_reader import Rows
from sr_assets.adapters.published.queries import ask, day_parameters
from sr_assets.domain.days import Day

By = Literal["node", "site", "day"]

_KEYS: Final[dict[By, str]] = {"node": "name, stream, node", "site": "name, stream", "day": "date"}
#: Tolerance, because published times have microseconds.
_ROUNDED_SECONDS: Final = 2e-6


def availability(
    home: Path,
    *,
    by: By,
    site: str | None = None,
    node: str | None = None,
    since: date | None = None,
    most: int | None = None,
) -> Rows:
    """Return availability and outages by node or site, least available first, or by day in order.

    `availability_percent` is the share of the watched time since the first sighting in which a node was up; NULL if no
    time was watched. A node that was retired throughout is left out, because it was not part of the fleet.
    """
    keys = _KEYS[by]
    sql = f"""
        WITH chosen AS (
            SELECT * FROM availability_daily
            WHERE ($site IS NULL OR name = $site) AND ($node IS NULL OR node = $node) AND ($since IS NULL OR date >= $since)
            QUALIFY sum(up_seconds + timeout_seconds) OVER (PARTITION BY replicator, name, stream, node) > 0
        )
        SELECT {keys},
            round(100 * sum(up_seconds) / nullif(sum(up_seconds + timeout_seconds + retired_seconds), 0), 4)
                AS availability_percent,
            count(DISTINCT (replicator, name, stream, node)) AS nodes, sum(outages)::BIGINT AS outages,
            max(longest_outage_seconds) AS longest_outage_seconds, sum(timeout_seconds + retired_seconds) AS down_seconds,
            sum(blind_seconds) AS blind_seconds, sum(maintenance_seconds) AS maintenance_seconds,
            min(date) AS first_date, max(date) AS last_date, bool_and(final) AS final
        FROM chosen GROUP BY {keys}
        ORDER BY {"date" if by == "day" else f"availability_percent NULLS LAST, down_seconds DESC, {keys}"}
        LIMIT $most
        """
    return ask(home, sql, {"site": site, "node": node, "since": since, "most": most})


def shares_by_day(home: Path, since: date) -> Rows:
    """Return the available and the maintained share of the nodes' time by day, in percent; by class too if there are any.

    Columns: date, class (NULL: all nodes), available_percent, maintained_percent.
    """
    sql = """
        SELECT date, class, round(100 * sum(up_seconds) / nullif(sum(up_seconds + timeout_seconds + retired_seconds), 0), 4),
            round(100 * sum(maintenance_seconds) / nullif(
                sum(up_seconds + timeout_seconds + retired_seconds + blind_seconds), 0), 4)
        FROM availability_daily LEFT JOIN (SELECT name, stream, node, class FROM node_availability)
            USING (name, stream, node)
        WHERE date >= $since AND up_seconds + timeout_seconds > 0
        GROUP BY GROUPING SETS ((date), (date, class)) HAVING grouping(class) = 1 OR class IS NOT NULL
        ORDER BY date, class NULLS FIRST
        """
    return ask(home, sql, {"since": since})


def wrong_sums(home: Path, day: Day) -> int:
    """Return the number of a day's rows that do not add up to the node's time since its first sighting.

    For rows that are not final, check only that they are not longer than the day, and their longest outage.
    """
    sql = f"""
        SELECT count(*) FROM availability_daily AS a LEFT JOIN node_availability AS n USING (name, stream, node),
            LATERAL (SELECT up_seconds + timeout_seconds + retired_seconds + blind_seconds AS seconds,
                least(1.0, 1.0 - (epoch_us(n.first_seen) - $first_us) / ($next_us - $first_us)::DOUBLE)
                    * ($next_us - $first_us) / 1e6 AS known_seconds)
        WHERE date = $date AND (seconds > ($next_us - $first_us) / 1e6 + {_ROUNDED_SECONDS} OR longest_outage_seconds
            > timeout_seconds + retired_seconds + {_ROUNDED_SECONDS}
            OR (final AND n.node IS NOT NULL AND abs(seconds - known_seconds) > {_ROUNDED_SECONDS}))
        """
    return int(ask(home, sql, day_parameters(day)).values[0][0])


def missing_nodes(home: Path, day: Day) -> int:
    """Return the number of nodes without a row that were seen before the day's end and the stream's watermark."""
    sql = """
        SELECT count(*) FROM node_availability AS n JOIN replication AS r USING (name, stream)
        ANTI JOIN (SELECT name, stream, node FROM availability_daily WHERE date = $date) USING (name, stream, node)
        WHERE epoch_us(first_seen) < least($next_us, epoch_us(watermark)) AND epoch_us(watermark) > $first_us
        """
    return int(ask(home, sql, day_parameters(day)).values[0][0])
