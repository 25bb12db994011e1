"""The way of a fleet's messages, expected and observed: source, target, advisories and tables, while a run works on them."""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, NamedTuple, Self

from sr_assets.adapters import times
from sr_assets.adapters.jetstream import STREAM_NOT_FOUND
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.published.fleet_reader import open_fleet, read_rows
from sr_assets.adapters.wire import Connection, WireError, read_confirmed
from sr_assets.adapters.wire.connection import RefusedError
from sr_assets.domain.blindness import NO_BLIND_SPANS
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SECOND_NS, SequenceRange
from sr_assets.domain.provenance import find_copy
from sr_assets.domain.received import LIFE_CYCLE, Advisory, read_message
from sr_assets.domain.senders import Document
from sr_assets.domain.subjects import advisory_pattern
from sr_assets.domain.tracking.rules import NodeState, Sighting, sight, splay_ns
from sr_assets.embedded.fleet_plan import FleetPlan
from sr_assets.measure.measured_stream import MeasuredStream
from sr_assets.measure.results import Trial
from sr_assets.settings import StreamSettings

#: A server that is stopped must not hold up a measurement for long.
_REQUEST_SECONDS: Final = 5.0
#: The ends of the way; each is a test.
COPIED: Final = "copied"
ADVISED: Final = "advisory"
SEEN: Final = "last seen"
QUERYABLE: Final = "queryable"


class StreamLog:
    """A reader of each message stored after its creation, in order and once; a context manager.

    A stream that does not exist yet is empty. Methods raise WireError if the server fails; the next call connects again.
    """

    def __init__(self, cluster: ClusterSettings, stream: str, *, headers_only: bool = False) -> None:
        self._connection = Connection(cluster, "sr-assets measure", request_seconds=_REQUEST_SECONDS)
        self._stream, self._headers_only, self._is_open = stream, headers_only, False
        self.next_sequence = self._last_sequence() + 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def poll(self) -> Iterator[Message]:
        """Yield the messages stored since the last call."""
        with_last = SequenceRange(self.next_sequence, max(self.next_sequence, self._last_sequence() + 1))
        if not len(with_last):
            return
        try:
            for messages in read_confirmed(
                self._connection, self._stream, with_last, direct=False, headers_only=self._headers_only
            ):
                for message in messages:
                    self.next_sequence = message.sequence + 1
                    yield message
        except WireError:
            self._disconnect()
            raise

    def _last_sequence(self) -> int:
        try:
            if not self._is_open:
                self._connection.open()
                self._is_open = True
            return int(self._connection.request_api(f"STREAM.INFO.{self._stream}")["state"]["last_seq"])
        except RefusedError as error:
            if error.code == STREAM_NOT_FOUND:
                return 0
            raise
        except WireError:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        self._is_open = False
        with suppress(WireError):
            self._connection.close()


class Published(NamedTuple):
    """The rows of a fleet in one publication, and the time at which a reader saw them (unix ns)."""

    at_ns: int
    #: The stored time of each node's newest message (unix microseconds, rounded down).
    last_seen_us: dict[str, int]
    #: The sequences of the messages in the history.
    history: list[int]
    #: Id, node, event, and times of the event and its publication (unix ns) of each published advisory.
    advisories: list[tuple[str, str, str, int, int]]


class PublishedTables:
    """A reader of the rows of the nodes whose names end in `suffix`."""

    def __init__(self, stream: MeasuredStream, suffix: str, first_sequence: int) -> None:
        self._home = stream.settings.home
        self._names = [stream.entry.name, stream.entry.stream]
        self._suffix, self._first_sequence = suffix, first_sequence
        # The source's clock may be a moment behind ours.
        self._first_date = times.utc_now().date() - timedelta(days=1)
        self._generation: str | None = None

    def poll(self) -> Published | None:
        """Return the rows of a new publication, or None."""
        with suppress(RunError), open_fleet(self._home) as connection:
            ((generation,),) = read_rows(connection, "SELECT generation FROM snapshot_info").values
            if generation == self._generation:
                return None
            of_fleet = [*self._names, self._suffix]
            last = read_rows(
                connection,
                """
                SELECT node, epoch_us(last_seen) FROM node_availability
                WHERE name = ? AND stream = ? AND suffix(node, ?)
                """,
                of_fleet,
            ).values
            history = read_rows(
                connection,
                """
                SELECT sequence FROM node_snapshot_history
                WHERE name = ? AND stream = ? AND suffix(node, ?) AND sequence >= ? AND date >= ?
                """,
                [*of_fleet, self._first_sequence, self._first_date],
            ).values
            advisories = read_rows(
                connection,
                """
                SELECT event_id, node, event, event_ns, epoch_ns(published_at) FROM node_advisories
                WHERE name = ? AND stream = ? AND suffix(node, ?) AND published_at IS NOT NULL
                """,
                of_fleet,
            ).values
            self._generation = generation
            return Published(times.time_ns(), dict(last), [sequence for (sequence,) in history], advisories)
        return None


