"""The status page's queries on the published tables.

Sites and transitions come from the feeds, and from this installation where no feed reports them.
"""

from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import duckdb

from sr_assets.adapters.published.availability import availability
from sr_assets.adapters.published.fleet_reader import Rows, open_fleet, read_rows
from sr_assets.adapters.published.queries import CLASS_COUNTS, RULE_COUNTS, ask
from sr_assets.domain.errors import SrAssetsError

#: Number of displayed transitions, and of the least available nodes.
MOST_TRANSITIONS: Final = 15
MOST_WORST: Final = 15
#: The most outages of a chart.
MOST_OUTAGES: Final = 100
_WORST_DAYS: Final = 30
#: Step of the chart, which covers a day.
STEP: Final = timedelta(minutes=15)
STEPS: Final = 96

_SITES: Final = f"""
    SELECT reported.*, classes, coalesce(flapping, 0) AS flapping, coalesce(held, 0) AS held,
        coalesce(suppressed, 0) AS suppressed, affected FROM (
        SELECT replicator, name, stream, up, timeout, retired, new_24h, as_of, observer, observer_alive_at, outage, outage_since
        FROM global_summary
        UNION ALL SELECT NULL, name, stream, up, timeout, retired, new_24h, as_of, NULL, NULL, outage, outage_since
            FROM site_summary ANTI JOIN global_summary USING (name, stream)
    ) AS reported LEFT JOIN ({CLASS_COUNTS}) USING (name, stream) LEFT JOIN ({RULE_COUNTS}) USING (name, stream)
    LEFT JOIN (
        SELECT name, stream, arg_max(silent || ' of ' || nodes, (event_time, event = 'restored')) AS affected
        FROM site_events GROUP BY ALL) USING (name, stream)
    ORDER BY coalesce(observer = 'blind', false) DESC, outage IS NULL, timeout DESC, replicator, name, stream
    """
_EVENTS: Final = """
    SELECT replicator, name, stream, node, event, event_time, returned FROM global_advisories
    UNION ALL SELECT NULL, name, stream, node, event, event_time, returned
        FROM node_advisories ANTI JOIN global_summary USING (name, stream)
    """
_TRANSITIONS: Final = f"SELECT * FROM ({_EVENTS}) ORDER BY event_time DESC, node LIMIT $most"
#: Changes of the numbers of up and silent nodes in each step.
_STEPS: Final = f"""
    SELECT greatest(0, least($steps - 1, floor((epoch_us($until) - epoch_us(event_time)) / $step_us)))::INTEGER AS back,
        sum(CASE event WHEN 'timeout' THEN -1 WHEN 'expire' THEN 0 ELSE 1 END)::BIGINT AS up,
        sum(CASE event WHEN 'timeout' THEN 1 WHEN 'new' THEN 0 WHEN 'unretired' THEN 0 ELSE -1 END)::BIGINT AS silent
    FROM ({_EVENTS}) WHERE epoch_us(event_time) > epoch_us($until) - $steps * $step_us::BIGINT GROUP BY back
    """
_FLAPPING: Final = """
    SELECT name, stream, node, event_time, transitions FROM node_events WHERE event <> 'unretired'
    QUALIFY row_number() OVER (PARTITION BY name, stream, node ORDER BY event_time DESC) = 1 AND event = 'flapping'
    ORDER BY event_time DESC, node
    """
_OUTAGES: Final = """
    SELECT name, stream, min(event_time) AS began_at, min(event_time) FILTER (event = 'dark') AS dark_at,
        max(event_time) FILTER (event = 'restored') AS restored_at, max(nodes) AS nodes,
        max(silent) FILTER (event <> 'restored') AS silent
    FROM site_events GROUP BY name, stream, outage HAVING coalesce(restored_at, now()) >= $since
    ORDER BY began_at DESC, name, stream LIMIT $most
    """
_REPLICATION: Final = """
    SELECT name, stream, target_stream, lag_messages, lag_seconds, queued_messages, paused, last_error
    FROM replication
    ORDER BY last_error IS NULL, lag_seconds DESC NULLS LAST, lag_messages DESC NULLS LAST, name, stream
    """


@dataclass(frozen=True, slots=True)
class Status:
    """The published status as records by column; `chart` has the number of up and silent nodes, oldest step first."""

    as_of: datetime
    sites: list[dict[str, Any]]
    transitions: list[dict[str, Any]]
    replication: list[dict[str, Any]]
    worst: list[dict[str, Any]]
    chart: list[tuple[int, int]]
    flapping: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RecentNodes:
    """The number of up and silent nodes of all sites at the end of each step until `as_of`, and the outages meanwhile.

    `outages` are records with name, stream, began_at, dark_at and restored_at.
    """

    as_of: datetime
    counts: list[tuple[int, int]]
    outages: list[dict[str, Any]]


def recent_nodes(home: Path) -> RecentNodes:
    """Return the last day. Raises RunError before the first publication."""
    with open_fleet(home) as connection:
        as_of = _ask(connection, "SELECT as_of FROM snapshot_info")[0]["as_of"]
        sites = _ask(connection, _SITES)
        outages = _ask(connection, _OUTAGES, since=as_of - STEPS * STEP, most=MOST_OUTAGES)
        return RecentNodes(as_of, _steps(connection, sites, as_of), outages)


def site_outages(home: Path, since: date, most: int) -> Rows:
    """Return the newest outages of this installation's sites that lasted until a date or longer, newest first."""
    return ask(home, _OUTAGES, {"since": since, "most": most})


def status(home: Path) -> Status:
    """Return the content of the status page. Raises RunError before the first publication."""
    with open_fleet(home) as connection:
        as_of = _ask(connection, "SELECT as_of FROM snapshot_info")[0]["as_of"]
        sites, replication = _ask(connection, _SITES), _ask(connection, _REPLICATION)
        transitions = _ask(connection, _TRANSITIONS, most=MOST_TRANSITIONS)
        flapping = _ask(connection, _FLAPPING)
        chart = _steps(connection, sites, as_of)
    return Status(as_of, sites, transitions, replication, _worst(home, as_of), chart, flapping)


def _steps(
    connection: duckdb.DuckDBPyConnection, sites: list[dict[str, Any]], as_of: datetime
) -> list[tuple[int, int]]:
    """Return the number of up and silent nodes at the end of each step, computed backwards from the current numbers."""
    steps = _ask(connection, _STEPS, until=as_of, steps=STEPS, step_us=STEP // timedelta(microseconds=1))
    up, silent = sum(site["up"] for site in sites), sum(site["timeout"] for site in sites)
    changes = {step["back"]: (step["up"], step["silent"]) for step in steps}
    counted = []
    for back in range(STEPS):
        counted.append((max(0, up), max(0, silent)))
        more_up, more_silent = changes.get(back, (0, 0))
        up, silent = up - more_up, silent - more_silent
    return counted[::-1]


def _worst(home: Path, as_of: datetime) -> list[dict[str, Any]]:
    """Return the least available nodes of thirty days, without nodes that were always up."""
    since = (as_of - timedelta(days=_WORST_DAYS)).date()
    try:
        rows = availability(home, by="node", since=since, most=MOST_WORST)
    except SrAssetsError:
        return []
    records = [dict(zip(rows.columns, row, strict=True)) for row in rows.values]
    return [record for record in records if (record["availability_percent"] or 100) < 100 or record["down_seconds"]]


def _ask(connection: duckdb.DuckDBPyConnection, sql: str, **parameters: object) -> list[dict[str, Any]]:
    rows = read_rows(connection, sql, parameters)
    return [dict(zip(rows.columns, row, strict=True)) for row in rows.values]
