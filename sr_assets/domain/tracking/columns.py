"""The column form of the rules: states of many senders are columns; one step decides on one sighting of each, or sweeps all.

Most sightings come from a sender that is up and reported recently, and those of a new fleet from unknown senders. One step
decides all of these, at a sixth of the cost of single steps, or less if senders report several times. Every other sighting
goes through `rules.sight`, which defines the rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.positions import CLOCK_TOLERANCE_NS
from sr_assets.domain.tracking.class_policies import NO_CLASS, ClassPolicies, class_of
from sr_assets.domain.tracking.rows import NODE_SCHEMA, folded_rows, folded_table, transition_row
from sr_assets.domain.tracking.rules import (
    NODE_COLUMNS,
    Event,
    NodeState,
    Policy,
    Reason,
    Sighting,
    Status,
    Transition,
    sight,
    splay_ns,
)

if TYPE_CHECKING:
    Integers = np.ndarray[tuple[int], np.dtype[np.int64]]
    Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]
    Codes = np.ndarray[tuple[int], np.dtype[np.int8]]

_INTEGERS: Final = tuple(name for name in NODE_COLUMNS if name != "status")
#: Integer for a missing value; no sender has this time or size.
_NONE: Final = -(1 << 63)
_STATUSES: Final = tuple(Status)
_UP: Final = _STATUSES.index(Status.UP)
_RETIRED: Final = _STATUSES.index(Status.RETIRED)
_UNKNOWN: Final = -1
_REASONS: Final = tuple(Reason)
_SAMPLED, _INTERVAL, _SIZE, _FORCED, _NEW, _TOO_OLD = map(
    _REASONS.index, (Reason.SAMPLED, Reason.INTERVAL, Reason.SIZE, Reason.FORCED, Reason.NEW, Reason.TOO_OLD)
)
_NOT_PLAIN: Final = -1
#: Minimum number of senders for a column step; below it, single steps are cheaper.
_FEW: Final = 64


class BlindColumns:
    """`BlindSpans` for many senders at once, with the same formulas."""

    def __init__(self, blind: BlindSpans) -> None:
        """Convert the spans to arrays: their starts, and the blind time before each and after the last."""
        spans = np.array(blind.spans, np.int64).reshape(-1, 2)
        self._starts, self._ends = spans[:, 0], spans[:, 1]
        self._before = np.concatenate(([0], np.cumsum(self._ends - self._starts)))

    def silence_ns(self, seen_ns: Integers, now_ns: Integers) -> Integers:
        """Return the time from `seen_ns` to `now_ns` (not earlier) outside of the spans."""
        return now_ns - seen_ns if not len(self._starts) else self._watched(now_ns) - self._watched(seen_ns)

    def exceeds_at_ns(self, seen_ns: Integers, limit_ns: Integers | int) -> Integers:
        """Return the last instant at which the silence since `seen_ns` does not exceed `limit_ns`."""
        if not len(self._starts):
            return seen_ns + limit_ns
        watched = self._watched(seen_ns) + limit_ns
        return watched + self._before[np.searchsorted(self._starts - self._before[:-1], watched, side="right")]

    def _watched(self, time_ns: Integers) -> Integers:
        """Return times minus the blind time before them."""
        index = np.searchsorted(self._starts, time_ns, side="right")
        last = np.maximum(index - 1, 0)
        inside = np.where(index > 0, np.maximum(self._ends[last] - time_ns, 0), 0)
        return time_ns - self._before[index] + inside


class Limits(NamedTuple):
    """The limits of many senders, one row each, named as in `Policy`."""

    warning_ns: Integers
    interval_ns: Integers
    due_ns: Integers

    def take(self, which: Integers) -> Limits:
        """Return a selection of the rows."""
        return Limits(*(column[which] for column in self))


class ClassColumns:
    """`ClassPolicies` for many senders at once."""

    def __init__(self, classes: ClassPolicies) -> None:
        """Convert the limits to arrays; the last row is the stream's own, for `NO_CLASS`."""
        self.policies = classes
        self._names = pa.array(classes.names, pa.string())
        policies = (*classes.policies, classes.own)
        self._limits = Limits(
            *(np.array([getattr(each, name) for each in policies], np.int64) for name in Limits._fields)
        )

    def limits(self, codes: Integers) -> Limits:
        """Return the limits of many senders by the codes of their classes."""
        return self._limits.take(codes)

    def codes(self, names: pa.ChunkedArray | pa.Array) -> Integers:
        """Return the codes of classes; a class that is no longer configured is none."""
        codes: Integers = pc.fill_null(pc.index_in(names, self._names), NO_CLASS).to_numpy().astype(np.int64)
        return codes

    def column(self, codes: Integers) -> pa.Array:
        """Return the names of classes; null for none."""
        return self._names.take(pa.array(codes, mask=codes == NO_CLASS))


