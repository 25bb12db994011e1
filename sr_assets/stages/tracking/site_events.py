"""The publication of a stream's site events and of its nodes' events, each once, also from an older state."""

import time
from typing import Any

from sr_assets.adapters import wire
from sr_assets.adapters.jetstream import PermissionDeniedError
from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.advisories import encode_node_event, encode_site_event
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import MESSAGE_ID_HEADER, header_values
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.subjects import rule_subject
from sr_assets.settings import StreamSettings
from sr_assets.stages.clock import Clock
from sr_assets.stages.report import StreamReport
from sr_assets.stages.source.position import sequence_at
from sr_assets.stages.tracking.node_advisories import RETRY_SECONDS

#: The clocks of source and advisory stream differ by less than this.
_CLOCKS_NS = 3_600_000_000_000


class EventStage:
    """The publication of a stream's events from the state of one run.

    JetStream stores an event if a stream takes its subject; else current subscribers receive it. An event that is stored
    already, by a later state of this site, is not stored again.
    """

    def __init__(self, stream: StreamSettings, store: SiteState, clock: Clock, report: StreamReport) -> None:
        self._stream, self._clock, self._report = stream, clock, report
        self._store = store
        self._retry_at = 0.0

    def publish(self, cluster: Cluster) -> bool:
        """Publish the unpublished events in order; return whether there were any.

        After a refusal, `report.undeliverable_event` says why they wait, and a later step tries again.
        """
        if time.monotonic() < self._retry_at:
            return False
        self._report.undeliverable_event = None
        store, stream = self._store, self._stream.stream
        published = False
        for kind, rows in (("site", store.guard(stream)), ("node", store.undecided(stream))):
            sent: list[str] = []
            try:
                for event in rows.unpublished():
                    _publish(kind, self._stream, event, cluster)
                    sent.append(event["event_id"])
            except (PermissionDeniedError, _RefusedError) as error:
                self._report.undeliverable_event = f"{error}; it will be sent again"
                self._retry_at = time.monotonic() + RETRY_SECONDS
            finally:
                if sent:
                    with store.transaction():
                        rows.mark_published(sent, self._clock.now_ns())
            published |= bool(sent)
        return published


class _RefusedError(RunError):
    """No stream stored an event; the text says why."""


def _publish(kind: str, stream: StreamSettings, event: dict[str, Any], cluster: Cluster) -> None:
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
    elif not any(_stores(cluster, keeper, subject, event) for keeper in keepers):
        (delivery,) = cluster.publish_many([(subject, body, event["event_id"])])
        if not delivery.acknowledged:
            raise _RefusedError(f"{cluster.settings.label}: {subject}: {delivery.refusal or cluster.last_refusal}")


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
