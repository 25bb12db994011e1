"""The outage guard: when a large share of a stream's nodes is silent.

The guard knows sightings and timeouts alone, so that its result does not depend on what else is announced.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from sr_assets.domain.tracking.columns import BlindColumns
from sr_assets.domain.tracking.outages import WHOLE, Guard, Outage, SiteEvent, SiteReport

if TYPE_CHECKING:
    from sr_assets.domain.blindness import BlindSpans
    from sr_assets.domain.tracking.columns import Flags, Integers

_NEVER: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Watched:
    """The nodes of a stream from one time to a later one, as numbers from 1 on; `quiet_ns` is that of each node.

    Members are up at the first time, or held then (`held`): their number and last sighting. A node leaves by its timeout,
    or `retired` by hand. Sightings and exits are in order of time. At equal times, sightings precede exits.
    """

    quiet_ns: Integers
    member: Integers
    member_seen_ns: Integers
    held: Flags
    sighted: Integers
    sighted_ns: Integers
    left: Integers
    left_ns: Integers
    retired: Flags


@dataclass(slots=True)
class _Silences:
    """The silences of all nodes: each from one sighting to the node's next, quiet after `quiet_ns`."""

    node: Integers
    seen_ns: Integers
    quiet_ns: Integers
    end_ns: Integers
    #: The same times in order.
    quiets: Integers = field(init=False)
    ends: Integers = field(init=False)

    def __post_init__(self) -> None:
        # A silence without a quiet part counts nowhere.
        quiet = self.quiet_ns < self.end_ns
        self.quiets, self.ends = np.sort(self.quiet_ns[quiet]), np.sort(self.end_ns[quiet])

    @classmethod
    def of(cls, watched: Watched, blind: BlindSpans) -> _Silences:
        node = np.concatenate([watched.member, watched.sighted])
        seen_ns = np.concatenate([watched.member_seen_ns, watched.sighted_ns])
        order = np.lexsort((seen_ns, node))
        node, seen_ns = node[order], seen_ns[order]
        last = np.append(node[1:] != node[:-1], True)
        end_ns = np.where(last, _NEVER, np.append(seen_ns[1:], _NEVER))
        return cls(node, seen_ns, BlindColumns(blind).exceeds_at_ns(seen_ns, watched.quiet_ns[node - 1]), end_ns)

    def at(self, node: Integers, at_ns: Integers) -> Integers:
        """Return the index of each node's silence at a time, which follows a sighting of it."""
        wanted = np.repeat([False, True], [len(self.node), len(node)])
        times, nodes = np.concatenate([self.seen_ns, at_ns]), np.concatenate([self.node, node])
        order = np.lexsort((wanted, times, nodes))
        index = np.empty(len(order), np.int64)
        index[order] = np.cumsum(~wanted[order]) - 1
        return index[len(self.node) :]

    def quiet_at(self, at_ns: Integers | int) -> Integers:
        """Return the number of nodes that are quiet at times."""
        return np.searchsorted(self.quiets, at_ns, side="left") - np.searchsorted(self.ends, at_ns, side="right")


