"""The way of a fleet's messages: source, target, advisories and tables, observed while a run works on them."""

from collections import defaultdict, deque
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Final, Self

from sr_assets.domain.provenance import Identity, find_copy
from sr_assets.embedded.fleet_plan import FleetPlan
from sr_assets.measure.advisory_log import AdvisoryLog, Announced
from sr_assets.measure.expectation import Expectation, needs_payloads
from sr_assets.measure.measured_stream import MeasuredStream
from sr_assets.measure.results import Trial
from sr_assets.measure.stream_log import StreamLog
from sr_assets.measure.tables import Published, PublishedTables

#: The ends of the way; each is a test.
COPIED: Final = "copied"
ADVISED: Final = "advisory"
SEEN: Final = "last seen"
QUERYABLE: Final = "queryable"


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
        self._identity = Identity(entry.stream, entry.replicator, entry.name)
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
