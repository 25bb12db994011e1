"""The fold of a batch: the rules themselves, one sender after the other; the same in this process as in Spark."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sr_assets.domain.blindness import NO_BLIND_SPANS, BlindSpans
from sr_assets.domain.tracking import (
    NODE_COLUMNS,
    NodeState,
    Policy,
    Sighting,
    Status,
    Transition,
    deadline_ns,
    sight,
    splay_ns,
)
from sr_assets.stages.tracking import columns
from sr_assets.stages.tracking.columns import BlindColumns, deadlines, state_of, state_values
from sr_assets.stages.tracking.fold import FOLDED_SCHEMA, fold_batch, folded_table, transition_row

SECOND = 1_000_000_000
POLICY = Policy(3600 * SECOND, 1800 * SECOND, 100)
KNOWN = NodeState(SECOND, 2 * SECOND, 7, 2 * SECOND, 50, Status.TIMEOUT, 2 * SECOND, None, 0, 2)

senders = st.sampled_from(["web1", "web2", "é", "db.example.net"])
anyhow = st.lists(
    st.tuples(senders, st.integers(0, 10_000), st.integers(0, 300), st.booleans()), max_size=30
)  # sender, seconds, payload bytes, forced
#: A fleet that goes on: mostly seen in time, sooner or later due.
steadily = st.lists(
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
sightings = anyhow | steadily
#: In seconds; most lengths matter to some silence.
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


@pytest.mark.parametrize("few", (1, 3, 64), ids=("together", "together, then one by one", "one by one"))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seen=sightings, nodes=known, blind=st.just(NO_BLIND_SPANS) | blind_spans)
def test_a_batch_is_folded_as_the_rules_fold_each_sender(
    few: int, monkeypatch: pytest.MonkeyPatch, seen: Sightings, nodes: dict[str, NodeState], blind: BlindSpans
) -> None:
    monkeypatch.setattr(columns, "_FEW", few)
    folded = fold_batch(fold_input(seen, nodes), POLICY, 5 * SECOND, blind, first_transition=30)
    assert folded.schema == FOLDED_SCHEMA
    assert in_order(folded.to_pylist()) == in_order(expected(seen, nodes, blind))


@given(blind_spans, st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 9_000)), min_size=1))
def test_columns_know_of_blind_time_what_the_spans_know(blind: BlindSpans, times: list[tuple[int, int]]) -> None:
    seen, lengths = (np.array(column, np.int64) * SECOND for column in zip(*times, strict=True))
    asked = BlindColumns(blind)
    pairs = list(zip(seen.tolist(), lengths.tolist(), strict=True))
    assert asked.silence_ns(seen, seen + lengths).tolist() == [
        length - blind.blind_ns(at, at + length) for at, length in pairs
    ]
    assert asked.exceeds_at_ns(seen, lengths).tolist() == [blind.exceeds_at_ns(at, length) for at, length in pairs]


@given(blind_spans, st.lists(st.sampled_from(Status), min_size=1), st.integers(0, 20_000))
def test_deadlines_of_many_senders_are_those_of_each(blind: BlindSpans, statuses: list[Status], seen: int) -> None:
    at_ns = seen * SECOND
    states = [NodeState(0, at_ns, 1, None, None, status, at_ns, None, 0, 1) for status in statuses]
    together = deadlines(POLICY, blind, pa.array(statuses), np.full(len(statuses), at_ns, np.int64))
    assert together.to_pylist() == [deadline_ns(POLICY, state, blind) for state in states]


def test_what_a_blind_span_hides_is_decided_for_all_senders_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet that went on while nobody could see costs no more than any other batch."""
    nodes = {f"web{number}": NodeState(0, 9, 1, 9, 50, Status.UP, 0, None, 0, 1) for number in range(100)}
    seen = [(name, 7_200, 50, False) for name in nodes]
    monkeypatch.setattr(columns, "sight", None)
    folded = fold_batch(fold_input(seen, nodes), POLICY, None, BlindSpans(((9, 7_190 * SECOND),)))
    assert set(folded["reason"].to_pylist()) == {None, "interval"}
    assert set(folded["event"].to_pylist()) == {None}


@given(known)
def test_a_state_comes_back_from_its_columns(nodes: dict[str, NodeState]) -> None:
    for state in nodes.values():
        values = [str(value) if isinstance(value, Status) else value for value in state_values(state)]
        assert state_of(values) == state