def credible_times(stored_ns: Integers, before_ns: int | None, own_clock_ns: int) -> tuple[Integers, Flags]:
    """Return the stored times and which of them are incredible; each of these is replaced by the credible time before it.

    `before_ns` is the latest credible time before the first one. Without any, the first credible time after them counts:
    our clock's time would be later than the following messages, and nodes would seem silent; it counts only if no time is
    credible.
    """
    ahead = stored_ns - own_clock_ns > CLOCK_TOLERANCE_NS
    if not ahead.any():
        return stored_ns, ahead
    if before_ns is None:
        before_ns = own_clock_ns if ahead.all() else int(stored_ns[~ahead][0])
    latest_ns = np.maximum(np.maximum.accumulate(np.where(ahead, 0, stored_ns)), before_ns)
    return np.where(ahead, latest_ns, stored_ns), ahead


def limits_of(policy: Policy, classes: ClassPolicies | None, names: pa.ChunkedArray | pa.Array) -> Policy | Limits:
    """Return the limits of senders by the names of their classes; without classes, those of the policy."""
    if classes is None:
        return policy
    columns = ClassColumns(classes)
    return columns.limits(columns.codes(names))


def deadlines(limits: Policy | Limits, blind: BlindSpans, status: pa.Array, seen_ns: Integers) -> pa.Array:
    """Return `deadline_ns` of many senders from their columns `status` and `seen_ns`; null means none."""
    codes = pc.index_in(status, pa.array(_STATUSES)).to_numpy()
    limit_ns = np.where(codes == _UP, limits.warning_ns, limits.interval_ns)
    return pa.array(BlindColumns(blind).exceeds_at_ns(seen_ns, limit_ns), mask=codes == _RETIRED)


class Sightings(NamedTuple):
    """Sightings as columns: the sender's index among the names, then the fields of `Sighting`, and the class's code."""

    sender: Integers
    sequence: Integers
    stored_ns: Integers
    payload_bytes: Integers
    forced: Flags
    classes: Integers | None = None

    def take(self, which: Integers | Flags | slice) -> Sightings:
        return Sightings(
            self.sender[which],
            self.sequence[which],
            self.stored_ns[which],
            self.payload_bytes[which],
            self.forced[which],
            None if self.classes is None else self.classes[which],
        )


