"""The rules of `domain.tracking` for many senders at once: their states are columns, and a turn is one step for all.

Most sightings are of a sender that is up and was heard of a short while ago: it has one more sighting and is copied or not.
Those are decided together, for a sixth of what it costs one by one and, where senders speak several times, far less. Every
other goes through `sight`, whose rules these are. Not here: where rows come from and go to (`fold`).
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sr_assets.adapters.state.nodes import NODE_COLUMNS
from sr_assets.domain.tracking import NodeState, Policy, Reason, Sighting, Status, sight, splay_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sr_assets.domain.tracking import Transition

    Integers = np.ndarray[tuple[int], np.dtype[np.int64]]
    Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]
    Codes = np.ndarray[tuple[int], np.dtype[np.int8]]

#: A state's values in the order of `NODE_COLUMNS`.
state_values: Final = attrgetter(*NODE_COLUMNS)
_STATUS: Final = {status.value: status for status in Status}
_STATUS_AT: Final = NODE_COLUMNS.index("status")
_INTEGERS: Final = tuple(name for name in NODE_COLUMNS if name != "status")
#: What a column of integers says where there is nothing; of no sender's time or size.
_NONE: Final = -(1 << 63)
_STATUSES: Final = tuple(Status)
_UP: Final = _STATUSES.index(Status.UP)
_UNKNOWN: Final = -1
_REASONS: Final = tuple(Reason)
_SAMPLED, _INTERVAL, _SIZE, _FORCED = (
    _REASONS.index(one) for one in (Reason.SAMPLED, Reason.INTERVAL, Reason.SIZE, Reason.FORCED)
)
_NOT_PLAIN: Final = -1
#: A step for fewer senders than this costs more than taking them one by one.
_FEW: Final = 64


def state_of(values: Sequence[Any]) -> NodeState:
    """Make a state of values in the order of `NODE_COLUMNS`, which is that of `NodeState`."""
    return NodeState(*values[:_STATUS_AT], _STATUS[values[_STATUS_AT]], *values[_STATUS_AT + 1 :])


class Sightings(NamedTuple):
    """Sightings as columns: the sender's place, then what a `Sighting` says."""

    place: Integers
    sequence: Integers
    stored_ns: Integers
    payload_bytes: Integers
    forced: Flags

    def take(self, which: Integers | Flags | slice) -> Sightings:
        """Return some of them."""
        return self._make(column[which] for column in self)


