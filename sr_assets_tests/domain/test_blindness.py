"""Blind spans: their arithmetic against counting, what holes blind, and the rules with holes against the reference."""

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
def test_spans_are_kept_in_order_and_apart_and_hold_the_same_instants(first: list[Span], more: list[Span]) -> None:
    blind = BlindSpans(tuple(first)).add(more)
    assert blind == BlindSpans((*more, *first))
    ends = [instant for span in blind.spans for instant in span]
    assert ends == sorted(set(ends))
    held = {instant for since, until in blind.spans for instant in range(since, until)}
    assert held == {instant for since, until in (*first, *more) for instant in range(since, until)}


@given(raw_spans, instants, instants)
def test_blind_time_is_what_the_spans_cover(raw: list[Span], since: int, until: int) -> None:
    covered = sum(any(first <= instant < last for first, last in raw) for instant in range(since, until))
    assert BlindSpans(tuple(raw)).blind_ns(since, until) == covered == reference.covered(raw, since, until)


@given(raw_spans, instants, st.integers(1, 30))
def test_a_silence_exceeds_a_limit_behind_the_last_instant_at_which_it_does_not(
    raw: list[Span], seen: int, limit: int
) -> None:
    blind = BlindSpans(tuple(raw))
    at = blind.exceeds_at_ns(seen, limit)
    assert at - seen - blind.blind_ns(seen, at) == limit
    assert at + 1 - seen - blind.blind_ns(seen, at + 1) == limit + 1
    assert at == reference.reached(raw, seen, limit)


@given(raw_spans, instants, instants)
def test_what_is_forgotten_covers_no_silence_that_began_later(raw: list[Span], oldest: int, length: int) -> None:
    blind = BlindSpans(tuple(raw))
    kept = blind.forget_before(oldest)
    assert all(until > oldest for _, until in kept.spans)
    assert kept.blind_ns(oldest, oldest + length) == blind.blind_ns(oldest, oldest + length)


def test_the_closest_of_too_many_spans_become_one() -> None:
    apart = [(1_000 * number, 1_000 * number + 500 + number % 7) for number in range(MAX_BLIND_SPANS + 2)]
    blind = BlindSpans(tuple(apart))
    assert len(blind.spans) == MAX_BLIND_SPANS
    # Those that lie closest behind each other: the ones that end latest in their thousand, the earlier of equals first.
    assert (6_000, 7_500) in blind.spans
    assert (13_000, 14_500) in blind.spans
    assert (20_000, 20_506) in blind.spans
    one_by_one = NO_BLIND_SPANS
    for span in apart:
        one_by_one = one_by_one.add([span])
    assert one_by_one == blind


# ----------------------------------------------------------------------------------------------------------- holes


@pytest.mark.parametrize("reason", ("overtaken", "deleted", "per_subject_limit"))
def test_a_hole_blinds_from_the_message_before_it_to_the_one_after_it(reason: str) -> None:
    holes = [(SequenceRange(5, 7), reason), (SequenceRange(3, 4), reason), (SequenceRange(7, 8), "filtered")]
    spans, is_open = find_blind_spans(holes, [4, 8], [40, 80], before_ns=20, after_hole=False, until_ns=None)
    assert (spans, is_open) == ([(20, 40), (40, 80)], False)


def test_what_a_filter_leaves_out_blinds_nobody() -> None:
    holes = [(SequenceRange(2, 9), "filtered")]
    assert find_blind_spans(holes, [1], [10], before_ns=None, after_hole=False, until_ns=90) == ([], False)


def test_a_hole_before_which_there_was_no_message_blinds_nobody() -> None:
    holes = [(SequenceRange(1, 3), "overtaken")]
    assert find_blind_spans(holes, [3], [30], before_ns=None, after_hole=False, until_ns=90) == ([], False)


@pytest.mark.parametrize(
    ("until", "expected"), ((None, ([], True)), (10, ([], True)), (11, ([(10, 11)], False)), (90, ([(10, 90)], False)))
)
def test_a_hole_at_the_end_lasts_until_the_watermark_and_stays_open_without_one(
    until: int | None, expected: tuple[list[Span], bool]
) -> None:
    holes = [(SequenceRange(2, 9), "overtaken")]
    assert find_blind_spans(holes, [1], [10], before_ns=5, after_hole=False, until_ns=until) == expected


