"""Classes in the rules: random histories of nodes that change their class, in the scalar and the column form."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sr_assets.domain.blindness import NO_BLIND_SPANS, BlindSpans
from sr_assets.domain.tracking import columns
from sr_assets.domain.tracking.class_policies import NO_CLASS, ClassPolicies
from sr_assets.domain.tracking.columns import fold_batch, sweep_nodes
from sr_assets.domain.tracking.rows import (
    FOLDED_SCHEMA,
    NODE_SCHEMA,
    folded_table,
    node_row,
    node_table,
    state_of,
    transition_row,
)
from sr_assets.domain.tracking.rules import (
    NODE_COLUMNS,
    NodeState,
    Policy,
    Sighting,
    deadline_ns,
    sight,
    splay_ns,
    sweep,
)
from sr_assets_tests.domain.test_tracking_columns import (
    SECOND,
    Sightings,
    blind_spans,
    fold_input,
    sightings,
    silent_nodes,
)

CLASSES = ClassPolicies(
    Policy(3600 * SECOND, 1800 * SECOND, 100),
    ("fast", "slow"),
    (Policy(600 * SECOND, 300 * SECOND, 100), Policy(7200 * SECOND, 5400 * SECOND, 100)),
)
NAMES = (*CLASSES.names, None)
names = st.sampled_from(NAMES)
#: A class for each of at most 60 sightings.
kinds = st.lists(names, min_size=60, max_size=60)
Known = dict[str, tuple[NodeState, str | None]]
Results = tuple[list[tuple[int, str]], Known, list[tuple[object, ...]]]


def policy_of(name: str | None) -> Policy:
    return CLASSES.of(NO_CLASS if name is None else CLASSES.names.index(name))


def fold(seen: Sightings, classes: list[str | None], known: Known, blind: BlindSpans, first: int) -> Results:
    """Fold a batch in columns; `first` is the sequence of its first sighting."""
    table = fold_input(seen, {name: state for name, (state, _) in known.items()})
    sequences = [sequence and sequence - 10 + first for sequence in table["sighting"].to_pylist()]
    table = table.set_column(1, "sighting", pa.array(sequences, pa.int64()))
    labels = [*(name for _, name in known.values()), *classes[: len(seen)]]
    table = table.append_column("class", pa.array(labels, pa.string()))
    folded = fold_batch(table, CLASSES.own, 5 * SECOND, blind, 30, None, CLASSES).to_pylist()
    decisions = [(row["decided"], row["reason"]) for row in folded if row["reason"]]
    states = {
        row["sender"]: (state_of([row[column] for column in NODE_COLUMNS]), row["class"])
        for row in folded
        if row["seen_ns"] is not None
    }
    for row in folded:
        if row["seen_ns"] is not None:
            state, label = states[row["sender"]]
            assert row["deadline_ns"] == deadline_ns(policy_of(label), state, blind)
    events = [row for row in folded if row["event"]]
    events.sort(key=lambda row: (row["sender"], row["event_transition"]))
    rows = [tuple(row[name] for name in EVENT) for row in events]
    return sorted(decisions), known | states, rows


EVENT = tuple(name for name in FOLDED_SCHEMA.names if name.startswith("event") or name in ("sender", "class"))


def scalar(seen: Sightings, classes: list[str | None], blind: BlindSpans) -> Results:
    """Fold a history by the scalar rules, with the policy of the class before and after each message."""
    known: Known = {}
    decisions, events = [], []
    for sequence, ((name, seconds, payload_bytes, forced), now) in enumerate(zip(seen, classes, strict=False), 1):
        state, before = known.get(name, (None, None))
        policy, sighting = policy_of(now), Sighting(sequence, seconds * SECOND, payload_bytes, forced)
        splay = splay_ns(name, policy.interval_ns)
        after, decision, transitions = sight(
            policy, splay, state, sighting, blind, 5 * SECOND, 30, silence=policy_of(before)
        )
        known[name] = after, now
        decisions.append((sequence, decision.reason.value))
        silent = ("timeout", "expire")
        events += [transition_row(name, event, before if event.event in silent else now) for event in transitions]
    rows = folded_table(events).sort_by([("sender", "ascending"), ("event_transition", "ascending")])
    return sorted(decisions), known, [tuple(row[name] for name in EVENT) for row in rows.to_pylist()]


def in_schema(known: Known, blind: BlindSpans) -> pa.Table:
    return node_table(
        [node_row(policy_of(label), name, state, blind, label) for name, (state, label) in sorted(known.items())]
    )


@pytest.mark.parametrize("few", (1, 64), ids=("columns", "scalar"))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seen=sightings, classes=kinds, blind=st.just(NO_BLIND_SPANS) | blind_spans, cut=st.integers(0, 60))
def test_any_cut_of_a_history_equals_the_scalar_rules(
    few: int, monkeypatch: pytest.MonkeyPatch, seen: Sightings, classes: list[str | None], blind: BlindSpans, cut: int
) -> None:
    monkeypatch.setattr(columns, "_FEW", few)
    cut = min(cut, len(seen))
    decided, known, events = fold(seen[:cut], classes, {}, blind, 1)
    later, known, more = fold(seen[cut:], classes[cut:], known, blind, cut + 1)
    whole = scalar(seen, classes, blind)
    assert decided + later == whole[0]
    assert known == whole[1]
    assert sorted(map(repr, events + more)) == sorted(map(repr, whole[2]))


@given(st.lists(st.tuples(silent_nodes, names), min_size=1, max_size=20), st.just(BlindSpans()) | blind_spans)
def test_sweep_of_classes_equals_the_scalar_sweep(nodes: list[tuple[NodeState, str | None]], blind: BlindSpans) -> None:
    now_ns = 20_000 * SECOND
    before = {f"web{number:02}": node for number, node in enumerate(nodes)}
    swept: Known = {}
    changes = []
    for name, (state, label) in before.items():
        after, transitions = sweep(policy_of(label), state, now_ns, blind)
        swept[name] = after, label
        changes += [transition_row(name, transition, label) for transition in transitions]
    due = in_schema(before, blind).drop(["deadline_ns"])
    assert due.schema.names == [name for name in NODE_SCHEMA.names if name != "deadline_ns"]
    assert sweep_nodes(CLASSES.own, due, now_ns, blind, CLASSES) == (in_schema(swept, blind), folded_table(changes))
