"""Rebuilt nodes: the fold that continues with them makes the same copies as one that never stopped."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.messages import Message
from sr_assets.domain.received import LIFE_CYCLE, Advisory
from sr_assets.domain.tracking.rules import Event, NodeState, Sighting, Transition, sight, splay_ns
from sr_assets.settings import StreamSettings, load_settings
from sr_assets.stages.replication.found_copies import Copy
from sr_assets.stages.replication.rebuilding import (
    Announced,
    Rebuilt,
    continue_announced,
    rebuild_nodes,
    restore_blind_time,
)
from sr_assets.stages.replication.target_copies import Copies

BEGIN_NS = 1_700_000_000_000_000_000
STEP_NS = 100_000_000
INTERVAL_STEPS = 120


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> StreamSettings:
    """A stream with an interval of 12 s."""
    file = tmp_path_factory.mktemp("settings") / "replication.yaml"
    entry = "{stream: S, source_url: nats://a, target_url: nats://b, inspect_field: sender, inspect_duration: 12s}"
    file.write_text(f"name: LONDON\nstreams: [{entry}]\n")
    return load_settings(file, {"SR_ASSETS_HOME": str(file.parent)}).streams[0]


Nodes = dict[str, NodeState]


def fold(
    stream: StreamSettings, nodes: Nodes, messages: list[Message]
) -> tuple[list[int], list[tuple[str, Transition]]]:
    """Fold messages into nodes; return the copied sequences and the transitions."""
    assert stream.policy is not None
    copied, events = [], []
    for message in messages:
        node = json.loads(message.payload)["sender"]
        sighting = Sighting(message.sequence, message.stored_ns, len(message.payload), forced=False)
        before, splay = nodes.get(node), splay_ns(node, stream.policy.interval_ns)
        nodes[node], decision, transitions = sight(stream.policy, splay, before, sighting, Rebuilt().blind)
        events += [(node, transition) for transition in transitions]
        if decision.copy:
            copied.append(message.sequence)
    return copied, events


def advisory(stream: StreamSettings, node: str, event: Transition) -> Advisory:
    return Advisory(
        stream.replicator, stream.name, stream.stream, node, 1, event.transition, event.event_ns,
        LIFE_CYCLE.index(event.event), event.seen_ns, "ours", f"{event.event} {node} {event.event_ns}", event.age_ns / 1e9,
        None, False, False, None,
    )  # fmt: skip


STEPS = st.lists(st.tuples(st.integers(1, INTERVAL_STEPS + 20), st.sampled_from("abc")), min_size=2, max_size=40)


@given(steps=STEPS, at=st.integers(0, 1_000), deleted=st.sets(st.integers(1, 40)))
@example(steps=[(1, "a"), (40, "a"), (70, "a")], at=0, deleted=set())
def test_rebuilt_nodes_continue_with_the_copies_that_the_rules_demand(
    stream: StreamSettings, steps: list[tuple[int, str]], at: int, deleted: set[int]
) -> None:
    """The copies end somewhere, the fold had read and announced more, and the source has lost some copied messages."""
    times = [BEGIN_NS]
    for wait, _ in steps:
        times.append(times[-1] + wait * STEP_NS)
    messages = [
        Message(number, stored_ns, "s", b"", json.dumps({"sender": node}).encode())
        for number, ((_, node), stored_ns) in enumerate(zip(steps, times[1:], strict=True), 1)
    ]
    copied, events = fold(stream, {}, messages)
    last = copied[at % len(copied)]
    copies, rebuilt = Copies(), Rebuilt()
    for number, sequence in enumerate(copied, 1):
        if sequence <= last:
            message = messages[sequence - 1]
            sender = json.loads(message.payload)["sender"]
            copies.here.add(Copy(number, sequence, message.stored_ns, len(message.payload), sender))
    copies.here.sort_by_sequence()
    held = [each for each in messages[:last] if each.sequence not in deleted.intersection(copied)]
    rebuild_nodes(stream, copies, held[0].sequence if held else last + 1, held, rebuilt)
    reread_ns = messages[last].stored_ns if last < len(messages) else None
    advisories = [advisory(stream, node, event) for node, event in events]
    announced = Announced(reread_ns)
    for each in advisories:
        announced.note(each)
    if announced.after:
        assert announced.find_messages(stream, messages[last:]) is None
    continue_announced(stream, rebuilt, announced, {})
    assert fold(stream, rebuilt.nodes, messages[last:])[0] == [sequence for sequence in copied if sequence > last]


@given(
    seen=st.lists(st.integers(0, 200), min_size=1, max_size=6),
    hole=st.tuples(st.integers(0, 200), st.integers(1, 50)),
    told_until=st.integers(0, 400),
)
def test_restored_blind_time_ends_announced_silences_at_their_times(
    stream: StreamSettings, seen: list[int], hole: tuple[int, int], told_until: int
) -> None:
    """Each node reports once, and the source was reset: no message comes from within the hole."""
    assert stream.policy is not None
    hole_ns = BEGIN_NS + hole[0] * STEP_NS, BEGIN_NS + sum(hole) * STEP_NS
    blind, announced, rebuilt = BlindSpans((hole_ns,)), Announced(reread_ns=BEGIN_NS), Rebuilt()
    limits = {Event.TIMEOUT: stream.policy.warning_ns, Event.EXPIRE: stream.policy.interval_ns}
    silences = []
    for number, step in enumerate(seen):
        seen_ns, node = BEGIN_NS + step * STEP_NS, f"n{number}"
        if hole_ns[0] < seen_ns < hole_ns[1]:
            continue
        for event, limit_ns in limits.items():
            at_ns = blind.exceeds_at_ns(seen_ns, limit_ns)
            if at_ns <= BEGIN_NS + told_until * STEP_NS:
                silences.append((seen_ns, limit_ns, at_ns))
                told = advisory(
                    stream, node, Transition(event, at_ns, seen_ns, at_ns - seen_ns, 1, None, 2, False, None)
                )
                announced.note(told)
                announced.times_ns[told.event_id] = seen_ns
    restore_blind_time(stream, rebuilt, announced)
    assert [rebuilt.blind.exceeds_at_ns(*silence[:2]) for silence in silences] == [at_ns for *_, at_ns in silences]
