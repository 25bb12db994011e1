"""The replay of a range of a stream: a survey of its sequences and times, and the fold of its sightings, batch by batch.

A survey reads each part of the range on its own; the blind spans follow from all parts together. The fold then needs all
sightings of a sender in order, and no other sender's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sr_assets.domain.blindness import CLOCK_AHEAD, BlindSpans, Span, find_blind_spans
from sr_assets.domain.positions import CLOCK_TOLERANCE_NS, SequenceRange
from sr_assets.domain.tracking.columns import fold_batch, sweep_nodes
from sr_assets.domain.tracking.rows import NODE_SCHEMA
from sr_assets.domain.tracking.rules import NODE_COLUMNS, SAMPLED, TOO_OLD

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sr_assets.domain.tracking.class_policies import ClassPolicies
    from sr_assets.domain.tracking.rules import Policy

    Integers = NDArray[np.int64]

#: A stretch: consecutive messages of one part of a range, without a lost one between them, from `first` to before `next`.
#: `highest_ns` is the latest credible time until its end, `lowest_ns` its earliest time. Its first message with a time after
#: all earlier ones has the sequence `rise` and the time `rise_ns`. `ahead`: its times are not credible; `behind`: they are
#: more than the tolerance before an earlier one.
STRETCH: Final = (
    "part long, first long, next long, highest_ns long, lowest_ns long, rise long, rise_ns long, ahead boolean,"
    " behind boolean"
)
#: Results of the fold. A transition: node, event, event_ns, previous. A copy: node, event `copy`, its stored time and
#: sequence. A node: its final status in `previous`, its first and last sighting, and its copies in the range. Without a
#: node: the numbers of messages and of copies without a sender.
REPLAYED: Final = (
    "node string, event string, event_ns long, previous string, sequence long, first_ns long, seen_ns long, copies long,"
    " messages long"
)
#: The event of a copy.
COPY: Final = "copy"
_UNKNOWN_NS: Final = -1
_FOLDED_TOGETHER: Final = 200_000
_NOT_COPIED: Final = (SAMPLED.reason.value, TOO_OLD.reason.value)


def survey_part(
    number: int, sequence: Integers, stored_ns: Integers, before_ns: int, until_ns: int, lost: Integers | None
) -> list[Any]:
    """Return the stretches of one part, not empty, as the columns of `STRETCH`.

    `before_ns` is the latest credible time of the parts before it, `until_ns` a time that every right clock has reached at
    the end of the range. `lost` are the sequences that the source has deleted, if it is known that it holds all others.
    """
    ahead = stored_ns - until_ns > CLOCK_TOLERANCE_NS
    highest = np.maximum.accumulate(np.maximum(np.where(ahead, _UNKNOWN_NS, stored_ns), before_ns))
    earlier = np.concatenate(([before_ns], highest[:-1]))
    behind = earlier - stored_ns > CLOCK_TOLERANCE_NS
    after_gap = np.diff(sequence, prepend=sequence[0] - 1) > 1
    if lost is not None:
        deleted = np.searchsorted(lost, sequence)
        after_gap &= np.diff(deleted, prepend=deleted[0]) > 0
    kind = ahead + 2 * behind
    starts = np.flatnonzero(after_gap | (np.diff(kind, prepend=-1) != 0))
    rises = np.flatnonzero(~ahead & (stored_ns > earlier))
    nexts = np.append(starts[1:], len(sequence))
    rise = np.append(rises, len(sequence))[np.searchsorted(rises, starts)]
    has_rise = rise < nexts
    rise = np.minimum(rise, len(sequence) - 1)
    return [
        np.full(len(starts), number),
        sequence[starts],
        sequence[nexts - 1] + 1,
        highest[nexts - 1],
        np.minimum.reduceat(stored_ns, starts),
        pa.array(sequence[rise], mask=~has_rise),
        pa.array(stored_ns[rise], mask=~has_rise),
        ahead[starts],
        behind[starts],
    ]


@dataclass(frozen=True, slots=True)
class Survey:
    """The stretches of a whole range, in order."""

    stretches: pa.Table

    def latest_before(self, parts: int) -> list[int]:
        """Return the latest credible time before each part; negative before the first message."""
        highest = np.full(parts, _UNKNOWN_NS, np.int64)
        np.maximum.at(highest, self.stretches["part"].to_numpy(), self.stretches["highest_ns"].to_numpy())
        before: list[int] = np.maximum.accumulate(np.concatenate(([_UNKNOWN_NS], highest[:-1]))).tolist()
        return before

    @property
    def first_ns(self) -> int:
        """The earliest time of the first stretch; negative without a message."""
        return int(self.stretches["lowest_ns"][0].as_py()) if self.stretches.num_rows else _UNKNOWN_NS

    def absent(self, covered: SequenceRange) -> list[SequenceRange]:
        """Return the ranges between the stretches of a range."""
        edges = zip(
            [covered.first, *self.stretches["next"].to_pylist()],
            [*self.stretches["first"].to_pylist(), covered.next],
            strict=True,
        )
        return [SequenceRange(first, after) for first, after in edges if first < after]

    def blind_spans(self, holes: Iterable[tuple[SequenceRange, str]], until_ns: int) -> list[Span]:
        """Return the blind spans of holes, and of messages with times that are not credible, until a time."""
        sequences, stored_ns, unclear = list[int](), list[int](), list[tuple[SequenceRange, str]]()
        for row in self.stretches.to_pylist():
            if row["ahead"]:
                unclear.append((SequenceRange(row["first"], row["next"]), CLOCK_AHEAD))
                continue
            last = row["next"] - 1
            if row["rise"] is not None and row["rise"] < last:
                sequences.append(row["rise"])
                stored_ns.append(row["rise_ns"])
            sequences.append(last)
            # The last message counts with the latest time so far, which is its own or an earlier one's.
            stored_ns.append(row["highest_ns"])
        spans, _ = find_blind_spans(
            [*holes, *unclear], sequences, stored_ns, before_ns=None, after_hole=False, until_ns=until_ns
        )
        return spans

    def unclear_times(self) -> list[Span]:
        """Return the spans in which the order of the stored times shows that a clock was wrong by more than an hour."""
        rows = [row for row in self.stretches.to_pylist() if row["ahead"] or row["behind"]]
        return [(min(row["lowest_ns"], row["highest_ns"]), row["highest_ns"] + 1) for row in rows]

    @property
    def times_ahead(self) -> tuple[Integers, Integers, Integers]:
        """The ranges of messages whose time is not credible, and the time that each range has instead."""
        rows = self.stretches.filter(self.stretches["ahead"])
        first, after, highest = (rows[name].to_numpy() for name in ("first", "next", "highest_ns"))
        # Before the first credible message, that one's time counts.
        rises = self.stretches["rise_ns"].drop_null()
        return first, after, np.where(highest < 0, rises[0].as_py() if len(rises) else 0, highest)


@dataclass(frozen=True, slots=True)
class RangeRules:
    """The rules of a replay: transitions and copies count from `since_ns` to before `until_ns`, both in stored time.

    Silence is known until `swept_ns`, which may be before the last messages, as the watermark of a run is.
    `times_ahead` are those of the survey. The messages `known_copies` were copied; they are copies in the replay too. With
    `lists_copies`, each copy is a row of the results.
    """

    policy: Policy
    classes: ClassPolicies | None
    spans: BlindSpans
    since_ns: int
    until_ns: int
    swept_ns: int
    times_ahead: tuple[Integers, Integers, Integers]
    known_copies: Integers
    lists_copies: bool


def fold_range(batches: Iterator[pa.RecordBatch], rules: RangeRules) -> Iterator[pa.Table]:
    """Fold sightings, in order of sequence, of some of the senders; yield tables with some columns of `REPLAYED`.

    The senders are unknown before. Memory holds their states and a part of the sightings.
    """
    states = NODE_SCHEMA.empty_table()
    copies: dict[str, int] = {}
    messages = without_sender = 0
    for rows in _gathered(batches):
        sightings = _with_credible_times(rows, rules)
        inside = pc.greater_equal(sightings["stored_ns"], rules.since_ns)
        messages += pc.sum(inside).as_py() or 0
        without_sender += pc.sum(pc.and_(inside, pc.is_null(sightings["sender"]))).as_py() or 0
        sightings = sightings.filter(pc.is_valid(sightings["sender"]))
        if not sightings.num_rows:
            continue
        known = states.filter(pc.is_in(states["node"], sightings["sender"].combine_chunks()))
        folded = fold_batch(
            _fold_input(sightings, known, rules.known_copies), rules.policy, None, rules.spans, classes=rules.classes
        )
        seen = folded.filter(pc.is_valid(folded["seen_ns"]))
        seen = seen.select(["sender", *NODE_COLUMNS, "deadline_ns", "class"]).rename_columns(NODE_SCHEMA.names)
        others = states.filter(pc.invert(pc.is_in(states["node"], seen["node"].combine_chunks())))
        states = pa.concat_tables([others, seen])
        yield _transitions(folded, rules)
        copied = _copied(folded, sightings, rules)
        for row in pc.value_counts(copied["node"]).to_pylist():
            copies[row["values"]] = copies.get(row["values"], 0) + row["counts"]
        if rules.lists_copies:
            yield copied
    states, transitions = sweep_nodes(rules.policy, states, rules.swept_ns, rules.spans, rules.classes)
    yield _transitions(transitions, rules)
    counts = [copies.get(node, 0) for node in states["node"].to_pylist()]
    names = {"node": "node", "previous": "status", "first_ns": "first_seen_ns", "seen_ns": "seen_ns"}
    nodes = {name: states[column] for name, column in names.items()}
    yield pa.table({**nodes, "copies": pa.array(counts, pa.int64())})
    yield pa.table({"copies": [without_sender], "messages": [messages]})


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield larger tables, because a fold costs something for each known sender."""
    held, count = list[pa.RecordBatch](), 0
    for batch in batches:
        held.append(batch)
        count += batch.num_rows
        if count >= _FOLDED_TOGETHER:
            yield pa.Table.from_batches(held)
            held, count = [], 0
    if count:
        yield pa.Table.from_batches(held)