class ColumnFold:
    """The states of senders, known by their place among `names`, and what happens to them.

    `transitions` are those of all sightings so far, with the sender's place; of one sender in their order.
    """

    def __init__(self, policy: Policy, cutoff_ns: int | None, names: pa.StringArray) -> None:
        """Begin with senders of whom nothing is known."""
        self.transitions: list[tuple[int, Transition]] = []
        self._policy, self._cutoff_ns, self._names = policy, cutoff_ns, names
        self._status = np.full(len(names), _UNKNOWN, np.int8)
        self._columns = {name: np.full(len(names), _NONE, np.int64) for name in _INTEGERS}

    def know(self, places: Integers, states: pa.Table) -> None:
        """Take what is known of some senders, a row each with `NODE_COLUMNS`."""
        self._status[places] = pc.index_in(states["status"], pa.array(_STATUSES)).to_numpy()
        for name, column in self._columns.items():
            column[places] = pc.fill_null(states[name], _NONE).to_numpy()

    def see(self, seen: Sightings) -> pa.StringArray:
        """Take sightings, ordered by sender and by sequence; returns the reason of each decision."""
        reasons = np.zeros(len(seen.place), np.int8)
        starts = np.flatnonzero(np.diff(seen.place, prepend=-1))
        counts = np.diff(starts, append=len(reasons))
        turn = 0
        while len(starts) >= _FEW:
            # Every sender that is seen so often, each by its sighting of this turn.
            now = starts + turn
            reasons[now] = self._see_plain(seen.take(now))
            for at in now[reasons[now] == _NOT_PLAIN].tolist():
                reasons[at] = self._see_one(seen.take(slice(at, at + 1)))[0]
            turn += 1
            starts, counts = starts[counts > turn], counts[counts > turn]
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            rest = slice(start + turn, start + count)
            reasons[rest] = self._see_one(seen.take(rest))
        return pa.array(_REASONS).take(pa.array(reasons))

    def _see_plain(self, seen: Sightings) -> Codes:
        """Decide on one sighting of each of some senders, and leave it alone where it is not plain.

        Plain is a sighting, not too old, of a sender that is up, was copied before and has not been silent too long.
        """
        policy, columns = self._policy, self._columns
        seen_ns, since_ns, copied_ns, copied_bytes = (
            columns[name][seen.place] for name in ("seen_ns", "status_since_ns", "copied_ns", "copied_bytes")
        )
        at_ns = np.maximum(np.maximum(seen.stored_ns, seen_ns), since_ns)
        plain = (self._status[seen.place] == _UP) & (copied_ns != _NONE)
        plain[plain] = (at_ns - seen_ns)[plain] <= policy.warning_ns
        if self._cutoff_ns is not None:
            plain &= seen.stored_ns >= self._cutoff_ns
        if not plain.all():
            reasons = np.full(len(plain), _NOT_PLAIN, np.int8)
            reasons[plain] = self._see_plain(seen.take(plain))
            return reasons
        sized = (copied_bytes == 0) & (seen.payload_bytes > 0)
        if policy.size_trigger_bytes:
            sized |= np.abs(seen.payload_bytes - copied_bytes) >= policy.size_trigger_bytes
        due = self._due(seen.place, at_ns - copied_ns)
        reasons = np.where(seen.forced, _FORCED, np.where(sized, _SIZE, np.where(due, _INTERVAL, _SAMPLED)))
        columns["seen_ns"][seen.place] = at_ns
        columns["sequence"][seen.place] = seen.sequence
        copied = reasons != _SAMPLED
        columns["copied_ns"][seen.place[copied]] = at_ns[copied]
        columns["copied_bytes"][seen.place[copied]] = seen.payload_bytes[copied]
        return reasons.astype(np.int8)

    def _due(self, places: Integers, since_ns: Integers) -> Flags:
        """Tell who is due so long after the last copy; a splay, below a tenth of the interval, is only asked if it counts."""
        policy = self._policy
        due = since_ns >= policy.due_ns
        for at in np.flatnonzero(~due & (since_ns >= policy.due_ns - policy.interval_ns // 10)).tolist():
            due[at] = since_ns[at] >= policy.due_ns - self._splay_ns(places[at])
        return due

    def _splay_ns(self, place: int) -> int:
        return splay_ns(self._names[place].as_py(), self._policy.interval_ns)

    def _see_one(self, seen: Sightings) -> list[int]:
        """Take sightings of one sender by the rules themselves; returns the reasons."""
        place = int(seen.place[0])
        state, splay, reasons = self._state(place), self._splay_ns(place), []
        for sighting in map(Sighting, *(column.tolist() for column in seen[1:])):
            state, decision, events = sight(self._policy, splay, state, sighting, self._cutoff_ns)
            reasons.append(_REASONS.index(decision.reason))
            self.transitions += [(place, event) for event in events]
        assert state is not None
        self._status[place] = _STATUSES.index(state.status)
        for name, column in self._columns.items():
            value = getattr(state, name)
            column[place] = _NONE if value is None else value
        return reasons

    def _state(self, place: int) -> NodeState | None:
        if self._status[place] == _UNKNOWN:
            return None
        values = {name: int(column[place]) for name, column in self._columns.items()}
        known: dict[str, Any] = {name: None if value == _NONE else value for name, value in values.items()}
        return NodeState(status=_STATUSES[self._status[place]], **known)

    def states(self) -> dict[str, Any]:
        """Return the senders' states as columns: sender, `NODE_COLUMNS`, deadline_ns."""
        columns = {name: pa.array(values, mask=values == _NONE) for name, values in self._columns.items()}
        limits = {Status.UP: self._policy.warning_ns, Status.TIMEOUT: self._policy.interval_ns, Status.RETIRED: 0}
        deadline_ns = self._columns["seen_ns"] + np.array([limits[status] for status in _STATUSES])[self._status]
        ended = self._status == _STATUSES.index(Status.RETIRED)
        status = pa.array(_STATUSES).take(pa.array(self._status))
        return {"sender": self._names, **columns, "status": status, "deadline_ns": pa.array(deadline_ns, mask=ended)}