class Announced(NamedTuple):
    """An advisory of a node: the times of the event and of its publication (unix ns).

    In version 1, the event's time is rounded down to a second.
    """

    event_id: str
    node: str
    event: str
    event_ns: int
    at_ns: int


class AdvisoryLog:
    """A reader of the advisories of one stream's nodes; a context manager."""

    def __init__(self, entry: StreamSettings) -> None:
        self._entry, self._log = entry, _log_of(entry)
        self._known: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.__exit__()

    @property
    def needs_tables(self) -> bool:
        """Whether no stream takes the advisories, so that only the tables show them."""
        return self._log is None

    def poll(self, published: Published | None) -> Iterator[Announced]:
        """Yield the advisories since the last call; `published` is a new publication."""
        if self._log is None:
            for row in published.advisories if published else ():
                if row[0] not in self._known:
                    self._known.add(row[0])
                    yield Announced(*row)
            return
        for message in self._log.poll():
            advisory = read_message(message.payload, message.stored_ns)
            if isinstance(advisory, Advisory) and advisory.stream in ("", self._entry.stream):
                event = LIFE_CYCLE[advisory.event_code]
                yield Announced(advisory.event_id, advisory.node, event, advisory.event_ns, message.stored_ns)


def _log_of(entry: StreamSettings) -> StreamLog | None:
    cluster, advisory = entry.advisory_cluster, entry.advisory
    if cluster is None or advisory is None:
        return None
    with Cluster(cluster, "sr-assets measure") as admin:
        streams = admin.stream_names(advisory_pattern(advisory.subject))
    return StreamLog(cluster, streams[0]) if streams else None


def needs_payloads(entry: StreamSettings) -> bool:
    """Return whether the class of a node, and so its sampling, depends on its payloads."""
    return entry.node_classes is not None and entry.node_classes.classifier.reads_payload


@dataclass(slots=True)
class Expectation:
    """The stored messages of the nodes that publish on `subjects`, and the sequences of those to copy.

    A stream without sampling copies all of them.
    """

    entry: StreamSettings
    #: The node of each subject.
    subjects: Mapping[str, str]
    stored_ns: dict[int, int] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)
    due: set[int] = field(default_factory=set)
    sequences: dict[str, list[int]] = field(default_factory=dict)
    classes: dict[str, str | None] = field(default_factory=dict)
    _states: dict[str, NodeState] = field(default_factory=dict)

    def add(self, message: Message) -> None:
        """Add the source's next message."""
        node = self.subjects.get(message.subject)
        if node is None:
            return
        sequence = message.sequence
        self.stored_ns[sequence], self.nodes[sequence] = message.stored_ns, node
        self.sequences.setdefault(node, []).append(sequence)
        if not self.entry.tracked or self._is_due(node, message):
            self.due.add(sequence)

    def is_false_timeout(self, node: str, event_ns: int) -> bool:
        """Return whether a node reported within its `warn_duration` before a timeout at `event_ns`."""
        # Seconds of version 1 are rounded down.
        before_ns = SECOND_NS if event_ns % SECOND_NS == 0 else 0
        times = (self.stored_ns[sequence] for sequence in reversed(self.sequences[node]))
        newest_ns = next((stored_ns for stored_ns in times if stored_ns < event_ns), None)
        return newest_ns is None or event_ns + before_ns - newest_ns < self.warning_ns(node)

    def warning_ns(self, node: str) -> int:
        """Return the silence after which a node times out."""
        return self.entry.policy_of(self.classes[node]).warning_ns

    def _is_due(self, node: str, message: Message) -> bool:
        classes = self.entry.node_classes
        document = Document(message.payload)
        node_class = classes.classifier.classify(node, message.headers, document) if classes else None
        policy, self.classes[node] = self.entry.policy_of(node_class), node_class
        # An emulated node never sets the force field.
        sighting = Sighting(message.sequence, message.stored_ns, message.payload_bytes, forced=False)
        splay = splay_ns(node, policy.interval_ns)
        state, decision, _ = sight(policy, splay, self._states.get(node), sighting, NO_BLIND_SPANS)
        self._states[node] = state
        return decision.copy


class Items:
    """One test: its wanted items, which may grow, each found at most once."""

    def __init__(self, test: Trial, wanted: Collection[int | str]) -> None:
        self.test, self.wanted = test, wanted
        self.found: set[int | str] = set()

    def note(self, item: int | str, time_ns: int) -> None:
        """Add an item that was found after a time."""
        self.found.add(item)
        self.test.times_ns.append(max(0, time_ns))

    def refuse(self, item: str) -> None:
        """Add an item that should not exist."""
        self.test.unexpected += 1
        self.test.extra.append(item)

    @property
    def is_complete(self) -> bool:
        """Whether all items wanted so far were found."""
        return len(self.found) >= len(self.wanted)

    def conclude(self, text: Callable[[int | str], str]) -> None:
        """Set the number of expected items, and the missing ones as text."""
        self.test.expected = len(self.wanted)
        self.test.missing = [text(item) for item in sorted(set(self.wanted) - self.found, key=str)]