def _with_credible_times(rows: pa.Table, rules: RangeRules) -> pa.Table:
    """Return the messages of the range, with the times that count."""
    sequence, stored_ns = rows["sequence"].to_numpy(), rows["stored_ns"].to_numpy()
    first, after, at_ns = rules.times_ahead
    if len(first):
        index = np.maximum(np.searchsorted(first, sequence, side="right") - 1, 0)
        ahead = (sequence >= first[index]) & (sequence < after[index])
        stored_ns = np.where(ahead, at_ns[index], stored_ns)
        rows = rows.set_column(rows.column_names.index("stored_ns"), "stored_ns", pa.array(stored_ns))
    return rows.filter(pa.array(stored_ns < rules.until_ns))


def _fold_input(sightings: pa.Table, known: pa.Table, known_copies: Integers) -> pa.Table:
    """Return the input of `fold_batch`."""
    forced = sightings["forced"].to_numpy() | np.isin(sightings["sequence"].to_numpy(), known_copies)
    rows = {name: sightings[name] for name in ("sender", "stored_ns", "payload_bytes")}
    rows |= {"sighting": sightings["sequence"], "forced": pa.array(forced)}
    classes = {"class": sightings["class"]} if "class" in sightings.column_names else {}
    zeros = pa.array(np.zeros(known.num_rows, np.int64))
    nodes = {"sender": known["node"], **{name: known[name] for name in (*NODE_COLUMNS, *classes)}}
    nodes |= {"sighting": zeros, "stored_ns": zeros, "payload_bytes": zeros}
    nodes |= {"forced": pa.array(np.zeros(known.num_rows, np.bool_))}
    return pa.concat_tables([pa.table(nodes), pa.table({**rows, **classes})], promote_options="default")


