"""The published tables of a centre: columns, and queries over the global view in the site's state.

Column `feed` is `name/stream` of the feed; `name` is the site that an advisory came from.
"""

from typing import Final

from sr_assets.adapters.published.table import Growth, Table, at
from sr_assets.adapters.state.global_view import blind, same_key
from sr_assets.domain.positions import DAY_NS
from sr_assets.domain.received import REPORTED, STATUS

#: By event code.
_STATUS: Final = f"{[status.value for status in STATUS]}[event_code + 1]"
_EVENT: Final = f"{list(REPORTED)}[event_code + 1]"
_FEED: Final = "$name || '/' || feed"
_FEEDS_SITE: Final = "split_part(feed, '/', 1)"
_SITE: Final = ("replicator", "name", "stream")
_BLIND: Final = blind("watermarks.now_ns")
_NODES_GROWTH: Final = Growth(
    "received_ns",
    "hash(received_ns, event_ns, epoch_ns, transition, event_code, seen_ns)",
    "hash($name, feed, replicator, name, stream, node)",
)
_HISTORY_GROWTH: Final = Growth("received_ns", "hash(received_ns, event_ns, epoch_ns, transition, event_code)")


def _site(table: str) -> str:
    return f"{table}.replicator, nullif({table}.name, ''), nullif({table}.stream, '')"


GLOBAL_TABLES: Final[dict[str, Table]] = {
    "global_availability": Table(
        """
        replicator VARCHAR, name VARCHAR, stream VARCHAR, node VARCHAR, status VARCHAR, status_since TIMESTAMPTZ,
        last_seen TIMESTAMPTZ, event_time TIMESTAMPTZ, received_at TIMESTAMPTZ, source VARCHAR, feed VARCHAR
        """,
        f"""
        SELECT {_site("latest")}, node, {_STATUS}, {at("event_ns")},
            {at("CASE WHEN event_code IN (0, 2) THEN event_ns ELSE seen_ns END")}, {at("event_ns")}, {at("received_ns")},
            origin, {_FEED}, {_NODES_GROWTH.key}, {_NODES_GROWTH.mark}
        FROM global_nodes AS latest WHERE true
        """,
        "global_nodes",
        "feed",
        _FEEDS_SITE,
        _NODES_GROWTH,
    ),
    "global_advisories": Table(
        """
        event_id VARCHAR, replicator VARCHAR, name VARCHAR, stream VARCHAR, node VARCHAR, event VARCHAR,
        event_time TIMESTAMPTZ, received_at TIMESTAMPTZ, seen TIMESTAMPTZ, age_seconds DOUBLE, previous VARCHAR,
        transition BIGINT, late BOOLEAN, returned BOOLEAN, outage_seconds DOUBLE, source VARCHAR, feed VARCHAR,
        epoch BIGINT, event_ns BIGINT
        """,
        f"""
        SELECT event_id, {_site("advisory")}, node, {_EVENT}, {at("event_ns")}, {at("received_ns")}, {at("seen_ns")},
            age_seconds, previous, nullif(transition, 0), late, returned, outage_seconds, origin, {_FEED},
            nullif(epoch_ns, 0), event_ns
        FROM global_history AS advisory WHERE true
        """,
        "global_history",
        "feed",
        _FEEDS_SITE,
        _HISTORY_GROWTH,
    ),
    "global_summary": Table(
        """
        replicator VARCHAR, name VARCHAR, stream VARCHAR, nodes BIGINT, up BIGINT, timeout BIGINT, retired BIGINT,
        new_24h BIGINT, last_advisory_at TIMESTAMPTZ, blind BOOLEAN, observer VARCHAR, observer_alive_at TIMESTAMPTZ,
        watermark TIMESTAMPTZ, position BIGINT, lag_messages BIGINT, tracked_nodes BIGINT, as_of TIMESTAMPTZ,
        feed VARCHAR, outage VARCHAR, outage_since TIMESTAMPTZ
        """,
        f"""
        SELECT {_site("site")}, coalesce(up, 0) + coalesce(timeout, 0), coalesce(up, 0), coalesce(timeout, 0),
            coalesce(retired, 0), coalesce(new_24h, 0), {at("advised_ns")}, {_BLIND},
            CASE WHEN {_BLIND} THEN 'blind' WHEN observed_ns IS NULL THEN 'unwatched' ELSE 'ok' END,
            {at("observed_ns")}, {at("site.watermark_ns")}, position, lag_messages, site.nodes,
            {at("watermarks.now_ns")}, {_FEED}, nullif(outage, 'restored'),
            {at("if(outage = 'restored', NULL, outage_ns)")}
        FROM global_sites AS site
        JOIN (SELECT stream AS feed, watermark_ns AS now_ns FROM streams) AS watermarks USING (feed)
        LEFT JOIN (
            SELECT replicator, name, stream, count(*) FILTER (event_code IN (0, 2, 4)) AS up,
                count(*) FILTER (event_code = 1) AS timeout, count(*) FILTER (event_code = 3) AS retired
            FROM global_nodes GROUP BY ALL
        ) AS counted ON {same_key("counted", "site", _SITE)}
        LEFT JOIN (
            SELECT replicator, name, advisory.stream, count(DISTINCT node) AS new_24h
            FROM global_history AS advisory JOIN streams ON streams.stream = advisory.feed
            WHERE event_code = 0 AND event_ns > streams.watermark_ns - {DAY_NS} GROUP BY ALL
        ) AS recent ON {same_key("recent", "site", _SITE)}
        WHERE true
        """,
        "global_sites",
        "feed",
        _FEEDS_SITE,
    ),
    "global_rejects": Table(
        """
        feed VARCHAR, sequence BIGINT, received_at TIMESTAMPTZ, subject VARCHAR, payload_bytes BIGINT, reason VARCHAR,
        field VARCHAR, excerpt VARCHAR
        """,
        f"""
        SELECT {_FEED}, sequence, {at("received_ns")}, subject, payload_bytes, reason, field, excerpt
        FROM global_rejects WHERE true
        """,
        "global_rejects",
        "feed",
        _FEEDS_SITE,
    ),
}
#: View → its query over the published tables, each as `{table}`.
GLOBAL_VIEWS: Final[dict[str, str]] = {
    # At a site that a node left, it is retired.
    "v_nodes_at_several_sites": """
        SELECT node, count(DISTINCT (replicator, coalesce(name, replicator))) AS sites,
            list(DISTINCT coalesce(name, replicator) ORDER BY coalesce(name, replicator)) AS names,
            max(last_seen) AS last_seen
        FROM {global_availability} WHERE status <> 'retired' GROUP BY node HAVING sites > 1
        """,
}
