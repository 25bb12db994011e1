"""The text of `/metrics`: streams, elections, heartbeats and published tables. Add a metric of a table here.

Files are read again only after they were replaced. No state of a running site is opened and no server is queried. A metric of
a table has a query over `fleet.duckdb`: label columns first, the value last. A missing table yields no samples.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import duckdb

from sr_assets.adapters import times
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.adapters.published.manifest import identity
from sr_assets.adapters.state.checkpoint import last_stored
from sr_assets.adapters.state.heartbeat_counts import HeartbeatCounts
from sr_assets.adapters.state.lease import Lease
from sr_assets.adapters.state.status_file import SiteStatus, last_idle_poll, read_status
from sr_assets.domain.election_keys import heartbeats_site
from sr_assets.domain.errors import SrAssetsError
from sr_assets.domain.exposition import MetricKind, Sample, expose, labels
from sr_assets.operate.metrics.replicator import LEGACY, REPLICATOR
from sr_assets.operate.metrics.stream_metrics import STREAM_METRICS, StreamNumbers
from sr_assets.settings import Settings

_ELECTION_PREFIX: Final = "choria_stream_replicator_election_"
_HEARTBEAT_PREFIX: Final = "choria_stream_replicator_heartbeat_"
_SITE: Final = ("name", "stream", "replicator")
_SITE_COLUMNS: Final = "coalesce(name, replicator), stream, replicator"
_LINK: Final = ("cluster", "stream", "kind", "origin")
_LINK_COLUMNS: Final = "cluster, stream, kind, concat_ws('/', origin_cluster, origin_stream)"
_HEARTBEAT: Final = ("name", "stream", "subject")
_PARTITION: Final = ("name", "stream", "partition")
Rows = dict[str, list[tuple[Any, ...]]]


def election_lines(settings: Settings) -> Iterator[str]:
    """Yield the lines of the election's metrics; none for sites without an election."""
    leases = {site: Lease.read(settings.home / "sites" / site) for site in settings.sites}
    # As in the Stream Replicator, the election of the heartbeats has no replicator.
    heartbeats = Lease.read(settings.home / "sites" / heartbeats_site(settings.replicator))
    elections = [*((lease, settings.replicator) for lease in leases.values()), (heartbeats, "unknown")]
    keys = [(key, (member, replicator), lease) for lease, replicator in elections for key, member in lease.keys.items()]

    def named(key: str, member: tuple[str, str], **more: str) -> str:
        return labels(election=key, identity=member[0], **more, replicator=member[1])

    campaigns = (
        Sample(named(key, member, state=state), float(count))
        for key, member, lease in keys
        for state, count in lease.campaigns.items()
    )
    yield from expose(f"{_ELECTION_PREFIX}campaigns", "counter", "Campaigns for a key, by state.", campaigns)
    leaders = (Sample(named(key, member), float(lease.holds)) for key, member, lease in keys)
    yield from expose(f"{_ELECTION_PREFIX}leader", "gauge", "1 while this member leads.", leaders)
    intervals = (Sample(named(key, member), lease.interval_seconds) for key, member, lease in keys)
    yield from expose(f"{_ELECTION_PREFIX}interval_seconds", "gauge", "Mean pause between two campaigns.", intervals)
    sites = (Sample(labels(name=site), float(lease.holds)) for site, lease in leases.items() if lease.keys)
    ages = (
        Sample(labels(name=site), max(0.0, times.time() - stored.at_ns / 1e9))
        for site in settings.sites
        if (stored := last_stored(settings.home / "sites" / site)) and settings.checkpoint_store(site)
    )
    yield from expose("sr_assets_checkpoint_age_seconds", "gauge", "Age of the newest checkpoint by this home.", ages)
    yield from expose("sr_assets_leader", "gauge", "1 while this member leads the site.", sites)


