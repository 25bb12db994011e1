"""The publication of a stream's site events and of its nodes' events, each once, also from an older state."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

from sr_assets.adapters import times, wire
from sr_assets.adapters.jetstream import PermissionDeniedError
from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.advisories import encode_node_event, encode_site_event, published_id
from sr_assets.domain.messages import MESSAGE_ID_HEADER, header_values
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.subjects import rule_subject
from sr_assets.settings import StreamSettings
from sr_assets.stages.clock import Clock
from sr_assets.stages.report import StreamReport
from sr_assets.stages.source.position import sequence_at
from sr_assets.stages.tracking.node_advisories import RETRY_SECONDS

#: The clocks of source and advisory stream differ by less than this.
_CLOCKS_NS: Final = 3_600_000_000_000
#: Events that are published and marked at once.
_CHUNK: Final = 5_000


class EventStage:
    """The publication of a stream's events from the state of one run.

    JetStream stores an event if a stream takes its subject; else current subscribers receive it. An event that is stored
    already, by a later state of this site, is not stored again.
    """

    def __init__(self, stream: StreamSettings, store: SiteState, clock: Clock, report: StreamReport) -> None:
        self._stream, self._clock, self._report = stream, clock, report
        self._store = store
        self._stored = {kind: _StoredEvents(rule_subject(kind, "*", *_names(stream))) for kind in ("site", "node")}
        self._retry_at = 0.0

    def publish(self, cluster: Cluster) -> bool:
        """Publish the unpublished events in order; return whether there were any.

        After a refusal, `report.undeliverable_event` says why they wait, and a later step tries again.
        """
        if times.monotonic() < self._retry_at:
            return False
        self._report.undeliverable_event = None
        store, stream = self._store, self._stream.stream
        published = False
        for kind, rows in (("site", store.guard(stream)), ("node", store.undecided(stream))):
            events = rows.unpublished()
            for first in range(0, len(events), _CHUNK):
                sent, refusal = self._publish(kind, events[first : first + _CHUNK], cluster)
                if sent:
                    with store.transaction():
                        rows.mark_published(sent, self._clock.now_ns())
                published |= bool(sent)
                if refusal:
                    self._report.undeliverable_event = f"{refusal}; it will be sent again"
                    self._retry_at = times.monotonic() + RETRY_SECONDS
                    break
        return published

    def _publish(self, kind: str, events: list[dict[str, Any]], cluster: Cluster) -> tuple[list[str], str | None]:
        """Publish events of a kind, each node's in order; return the ids of the sent ones and of the stored ones, and why
        others wait.
        """
        stream, advisory = self._stream, self._stream.advisory
        assert advisory is not None
        subjects = {name: rule_subject(kind, name, *_names(stream)) for name in {event["event"] for event in events}}
        kept = {
            name: cluster.stream_names(subjects[name]) if advisory.reliable is not False else [] for name in subjects
        }
        since_ns = min(event["event_ns"] for event in events)
        stored = self._stored[kind].ids(cluster, sorted(set(chain.from_iterable(kept.values()))), since_ns)
        sent = [event["event_id"] for event in events if event["event_id"] in stored]
        new = [event for event in events if event["event_id"] not in stored]
        core = [event for event in new if not kept[event["event"]]]
        if core:
            try:
                cluster.publish_core([(subjects[event["event"]], self._body(kind, event)) for event in core])
            except PermissionDeniedError as denied:
                return sent, str(denied)
            sent += [event["event_id"] for event in core]
        kept_events = [event for event in new if kept[event["event"]]]
        if not kept_events:
            return sent, None
        items = [(subjects[event["event"]], self._body(kind, event), event["event_id"]) for event in kept_events]
        deliveries = cluster.publish_many(items, [event.get("node", kind) for event in kept_events])
        refusal = None
        for (subject, _, event_id), delivery in zip(items, deliveries, strict=True):
            if delivery.acknowledged:
                sent.append(event_id)
            elif refusal is None:
                refusal = f"{cluster.settings.label}: {subject}: {delivery.refusal or cluster.last_refusal}"
                # It may be stored although its acknowledgement was lost.
                self._stored[kind].forget()
        return sent, refusal

    def _body(self, kind: str, event: dict[str, Any]) -> bytes:
        replicator, name, _ = _names(self._stream)
        if kind == "site":
            return encode_site_event(event, replicator=replicator, name=name)
        assert self._stream.advisory is not None
        # Advisories of the older format have no numbers to rank the state of an event among.
        return encode_node_event(event, replicator=replicator, name=name, ranked=self._stream.advisory.format == "v2")


class _StoredEvents:
    """The ids of a site's events that streams store under a pattern; each run reads them once, from an event's time on."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._read_from_ns: dict[str, int] = {}
        self._ids: set[str] = set()

    def ids(self, cluster: Cluster, keepers: Sequence[str], since_ns: int) -> set[str]:
        """Return the ids that the streams stored before this run, of events since a time (unix ns) or earlier."""
        for keeper in keepers:
            if keeper in self._read_from_ns and self._read_from_ns[keeper] <= since_ns:
                continue
            info = cluster.stream_info(keeper)
            first = sequence_at(cluster, info, since_ns - _CLOCKS_NS)
            held = SequenceRange(first, max(first, info.last_sequence + 1))
            with wire.Connection(cluster.settings, "sr-assets site events") as connection:
                for messages in wire.read_confirmed(
                    connection, keeper, held, filter_subject=self._pattern, direct=False
                ):
                    for message in messages:
                        self._ids.update(
                            published_id(value) for value in header_values(message.headers, MESSAGE_ID_HEADER)
                        )
            self._read_from_ns[keeper] = since_ns
        return self._ids

    def forget(self) -> None:
        """Read the streams again before the next event."""
        self._read_from_ns.clear()


def _names(stream: StreamSettings) -> tuple[str, str, str]:
    return stream.replicator, stream.name, stream.stream
