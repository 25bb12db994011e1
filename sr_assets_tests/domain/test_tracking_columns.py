"""The column form of the rules, compared with the scalar rules."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sr_assets.domain.blindness import NO_BLIND_SPANS, BlindSpans
from sr_assets.domain.tracking import columns
from sr_assets.domain.tracking.columns import BlindColumns, deadlines, fold_batch, sweep_nodes
from sr_assets.domain.tracking.rows import (
    FOLDED_SCHEMA,
    folded_table,
    node_row,
    node_table,
    state_of,
    state_values,
    transition_row,
)
from sr_assets.domain.tracking.rules import (
    NODE_COLUMNS,
    NodeState,
    Policy,
    Sighting,
    Status,
    Transition,
    deadline_ns,
    sight,
    splay_ns,
    sweep,
)

SECOND = 1_000_000_000
POLICY = Policy(3600 * SECOND, 1800 * SECOND, 100)
KNOWN = NodeState(SECOND, 2 * SECOND, 7, 2 * SECOND, 50, Status.TIMEOUT, 2 * SECOND, None, 0, 2)

senders = st.sampled_from(["web1", "web2", "é", "db.example.net"])
arbitrary = st.lists(
    st.tuples(senders, st.integers(0, 10_000), st.integers(0, 300), st.booleans()), max_size=30
)  # sender, seconds, payload bytes, forced
#: A steady fleet: most sightings are in time, and every sender becomes due.
steady = st.lists(
    st.tuples(
        senders,
        st.sampled_from([0, 100, 300, 599, 600, 1799, 1800, 1801]),
        st.sampled_from([0, 50, 149, 150]),
        st.sampled_from([False, False, False, True]),
    ),
    max_size=60,
).map(
    lambda steps: [
        (name, 10 + sum(seconds for _, seconds, *_ in steps[: at + 1]), *rest)
        for at, (name, _, *rest) in enumerate(steps)
    ]
)
sightings = arbitrary | steady
#: Lengths (1 s to 5,000 s) around the limits of the policy.
blind_spans = st.lists(
    st.tuples(st.integers(0, 20_000), st.sampled_from([1, 600, 1800, 5_000])).map(
        lambda span: (span[0] * SECOND, sum(span) * SECOND)
    ),
    max_size=6,
).map(lambda spans: BlindSpans(tuple(spans)))
known = st.dictionaries(senders, st.sampled_from([KNOWN, NodeState(0, 0, 3, None, None, Status.UP, 0, None, 1, 4)]))
Sightings = list[tuple[str, int, int, bool]]


def fold_input(seen: Sightings, nodes: dict[str, NodeState]) -> pa.Table:
    rows = [(name, 0, 0, 0, False, *state_values(state)) for name, state in nodes.items()]
    for sequence, (name, seconds, payload_bytes, forced) in enumerate(seen, 10):
        rows.append((name, sequence, seconds * SECOND, payload_bytes, forced, *(None,) * len(NODE_COLUMNS)))
    kinds = {"sender": pa.string(), "forced": pa.bool_(), "status": pa.string()}
    names = ("sender", "sighting", "stored_ns", "payload_bytes", "forced", *NODE_COLUMNS)
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    return pa.table(
        {name: pa.array(column, kinds.get(name, pa.int64())) for name, column in zip(names, columns, strict=True)}
    )


def expected(seen: Sightings, nodes: dict[str, NodeState], blind: BlindSpans) -> list[dict[str, Any]]:
    states, changes, decided = dict(nodes), [], []
    for sequence, (name, seconds, payload_bytes, forced) in enumerate(seen, 10):
        splay = splay_ns(name, POLICY.interval_ns)
        sighting = Sighting(sequence, seconds * SECOND, payload_bytes, forced)
        states[name], decision, transitions = sight(POLICY, splay, states.get(name), sighting, blind, 5 * SECOND, 30)
        decided.append({"sender": name, "decided": sequence, "reason": decision.reason.value})
        changes += [(name, transition) for transition in transitions]
    ends = [
        {
            "sender": name,
            **dict(zip(NODE_COLUMNS, state_values(state), strict=True)),
            "status": state.status.value,
            "deadline_ns": deadline_ns(POLICY, state, blind),
        }
        for name, state in states.items()
    ]
    blank = dict.fromkeys(FOLDED_SCHEMA.names)
    return [{**blank, **row} for row in (*decided, *ends)] + transition_rows(changes)


def transition_rows(changes: list[tuple[str, Transition]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = folded_table([transition_row(name, change) for name, change in changes]).to_pylist()
    return rows


def in_order(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(map(repr, rows))


@pytest.mark.parametrize("few", (1, 3, 64), ids=("columns", "columns, then scalar", "scalar"))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seen=sightings, nodes=known, blind=st.just(NO_BLIND_SPANS) | blind_spans)
def test_fold_batch_equals_the_scalar_rules(
    few: int, monkeypatch: pytest.MonkeyPatch, seen: Sightings, nodes: dict[str, NodeState], blind: BlindSpans
) -> None:
    monkeypatch.setattr(columns, "_FEW", few)
    folded = fold_batch(fold_input(seen, nodes), POLICY, 5 * SECOND, blind, first_transition=30)
    assert folded.schema == FOLDED_SCHEMA
    assert in_order(folded.to_pylist()) == in_order(expected(seen, nodes, blind))


@given(blind_spans, st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 9_000)), min_size=1))
def test_blind_columns_equal_blind_spans(blind: BlindSpans, times: list[tuple[int, int]]) -> None:
    seen, lengths = (np.array(column, np.int64) * SECOND for column in zip(*times, strict=True))
    together = BlindColumns(blind)
    pairs = list(zip(seen.tolist(), lengths.tolist(), strict=True))
    assert together.silence_ns(seen, seen + lengths).tolist() == [
        length - blind.blind_ns(at, at + length) for at, length in pairs
    ]
    assert together.exceeds_at_ns(seen, lengths).tolist() == [blind.exceeds_at_ns(at, length) for at, length in pairs]


@given(blind_spans, st.lists(st.sampled_from(Status), min_size=1), st.integers(0, 20_000))
def test_deadlines_equal_the_scalar_deadline(blind: BlindSpans, statuses: list[Status], seen: int) -> None:
    at_ns = seen * SECOND
    states = [NodeState(0, at_ns, 1, None, None, status, at_ns, None, 0, 1) for status in statuses]
    together = deadlines(POLICY, blind, pa.array(statuses), np.full(len(statuses), at_ns, np.int64))
    assert together.to_pylist() == [deadline_ns(POLICY, state, blind) for state in states]


def test_blind_silence_is_decided_without_the_scalar_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {f"web{number}": NodeState(0, 9, 1, 9, 50, Status.UP, 0, None, 0, 1) for number in range(100)}
    seen = [(name, 7_200, 50, False) for name in nodes]
    monkeypatch.setattr(columns, "sight", None)
    folded = fold_batch(fold_input(seen, nodes), POLICY, None, BlindSpans(((9, 7_190 * SECOND),)))
    assert set(folded["reason"].to_pylist()) == {None, "interval"}
    assert set(folded["event"].to_pylist()) == {None}


def test_new_fleet_is_decided_without_the_scalar_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first node's message is too old to copy; the others send another one.
    seen = [(f"web{number}", 4 + number, 50, False) for number in range(100)]
    monkeypatch.setattr(columns, "sight", None)
    folded = fold_batch(fold_input(seen + seen[1:], {}), POLICY, 5 * SECOND, NO_BLIND_SPANS, first_transition=30)
    assert Counter(folded["reason"].to_pylist()) == {"too_old": 1, "new": 99, "sampled": 99, None: 200}
    assert Counter(folded["event"].to_pylist()) == {"new": 100, None: 299}


@given(known)
def test_state_of_inverts_state_values(nodes: dict[str, NodeState]) -> None:
    for state in nodes.values():
        values = [str(value) if isinstance(value, Status) else value for value in state_values(state)]
        assert state_of(values) == state


NOW_NS = 20_000 * SECOND
BLIND = BlindSpans(((15_000 * SECOND, 15_600 * SECOND),))
#: Seconds, on both sides of each limit, with and without the blind span.
SILENCES = (0, 1_799, 1_800, 1_801, 2_401, 3_599, 3_600, 3_601, 4_200, 4_201, 9_000)
silent_nodes = st.builds(
    lambda silence, status, since, copied: NodeState(
        SECOND,
        NOW_NS - silence * SECOND,
        7,
        copied,
        copied,
        status,
        NOW_NS - min(since, silence) * SECOND,
        NOW_NS if status is Status.RETIRED else None,
        int(status is Status.RETIRED),
        3,
    ),
    st.sampled_from(SILENCES),
    st.sampled_from(Status),
    st.sampled_from(SILENCES),
    st.sampled_from([None, 50]),
)


@given(st.lists(silent_nodes, min_size=1, max_size=20), st.just(BlindSpans()) | st.just(BLIND))
def test_sweep_nodes_equals_the_scalar_sweep(nodes: list[NodeState], blind: BlindSpans) -> None:
    states = {f"web{number}": state for number, state in enumerate(nodes)}
    swept, changes = {}, []
    for name, state in states.items():
        swept[name], transitions = sweep(POLICY, state, NOW_NS, blind)
        changes += [transition_row(name, transition) for transition in transitions]
    before, after = (
        node_table([node_row(POLICY, name, state, blind) for name, state in each.items()]) for each in (states, swept)
    )
    assert sweep_nodes(POLICY, before.drop(["deadline_ns"]), NOW_NS, blind) == (after, folded_table(changes))