def _transitions(folded: pa.Table, rules: RangeRules) -> pa.Table:
    """Return the transitions of the range among folded rows."""
    at_ns = folded["event_ns"]
    inside = pc.and_(pc.greater_equal(at_ns, rules.since_ns), pc.less(at_ns, rules.until_ns))
    rows = folded.filter(pc.and_(pc.is_valid(folded["event"]), inside))
    names = {"node": "sender", "event": "event", "event_ns": "event_ns", "previous": "event_previous"}
    return pa.table({name: rows[column] for name, column in names.items()})


def _copied(folded: pa.Table, sightings: pa.Table, rules: RangeRules) -> pa.Table:
    """Return the copies of the range: node, event, event_ns (the stored time) and sequence."""
    decided = folded.filter(pc.is_valid(folded["reason"]))
    decided = decided.filter(pc.invert(pc.is_in(decided["reason"], pa.array(_NOT_COPIED))))
    sequence = decided["decided"].to_numpy()
    at = np.searchsorted(sightings["sequence"].to_numpy(), sequence)
    stored_ns = sightings["stored_ns"].to_numpy()[at]
    inside = pa.array(stored_ns >= rules.since_ns)
    copied = {"node": decided["sender"], "event_ns": pa.array(stored_ns), "sequence": pa.array(sequence)}
    rows = pa.table(copied).filter(inside)
    return rows.append_column("event", pa.repeat(COPY, rows.num_rows))