def test_an_open_hole_ends_with_the_next_message_or_watermark() -> None:
    assert find_blind_spans([], [9], [90], before_ns=10, after_hole=True, until_ns=None) == ([(10, 90)], False)
    assert find_blind_spans([], [], [], before_ns=10, after_hole=True, until_ns=None) == ([], True)
    assert find_blind_spans([], [], [], before_ns=10, after_hole=True, until_ns=70) == ([(10, 70)], False)


def test_a_hole_across_which_a_clock_goes_back_lasts_until_a_message_is_stored_later() -> None:
    holes = [(SequenceRange(2, 3), "deleted"), (SequenceRange(4, 5), "deleted")]
    spans, _ = find_blind_spans(holes, [1, 3, 5], [50, 40, 60], before_ns=None, after_hole=False, until_ns=None)
    assert spans == [(50, 60), (50, 60)]
    holes = [(SequenceRange(2, 3), "deleted")]
    assert find_blind_spans(holes, [1, 3], [50, 40], before_ns=None, after_hole=False, until_ns=None) == ([], True)
    assert find_blind_spans([], [4, 5], [45, 51], before_ns=50, after_hole=True, until_ns=None) == ([(50, 51)], False)


# -------------------------------------------------------------------------------------------------------- the rules


def seen_once(at_ns: int = 0) -> NodeState:
    return sight(POLICY, 0, None, Sighting(1, at_ns, 500, forced=False), NO_BLIND_SPANS)[0]


def test_silence_does_not_grow_while_nobody_could_see() -> None:
    blind = seconds((10, 180))
    state, decision, transitions = sight(POLICY, 0, seen_once(), Sighting(2, 185 * S, 500, forced=False), blind)
    assert (decision.reason, transitions, state.status_since_ns) == ("interval", (), 0)
    assert sweep(POLICY, state, 210 * S, blind) == (state, ())


def test_an_event_comes_later_by_the_blind_time_and_its_age_is_the_true_distance() -> None:
    # 25 s of silence: 10 before the first span and 15 behind it. 60 s: 10, 30 between the spans and 20 behind both.
    blind = seconds((10, 40), (70, 71))
    _, _, transitions = sight(POLICY, 0, seen_once(), Sighting(2, 300 * S, 500, forced=False), blind)
    timeout, expire, new = transitions
    assert (timeout.event_ns, timeout.age_ns) == (55 * S, 55 * S)
    assert (expire.event_ns, expire.age_ns) == (91 * S, 91 * S)
    assert (new.event, new.outage_ns) == ("new", 300 * S)


def test_a_limit_that_is_reached_where_a_span_begins_is_exceeded_where_it_ends() -> None:
    blind = seconds((25, 26))
    assert sweep(POLICY, seen_once(), 26 * S, blind)[1] == ()
    _, (timeout,) = sweep(POLICY, seen_once(), 26 * S + 1, blind)
    assert timeout.event_ns == 26 * S