class Observation:
    """The logs of one fleet, as a context manager; everything stored or published after its creation counts.

    It appends its tests. `began_ns` is the start of all times (unix ns); None: the stored time of each message. An
    untracked stream has neither advisories nor tables.
    """

    def __init__(
        self, stream: MeasuredStream, plan: FleetPlan, tests: list[Trial], *, from_start: bool = False
    ) -> None:
        entry = self._entry = stream.entry
        self.began_ns: int | None = None
        self.expectation = Expectation(entry, stream.subjects(plan))
        self._nodes = set(plan.senders())
        self._identity = entry.identity
        with ExitStack() as stack:
            payloads = needs_payloads(entry)
            self.source = stack.enter_context(StreamLog(entry.source, entry.stream, headers_only=not payloads))
            self._target = stack.enter_context(StreamLog(entry.target, entry.target_stream, headers_only=True))
            self._advisories = stack.enter_context(AdvisoryLog(entry))
            self._closing = stack.pop_all()
        self._tables = PublishedTables(stream, plan.suffix, self.source.next_sequence)
        self._unseen: dict[str, deque[int]] = defaultdict(deque)
        # A server may fail between reading a log and the source.
        self._copies: list[tuple[int, int]] = []
        self._announced: list[Announced] = []
        self._published: list[Published] = []
        wanted: dict[str, Collection[int | str]] = {COPIED: self.expectation.due}
        if entry.tracked and entry.advisory is not None and entry.advisory.format != "v1":
            # Version 1 has no event `new`.
            wanted[ADVISED] = self.expectation.sequences
        if entry.tracked:
            wanted |= {SEEN: self.expectation.stored_ns, QUERYABLE: self.expectation.due}
        start = "start" if from_start else "stored"
        self.items = {kind: Items(Trial(f"{start} → {kind}", plan.nodes, 0), items) for kind, items in wanted.items()}
        tests.extend(items.test for items in self.items.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for items in self.items.values():
            items.conclude(self._text)
        self._closing.close()

    @property
    def is_complete(self) -> bool:
        """Whether everything wanted so far was found."""
        return all(items.is_complete for items in self.items.values())

    def poll(self) -> int:
        """Read all news, and return how many items were found so far. Raises WireError if a server fails."""
        # The source last: it then has the original of every copy.
        for message in self._target.poll():
            copy = find_copy(message.headers, self._identity)
            if copy is not None:
                self._copies.append((copy.sequence, message.stored_ns))
        published = self._tables.poll() if self._entry.tracked else None
        self._published += [published] if published else []
        self._announced += [each for each in self._advisories.poll(published) if each.node in self._nodes]
        self.read_source()
        for sequence, at_ns in self._copies:
            self._note_copy(sequence, at_ns)
        for announced in self._announced:
            self._note_advisory(announced)
        for each in self._published:
            self._note_published(each)
        self._copies, self._announced, self._published = [], [], []
        return sum(len(items.found) for items in self.items.values())

    def read_source(self) -> None:
        """Read the new messages of the source."""
        for message in self.source.poll():
            self.expectation.add(message)
            if message.sequence in self.expectation.nodes:
                self._unseen[self.expectation.nodes[message.sequence]].append(message.sequence)

    def _note_advisory(self, announced: Announced) -> None:
        """Note an advisory of a node: one `new` is expected; a timeout is not, unless the node was silent."""
        if (items := self.items.get(ADVISED)) is None:
            return
        node = announced.node
        if announced.event == "new" and node not in items.found:
            items.note(node, announced.at_ns - self._start_ns(self.expectation.sequences[node][0]))
        elif announced.event == "new" or (
            announced.event == "timeout" and self.expectation.is_false_timeout(node, announced.event_ns)
        ):
            items.refuse(f"{node}: {announced.event}")

    def _note_copy(self, sequence: int, at_ns: int) -> None:
        items = self.items[COPIED]
        if sequence in items.found:
            items.refuse(f"{self._text(sequence)} copied twice")
        elif sequence in self.expectation.due:
            items.note(sequence, at_ns - self._start_ns(sequence))
        elif sequence in self.expectation.stored_ns:
            items.refuse(f"{self._text(sequence)} copied although not due")

    def _note_published(self, published: Published) -> None:
        seen, queryable = self.items[SEEN], self.items[QUERYABLE]
        for node, last_us in published.last_seen_us.items():
            unseen = self._unseen[node]
            while unseen and self.expectation.stored_ns[unseen[0]] // 1_000 <= last_us:
                sequence = unseen.popleft()
                seen.note(sequence, published.at_ns - self._start_ns(sequence))
        for sequence in self.expectation.due.intersection(published.history) - queryable.found:
            queryable.note(sequence, published.at_ns - self._start_ns(sequence))

    def _start_ns(self, sequence: int) -> int:
        return self.expectation.stored_ns[sequence] if self.began_ns is None else self.began_ns

    def _text(self, item: int | str) -> str:
        return item if isinstance(item, str) else f"{self.expectation.nodes[item]} {item}"
