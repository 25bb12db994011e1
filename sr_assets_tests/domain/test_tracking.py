"""The fold: examples from the rules, and properties of every history."""

import hashlib
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.domain.advisories import event_id
from sr_assets.domain.blindness import NO_BLIND_SPANS, BlindSpans
from sr_assets.domain.tracking import rules
from sr_assets.domain.tracking.rules import (
    NODE_COLUMNS,
    Decision,
    Event,
    NodeState,
    Policy,
    Reason,
    Sighting,
    Status,
    Transition,
    deadline_ns,
    sight,
    splay_ns,
    sweep,
    tolerance_ns,
    untracked,
)

S = 1_000_000_000
I, W = 60 * S, 25 * S  # noqa: E741 - the names the rules use
POLICY = Policy(I, W, 100)
T0 = 1_647_351_430 * S

Step = tuple[Sighting, Decision, NodeState | None, NodeState]


def fold(
    sightings: list[Sighting],
    *,
    policy: Policy = POLICY,
    splay: int = 0,
    cutoff_ns: int | None = None,
    sweeps: dict[int, int] | None = None,
    until_ns: int | None = None,
    blind: BlindSpans = NO_BLIND_SPANS,
) -> tuple[NodeState | None, list[Step], list[Transition]]:
    """Fold a history; `sweeps` maps an index to the time of a sweep just before that message."""
    state: NodeState | None = None
    steps: list[Step] = []
    transitions: list[Transition] = []
    for index, sighting in enumerate(sightings):
        if state and sweeps and index in sweeps:
            state, events = sweep(policy, NodeState(*astuple(state)), sweeps[index], blind)
            transitions += events
        before = state
        state, decision, events = sight(policy, splay, state, sighting, blind, cutoff_ns)
        transitions += events
        steps.append((sighting, decision, before, state))
    if state and until_ns is not None:
        state, events = sweep(policy, state, until_ns, blind)
        transitions += events
    return state, steps, transitions


def seen_at(*offsets: int, payload_bytes: int = 500) -> list[Sighting]:
    return [Sighting(number, T0 + offset, payload_bytes, False) for number, offset in enumerate(offsets, 1)]


def reasons(steps: list[Step]) -> list[str]:
    return [decision.reason.value for _, decision, _, _ in steps]


@st.composite
def histories(draw: st.DrawFn) -> list[Sighting]:
    """Draw sightings with gaps near every limit and a clock that sometimes goes back by up to a second."""
    limits = [0, 1, S, W - 1, W, W + 1, I - S, I - 1, I, I + 1, 3 * I]
    gaps = st.one_of(st.sampled_from(limits), st.integers(-S, I), st.integers(0, 10 * S))
    at, sightings = T0, []
    for number in range(1, draw(st.integers(1, 25)) + 1):
        at += draw(gaps)
        size = draw(st.sampled_from([0, 0, 400, 450, 499, 500, 550]))
        sightings.append(Sighting(number, at, size, draw(st.integers(0, 9)) == 0))
    return sightings


