"""The Stream Replicator's metrics of the publisher of the block `heartbeats`."""

import socket
from collections.abc import Iterator
from typing import Final

from sr_assets.adapters.state.heartbeat_counts import HeartbeatCounts
from sr_assets.adapters.state.lease import Lease
from sr_assets.domain.election import heartbeats_site
from sr_assets.domain.exposition import Sample, expose, labels
from sr_assets.settings import Settings

_PREFIX: Final = "choria_stream_replicator_heartbeat_"


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
    yield from expose(f"{_PREFIX}subjects_count", "gauge", "Subjects of heartbeats.", [Sample(here, len(counts))])
    published = (Sample(named, count.published) for named, count in counts.items())
    yield from expose(f"{_PREFIX}published_count", "counter", "Attempts to publish a heartbeat.", published)
    errors = (Sample(named, count.errors) for named, count in counts.items())
    yield from expose(f"{_PREFIX}published_error_count", "counter", "Heartbeats that no stream stored.", errors)
    times = (
        sample
        for named, count in counts.items()
        for sample in (Sample(named, count.seconds, "_sum"), Sample(named, count.published, "_count"))
    )
    yield from expose(f"{_PREFIX}publish_time", "summary", "Time until the server's answer.", times)
    host = labels(replicator=settings.replicator, hostname=socket.gethostname())
    paused = bool(block.leader_election) and not Lease.read(folder).holds
    yield from expose(f"{_PREFIX}paused", "gauge", "1 while another member publishes.", [Sample(host, float(paused))])