class ColumnFold:
    """The states of senders, by index among `names`, and their transitions.

    `cutoff_ns`, `blind`, `first_transition` and `read_until_ns` are the arguments of `sight`. `classes` are the stream's,
    if it has any: all sightings then have a class.
    """

    def __init__(
        self,
        policy: Policy,
        names: pa.StringArray,
        blind: BlindSpans,
        cutoff_ns: int | None,
        first_transition: int,
        read_until_ns: int | None = None,
        classes: ClassPolicies | None = None,
    ) -> None:
        """Start with unknown senders."""
        # The transitions `new` of unknown senders, and all others with the sender's index and the code of its class.
        self._begun: list[pa.Table] = []
        self._changes: list[tuple[int, Transition, int]] = []
        self._classes = None if classes is None else ClassColumns(classes)
        self._class = np.full(len(names) if classes else 0, NO_CLASS)
        self._policy, self._names, self._blind, self._cutoff_ns = policy, names, blind, cutoff_ns
        self._first_transition, self._read_until_ns = first_transition, read_until_ns
        self._blind_columns = BlindColumns(blind)
        self._status = np.full(len(names), _UNKNOWN, np.int8)
        self._columns = {name: np.full(len(names), _NONE, np.int64) for name in _INTEGERS}

    def know(self, indexes: Integers, states: pa.Table) -> None:
        """Load the states of known senders, one row each with `NODE_COLUMNS`."""
        self._status[indexes] = pc.index_in(states["status"], pa.array(_STATUSES)).to_numpy()
        for name, column in self._columns.items():
            column[indexes] = pc.fill_null(states[name], _NONE).to_numpy()
        if self._classes is not None:
            self._class[indexes] = self._classes.codes(states["class"])

    def see(self, seen: Sightings) -> pa.StringArray:
        """Apply sightings, ordered by sender and sequence; return the reason of each decision."""
        reasons = np.zeros(len(seen.sender), np.int8)
        starts = np.flatnonzero(np.diff(seen.sender, prepend=-1))
        counts = np.diff(starts, append=len(reasons))
        rounds = 0
        while len(starts) >= _FEW:
            # All senders with at least this many sightings, each with its sighting of this round.
            rows = starts + rounds
            reasons[rows] = self._see_each(seen.take(rows))
            for row in rows[reasons[rows] == _NOT_PLAIN].tolist():
                reasons[row] = self._see_one(seen.take(slice(row, row + 1)))[0]
            rounds += 1
            starts, counts = starts[counts > rounds], counts[counts > rounds]
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            rest = slice(start + rounds, start + count)
            reasons[rest] = self._see_one(seen.take(rest))
        return pa.array(_REASONS).take(pa.array(reasons))

    def _see_each(self, seen: Sightings) -> Codes:
        """Decide the first and the plain ones of a sighting per sender in columns; `sight` decides the others."""
        unknown = self._status[seen.sender] == _UNKNOWN
        if not unknown.any():
            return self._see_plain(seen)
        reasons = np.empty(len(unknown), np.int8)
        reasons[~unknown] = self._see_plain(seen.take(~unknown))
        reasons[unknown] = self._see_first(seen.take(unknown))
        return reasons

    def _see_first(self, seen: Sightings) -> Codes:
        """Decide the first sighting of each unknown sender: it is copied unless it is too old."""
        count, columns = len(seen.sender), self._columns
        for name in ("first_seen_ns", "seen_ns", "status_since_ns"):
            columns[name][seen.sender] = seen.stored_ns
        columns["sequence"][seen.sender] = seen.sequence
        columns["times_retired"][seen.sender] = 0
        columns["transition"][seen.sender] = self._first_transition
        self._status[seen.sender] = _UP
        if seen.classes is not None:
            self._class[seen.sender] = seen.classes
        copied = np.full(count, True) if self._cutoff_ns is None else seen.stored_ns >= self._cutoff_ns
        columns["copied_ns"][seen.sender[copied]] = seen.stored_ns[copied]
        columns["copied_bytes"][seen.sender[copied]] = seen.payload_bytes[copied]
        transitions = {
            "sender": self._names.take(pa.array(seen.sender)),
            "event": pa.repeat(Event.NEW.value, count),
            **dict.fromkeys(("event_ns", "event_seen_ns"), seen.stored_ns),
            "event_age_ns": pa.repeat(0, count),
            "event_sequence": seen.sequence,
            "event_transition": pa.repeat(self._first_transition, count),
            "event_returned": pa.repeat(False, count),
        }
        if self._classes is not None and seen.classes is not None:
            transitions["class"] = self._classes.column(seen.classes)
        self._begun.append(folded_rows(transitions))
        return np.where(copied, _NEW, _TOO_OLD).astype(np.int8)

    def _see_plain(self, seen: Sightings) -> Codes:
        """Decide one sighting per sender in columns, leaving non-plain ones to `sight`.

        A plain sighting is not too old, and its sender is up, was copied before and has not been silent too long.
        """
        policy, columns, classes = self._policy, self._columns, self._classes
        seen_ns, since_ns, copied_ns, copied_bytes = (
            columns[name][seen.sender] for name in ("seen_ns", "status_since_ns", "copied_ns", "copied_bytes")
        )
        at_ns = np.maximum(np.maximum(seen.stored_ns, seen_ns), since_ns)
        plain = (self._status[seen.sender] == _UP) & (copied_ns != _NONE)
        warning_ns = policy.warning_ns if classes is None else classes.limits(self._class[seen.sender]).warning_ns
        silent = np.flatnonzero(plain & (at_ns - seen_ns > warning_ns))
        if len(silent):
            limit_ns = np.broadcast_to(warning_ns, plain.shape)[silent]
            plain[silent] = self._blind_columns.silence_ns(seen_ns[silent], at_ns[silent]) <= limit_ns
        if self._cutoff_ns is not None:
            plain &= seen.stored_ns >= self._cutoff_ns
        if not plain.all():
            reasons = np.full(len(plain), _NOT_PLAIN, np.int8)
            reasons[plain] = self._see_plain(seen.take(plain))
            return reasons
        sized = (copied_bytes == 0) & (seen.payload_bytes > 0)
        if policy.size_trigger_bytes:
            sized |= np.abs(seen.payload_bytes - copied_bytes) >= policy.size_trigger_bytes
        due = self._due(seen.sender, at_ns - copied_ns, seen.classes)
        reasons = np.where(seen.forced, _FORCED, np.where(sized, _SIZE, np.where(due, _INTERVAL, _SAMPLED)))
        columns["seen_ns"][seen.sender] = at_ns
        columns["sequence"][seen.sender] = seen.sequence
        if seen.classes is not None:
            self._class[seen.sender] = seen.classes
        copied = reasons != _SAMPLED
        columns["copied_ns"][seen.sender[copied]] = at_ns[copied]
        columns["copied_bytes"][seen.sender[copied]] = seen.payload_bytes[copied]
        return reasons.astype(np.int8)

    def _due(self, indexes: Integers, since_ns: Integers, codes: Integers | None) -> Flags:
        """Return the senders whose copy is due by the time since the last one; splays are computed only if they decide."""
        limits = self._policy if self._classes is None or codes is None else self._classes.limits(codes)
        due: Flags = since_ns >= limits.due_ns
        for at in np.flatnonzero(~due & (since_ns >= limits.due_ns - limits.interval_ns // 10)).tolist():
            policy = self._policy_of(None if codes is None else int(codes[at]))
            due[at] = since_ns[at] >= policy.due_ns - self._splay_ns(indexes[at], policy)
        return due

    def _policy_of(self, code: int | None) -> Policy:
        return self._policy if self._classes is None or code is None else self._classes.policies.of(code)

    def _splay_ns(self, index: int, policy: Policy) -> int:
        return splay_ns(self._names[index].as_py(), policy.interval_ns)

    def _see_one(self, seen: Sightings) -> list[int]:
        """Apply sightings of one sender by the scalar rules; return the reasons."""
        index = int(seen.sender[0])
        state, reasons = self._state(index), []
        before = NO_CLASS if self._classes is None else int(self._class[index])
        codes = [before] * len(seen.sender) if seen.classes is None else seen.classes.tolist()
        policies = {code: self._policy_of(code) for code in {before, *codes}}
        splays = {code: self._splay_ns(index, policy) for code, policy in policies.items()}
        for code, *values in zip(codes, *(column.tolist() for column in seen[1:5]), strict=True):
            seen_state, decision, transitions = sight(
                policies[code],
                splays[code],
                state,
                Sighting(*values),
                self._blind,
                self._cutoff_ns,
                self._first_transition,
                self._read_until_ns,
                policies[before],
            )
            reasons.append(_REASONS.index(decision.reason))
            self._changes += [(index, event, class_of(event, before, code)) for event in transitions]
            # A message that is read again leaves a silent sender, and its class, as they are.
            before = before if seen_state is state else code
            state = seen_state
        assert state is not None
        self._status[index] = _STATUSES.index(state.status)
        for name, column in self._columns.items():
            value = getattr(state, name)
            column[index] = _NONE if value is None else value
        if self._classes is not None:
            self._class[index] = before
        return reasons

    def _state(self, index: int) -> NodeState | None:
        if self._status[index] == _UNKNOWN:
            return None
        values = {name: int(column[index]) for name, column in self._columns.items()}
        known: dict[str, Any] = {name: None if value == _NONE else value for name, value in values.items()}
        return NodeState(status=_STATUSES[self._status[index]], **known)

    def states(self) -> dict[str, Any]:
        """Return the senders' states as columns: sender, `NODE_COLUMNS`, deadline_ns."""
        columns = {name: pa.array(values, mask=values == _NONE) for name, values in self._columns.items()}
        status = pa.array(_STATUSES).take(pa.array(self._status))
        limits = self._policy if self._classes is None else self._classes.limits(self._class)
        deadline_ns = deadlines(limits, self._blind, status, self._columns["seen_ns"])
        states = {"sender": self._names, **columns, "status": status, "deadline_ns": deadline_ns}
        return states if self._classes is None else {**states, "class": self._classes.column(self._class)}

    def transitions(self) -> pa.Table:
        """Return the transitions so far as `FOLDED_SCHEMA`, in order per sender."""
        labels = [None] if self._classes is None else [*self._classes.policies.names, None]
        rows = [transition_row(self._names[at].as_py(), event, labels[code]) for at, event, code in self._changes]
        return pa.concat_tables([*self._begun, folded_table(rows)])


def fold_batch(
    rows: pa.Table,
    policy: Policy,
    cutoff_ns: int | None,
    blind: BlindSpans,
    first_transition: int = 1,
    read_until_ns: int | None = None,
    classes: ClassPolicies | None = None,
) -> pa.Table:
    """Fold a batch's sightings into decisions, states and transitions.

    `rows` come from `SiteState.fold_input`: one per sighting and one per known node, with columns sender, sighting (its
    sequence; 0 for a known node), stored_ns, payload_bytes, forced and `NODE_COLUMNS`. `blind` has the stream's spans,
    including this batch's; `first_transition` and `read_until_ns` are the arguments of `rules.sight`. `classes` are the
    stream's, if it has any; `rows` then have the column class. A known sender without a sighting stays unchanged.
    Returns `FOLDED_SCHEMA`, unordered.
    """
    names = rows["sender"].combine_chunks().dictionary_encode()
    indexes, sequences = names.indices.to_numpy(), rows["sighting"].to_numpy()
    fold = ColumnFold(policy, names.dictionary, blind, cutoff_ns, first_transition, read_until_ns, classes)
    fold.know(indexes[sequences == 0], rows.filter(pa.array(sequences == 0)))
    stored_ns, payload_bytes, forced = (rows[name].to_numpy() for name in ("stored_ns", "payload_bytes", "forced"))
    order = np.lexsort((sequences, indexes))
    codes = None if classes is None else ClassColumns(classes).codes(rows["class"])
    seen = Sightings(indexes, sequences, stored_ns, payload_bytes, forced, codes).take(order[sequences[order] > 0])
    reasons = fold.see(seen)
    decisions = {"sender": names.dictionary.take(pa.array(seen.sender)), "decided": seen.sequence, "reason": reasons}
    return pa.concat_tables([folded_rows(decisions), folded_rows(fold.states()), fold.transitions()])


def sweep_nodes(
    policy: Policy, due: pa.Table, now_ns: int, blind: BlindSpans, classes: ClassPolicies | None = None
) -> tuple[pa.Table, pa.Table]:
    """Sweep nodes until `now_ns`; columns node, `NODE_COLUMNS` and class. `classes` are the stream's, if it has any.

    Return their states as `NODE_SCHEMA`, and their transitions as `FOLDED_SCHEMA`, ordered per node.
    """
    spans = BlindColumns(blind)
    limits = limits_of(policy, classes, due["class"])
    seen, since, number, retired = (
        due[name].to_numpy() for name in ("seen_ns", "status_since_ns", "transition", "times_retired")
    )
    silence = spans.silence_ns(seen, np.maximum(seen, now_ns))
    up, timeout = (pc.equal(due["status"], status.value).to_numpy() for status in (Status.UP, Status.TIMEOUT))
    timed_out = up & (silence > limits.warning_ns)
    expired = (timeout | timed_out) & (silence > limits.interval_ns)
    out_ns = spans.exceeds_at_ns(seen, limits.warning_ns)
    since = np.where(timed_out, out_ns, since)
    # With a policy shortened since, the interval may have ended before the timeout was noticed.
    end_ns = np.maximum(spans.exceeds_at_ns(seen, limits.interval_ns), since)
    ended = pa.array(expired)
    status = pc.if_else(
        ended,
        Status.RETIRED.value,
        pc.if_else(pa.array(timed_out), Status.TIMEOUT.value, due["status"].combine_chunks()),
    )
    states = {
        **{name: due[name] for name in ("node", "first_seen_ns", "seen_ns", "sequence")},
        "copied_ns": pc.if_else(ended, None, due["copied_ns"].combine_chunks()),
        "copied_bytes": pc.if_else(ended, None, due["copied_bytes"].combine_chunks()),
        "status": status,
        "status_since_ns": np.where(expired, end_ns, since),
        "retired_at_ns": pc.if_else(ended, pa.array(end_ns), due["retired_at_ns"].combine_chunks()),
        "times_retired": retired + expired,
        "transition": number + timed_out + expired,
        "deadline_ns": deadlines(limits, blind, status, seen),
        "class": due["class"],
    }
    timeouts = _transitions(due, timed_out, Event.TIMEOUT, Status.UP, out_ns, number + 1)
    ends = _transitions(due, expired, Event.EXPIRE, Status.TIMEOUT, end_ns, number + timed_out + 1)
    by_node = np.argsort(np.concatenate([np.flatnonzero(timed_out), np.flatnonzero(expired)]), kind="stable")
    return pa.table(states, schema=NODE_SCHEMA), pa.concat_tables([timeouts, ends]).take(by_node)


def _transitions(
    due: pa.Table, which: Flags, event: Event, previous: Status, at_ns: Integers, number: Integers
) -> pa.Table:
    """Return the same transition for each node in `which`; `at_ns` and `number` are the columns of all nodes."""
    nodes, count = due.filter(pa.array(which)), int(which.sum())
    return folded_rows(
        {
            "sender": nodes["node"],
            "event": [event.value] * count,
            "event_ns": at_ns[which],
            "event_seen_ns": nodes["seen_ns"],
            "event_age_ns": at_ns[which] - nodes["seen_ns"].to_numpy(),
            "event_sequence": nodes["sequence"],
            "event_previous": [previous.value] * count,
            "event_transition": number[which],
            "event_returned": [False] * count,
            "class": nodes["class"],
        }
    )
