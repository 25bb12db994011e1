"""The publication of a stream's site events and of its nodes' events, each once, also from an older state."""

from typing import Any

from sr_assets.adapters import wire
from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.advisories import encode_node_event, encode_site_event
from sr_assets.domain.messages import MESSAGE_ID_HEADER, header_values
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.subjects import rule_subject
from sr_assets.settings import StreamSettings
from sr_assets.stages.clock import Clock
from sr_assets.stages.source.position import sequence_at

#: The clocks of source and advisory stream differ by less than this.
_CLOCKS_NS = 3_600_000_000_000


def publish_events(stream: StreamSettings, store: SiteState, cluster: Cluster, clock: Clock) -> bool:
    """Publish the unpublished events in order; return whether there were any.

    JetStream stores an event if a stream takes its subject; else current subscribers receive it. An event that is stored
    already, by a later state of this site, is not stored again.
    """
    published = False
    for kind, rows in (("site", store.guard(stream.stream)), ("node", store.undecided(stream.stream))):
        sent = []
        for event in rows.unpublished():
            if not _publish(kind, stream, event, cluster):
                break
            sent.append(event["event_id"])
        if sent:
            with store.transaction():
                rows.mark_published(sent, clock.now_ns())
        published |= bool(sent)
    return published


def _publish(kind: str, stream: StreamSettings, event: dict[str, Any], cluster: Cluster) -> bool:
    subject = rule_subject(kind, event["event"], stream.replicator, stream.name, stream.stream)
    assert stream.advisory is not None
    identity = {"replicator": stream.replicator, "name": stream.name}
    if kind == "site":
        body = encode_site_event(event, **identity)
    else:
        # Advisories of the older format have no numbers to rank the state of an event among.
        body = encode_node_event(event, **identity, ranked=stream.advisory.format == "v2")
    keepers = cluster.stream_names(subject) if stream.advisory.reliable is not False else []
    if not keepers:
        cluster.publish_core([(subject, body)])
        return True
    if any(_stores(cluster, keeper, subject, event) for keeper in keepers):
        return True
    return cluster.publish_many([(subject, body, event["event_id"])])[0].acknowledged


def _stores(cluster: Cluster, keeper: str, subject: str, event: dict[str, Any]) -> bool:
    """Return whether a stream stores an event."""
    info = cluster.stream_info(keeper)
    first = sequence_at(cluster, info, event["event_ns"] - _CLOCKS_NS)
    held = SequenceRange(first, max(first, info.last_sequence + 1))
    with wire.Connection(cluster.settings, "sr-assets site events") as connection:
        return any(
            event["event_id"].encode() in header_values(message.headers, MESSAGE_ID_HEADER)
            for messages in wire.read_confirmed(connection, keeper, held, filter_subject=subject, direct=False)
            for message in messages
        )
