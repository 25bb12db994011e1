"""Blind spans: arithmetic against counting, spans from holes, and the rules with holes against the reference."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.domain.blindness import MAX_BLIND_SPANS, NO_BLIND_SPANS, BlindSpans, Span, find_blind_spans
from sr_assets.domain.positions import SequenceRange, missing
from sr_assets.domain.tracking.rules import (
    NodeState,
    Policy,
    Sighting,
    Status,
    Transition,
    deadline_ns,
    sight,
    splay_ns,
    sweep,
    untracked,
)
from sr_assets_tests import reference
from sr_assets_tests.reference import Rules, Seen

S = 1_000_000_000
POLICY = Policy(60 * S, 25 * S, 100)
RULES = Rules(
    "R",
    "n",
    "S",
    POLICY.interval_ns,
    POLICY.warning_ns,
    "0",
    sender=lambda message: message.subject or None,
    forced=lambda message: message.headers == b"forced",
    trigger_bytes=POLICY.size_trigger_bytes,
)

raw_spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)
instants = st.integers(0, 60)


def seconds(*spans: Span) -> BlindSpans:
    return BlindSpans(tuple((since * S, until * S) for since, until in spans))


# ------------------------------------------------------------------------------------------------------ arithmetic


@given(raw_spans, raw_spans)
def test_spans_are_sorted_and_disjoint_and_cover_the_same_instants(first: list[Span], more: list[Span]) -> None:
    blind = BlindSpans(tuple(first)).add(more)
    assert blind == BlindSpans((*more, *first))
    ends = [instant for span in blind.spans for instant in span]
    assert ends == sorted(set(ends))
    covered_instants = {instant for since, until in blind.spans for instant in range(since, until)}
    assert covered_instants == {instant for since, until in (*first, *more) for instant in range(since, until)}


@given(raw_spans, instants, instants)
def test_blind_time_counts_the_instants_in_spans(raw: list[Span], since: int, until: int) -> None:
    covered = sum(any(first <= instant < last for first, last in raw) for instant in range(since, until))
    assert BlindSpans(tuple(raw)).blind_ns(since, until) == covered == reference.covered(raw, since, until)


@given(raw_spans, instants, st.integers(1, 30))
def test_exceeds_at_is_the_last_instant_within_the_limit(raw: list[Span], seen: int, limit: int) -> None:
    blind = BlindSpans(tuple(raw))
    at = blind.exceeds_at_ns(seen, limit)
    assert at - seen - blind.blind_ns(seen, at) == limit
    assert at + 1 - seen - blind.blind_ns(seen, at + 1) == limit + 1
    assert at == reference.reached(raw, seen, limit)


@given(raw_spans, instants, instants)
def test_forgotten_spans_cover_no_later_silence(raw: list[Span], oldest: int, length: int) -> None:
    blind = BlindSpans(tuple(raw))
    remaining = blind.forget_before(oldest)
    assert all(until > oldest for _, until in remaining.spans)
    assert remaining.blind_ns(oldest, oldest + length) == blind.blind_ns(oldest, oldest + length)


def test_closest_spans_are_merged_above_the_maximum() -> None:
    separate = [(1_000 * number, 1_000 * number + 500 + number % 7) for number in range(MAX_BLIND_SPANS + 2)]
    blind = BlindSpans(tuple(separate))
    assert len(blind.spans) == MAX_BLIND_SPANS
    # The spans with the smallest gaps are merged; of equal gaps the earlier one.
    assert (6_000, 7_500) in blind.spans
    assert (13_000, 14_500) in blind.spans
    assert (20_000, 20_506) in blind.spans
    one_by_one = NO_BLIND_SPANS
    for span in separate:
        one_by_one = one_by_one.add([span])
    assert one_by_one == blind


# ----------------------------------------------------------------------------------------------------------- holes


@pytest.mark.parametrize("reason", ("overtaken", "deleted", "per_subject_limit"))
def test_hole_is_blind_between_its_neighbouring_messages(reason: str) -> None:
    holes = [(SequenceRange(5, 7), reason), (SequenceRange(3, 4), reason), (SequenceRange(7, 8), "filtered")]
    spans, is_open = find_blind_spans(holes, [4, 8], [40, 80], before_ns=20, after_hole=False, until_ns=None)
    assert (spans, is_open) == ([(20, 40), (40, 80)], False)


def test_filtered_messages_leave_no_blind_span() -> None:
    holes = [(SequenceRange(2, 9), "filtered")]
    assert find_blind_spans(holes, [1], [10], before_ns=None, after_hole=False, until_ns=90) == ([], False)


def test_hole_before_the_first_message_leaves_no_blind_span() -> None:
    holes = [(SequenceRange(1, 3), "overtaken")]
    assert find_blind_spans(holes, [3], [30], before_ns=None, after_hole=False, until_ns=90) == ([], False)


@pytest.mark.parametrize(
    ("until", "expected"), ((None, ([], True)), (10, ([], True)), (11, ([(10, 11)], False)), (90, ([(10, 90)], False)))
)
def test_hole_at_the_end_lasts_until_the_watermark(until: int | None, expected: tuple[list[Span], bool]) -> None:
    holes = [(SequenceRange(2, 9), "overtaken")]
    assert find_blind_spans(holes, [1], [10], before_ns=5, after_hole=False, until_ns=until) == expected


def test_open_hole_ends_with_the_next_message_or_watermark() -> None:
    assert find_blind_spans([], [9], [90], before_ns=10, after_hole=True, until_ns=None) == ([(10, 90)], False)
    assert find_blind_spans([], [], [], before_ns=10, after_hole=True, until_ns=None) == ([], True)
    assert find_blind_spans([], [], [], before_ns=10, after_hole=True, until_ns=70) == ([(10, 70)], False)


def test_hole_with_a_clock_set_back_lasts_until_a_later_message() -> None:
    holes = [(SequenceRange(2, 3), "deleted"), (SequenceRange(4, 5), "deleted")]
    spans, _ = find_blind_spans(holes, [1, 3, 5], [50, 40, 60], before_ns=None, after_hole=False, until_ns=None)
    assert spans == [(50, 60), (50, 60)]
    holes = [(SequenceRange(2, 3), "deleted")]
    assert find_blind_spans(holes, [1, 3], [50, 40], before_ns=None, after_hole=False, until_ns=None) == ([], True)
    assert find_blind_spans([], [4, 5], [45, 51], before_ns=50, after_hole=True, until_ns=None) == ([(50, 51)], False)


# -------------------------------------------------------------------------------------------------------- the rules


def seen_once(at_ns: int = 0) -> NodeState:
    return sight(POLICY, 0, None, Sighting(1, at_ns, 500, forced=False), NO_BLIND_SPANS)[0]


def test_silence_does_not_grow_in_a_blind_span() -> None:
    blind = seconds((10, 180))
    state, decision, transitions = sight(POLICY, 0, seen_once(), Sighting(2, 185 * S, 500, forced=False), blind)
    assert (decision.reason, transitions, state.status_since_ns) == ("interval", (), 0)
    assert sweep(POLICY, state, 210 * S, blind) == (state, ())


def test_event_is_delayed_by_blind_time_and_its_age_includes_it() -> None:
    # The warning (25 s of silence): 10 s before the first span, 15 s after it. The interval (60 s): 10 s before the
    # first span, 30 s between the spans, 20 s after both.
    blind = seconds((10, 40), (70, 71))
    _, _, transitions = sight(POLICY, 0, seen_once(), Sighting(2, 300 * S, 500, forced=False), blind)
    timeout, expire, new = transitions
    assert (timeout.event_ns, timeout.age_ns) == (55 * S, 55 * S)
    assert (expire.event_ns, expire.age_ns) == (91 * S, 91 * S)
    assert (new.event, new.outage_ns) == ("new", 300 * S)


def test_limit_reached_at_the_start_of_a_span_is_exceeded_at_its_end() -> None:
    blind = seconds((25, 26))
    assert sweep(POLICY, seen_once(), 26 * S, blind)[1] == ()
    _, (timeout,) = sweep(POLICY, seen_once(), 26 * S + 1, blind)
    assert timeout.event_ns == 26 * S


@dataclass
class StreamRun:
    """A stream's state across batches, as a site keeps it."""

    policy: Policy
    forgets: bool
    nodes: dict[str, NodeState] = field(default_factory=dict)
    deadlines: dict[str, int | None] = field(default_factory=dict)
    transitions: dict[str, list[Transition]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    blind: BlindSpans = NO_BLIND_SPANS
    before_ns: int | None = None
    after_hole: bool = False

    def read_range(self, covered: SequenceRange, history: list[Seen], until_ns: int | None) -> None:
        """Read the messages of a range and add blind spans for its holes."""
        batch = [message for message in history if message.sequence in covered]
        sequences, times = [message.sequence for message in batch], [message.stored_ns for message in batch]
        spans, self.after_hole = find_blind_spans(
            [(hole, "deleted") for hole in missing(covered, sequences)],
            sequences,
            times,
            before_ns=self.before_ns,
            after_hole=self.after_hole,
            until_ns=until_ns,
        )
        self.blind = self.blind.add(spans)
        for message in batch:
            self.reasons[message.sequence] = self._see(message)
        earlier = [] if self.before_ns is None else [self.before_ns]
        self.before_ns = max([*times, *earlier], default=None)

    def _see(self, message: Seen) -> str:
        sender = RULES.sender(message)
        if sender is None:
            return untracked(message.stored_ns, None).reason.value
        sighting = Sighting(message.sequence, message.stored_ns, len(message.payload), RULES.forced(message))
        splay = splay_ns(sender, self.policy.interval_ns)
        state, decision, events = sight(self.policy, splay, self.nodes.get(sender), sighting, self.blind)
        self._save(sender, state, events)
        return decision.reason.value

    def pass_time(self, now_ns: int) -> None:
        """Sweep senders whose saved deadline has passed, and forget spans that no silence needs."""
        for sender, saved_ns in self.deadlines.items():
            if saved_ns is not None and saved_ns < now_ns:
                self._save(sender, *sweep(self.policy, self.nodes[sender], now_ns, self.blind))
        alive = [state.seen_ns for state in self.nodes.values() if state.status is not Status.RETIRED]
        if self.forgets:
            self.blind = self.blind.forget_before(min([now_ns, *alive]))

    def set_policy(self, policy: Policy) -> None:
        """Continue with another policy and recompute all saved deadlines."""
        self.policy = policy
        for sender, state in self.nodes.items():
            self._save(sender, state, ())

    def _save(self, sender: str, state: NodeState, events: tuple[Transition, ...]) -> None:
        self.nodes[sender] = state
        self.deadlines[sender] = deadline_ns(self.policy, state, self.blind)
        self.transitions.setdefault(sender, []).extend(events)


@dataclass
class Scenario:
    """A stream's messages, its last sequence, and a final watermark after all messages."""

    history: list[Seen]
    last: int
    end_ns: int

    def bound_ns(self, after: int) -> int:
        """Return the latest time that may pass before the messages from a sequence on are read, at most the start of a
        hole.
        """
        earlier = [message.stored_ns for message in self.history if message.sequence < after]
        later = [message.stored_ns for message in self.history if message.sequence >= after]
        return min([max(earlier, default=0), self.end_ns, *later])

    def run(
        self, cuts: set[int], policies: dict[int, Policy], back_ns: Callable[[], int] = lambda: 0, *, forgets: bool
    ) -> StreamRun:
        """Run in batches; at each cut, advance time to `back_ns` before the latest permitted time."""
        run = StreamRun(policies.get(0, POLICY), forgets)
        ends = sorted({*cuts, *policies, self.last + 1} - {0})
        first = 1
        for end in ends:
            at_end = end == self.last + 1
            run.read_range(SequenceRange(first, end), self.history, self.end_ns if at_end else None)
            run.pass_time(self.end_ns if at_end else self.bound_ns(end) - (0 if end in policies else back_ns()))
            if end in policies:
                run.set_policy(policies[end])
            first = end
        return run


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Draw messages of three senders or none, with time gaps near the limits and holes of any length."""
    limits = [0, 1, S, 25 * S - 1, 25 * S, 25 * S + 1, 35 * S, 60 * S - 1, 60 * S, 60 * S + 1, 200 * S]
    gaps = st.one_of(st.sampled_from(limits), st.integers(-S, 60 * S), st.integers(0, 10 * S))
    sequence, at_ns = 0, 1_000 * S
    history = []
    for _ in range(draw(st.integers(1, 20))):
        sequence += draw(st.sampled_from([1, 1, 1, 2, 5]))
        at_ns += draw(gaps)
        headers = draw(st.sampled_from([b"", b"", b"", b"forced"]))
        size = draw(st.sampled_from([0, 400, 450, 500]))
        history.append(Seen(sequence, at_ns, draw(st.sampled_from(["a", "a", "b", "c", ""])), headers, bytes(size)))
    last = sequence + draw(st.sampled_from([0, 0, 3]))
    return Scenario(history, last, max(message.stored_ns for message in history) + draw(st.integers(0, 240 * S)))


def cuts_of(data: st.DataObject, scenario: Scenario) -> set[int]:
    return data.draw(st.sets(st.integers(2, scenario.last + 1)))


@given(scenarios(), st.booleans(), st.data())
def test_history_with_holes_matches_the_reference_at_any_cuts(
    scenario: Scenario, forgets: bool, data: st.DataObject
) -> None:
    missing_sequences = sorted(set(range(1, scenario.last + 1)) - {message.sequence for message in scenario.history})
    blind = reference.blind_spans(scenario.history, missing_sequences, scenario.end_ns)
    expected = reference.expect(RULES, scenario.history, scenario.end_ns, blind)
    run = scenario.run(cuts_of(data, scenario), {}, lambda: data.draw(st.integers(0, 60 * S)), forgets=forgets)
    assert run.reasons == {sequence: reason for (_, sequence), reason in expected.reasons.items()}
    advised: dict[str, list[tuple[object, ...]]] = {sender: [] for sender in run.nodes}
    for advisory in expected.advisories:
        previous, outage = advisory["previous"], advisory["outage_seconds"]
        advised[advisory["value"]].append(
            (advisory["event"], advisory["timestamp"], advisory["age_seconds"], advisory["sequence"], previous, outage)
        )
    assert {sender: list(map(summary, events)) for sender, events in run.transitions.items()} == advised
    for sender, state in run.nodes.items():
        node = expected.nodes[sender]
        assert (state.status, state.times_retired, state.copied_bytes) == (
            node["status"],
            node["times_retired"],
            node["copied_bytes"],
        )
        assert reference.clock(state.status_since_ns) == node["status_since"]
        assert reference.clock(state.copied_ns) == node["last_copied"]


def summary(transition: Transition) -> tuple[object, ...]:
    outage_ns = transition.outage_ns
    return (
        transition.event.value,
        transition.event_ns // S,
        round(transition.age_ns / S, 3),
        transition.sequence,
        None if transition.previous is None else transition.previous.value,
        None if outage_ns is None else round(outage_ns / S, 3),
    )


policies = st.sampled_from([POLICY, Policy(60 * S, 5 * S), Policy(10 * S, 5 * S), Policy(200 * S, 100 * S, 40)])


@given(scenarios(), st.data())
def test_cuts_change_nothing_between_policy_changes(scenario: Scenario, data: st.DataObject) -> None:
    changes = data.draw(st.dictionaries(st.integers(0, scenario.last), policies, max_size=3))
    uncut = scenario.run(set(), changes, forgets=False)
    parts = scenario.run(cuts_of(data, scenario), changes, lambda: data.draw(st.integers(0, 60 * S)), forgets=True)
    assert parts.reasons == uncut.reasons
    assert parts.transitions == uncut.transitions
    assert parts.nodes == uncut.nodes
    for sender, state in uncut.nodes.items():
        exact = deadline_ns(uncut.policy, state, uncut.blind)
        assert deadline_ns(parts.policy, state, parts.blind) == exact
        # A deadline saved before a span was recorded may be too early, never too late.
        assert (parts.deadlines[sender] or 0) <= (exact or 0)
