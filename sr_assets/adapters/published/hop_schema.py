"""The published tables of hops: heartbeats, and the latency of copied messages.

A site publishes every hop that its copies show; the views combine the hops that several sites publish.
"""

from typing import Final

from sr_assets.adapters.published.table import Table, at
from sr_assets.adapters.state.latencies import SLOT_NS
from sr_assets.domain.latencies import bucket_seconds

#: The query of the latency of each stream's hops, over a site's state.
LATENCY: Final = f"""
    SELECT stream, hop_name, hop_stream, any_value(total)::BIGINT AS copies,
        {bucket_seconds("min(bucket) FILTER (upto >= 0.5 * total)")} AS p50_seconds,
        {bucket_seconds("min(bucket) FILTER (upto >= 0.95 * total)")} AS p95_seconds,
        {bucket_seconds("max(bucket)")} AS max_seconds, {at(f"((max(slot) + 1) * {SLOT_NS})")} AS until
    FROM (
        SELECT *, sum(copies) OVER (hop ORDER BY bucket) AS upto, sum(copies) OVER hop AS total
        FROM latencies WINDOW hop AS (PARTITION BY stream, hop_name, hop_stream)
    )
    GROUP BY stream, hop_name, hop_stream
    """

HOP_TABLES: Final[dict[str, Table]] = {
    "heartbeat_hops": Table(
        """
        name VARCHAR, stream VARCHAR, hop_name VARCHAR, hop_stream VARCHAR, subject VARCHAR, originator VARCHAR,
        sent_at TIMESTAMPTZ, stored_at TIMESTAMPTZ, arrived_at TIMESTAMPTZ, seconds DOUBLE, p50_seconds DOUBLE,
        p95_seconds DOUBLE, max_seconds DOUBLE
        """,
        f"""
        SELECT $name, stream, hop_name, hop_stream, subject, originator, {at("sent_ns")}, {at("stored_ns")},
            {at("arrived_ns")}, round(took_ns / 1e9, 3), round(p50_ns / 1e9, 3), round(p95_ns / 1e9, 3), round(max_ns / 1e9, 3)
        FROM (
            SELECT *, quantile_cont(took_ns, 0.5) OVER hop AS p50_ns, quantile_cont(took_ns, 0.95) OVER hop AS p95_ns,
                max(took_ns) OVER hop AS max_ns, arrived_ns = max(arrived_ns) OVER hop AS newest
            FROM (SELECT *, arrived_ns - stored_ns AS took_ns FROM heartbeats)
            WINDOW hop AS (PARTITION BY stream, hop_name, hop_stream, subject, originator)
        )
        WHERE newest
        """,
        "heartbeats",
    ),
    "message_hops": Table(
        """
        name VARCHAR, stream VARCHAR, hop_name VARCHAR, hop_stream VARCHAR, copies BIGINT, p50_seconds DOUBLE,
        p95_seconds DOUBLE, max_seconds DOUBLE, until TIMESTAMPTZ
        """,
        f"""
        SELECT $name, stream, hop_name, hop_stream, copies, p50_seconds, p95_seconds, max_seconds, until
        FROM ({LATENCY}) WHERE true
        """,
        "latencies",
    ),
}

#: The columns of each view, with their types.
HOP_COLUMNS: Final = {
    view: {name: kind for name, kind in HOP_TABLES[table].kinds.items() if name not in ("hop_name", "hop_stream")}
    for view, table in {"heartbeats": "heartbeat_hops", "hops": "message_hops"}.items()
}
HOP_VIEWS: Final[dict[str, str]] = {
    "heartbeats": """
        SELECT hop_name AS name, hop_stream AS stream, subject, originator, sent_at, stored_at, arrived_at, seconds,
            p50_seconds, p95_seconds, max_seconds
        FROM {heartbeat_hops}
        QUALIFY row_number() OVER (
            PARTITION BY hop_name, hop_stream, subject, originator ORDER BY arrived_at DESC) = 1
        """,
    "hops": """
        SELECT hop_name AS name, hop_stream AS stream, copies, p50_seconds, p95_seconds, max_seconds, until
        FROM {message_hops}
        QUALIFY row_number() OVER (PARTITION BY hop_name, hop_stream ORDER BY until DESC, copies DESC) = 1
        """,
}
