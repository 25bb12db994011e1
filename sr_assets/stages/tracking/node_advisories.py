"""Stage `node_advisories`: publishing the outbox in order per sender, site events, and the heartbeat; each once.

An advisory's message id is computed from its event, so that the streams prove the publication, however short their
duplicate windows are.
"""

import contextlib
import logging
from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

from sr_assets.adapters import times, wire
from sr_assets.adapters.crash_points import Point, reach
from sr_assets.adapters.jetstream import PermissionDeniedError
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.adapters.state.stream_tables import Counter
from sr_assets.domain.advisories import (
    encode,
    encode_node_event,
    encode_site_event,
    encode_v1,
    observer_alive,
    published_id,
)
from sr_assets.domain.errors import RunError, SrAssetsError, TransientError
from sr_assets.domain.messages import MESSAGE_ID_HEADER, Message, header_values
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.received import Advisory, read_message
from sr_assets.domain.subjects import advisory_pattern, advisory_subject, rule_subject
from sr_assets.domain.tracking.rules import Event, Status, Transition
from sr_assets.settings import Settings, StreamSettings
from sr_assets.stages.clock import Clock
from sr_assets.stages.report import StreamReport
from sr_assets.stages.source.position import sequence_at

logger = logging.getLogger(__name__)

#: The clocks of source and advisory stream may differ by less than this: a clock further ahead is not believed.
_CLOCKS_NS: Final = 3_600_000_000_000
_CHUNK: Final = 5_000
#: A starting server may respond that no stream takes the advisories; the query is repeated for this long.
_OLD_ANSWERS_SECONDS: Final = 3.0
#: Pause before a refused advisory is sent again; new ones are published meanwhile.
RETRY_SECONDS: Final = 10.0
_EVERY_SECONDS: Final = 60.0
_EVERY_NS: Final = 60_000_000_000
#: Maximum time from the request of a run to its first heartbeat.
_START_NS: Final = 30_000_000_000


class StoredAdvisories:
    """One stream's stored advisories; each run reads them from the outbox's earliest event on, again if one may be missing."""

    def __init__(self, stream: StreamSettings, store: SiteState, clock: Clock) -> None:
        self._stream, self._store, self._clock = stream, store, clock
        self._outbox = store.outbox(stream.stream)
        self._outbox.note_waiting()
        self._read_from_ns: int | None = None
        # Whether stored advisories may match later rows, and the time before which retention has deleted some.
        self._left = False
        self._dropped_before_ns = 0
        #: The latest epoch of the stream's stored advisories, 0 without any.
        self.epoch_ns = 0

    def settle(self, cluster: Cluster, pattern: str) -> None:
        """Mark the stored advisories in the outbox as published, and give the others their epoch if it is a later one.

        Otherwise a centre would rank them below those of a home that began without this state and has ended.
        """
        earliest_ns = self._outbox.earliest_ns()
        if earliest_ns is None:
            return
        if self._read_from_ns is None or earliest_ns < self._read_from_ns:
            try:
                self._read(cluster, pattern, earliest_ns)
            except RunError as error:
                if isinstance(error, TransientError) and not isinstance(error, wire.DeniedError):
                    raise
                logger.warning("%s: cannot read the stored advisories: %s", self._stream.label, error)
            self._read_from_ns = earliest_ns
        state = self._store.load_stream(self._stream.stream)
        is_later = state is not None and self.epoch_ns > state.epoch_ns
        if self._left or is_later:
            with self._store.transaction():
                if is_later:
                    self._outbox.raise_epoch(self.epoch_ns)
                self._left = self._outbox.count_stored(self._dropped_before_ns, self._clock.now_ns())

    def forget(self) -> None:
        """Read the streams again before the next advisory."""
        self._read_from_ns = None

    def _read(self, cluster: Cluster, pattern: str, since_ns: int) -> None:
        """Note the ids of the advisories stored since a time (unix ns)."""
        same_clock = cluster.settings == self._stream.source
        self._left, firsts_ns = False, list[int]()
        self._outbox.forget_stored()
        for keeper in cluster.stream_names(pattern):
            info = cluster.stream_info(keeper)
            first = sequence_at(cluster, info, since_ns - (1_000_000_000 if same_clock else _CLOCKS_NS))
            held = SequenceRange(first, max(first, info.last_sequence + 1))
            if info.first_sequence > 1 and (oldest := cluster.next_message(keeper, info.first_sequence)):
                firsts_ns.append(oldest.stored_ns)
            with wire.Connection(cluster.settings, "sr-assets advisories") as connection:
                for messages in wire.read_confirmed(connection, keeper, held, filter_subject=pattern, direct=False):
                    self._outbox.note_stored([row for message in messages for row in self._rows(message)])
                    self._left = True
        if self._left and (count := self._outbox.later_stored()):
            # A later state of this site has published events that this one neither knows nor has deleted.
            self._dropped_before_ns = max(self._dropped_before_ns, min(firsts_ns, default=0))
            logger.warning(
                "%s: %d advisories were published after this state; they are not sent again", self._stream.label, count
            )

    def _rows(self, message: Message) -> Iterator[tuple[str, int, int | None]]:
        """Yield an advisory's id, its stored time, and its event's time if it names this stream."""
        ids = header_values(message.headers, MESSAGE_ID_HEADER)
        if ids:
            advisory, event_ns = read_message(message.payload, message.stored_ns), None
            ours = self._stream.replicator, self._stream.name, self._stream.stream
            if isinstance(advisory, Advisory) and advisory[:3] == ours:
                event_ns, self.epoch_ns = advisory.event_ns, max(self.epoch_ns, advisory.epoch_ns)
            yield published_id(ids[-1]), message.stored_ns, event_ns