def heartbeat_lines(settings: Settings) -> Iterator[str]:
    """Yield the lines of the publisher's metrics; none without the block."""
    block = settings.heartbeats
    if block is None:
        return
    folder = settings.home / "sites" / heartbeats_site(settings.replicator)
    known = HeartbeatCounts.read(folder)
    counts = {
        labels(replicator=settings.replicator, subject=subject.subject): known.get(subject.subject, HeartbeatCounts())
        for subject in block.subjects
    }
    here = labels(replicator=settings.replicator)
    yield from expose(
        f"{_HEARTBEAT_PREFIX}subjects_count", "gauge", "Subjects of heartbeats.", [Sample(here, len(counts))]
    )
    published = (Sample(named, count.published) for named, count in counts.items())
    yield from expose(f"{_HEARTBEAT_PREFIX}published_count", "counter", "Attempts to publish a heartbeat.", published)
    errors = (Sample(named, count.errors) for named, count in counts.items())
    yield from expose(
        f"{_HEARTBEAT_PREFIX}published_error_count", "counter", "Heartbeats that no stream stored.", errors
    )
    times = (
        sample
        for named, count in counts.items()
        for sample in (Sample(named, count.seconds, "_sum"), Sample(named, count.published, "_count"))
    )
    yield from expose(f"{_HEARTBEAT_PREFIX}publish_time", "summary", "Time until the server's answer.", times)
    host = labels(replicator=settings.replicator, hostname=socket.gethostname())
    paused = bool(block.leader_election) and not Lease.read(folder).holds
    yield from expose(
        f"{_HEARTBEAT_PREFIX}paused", "gauge", "1 while another member publishes.", [Sample(host, float(paused))]
    )


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


class Exposition:
    """The metrics of a home as text; safe for several readers and one thread that calls `renew`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._guard = threading.Lock()
        self._status: dict[str, tuple[SiteStatus, list[StreamNumbers]]] = {}
        self._tables_identity: list[int] = []
        self._rows: Rows = {}

    def text(self) -> str:
        """Return all metrics in Prometheus' text format; values from tables date from the last `renew`."""
        with self._guard:
            return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        streams, now = list(self._streams()), times.time()
        legacy = LEGACY if self._settings.metrics.legacy else ()
        for metric in chain(STREAM_METRICS, REPLICATOR, legacy):
            yield from expose(metric.name, metric.kind, metric.text, metric.samples(streams, now))
        yield from election_lines(self._settings)
        yield from heartbeat_lines(self._settings)
        rows = self._rows
        for table in TABLE_METRICS:
            yield from expose(table.name, table.kind, table.text, table.samples(rows.get(table.name, ()), now))

    def _streams(self) -> Iterator[StreamNumbers]:
        for site in self._settings.sites:
            folder = self._settings.home / "sites" / site
            idle_at = last_idle_poll(folder)
            for stream in self._read(site, folder):
                stream.idle_at = idle_at
                yield stream

    def _read(self, site: str, folder: Path) -> list[StreamNumbers]:
        """Return the streams in a site's status, whose numbers stay until it changes."""
        status, cached = read_status(folder), self._status.get(site)
        if cached is None or cached[0] is not status:
            cached = self._status[site] = (
                status,
                [
                    StreamNumbers(entry, status.of(entry.stream), self._settings.replicator, index)
                    for index, entry in enumerate(self._settings.sites[site])
                    if entry.stream in status.streams
                ],
            )
        return cached[1]

    def renew(self) -> None:
        """Query the published tables again if they changed: the slowest step for a thousand sites."""
        current = identity(self._settings.home / "fleet.duckdb")
        if not current or current == self._tables_identity:
            return
        rows: Rows = {}
        with contextlib.suppress(SrAssetsError), open_fleet(self._settings.home) as connection:
            for metric in TABLE_METRICS:
                # A table is missing until its first publication.
                with contextlib.suppress(duckdb.Error):
                    rows[metric.name] = connection.execute(metric.query).fetchall()
            self._tables_identity, self._rows = current, rows