splays = st.integers(0, I // 10 - 1)
blind_spans = st.lists(
    st.tuples(st.integers(0, 6 * I), st.sampled_from([1, S, W, I])).map(lambda span: (T0 + span[0], T0 + sum(span)))
).map(lambda spans: BlindSpans(tuple(spans)))


def test_first_message_of_a_sender_is_new_and_copied() -> None:
    state, steps, transitions = fold(seen_at(0))
    assert reasons(steps) == ["new"]
    assert transitions == [Transition(Event.NEW, T0, T0, 0, 1, None, 1, False, None)]
    assert state == NodeState(T0, T0, 1, T0, 500, Status.UP, T0, None, 0, 1)


def test_silence_of_exactly_a_limit_does_not_exceed_it() -> None:
    state, _, _ = fold(seen_at(0))
    assert state
    assert sweep(POLICY, state, T0 + W, NO_BLIND_SPANS) == (state, ())
    silent, (timeout,) = sweep(POLICY, state, T0 + W + 1, NO_BLIND_SPANS)
    assert timeout == Transition(Event.TIMEOUT, T0 + W, T0, W, 1, Status.UP, 2, False, None)
    assert (silent.status, silent.status_since_ns, silent.copied_ns) == (Status.TIMEOUT, T0 + W, T0)
    assert sweep(POLICY, silent, T0 + I, NO_BLIND_SPANS) == (silent, ())
    retired, (expire,) = sweep(POLICY, silent, T0 + I + 1, NO_BLIND_SPANS)
    assert expire == Transition(Event.EXPIRE, T0 + I, T0, I, 1, Status.TIMEOUT, 3, False, None)
    assert retired == NodeState(T0, T0, 1, None, None, Status.RETIRED, T0 + I, T0 + I, 1, 3)
    assert sweep(POLICY, retired, T0 + 100 * I, NO_BLIND_SPANS) == (retired, ())


def test_gap_within_a_batch_gives_timeout_and_recover_without_copy() -> None:
    at = T0 + W + 1
    state, steps, transitions = fold(seen_at(0, W + 1))
    assert reasons(steps) == ["new", "sampled"]
    assert transitions[1:] == [
        Transition(Event.TIMEOUT, T0 + W, T0, W, 1, Status.UP, 2, False, None),
        Transition(Event.RECOVER, at, T0, W + 1, 2, Status.TIMEOUT, 3, False, W + 1),
    ]
    assert state == NodeState(T0, at, 2, T0, 500, Status.UP, at, None, 0, 3)


def test_sender_returning_after_the_interval_is_new_with_its_history() -> None:
    at = T0 + 3 * I
    state, steps, transitions = fold(seen_at(0, 3 * I))
    assert reasons(steps) == ["new", "new"]
    assert [transition.event.value for transition in transitions] == ["new", "timeout", "expire", "new"]
    assert transitions[-1] == Transition(Event.NEW, at, at, 0, 2, Status.RETIRED, 4, True, 3 * I)
    assert state == NodeState(T0, at, 2, at, 500, Status.UP, at, None, 1, 4)


def test_copy_is_due_after_the_interval_less_tolerance_and_splay() -> None:
    splay = 2 * S
    due = I - S - splay
    _, steps, _ = fold(seen_at(0, 20 * S, 40 * S, due - 1, due, due + 20 * S), splay=splay)
    assert reasons(steps) == ["new", "sampled", "sampled", "sampled", "interval", "sampled"]


@pytest.mark.parametrize(
    ("trigger", "sizes", "expected"),
    (
        (100, [500, 599, 600, 699, 700], ["new", "sampled", "size", "sampled", "size"]),
        (100, [500, 450, 401, 400], ["new", "sampled", "sampled", "size"]),
        (0, [500, 5_000, 0], ["new", "sampled", "sampled"]),
        (0, [0, 0, 1, 0], ["new", "sampled", "size", "sampled"]),
        (1000, [0, 1], ["new", "size"]),
    ),
)
def test_size_trigger_compares_with_the_last_copied_size(trigger: int, sizes: list[int], expected: list[str]) -> None:
    sightings = [Sighting(number, T0 + number, size, False) for number, size in enumerate(sizes)]
    assert reasons(fold(sightings, policy=Policy(I, W, trigger))[1]) == expected


def test_forced_copy_precedes_size_and_resets_the_size() -> None:
    sightings = [Sighting(1, T0, 500, True), Sighting(2, T0 + 1, 900, True), Sighting(3, T0 + 2, 950, False)]
    assert reasons(fold(sightings)[1]) == ["new", "forced", "sampled"]


def test_too_old_takes_precedence_and_counts_as_a_sighting() -> None:
    cutoff = T0 + 10
    sightings = [
        Sighting(1, T0 + 9, 500, True),
        Sighting(2, T0 + 10, 500, False),
        Sighting(3, T0 + 9, 5_000, True),  # The clock was set back.
    ]
    state, steps, transitions = fold(sightings, cutoff_ns=cutoff)
    assert reasons(steps) == ["too_old", "new", "too_old"]
    assert [transition.event.value for transition in transitions] == ["new"]
    assert state == NodeState(T0 + 9, T0 + 10, 3, T0 + 10, 500, Status.UP, T0 + 9, None, 0, 1)


def test_messages_without_a_sender_are_copied_unless_too_old() -> None:
    assert untracked(T0, None) == Decision(copy=True, reason=Reason.NO_SENDER)
    assert untracked(T0, T0, rules.ALL) == Decision(copy=True, reason=Reason.ALL)
    assert untracked(T0, T0 + 1, rules.ALL) == Decision(copy=False, reason=Reason.TOO_OLD)


def test_clock_set_back_never_turns_back_a_sender_time() -> None:
    state, _, transitions = fold(seen_at(10 * S, 3 * S))
    assert state
    assert (state.seen_ns, state.sequence) == (T0 + 10 * S, 2)
    assert len(transitions) == 1
    silent, _ = sweep(POLICY, state, T0 + 50 * S, NO_BLIND_SPANS)
    recovered, _, (recover,) = sight(POLICY, 0, silent, Sighting(3, T0, 500, False), NO_BLIND_SPANS)
    assert recover.event is Event.RECOVER
    assert recover.event_ns == recovered.seen_ns == silent.status_since_ns == T0 + 35 * S


def test_message_read_again_does_not_revive_a_silent_sender() -> None:
    up, _, _ = fold(seen_at(0, 10 * S))
    assert up
    silent, retired = (sweep(POLICY, up, T0 + now, NO_BLIND_SPANS)[0] for now in (40 * S, 80 * S))
    again = Sighting(3, T0 + 10 * S, 500, False)
    for state in (silent, retired):
        assert sight(POLICY, 0, state, again, NO_BLIND_SPANS, read_until_ns=T0 + 10 * S) == (
            state,
            rules.SAMPLED,
            (),
        )
        _, _, transitions = sight(POLICY, 0, state, again, NO_BLIND_SPANS, read_until_ns=T0 + 10 * S - 1)
        assert transitions
    seen_again, decision, transitions = sight(POLICY, 0, up, again, NO_BLIND_SPANS, read_until_ns=T0 + 10 * S)
    assert (seen_again.sequence, decision, transitions) == (3, rules.SAMPLED, ())
    new_state, _, (new,) = sight(POLICY, 0, None, again, NO_BLIND_SPANS, read_until_ns=T0 + 10 * S)
    assert (new_state.seen_ns, new.event) == (T0 + 10 * S, Event.NEW)


@given(blind_spans, st.integers(0, 3 * I))
def test_deadline_is_the_last_instant_without_a_sweep_effect(blind: BlindSpans, seen: int) -> None:
    state, _, _ = fold(seen_at(seen))
    for _ in range(2):
        assert state
        deadline = deadline_ns(POLICY, state, blind)
        assert deadline is not None
        assert sweep(POLICY, state, deadline, blind) == (state, ())
        state, (transition,) = sweep(POLICY, state, deadline + 1, blind)
        assert (transition.event_ns, transition.age_ns) == (deadline, deadline - state.seen_ns)
    assert state
    assert deadline_ns(POLICY, state, blind) is None


def test_unknown_sender_starts_at_first_transition() -> None:
    state, _, (new,) = sight(POLICY, 0, None, Sighting(1, T0, 500, False), NO_BLIND_SPANS, first_transition=18)
    assert new == Transition(Event.NEW, T0, T0, 0, 1, None, 18, False, None)
    assert state.transition == 18
    _, _, (timeout, recover) = sight(POLICY, 0, state, Sighting(2, T0 + W + 1, 500, False), NO_BLIND_SPANS, None, 99)
    assert (timeout.transition, recover.transition) == (19, 20)


def test_shorter_policy_applies_to_a_current_silence() -> None:
    state, _, _ = fold(seen_at(0))
    assert state
    shorter = Policy(20 * S, 5 * S)
    assert deadline_ns(shorter, state, NO_BLIND_SPANS) == T0 + 5 * S
    _, (timeout, expire) = sweep(shorter, state, T0 + W, NO_BLIND_SPANS)
    assert (timeout.event_ns, expire.event_ns) == (T0 + 5 * S, T0 + 20 * S)


#: From far shorter to far longer, so that one policy's interval ends before another's warning.
policies = st.sampled_from([Policy(2, 1), Policy(20 * S, 5 * S), POLICY, Policy(I + 1, I), Policy(4 * I, 2 * I)])
elapsed_times = st.sampled_from([0, 1, 2, 5 * S + 1, W, W + 1, I, I + 1, 2 * I + 1, 4 * I])


@given(
    st.lists(st.tuples(policies, st.booleans(), elapsed_times), min_size=2, max_size=12),
    st.just(NO_BLIND_SPANS) | blind_spans,
)
def test_changed_policy_applies_immediately_in_event_order(
    steps: list[tuple[Policy, bool, int]], blind: BlindSpans
) -> None:
    """Each step has its own policy, and is a sighting or a passage of time."""
    state, _, _ = fold(seen_at(0))
    now = T0
    for sequence, (policy, is_sighting, elapsed) in enumerate(steps, 2):
        assert state
        now += elapsed
        before = state
        if is_sighting:
            state, _, transitions = sight(policy, 0, before, Sighting(sequence, now, 500, False), blind)
        else:
            state, transitions = sweep(policy, before, now, blind)
            silence = now - state.seen_ns - blind.blind_ns(state.seen_ns, now)
            limit = {Status.UP: policy.warning_ns, Status.TIMEOUT: policy.interval_ns}.get(state.status, silence)
            assert silence <= limit
        since = before.status_since_ns
        for transition in transitions:
            warned, ended = (
                blind.exceeds_at_ns(before.seen_ns, limit) for limit in (policy.warning_ns, policy.interval_ns)
            )
            due = {Event.TIMEOUT: warned, Event.EXPIRE: max(ended, since)}.get(transition.event, now)
            assert transition.event_ns == due
            assert since <= transition.event_ns <= now
            since = transition.event_ns
        assert state.transition == before.transition + len(transitions)


def test_node_columns_keep_their_names_and_order() -> None:
    names = "first_seen_ns seen_ns sequence copied_ns copied_bytes status status_since_ns retired_at_ns times_retired"
    assert list(NODE_COLUMNS) == [*names.split(), "transition"]


@pytest.mark.parametrize(("interval", "tolerance"), ((10 * S, S), (10 * S - 1, S - 1), (3600 * S, S), (5 * S, S // 2)))
def test_tolerance_is_a_second_or_a_tenth_of_a_short_interval(interval: int, tolerance: int) -> None:
    assert tolerance_ns(interval) == tolerance


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.integers(2, 10**17))
def test_splay_is_stable_and_below_a_tenth_of_the_interval(sender: str, interval: int) -> None:
    share = int(hashlib.blake2b(sender.encode("utf-8")).hexdigest()[:16], 16)
    assert splay_ns(sender, interval) == interval * share // (10 * 2**64)
    assert 0 <= splay_ns(sender, interval) <= interval // 10


def test_splay_is_the_same_as_in_the_first_release() -> None:
    assert splay_ns("web1.example.net", 3600 * S) == 349_037_605_700


@pytest.mark.parametrize(("interval", "warning", "trigger"), ((10, 10, 0), (10, 0, 0), (10, 11, 0), (10, 5, -1)))
def test_policy_out_of_bounds_is_refused(interval: int, warning: int, trigger: int) -> None:
    with pytest.raises(ValueError, match="must"):
        Policy(interval, warning, trigger)


@given(histories(), splays, blind_spans, st.data())
def test_fold_gives_the_same_result_for_any_cuts_and_sweeps(
    history: list[Sighting], splay: int, blind: BlindSpans, data: st.DataObject
) -> None:
    end = max(sighting.stored_ns for sighting in history) + data.draw(st.integers(0, 4 * I))
    uncut = fold(history, splay=splay, until_ns=end, blind=blind)
    cuts = data.draw(st.sets(st.integers(1, len(history))))
    # No later message is stored before a watermark.
    bounds = {cut: min([end, *(sighting.stored_ns for sighting in history[cut:])]) for cut in cuts}
    sweeps = {cut: bound - data.draw(st.integers(0, 2 * I)) for cut, bound in bounds.items()}
    parts = fold(history, splay=splay, sweeps=sweeps, until_ns=end, blind=blind)
    assert [step[1] for step in parts[1]] == [step[1] for step in uncut[1]]
    assert parts[2] == uncut[2]
    assert parts[0] == uncut[0]


@given(histories(), splays, blind_spans)
def test_transitions_follow_the_life_cycle_in_numbered_order(
    history: list[Sighting], splay: int, blind: BlindSpans
) -> None:
    after = {
        None: {Event.NEW},
        Event.NEW: {Event.TIMEOUT},
        Event.RECOVER: {Event.TIMEOUT},
        Event.TIMEOUT: {Event.RECOVER, Event.EXPIRE},
        Event.EXPIRE: {Event.NEW},
    }
    leads_to = {Event.TIMEOUT: Status.TIMEOUT, Event.EXPIRE: Status.RETIRED}
    end = max(history[-1].stored_ns, max((until for _, until in blind.spans), default=0)) + 5 * I
    _, _, transitions = fold(history, splay=splay, until_ns=end, blind=blind)
    last: Transition | None = None
    for number, transition in enumerate(transitions, 1):
        assert transition.event in after[last.event if last else None]
        assert transition.previous == (leads_to.get(last.event, Status.UP) if last else None)
        assert transition.transition == number
        assert transition.event_ns >= (last.event_ns if last else 0)
        assert transition.returned == (transition.event is Event.NEW and number > 1)
        assert transition.age_ns == transition.event_ns - transition.seen_ns
        last = transition
    assert last is not None
    assert last.event is Event.EXPIRE


@given(histories(), splays)
def test_interval_copies_are_nearly_an_interval_apart(history: list[Sighting], splay: int) -> None:
    for _, decision, before, state in fold(history, splay=splay)[1]:
        if decision.reason is Reason.INTERVAL:
            assert before
            assert before.copied_ns is not None
            assert 10 * (state.seen_ns - before.copied_ns) >= 9 * I - 10 * S


@given(histories(), splays)
def test_live_sender_is_copied_at_least_every_interval(history: list[Sighting], splay: int) -> None:
    for _, decision, _, state in fold(history, splay=splay)[1]:
        assert state.copied_ns is not None
        assert state.seen_ns - state.copied_ns < I
        assert decision.copy == (state.copied_ns == state.seen_ns and decision.reason is not Reason.SAMPLED)


@given(histories(), splays)
def test_replay_gives_the_same_event_ids(history: list[Sighting], splay: int) -> None:
    def ids() -> list[str]:
        transitions = fold(history, splay=splay)[2]
        return [event_id("R", "n", "S", "web1", transition.event, transition.event_ns) for transition in transitions]

    assert ids() == ids()


@given(histories(), splays)
def test_state_fields_match_the_history(history: list[Sighting], splay: int) -> None:
    state, steps, transitions = fold(history, splay=splay)
    assert state
    assert state.first_seen_ns == history[0].stored_ns
    assert state.sequence == history[-1].sequence
    assert state.seen_ns == max(sighting.stored_ns for sighting in history)
    assert state.times_retired == sum(transition.event is Event.EXPIRE for transition in transitions)
    assert (state.status, state.retired_at_ns) == (Status.UP, None)
    copied = [(after.seen_ns, sighting.payload_bytes) for sighting, decision, _, after in steps if decision.copy]
    assert (state.copied_ns, state.copied_bytes) == copied[-1]
