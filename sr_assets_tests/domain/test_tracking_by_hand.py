"""Retiring a sender by hand, within random histories that are cut and swept in random places."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hypothesis import example, given
from hypothesis import strategies as st

from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.tracking.rules import (
    Event,
    NodeState,
    Policy,
    Sighting,
    Status,
    Transition,
    retire,
    sight,
    sweep,
    unretire,
)

SECOND = 10**9
POLICY = Policy(100 * SECOND, 50 * SECOND)
BLIND = BlindSpans(((200 * SECOND, 260 * SECOND),))


class Step(NamedTuple):
    """A step of a history after some seconds: a message, or an action of an operator at the watermark."""

    kind: str
    seconds: int
    sweeps: tuple[int, ...]


steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(["message", "message", "retire", "unretire"]),
        st.sampled_from([0, 1, 49, 50, 51, 99, 100, 101, 250]),
        st.lists(st.integers(0, 250), max_size=3).map(lambda times: tuple(sorted(times))),
    ),
    max_size=25,
)
spans = st.just(BlindSpans()) | st.just(BLIND)


def replay(history: list[Step], blind: BlindSpans, *, swept: bool) -> tuple[NodeState | None, list[Transition]]:
    """Replay a history, with or without sweeps between its steps."""
    state: NodeState | None = None
    events: list[Transition] = []
    now_ns = 0
    for sequence, step in enumerate(history, 1):
        for seconds in step.sweeps if swept and state else ():
            assert state is not None
            if seconds <= step.seconds:
                state, passed = sweep(POLICY, state, now_ns + seconds * SECOND, blind)
                events += passed
        now_ns += step.seconds * SECOND
        passed = ()
        if step.kind == "message":
            state, _, passed = sight(POLICY, 0, state, Sighting(sequence, now_ns, 9, False), blind)
        elif state is not None and step.kind == "retire" and state.status is not Status.RETIRED:
            state, passed = retire(POLICY, state, now_ns, blind)
        elif state is not None and step.kind == "unretire":
            # A run sweeps before it acts.
            state, passed = sweep(POLICY, state, now_ns, blind)
            if state.status is Status.RETIRED:
                state = unretire(POLICY, state, now_ns, blind) or state
        events += passed
    return state, events


@given(steps, spans)
def test_actions_have_the_same_result_with_any_sweeps(history: list[Step], blind: BlindSpans) -> None:
    assert replay(history, blind, swept=True) == replay(history, blind, swept=False)


@example([Step(kind, 0, ()) for kind in ("message", "retire", "unretire", "retire")], BlindSpans())
@example([Step(kind, 0, ()) for kind in ("message", "retire", "message", "retire", "message")], BlindSpans())
@given(steps, spans)
def test_transitions_of_actions_are_a_chain_of_distinct_events(history: list[Step], blind: BlindSpans) -> None:
    state, events = replay(history, blind, swept=True)
    assert [event.transition for event in events] == list(range(1, len(events) + 1))
    assert len({(event.event, event.event_ns) for event in events}) == len(events)
    assert [event.event_ns for event in events] == sorted(event.event_ns for event in events)
    assert all(event.event is not Event.NEW or event.returned == (number > 0) for number, event in enumerate(events))
    if state is not None:
        assert state.transition == len(events)
        assert state.times_retired == sum(event.event is Event.EXPIRE for event in events)


def up(seen: int = 10) -> NodeState:
    return NodeState(0, seen * SECOND, 3, seen * SECOND, 9, Status.UP, 0, None, 0, 1)


def test_node_that_is_up_retires_with_a_single_expire() -> None:
    state, (event,) = retire(POLICY, up(), 30 * SECOND, BlindSpans())
    assert (event.event, event.event_ns, event.age_ns, event.previous) == (
        Event.EXPIRE, 30 * SECOND, 20 * SECOND, Status.UP,
    )  # fmt: skip
    assert (state.status, state.retired_at_ns, state.copied_ns) == (Status.RETIRED, 30 * SECOND, None)
    _, _, (new,) = sight(POLICY, 0, state, Sighting(4, 31 * SECOND, 9, False), BlindSpans())
    assert (new.event, new.returned, new.previous, new.outage_ns) == (Event.NEW, True, Status.RETIRED, 21 * SECOND)


def test_silent_node_retires_after_its_own_timeout() -> None:
    _, events = retire(POLICY, up(), 61 * SECOND, BlindSpans())
    assert [(event.event, event.event_ns) for event in events] == [
        (Event.TIMEOUT, 60 * SECOND), (Event.EXPIRE, 61 * SECOND),
    ]  # fmt: skip


def test_unretire_follows_the_silence_without_blind_time() -> None:
    retired, _ = retire(POLICY, up(190), 195 * SECOND, BLIND)
    for now, status in ((240, Status.UP), (300, Status.UP), (301, Status.TIMEOUT), (350, Status.TIMEOUT), (351, None)):
        restored = unretire(POLICY, retired, now * SECOND, BLIND)
        if status is None:
            assert restored is None
        else:
            assert restored == replace(retired, status=status, status_since_ns=now * SECOND, retired_at_ns=None)