class _Watch:
    """The passing of time over watched nodes."""

    def __init__(self, guard: Guard, outage: Outage | None, watched: Watched, from_ns: int, blind: BlindSpans) -> None:
        self._guard, self.outage, self._now_ns = guard, outage, from_ns - 1
        self._sighted_ns = watched.sighted_ns
        self._silences = silences = _Silences.of(watched, blind)
        newcomers = np.setdiff1d(watched.sighted, watched.member)
        joining = silences.seen_ns[silences.at(newcomers, np.full(len(newcomers), -1)) + 1]
        self._joins = np.sort(np.concatenate([np.full(len(watched.member), from_ns - 1), joining]))
        exits = silences.at(watched.left, watched.left_ns)
        known = (exits >= 0) & (silences.node[exits] == watched.left) if len(exits) else exits >= 0
        leaving = (watched.left_ns[known], exits[known], watched.retired[known])
        self._leaving = list(zip(*(column.tolist() for column in leaving), strict=True))
        held = watched.member[watched.held]
        # The silences of nodes that an outage holds, and of nodes that are out: timed out and not held.
        self._held: list[int] = silences.at(held, np.full(len(held), from_ns - 1)).tolist()
        self._out: list[int] = []
        self._out_until_ns: list[int] = []
        #: Number of sightings that cannot end the outage.
        self._checked = 0
        self.reports: list[tuple[SiteReport, Outage]] = []

    def run(self, until_ns: int) -> None:
        """Pass all timeouts and retirements, then the rest of the time before `until_ns`."""
        for at_ns, silence, retired in self._leaving:
            self._pass(at_ns)
            if retired:
                self._leave(silence)
            else:
                self._time_out(at_ns, silence)
        self._pass(until_ns - 1)

    def _time_out(self, at_ns: int, silence: int) -> None:
        out = len(self._out_until_ns) - bisect_right(self._out_until_ns, at_ns)
        nodes = int(np.searchsorted(self._joins, at_ns, side="right")) - out
        silent = int(self._silences.quiet_at(at_ns)) - out
        dark = silent * WHOLE >= self._guard.dark * nodes
        starts = nodes >= self._guard.min_nodes and silent * WHOLE >= self._guard.partial * nodes
        if (self.outage is None and starts) or (self.outage is not None and dark and not self.outage.dark):
            event, since_ns = SiteEvent.DARK if dark else SiteEvent.PARTIAL, self._since_ns(at_ns)
            outage = self.outage or Outage("", at_ns, since_ns)
            self._report(SiteReport(event, at_ns, nodes, silent, since_ns), replace(outage, dark=dark))
        if self.outage is not None and self.outage.holds(self._guard, at_ns):
            self._held.append(silence)
        else:
            self._leave(silence)

    def _report(self, report: SiteReport, outage: Outage) -> None:
        self.reports.append((report, outage))
        self.outage = outage if outage.ended_ns is None else None
        # Only later sightings can end a new outage.
        self._checked = int(np.searchsorted(self._sighted_ns, report.event_ns, side="right"))

    def _pass(self, to_ns: int) -> None:
        """Let time pass until a time, sightings then included: an outage may end, or hold nothing more."""
        while self.outage is not None and self._now_ns < to_ns:
            limit_ns = self.outage.began_ns + self._guard.hold_ns
            expires = bool(self._held) and self._now_ns < limit_ns <= to_ns
            self._now_ns = limit_ns - 1 if expires else to_ns
            if self._restore(self._now_ns):
                break
            if expires:
                self._release()
        self._now_ns = to_ns

    def _restore(self, to_ns: int) -> bool:
        """End the outage at the first sighting until a time after which too few nodes are silent."""
        assert self.outage is not None
        times = self._sighted_ns[self._checked : np.searchsorted(self._sighted_ns, to_ns, side="right")]
        self._checked += len(times)
        if not len(times):
            return False
        ends = np.array(self._out_until_ns, np.int64)
        out = len(ends) - np.searchsorted(ends, times, side="right")
        nodes = np.searchsorted(self._joins, times, side="right") - out
        silent = self._silences.quiet_at(times) - out
        restoring = np.flatnonzero(silent * WHOLE < self._guard.partial * nodes)
        if not len(restoring):
            return False
        at, outage = restoring[0], self.outage
        report = SiteReport(SiteEvent.RESTORED, int(times[at]), int(nodes[at]), int(silent[at]), outage.since_ns)
        self._report(report, replace(outage, ended_ns=report.event_ns))
        self._release()
        return True

    def _leave(self, silence: int) -> None:
        self._out.append(silence)
        insort(self._out_until_ns, int(self._silences.end_ns[silence]))

    def _release(self) -> None:
        """Count the held nodes as out: the outage holds them no longer."""
        for silence in self._held:
            self._leave(silence)
        self._held = []

    def _since_ns(self, at_ns: int) -> int:
        """Return the earliest last sighting of the quiet nodes at a time."""
        quiet = (self._silences.quiet_ns < at_ns) & (self._silences.end_ns > at_ns)
        quiet[self._out] = False
        return int(self._silences.seen_ns[quiet].min())


def watch(
    guard: Guard, outage: Outage | None, watched: Watched, from_ns: int, until_ns: int, blind: BlindSpans
) -> list[tuple[SiteReport, Outage]]:
    """Return the site events before `until_ns`, each with the outage after it; `outage` runs at `from_ns`.

    All sightings and exits from `from_ns` until then are among `watched`. A new outage has no id.
    """
    passing = _Watch(guard, outage, watched, from_ns, blind)
    passing.run(until_ns)
    return passing.reports
