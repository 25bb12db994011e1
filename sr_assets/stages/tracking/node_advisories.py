"""Stage `node_advisories`: publish the outbox in order per sender, and mark what was acknowledged.

Not here: which transitions there are (`fold`, `node_state`), what an advisory looks like (`domain.advisories`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.domain.advisories import encode
from sr_assets.domain.subjects import advisory_subject
from sr_assets.domain.tracking import Event, Status, Transition

if TYPE_CHECKING:
    from sr_assets.adapters.nats.cluster import Cluster
    from sr_assets.settings import AdvisorySettings, StreamSettings
    from sr_assets.stages.site import Site, StreamReport

_CHUNK = 2_000


def publish_outbox(site: Site, stream: StreamSettings, report: StreamReport) -> bool:
    """Publish what waits; returns whether anything went out.

    Reliable advisories wait in the outbox until a stream has acknowledged them, however long that takes: without a
    stream for the subject nothing is published and the report says so. Unreliable ones are sent to whoever listens, and
    flushed.
    """
    advisory = stream.advisory
    if advisory is None or site.state.outbox_size(stream.stream) == 0:
        return False
    cluster = site.cluster(stream.source if advisory.cluster == "source" else stream.target)
    reliable = _is_reliable(cluster, advisory)
    if reliable and not _taken(cluster, advisory):
        report.undeliverable = (
            f"no stream on {cluster.settings.label} takes {_sample(advisory)}: {site.state.outbox_size(stream.stream)}"
            " advisories wait for one"
        )
        return False
    report.undeliverable = None
    sent = 0
    while rows := site.state.outbox(stream.stream, _CHUNK):
        published = _send(cluster, stream, advisory, rows, reliable=reliable)
        reach(Point.PUBLISHING_OUTBOX)
        if published:
            site.state.mark_published(published, site.now_ns())
            site.changed()
            sent += len(published)
        if len(published) < len(rows):
            report.undeliverable = (
                f"{cluster.settings.label} refuses advisories: {cluster.last_refusal}; they are kept and sent again"
            )
            break
    report.published += sent
    return sent > 0


def _is_reliable(cluster: Cluster, advisory: AdvisorySettings) -> bool:
    return _taken(cluster, advisory) if advisory.reliable is None else advisory.reliable


def _taken(cluster: Cluster, advisory: AdvisorySettings) -> bool:
    return bool(cluster.stream_names(_sample(advisory)))


def _sample(advisory: AdvisorySettings) -> str:
    return advisory_subject(advisory.subject, Event.NEW.value, "node")


def _send(
    cluster: Cluster, stream: StreamSettings, advisory: AdvisorySettings, rows: list[dict[str, Any]], *, reliable: bool
) -> list[str]:
    """Publish rows of the outbox; returns the ids of those that are delivered."""
    items = [
        (advisory_subject(advisory.subject, row["event"], row["node"]), _body(stream, row), row["event_id"])
        for row in rows
    ]
    if not reliable:
        cluster.publish_core([(subject, body) for subject, body, _ in items])
        return [row["event_id"] for row in rows]
    acknowledged = cluster.publish_many(items, [row["node"] for row in rows])
    return [row["event_id"] for row, done in zip(rows, acknowledged, strict=True) if done]


def _body(stream: StreamSettings, row: dict[str, Any]) -> bytes:
    transition = Transition(
        Event(row["event"]),
        row["event_ns"],
        row["seen_ns"],
        row["age_ns"],
        row["sequence"],
        None if row["previous"] is None else Status(row["previous"]),
        row["transition"],
        row["returned"],
        row["outage_ns"],
    )
    inspected = stream.extractor.text if stream.extractor else ""
    return encode(
        transition,
        replicator=stream.replicator,
        name=stream.name,
        stream=stream.stream,
        sender=row["node"],
        inspect_field=inspected,
        epoch_ns=0,
        late=row["late"],
    )