@dataclass
class Run:
    """A stream's state, batch after batch, as a site keeps it."""

    policy: Policy
    forgets: bool
    nodes: dict[str, NodeState] = field(default_factory=dict)
    deadlines: dict[str, int | None] = field(default_factory=dict)
    transitions: dict[str, list[Transition]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    blind: BlindSpans = NO_BLIND_SPANS
    before_ns: int | None = None
    after_hole: bool = False

    def take(self, covered: SequenceRange, history: list[Seen], until_ns: int | None) -> None:
        """Take the messages of a range, and blind spans from its holes."""
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
        known = [] if self.before_ns is None else [self.before_ns]
        self.before_ns = max([*times, *known], default=None)

    def _see(self, message: Seen) -> str:
        sender = RULES.sender(message)
        if sender is None:
            return untracked(message.stored_ns, None).reason.value
        sighting = Sighting(message.sequence, message.stored_ns, len(message.payload), RULES.forced(message))
        splay = splay_ns(sender, self.policy.interval_ns)
        state, decision, events = sight(self.policy, splay, self.nodes.get(sender), sighting, self.blind)
        self._keep(sender, state, events)
        return decision.reason.value

    def pass_time(self, now_ns: int) -> None:
        """Sweep the senders whose kept deadline has passed, and forget the spans that no silence needs."""
        for sender, kept_ns in self.deadlines.items():
            if kept_ns is not None and kept_ns < now_ns:
                self._keep(sender, *sweep(self.policy, self.nodes[sender], now_ns, self.blind))
        alive = [state.seen_ns for state in self.nodes.values() if state.status is not Status.RETIRED]
        if self.forgets:
            self.blind = self.blind.forget_before(min([now_ns, *alive]))

    def change(self, policy: Policy) -> None:
        """Go on with another policy: kept deadlines are made anew."""
        self.policy = policy
        for sender, state in self.nodes.items():
            self._keep(sender, state, ())

    def _keep(self, sender: str, state: NodeState, events: tuple[Transition, ...]) -> None:
        self.nodes[sender] = state
        self.deadlines[sender] = deadline_ns(self.policy, state, self.blind)
        self.transitions.setdefault(sender, []).extend(events)


@dataclass
class Story:
    """A stream's messages, its last sequence, and the watermark at the end: behind everything."""

    history: list[Seen]
    last: int
    end_ns: int

    def bound_ns(self, after: int) -> int:
        """Return up to when time may pass before the messages from a sequence on are known: not beyond a hole's beginning."""
        earlier = [message.stored_ns for message in self.history if message.sequence < after]
        later = [message.stored_ns for message in self.history if message.sequence >= after]
        return min([max(earlier, default=0), self.end_ns, *later])

    def run(
        self, cuts: set[int], policies: dict[int, Policy], back_ns: Callable[[], int] = lambda: 0, *, forgets: bool
    ) -> Run:
        """Go through it in batches; at each cut time passes up to `back_ns` before the latest that may be known."""
        run = Run(policies.get(0, POLICY), forgets)
        ends = sorted({*cuts, *policies, self.last + 1} - {0})
        first = 1
        for end in ends:
            at_end = end == self.last + 1
            run.take(SequenceRange(first, end), self.history, self.end_ns if at_end else None)
            run.pass_time(self.end_ns if at_end else self.bound_ns(end) - (0 if end in policies else back_ns()))
            if end in policies:
                run.change(policies[end])
            first = end
        return run


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """Draw messages of three senders and of none, whose gaps crowd around the limits, with holes of any length."""
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
    return Story(history, last, max(message.stored_ns for message in history) + draw(st.integers(0, 240 * S)))


def cuts_of(data: st.DataObject, story: Story) -> set[int]:
    return data.draw(st.sets(st.integers(2, story.last + 1)))


@given(stories(), st.booleans(), st.data())
def test_a_history_with_holes_cut_anywhere_is_what_the_reference_demands(
    story: Story, forgets: bool, data: st.DataObject
) -> None:
    gone = sorted(set(range(1, story.last + 1)) - {message.sequence for message in story.history})
    blind = reference.blind_spans(story.history, gone, story.end_ns)
    expected = reference.expect(RULES, story.history, story.end_ns, blind)
    run = story.run(cuts_of(data, story), {}, lambda: data.draw(st.integers(0, 60 * S)), forgets=forgets)
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


@given(stories(), st.data())
def test_cuts_change_nothing_when_the_policy_changes_in_between(story: Story, data: st.DataObject) -> None:
    changes = data.draw(st.dictionaries(st.integers(0, story.last), policies, max_size=3))
    whole = story.run(set(), changes, forgets=False)
    parts = story.run(cuts_of(data, story), changes, lambda: data.draw(st.integers(0, 60 * S)), forgets=True)
    assert parts.reasons == whole.reasons
    assert parts.transitions == whole.transitions
    assert parts.nodes == whole.nodes
    for sender, state in whole.nodes.items():
        exact = deadline_ns(whole.policy, state, whole.blind)
        assert deadline_ns(parts.policy, state, parts.blind) == exact
        # A deadline kept from before a span was known is too early, never too late.
        assert (parts.deadlines[sender] or 0) <= (exact or 0)