class AdvisoryStage:
    """The stage of one stream with an `advisory` block in one run."""

    def __init__(self, stream: StreamSettings, store: SiteState, clock: Clock, report: StreamReport) -> None:
        assert stream.advisory is not None
        self._stream, self._advisory = stream, stream.advisory
        self._outbox, self._store = store.outbox(stream.stream), store
        self._clock, self._report = clock, report
        self._stored = StoredAdvisories(stream, store, clock)
        # Senders with a refused advisory, whether the stream refuses all advisories, and the end of the pause.
        self._held_back: set[str] = set()
        self._all_refused, self._retry_at = False, 0.0

    @property
    def refused(self) -> bool:
        """Whether a stream refused advisories in the last attempt."""
        return bool(self._held_back)

    def publish(self, cluster: Cluster) -> bool:
        """Publish the outbox; return whether any advisory was sent.

        Reliable advisories stay in the outbox until a stream acknowledges them, without a time limit. A refused one
        delays only later ones of its sender. Unreliable ones go to current subscribers.
        """
        if self._outbox.size() == 0:
            return False
        if not self._is_reliable(cluster):
            return self._publish_core(cluster)
        if times.monotonic() >= self._retry_at:
            self._held_back.clear()
            self._all_refused = False
            if not self._takers(cluster):
                self._report.undeliverable = (
                    f"no stream on {cluster.settings.label} takes {advisory_pattern(self._advisory.subject)}:"
                    f" {self._outbox.size()} advisories wait; create such a stream"
                )
                self._retry_at = times.monotonic() + RETRY_SECONDS
                return False
            self._report.undeliverable = None
        elif self._all_refused or (self._report.undeliverable and not self._held_back):
            return False
        return self._publish_reliably(cluster)

    def _is_reliable(self, cluster: Cluster) -> bool:
        """Return whether advisories go to JetStream: as `reliable` says, or once a stream took the subject."""
        if self._advisory.reliable is not None:
            return self._advisory.reliable
        state = self._store.load_stream(self._stream.stream)
        if self._report.advisories_stored or state is None or state.advisories_stored:
            return True
        deadline = times.monotonic() + _OLD_ANSWERS_SECONDS
        while not self._takers(cluster):
            if times.monotonic() > deadline:
                return False
            times.sleep(0.5)
        # Only the reading thread writes this row: two threads must not.
        self._report.advisories_stored = True
        return True

    def _publish_core(self, cluster: Cluster) -> bool:
        sent = 0
        while times.monotonic() >= self._retry_at and (rows := self._known(self._outbox.unpublished(_CHUNK))):
            try:
                cluster.publish_core([(self._subject(row), advisory_body(self._stream, row)) for row in rows])
                delivered, self._report.undeliverable = rows, None
            except PermissionDeniedError as error:
                delivered, self._report.undeliverable = [], f"{error}; they will be sent again"
                self._retry_at = times.monotonic() + RETRY_SECONDS
            self._mark(delivered, failed=[] if delivered else rows)
            sent += len(delivered)
        self._report.published += sent
        return sent > 0

    def _publish_reliably(self, cluster: Cluster) -> bool:
        sent = 0
        while True:
            self._stored.settle(cluster, advisory_pattern(self._advisory.subject))
            self._report.epoch_ns = max(self._report.epoch_ns, self._stored.epoch_ns)
            if not (rows := self._known(self._outbox.unpublished(_CHUNK, without=self._held_back))):
                break
            items = [(self._subject(row), advisory_body(self._stream, row), row["event_id"]) for row in rows]
            deliveries = cluster.publish_many(items, [row["node"] for row in rows])
            if cluster.last_refusal is not None:
                self._stored.forget()  # one may be stored although its acknowledgement was lost
            answered = list(zip(rows, deliveries, strict=True))
            acknowledged = [row for row, delivery in answered if delivery.acknowledged]
            reach(Point.PUBLISHING_OUTBOX)
            refused = [row for row, delivery in answered if delivery.refusal]
            self._mark(acknowledged, failed=refused if acknowledged or refused else rows)
            sent += len(acknowledged)
            if refused:
                self._hold_back(
                    cluster, {row["node"]: delivery.refusal for row, delivery in answered if delivery.refusal}
                )
                # A full stream would refuse the rest of a long outbox too.
                self._all_refused = not acknowledged and all(each.by_stream for _, each in answered if each.refusal)
                if self._all_refused:
                    break
            elif not acknowledged:
                self._report.undeliverable = (
                    f"{cluster.settings.label}: {cluster.last_refusal}; they will be sent again"
                )
                break
        self._report.published += sent
        return sent > 0

    def _known(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows that the format supports and mark the others as done; skip chunks without supported rows."""
        if self._advisory.format == "v2":
            return rows
        while rows:
            unknown = [row["event_id"] for row in rows if row["event"] == Event.NEW]
            with self._store.transaction():
                self._outbox.mark_published(unknown, self._clock.now_ns())
            if len(unknown) < len(rows):
                break
            rows = self._outbox.unpublished(_CHUNK, without=self._held_back)
        return [row for row in rows if row["event"] != Event.NEW]

    def _hold_back(self, cluster: Cluster, refusals: dict[str, str]) -> None:
        if not self._held_back:
            self._retry_at = times.monotonic() + RETRY_SECONDS
        self._held_back.update(refusals)
        node, refusal = next(iter(refusals.items()))
        self._report.undeliverable = (
            f"{cluster.settings.label} refuses advisories of {len(self._held_back)} nodes, the first of {node}: {refusal};"
            " they will be sent again"
        )

    def _mark(self, sent: list[dict[str, Any]], failed: Sequence[dict[str, Any]] = ()) -> None:
        """Record and count the sent advisories, and count the failed attempts."""
        if not sent and not failed:
            return
        counters = self._store.counters(self._stream.stream)
        with self._store.transaction():
            self._outbox.mark_published([row["event_id"] for row in sent], self._clock.now_ns())
            for event, attempts in Tally(row["event"] for row in (*sent, *failed)).items():
                counters.add({Counter.ADVISORIES: attempts}, event)
            for event, errors in Tally(row["event"] for row in failed).items():
                counters.add({Counter.ADVISORY_ERRORS: errors}, event)

    def _takers(self, cluster: Cluster) -> list[str]:
        return cluster.stream_names(advisory_pattern(self._advisory.subject))

    def _subject(self, row: dict[str, Any]) -> str:
        return advisory_subject(self._advisory.subject, row["event"], row["node"])


def advisory_body(stream: StreamSettings, row: dict[str, Any]) -> bytes:
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
    field = stream.extractor.text if stream.extractor else ""
    if stream.advisory and stream.advisory.format == "v1":
        return encode_v1(transition, name=stream.name, sender=row["node"], inspect_field=field)
    return encode(
        transition,
        replicator=stream.replicator,
        name=stream.name,
        stream=stream.stream,
        sender=row["node"],
        inspect_field=field,
        epoch_ns=row["epoch"] or 0,
        late=row["late"],
    )


def heartbeat_grace_ns(settings: Settings) -> int:
    """Return the maximum delay of a due run's heartbeat: two sensor intervals, 30 s to start, up to a minute of work."""
    return min(_EVERY_NS, settings.run_budget_ns) + 2 * settings.sensor.interval_ns + _START_NS


class HeartbeatStage:
    """The heartbeat `observer_alive` of one stream with an `advisory` block: proof that the site still watches its nodes.

    The stream sends it at most once a minute, and once per run unless the previous run's heartbeat is still valid. A run
    after a failed one always sends one. It announces the maximum time until the next one: until the first node's
    deadline, which starts a run even without messages, plus `grace_ns` (`heartbeat_grace_ns`). Without a deadline it
    announces none.
    """

    def __init__(
        self, stream: StreamSettings, store: SiteState, clock: Clock, grace_ns: int, report: StreamReport
    ) -> None:
        assert stream.advisory is not None
        self._stream, self._advisory = stream, stream.advisory
        self._nodes, self._outbox = store.nodes(stream.stream), store.outbox(stream.stream)
        self._clock, self._grace_ns, self._report = clock, grace_ns, report
        # Whether an error preceded the next heartbeat: the first successful step clears it from the state.
        state = store.load_stream(stream.stream)
        self._failed = state is not None and state.last_error is not None

    def send(self, cluster: Cluster, *, busy: bool = False) -> None:
        """Send a heartbeat unless the last one is less than a minute old.

        A `busy` run delays its first one by a minute too, because it would report the initial lag. If the last
        heartbeat is overdue, the run only waits until it has caught up, because readers do not trust its advisories
        before.

        JetStream stores it if a stream takes the subject; else current subscribers receive it. A failure to send does
        not fail the stream: the next heartbeat replaces it.
        """
        report, state = self._report, self._report.state
        if state is None:
            return
        self._failed |= state.last_error is not None
        waits = busy and not (self._overdue(state) and not state.lag_messages)
        before = report.alive_at or (report.began_at if waits else None)
        if before is not None and times.monotonic() - before < _EVERY_SECONDS:
            return
        now_ns, deadline_ns = self._clock.now_ns(), self._nodes.next_deadline()
        due_ns = None if deadline_ns is None else now_ns + max(0, deadline_ns - (state.watermark_ns or deadline_ns))
        report.alive_at = times.monotonic()
        if not self._failed and _still_holds(state, now_ns, due_ns):
            return
        self._failed = False
        report.alive_ns, report.alive_due_ns = now_ns, due_ns
        self._publish(cluster, self.advisory_body(state, now_ns, due_ns), now_ns)

    def advisory_body(self, state: StreamState, now_ns: int, due_ns: int | None) -> bytes:
        """Return the heartbeat; its watermark is before the earliest event that is not published yet."""
        watermark_ns, waiting_ns = state.watermark_ns, self._outbox.earliest_ns()
        if watermark_ns is not None and waiting_ns is not None:
            # A centre takes a day as complete once this watermark has passed it.
            watermark_ns = min(watermark_ns, waiting_ns - 1)
        return observer_alive(
            replicator=self._stream.replicator,
            name=self._stream.name,
            stream=self._stream.stream,
            ts_ns=now_ns,
            watermark_ns=watermark_ns,
            position=state.next_sequence - 1,
            lag_messages=state.lag_messages,
            lag_ns=state.lag_ns,
            nodes=self._nodes.count(),
            epoch_ns=state.epoch_ns,
            next_within_ns=None if due_ns is None else due_ns - now_ns + self._grace_ns,
        )

    def _publish(self, cluster: Cluster, body: bytes, now_ns: int) -> None:
        subject = self._advisory.observer_subject
        with contextlib.suppress(SrAssetsError):
            if self._advisory.reliable is not False and cluster.stream_names(subject):
                message_id = f"observer_alive/{self._stream.replicator}/{self._stream.label}/{now_ns}"
                cluster.publish_many([(subject, body, message_id)])
            else:
                cluster.publish_core([(subject, body)])

    def _overdue(self, state: StreamState) -> bool:
        return state.alive_due_ns is not None and self._clock.now_ns() > state.alive_due_ns + self._grace_ns


def _still_holds(state: StreamState, now_ns: int, due_ns: int | None) -> bool:
    """Return whether the last successful heartbeat is recent and its announcement still holds.

    A run without new messages then sends none: if the advisory stream is copied, each heartbeat would start a run.
    """
    if state.alive_ns is None or now_ns - state.alive_ns >= _EVERY_NS:
        return False
    if due_ns is None or state.alive_due_ns is None:
        return due_ns == state.alive_due_ns
    return due_ns <= state.alive_due_ns + _START_NS // 2


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
            events = rows.unpublished() if rows.count_unpublished() else []
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
