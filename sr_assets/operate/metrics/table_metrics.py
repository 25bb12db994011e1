"""Metrics from published tables: partitions of a stream, sites at a centre, links of a topology, heartbeats.

Each has a query over `fleet.duckdb`: label columns first, the value last. A missing table yields no samples.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from sr_assets.domain.exposition import MetricKind, Sample, labels


class TableMetric(NamedTuple):
    """A metric: its name, type, help text and labels, and the query of its samples.

    With `age`, the query's value is a time (unix seconds) and the sample is its age.
    """

    name: str
    kind: MetricKind
    text: str
    labels: tuple[str, ...]
    query: str
    age: bool = False

    def samples(self, rows: Sequence[tuple[Any, ...]], now: float) -> Iterator[Sample]:
        """Yield a sample for each row that has a value; `now` is in unix seconds."""
        for *values, value in rows:
            if value is not None:
                named = labels(
                    **dict(zip(self.labels, ("" if value is None else str(value) for value in values), strict=True))
                )
                yield Sample(named, max(0.0, now - value) if self.age else float(value))


_SITE: Final = ("name", "stream", "replicator")
_SITE_COLUMNS: Final = "coalesce(name, replicator), stream, replicator"
_LINK: Final = ("cluster", "stream", "kind", "origin")
_LINK_COLUMNS: Final = "cluster, stream, kind, concat_ws('/', origin_cluster, origin_stream)"
_HEARTBEAT: Final = ("name", "stream", "subject")
_PARTITION: Final = ("name", "stream", "partition")

TABLE_METRICS: Final = (
    TableMetric(
        "sr_assets_partition_lag_messages",
        "gauge",
        "Messages of a partition that are not processed yet.",
        _PARTITION,
        "SELECT name, stream, partition, lag_messages FROM replication_partitions",
    ),
    TableMetric(
        "sr_assets_partition_next_sequence",
        "gauge",
        "First sequence of the source that a partition has not processed yet.",
        _PARTITION,
        "SELECT name, stream, partition, next_sequence FROM replication_partitions",
    ),
    TableMetric(
        "sr_assets_partition_watermark_age_seconds",
        "gauge",
        "Age of the watermark of a partition.",
        _PARTITION,
        "SELECT name, stream, partition, epoch(watermark) FROM replication_partitions",
        age=True,
    ),
    TableMetric(
        "sr_assets_site_observer_age_seconds",
        "gauge",
        "At a centre: time since a site's last heartbeat.",
        _SITE,
        f"SELECT {_SITE_COLUMNS}, epoch(max(observer_alive_at)) FROM global_summary GROUP BY ALL",
        age=True,
    ),
    TableMetric(
        "sr_assets_site_blind",
        "gauge",
        "At a centre: 1 while a site's heartbeat is overdue and its node states may be stale.",
        _SITE,
        f"SELECT {_SITE_COLUMNS}, max(blind::INTEGER) FROM global_summary GROUP BY ALL",
    ),
    TableMetric(
        "sr_assets_site_nodes",
        "gauge",
        "At a centre: nodes of a site by status.",
        (*_SITE, "status"),
        f"""
        SELECT {_SITE_COLUMNS}, status, sum(nodes)
        FROM (UNPIVOT (SELECT name, stream, replicator, up, timeout, retired FROM global_summary)
            ON up, timeout, retired INTO NAME status VALUE nodes)
        GROUP BY ALL
        """,
    ),
    TableMetric(
        "sr_assets_link_lag_messages",
        "gauge",
        "Messages that a mirror, source, replica or feed is behind its origin.",
        _LINK,
        f"SELECT {_LINK_COLUMNS}, max(lag_messages) FROM topology_links GROUP BY ALL",
    ),
    TableMetric(
        "sr_assets_link_active_seconds",
        "gauge",
        "Time since a link last heard from its origin.",
        _LINK,
        f"SELECT {_LINK_COLUMNS}, min(active_seconds) FROM topology_links GROUP BY ALL",
    ),
    TableMetric(
        "sr_assets_heartbeat_latency_seconds",
        "summary",
        "Transit time of heartbeats to a stream within the last hour; quantile 1 is the slowest.",
        (*_HEARTBEAT, "quantile"),
        """
        SELECT name, stream, subject, quantile, max(seconds) FROM (
            SELECT name, stream, subject, unnest(['0.5', '0.95', '1']) AS quantile,
                unnest([p50_seconds, p95_seconds, max_seconds]) AS seconds FROM heartbeats)
        GROUP BY ALL
        """,
    ),
    TableMetric(
        "sr_assets_hop_latency_seconds",
        "summary",
        "Transit time of copied messages to the next stream within the last hour; quantile 1 is the slowest.",
        ("name", "stream", "quantile"),
        """
        SELECT name, stream, unnest(['0.5', '0.95', '1']), unnest([p50_seconds, p95_seconds, max_seconds]) FROM hops
        """,
    ),
    TableMetric(
        "sr_assets_heartbeat_age_seconds",
        "gauge",
        "Time since the last heartbeat arrived at a stream.",
        _HEARTBEAT,
        "SELECT name, stream, subject, epoch(max(arrived_at)) FROM heartbeats GROUP BY ALL",
        age=True,
    ),
)
