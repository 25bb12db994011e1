"""Lanes: which one takes a subject, folds of lanes read in parallel, and copies of lanes after a crash."""

from __future__ import annotations

import random
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters.copying.receipt import Receipt
from sr_assets.domain.blindness import NO_BLIND_SPANS
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange, missing
from sr_assets.domain.subjects import lane_check, lane_finder
from sr_assets.domain.tracking.columns import fold_batch
from sr_assets.domain.tracking.rows import state_of, state_values
from sr_assets.domain.tracking.rules import NODE_COLUMNS, NodeState, Policy, Sighting, sight, splay_ns

SECOND = 1_000_000_000
POLICY = Policy(3600 * SECOND, 1800 * SECOND, 100)
#: Sender, seconds since the previous message, payload bytes, forced.
histories = st.lists(
    st.tuples(
        st.sampled_from(["web1", "web2", "é", "db.example.net", "n5"]),
        st.sampled_from([0, 100, 599, 1799, 1800, 1801, 4000]),
        st.sampled_from([0, 50, 150]),
        st.sampled_from([False, False, True]),
    ),
    max_size=40,
)
History = list[tuple[str, int, int, bool]]
Row = tuple[int, int, str, int, bool]


def rows_of(history: History) -> list[Row]:
    """Return sequence, stored seconds, sender, bytes and force flag of each message."""
    seconds, rows = 0, []
    for sequence, (sender, step, size, forced) in enumerate(history, 1):
        seconds += step
        rows.append((sequence, seconds, sender, size, forced))
    return rows


def naive(rows: list[Row]) -> tuple[dict[str, NodeState], list[str]]:
    """Return the states and the transitions of the scalar rules, message by message."""
    states: dict[str, NodeState] = {}
    changes = []
    for sequence, seconds, sender, size, forced in rows:
        sighting = Sighting(sequence, seconds * SECOND, size, forced)
        splay = splay_ns(sender, POLICY.interval_ns)
        states[sender], _, transitions = sight(POLICY, splay, states.get(sender), sighting, NO_BLIND_SPANS, None, 0)
        changes += [f"{sender} {change.event} {change.event_ns} {change.transition}" for change in transitions]
    return states, sorted(changes)


def folded(batches: list[list[Row]]) -> tuple[dict[str, NodeState], list[str]]:
    """Return the same of the column form, batch by batch; the rows of a batch are in order of sequences."""
    states: dict[str, NodeState] = {}
    changes = []
    names = ("sender", "sighting", "stored_ns", "payload_bytes", "forced", *NODE_COLUMNS)
    kinds = {"sender": pa.string(), "forced": pa.bool_(), "status": pa.string()}
    for batch in batches:
        wanted = {row[2] for row in batch}
        table = [(name, 0, 0, 0, False, *state_values(states[name])) for name in states.keys() & wanted]
        table += [
            (sender, sequence, seconds * SECOND, size, forced, *(None,) * len(NODE_COLUMNS))
            for sequence, seconds, sender, size, forced in batch
        ]
        columns = zip(*table, strict=True) if table else [()] * len(names)
        arrays = [pa.array(column, kinds.get(name, pa.int64())) for name, column in zip(names, columns, strict=True)]
        for row in fold_batch(pa.table(arrays, names), POLICY, None, NO_BLIND_SPANS, first_transition=0).to_pylist():
            if row["status"] is not None:
                states[row["sender"]] = state_of([row[name] for name in NODE_COLUMNS])
            if row["event"] is not None:
                changes.append(f"{row['sender']} {row['event']} {row['event_ns']} {row['event_transition']}")
    return states, sorted(changes)


@given(histories, st.integers(1, 5), st.integers(1, 5), st.lists(st.integers(0, 40), max_size=4), st.randoms())
def test_lanes_fold_like_one_stream_across_cuts_and_a_changed_count(
    history: History, before: int, after: int, cuts: list[int], chance: random.Random
) -> None:
    rows = rows_of(history)
    change = chance.randint(0, len(rows))
    batches = []
    for first, end in pairwise([0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]):
        lanes: dict[int, list[Row]] = {}
        for row in rows[first:end]:
            # Some senders are in several lanes.
            number = sum(row[2].encode()) if chance.random() < 0.8 else chance.randint(0, 9)
            lanes.setdefault(number % (before if row[0] <= change else after), []).append(row)
        read = [row for lane in chance.sample(sorted(lanes), len(lanes)) for row in lanes[lane]]
        batches.append(sorted(read))
    assert folded(batches) == naive(rows)


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 4), st.integers(1, 4), st.randoms())
def test_changed_lanes_keep_each_senders_order_after_a_crash(
    senders: list[int], before: int, after: int, chance: random.Random
) -> None:
    """Each old lane has copied its first messages of a batch, in any interleaving. One writer copies what is missing, up
    to the change; then the new lanes continue.
    """

    def interleaved(lanes: list[list[int]]) -> list[int]:
        stored, queues = [], [lane[:] for lane in lanes if lane]
        while queues:
            queue = chance.choice(queues)
            stored.append(queue.pop(0))
            queues = [lane for lane in queues if lane]
        return stored

    def divided(batch: range, count: int) -> list[list[int]]:
        return [[at for at in batch if senders[at] % count == lane] for lane in range(count)]

    end = chance.randint(0, len(senders))
    change = chance.randint(end, len(senders))
    stored = interleaved([lane[: chance.randint(0, len(lane))] for lane in divided(range(end), before)])
    stored += sorted(set(range(change)) - set(stored))
    stored += interleaved(divided(range(change, len(senders)), after))
    assert sorted(stored) == list(range(len(senders)))
    for sender in set(senders):
        own = [at for at in stored if senders[at] == sender]
        assert own == sorted(own)


@given(st.lists(st.lists(st.integers(1, 60), min_size=1, unique=True).map(sorted), max_size=4))
def test_receipts_of_lanes_name_the_sequences_that_none_has_read(lanes: list[list[int]]) -> None:
    total = Receipt()
    for lane in lanes:
        receipt = Receipt()
        receipt.hold(lane)
        total.add(Receipt.decode(receipt.encode()))
    held = sorted(sequence for first, after in total.held for sequence in range(first, after))
    assert held == sorted(sequence for lane in lanes for sequence in lane)
    absent = [sequence for hole in missing(SequenceRange(1, 61), held) for sequence in range(hole.first, hole.next)]
    assert absent == sorted(set(range(1, 61)) - set(held))


def test_lane_check_names_the_message_that_no_lane_takes() -> None:
    lanes = ["nodes.0.>", "nodes.1.*"]
    inside = [Message(1, 0, "nodes.0.a.b", b"", b""), Message(2, 0, "nodes.1.a", b"", b"")]
    lane_check("S", lanes)(inside)
    lane_check("S", [])([Message(3, 0, "other", b"", b"")])
    with pytest.raises(RunError, match=r"S holds message 3 with subject nodes\.1\.a\.b, which no partition takes; add"):
        lane_check("S", lanes)([*inside, Message(3, 0, "nodes.1.a.b", b"", b"")])
    assert [lane_finder(lanes)(subject) for subject in ("nodes.0.a", "nodes.1.b", "nodes.2.c")] == [0, 1, None]
