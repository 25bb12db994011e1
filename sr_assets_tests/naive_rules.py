"""Naive folds of the rules of operators, for comparison with the platform: whole histories, node by node.

They use nothing of `sr_assets`. All times are integers of any unit, the shares are percentages. A result ends before `end`,
the watermark.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

#: A node, an event, and its time.
Row = tuple[str, str, int]
#: A node, an event, its time, and the number of transitions.
Report = tuple[str, str, int, int]
_DOWN = ("timeout", "expire")


@dataclass
class NaiveGuard:
    """The outage guard, told step by step."""

    partial: int
    dark: int
    quiet: int
    hold: int
    min_nodes: int
    seen: dict[str, int] = field(default_factory=dict)
    up: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    events: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    #: Began, since, dark, ended.
    outages: list[list[Any]] = field(default_factory=list)
    #: The outage of each held timeout or expiry.
    holding: dict[Row, int] = field(default_factory=dict)

    def run(self, sightings: Sequence[tuple[int, str]], rows: Sequence[Row], end: int) -> None:
        """Pass the times in order; at each one the sightings come first, the expiries last."""
        sighted_at: dict[int, set[str]] = defaultdict(set)
        rows_at: dict[int, list[Row]] = defaultdict(list)
        for at, node in sightings:
            sighted_at[at].add(node)
        for row in rows:
            rows_at[row[2]].append(row)
        for at in sorted(each for each in sighted_at.keys() | rows_at.keys() if each < end):
            if self._running() and at >= self._running()[0] + self.hold:
                self.held.clear()
            self._see(at, sighted_at[at])
            for node, event, _ in sorted(rows_at[at], key=lambda row: row[1] == "expire"):
                if event == "timeout":
                    self._time_out(node, at)
                elif event == "expire" and self._holds(at):
                    self.holding[node, event, at] = len(self.outages) - 1

    def _see(self, at: int, nodes: set[str]) -> None:
        for node in nodes:
            self.seen[node] = at
        self.up |= nodes
        self.held -= nodes
        if nodes and self._running() and at > self._running()[0]:
            self._restore(at)

    def _running(self) -> list[Any]:
        return self.outages[-1] if self.outages and self.outages[-1][3] is None else []

    def _holds(self, at: int) -> bool:
        return bool(self._running()) and at < self._running()[0] + self.hold

    def _counts(self, at: int) -> tuple[int, list[str]]:
        nodes = self.up | self.held
        return len(nodes), [node for node in nodes if at - self.seen[node] > self.quiet]

    def _restore(self, at: int) -> None:
        nodes, silent = self._counts(at)
        if len(silent) * 100 < self.partial * nodes:
            self.events.append(("restored", at, nodes, len(silent), self.outages[-1][1]))
            self.outages[-1][3] = at
            self.held.clear()

    def _time_out(self, node: str, at: int) -> None:
        nodes, silent = self._counts(at)
        dark = len(silent) * 100 >= self.dark * nodes
        since = min((self.seen[each] for each in silent), default=0)
        if not self._running() and nodes >= self.min_nodes and len(silent) * 100 >= self.partial * nodes:
            self.events.append(("dark" if dark else "partial", at, nodes, len(silent), since))
            self.outages.append([at, since, dark, None])
        elif self._running() and dark and not self._running()[2]:
            self.events.append(("dark", at, nodes, len(silent), since))
            self.outages[-1][2] = True
        self.up.discard(node)
        if self._holds(at):
            self.held.add(node)
            self.holding[node, "timeout", at] = len(self.outages) - 1


def announced_by_guard(rows: Sequence[Row], guard: NaiveGuard, wait_of: Callable[[str], int], end: int) -> list[Row]:
    """Return the announced transitions: a held one waits for the node, for `wait_of(node)` after the outage, the limit."""
    result: list[Row] = []
    for node, own in _by_node(rows).items():
        waiting: list[Row] = []
        release, told = end, "up"
        for row in [*own, (node, "end", end)]:
            if waiting and release <= row[2] and release < end:
                result += waiting
                waiting, told = [], waiting[-1][1]
            if row[1] == "end":
                break
            if row in guard.holding or (waiting and row[1] == "expire"):
                if row in guard.holding and not waiting:
                    began, _, _, ended = guard.outages[guard.holding[row]]
                    limit = began + guard.hold
                    release = limit if ended is None else min(limit, ended + wait_of(node))
                waiting.append(row)
                continue
            if row[1] not in _DOWN and waiting:
                waiting = []
                if told not in _DOWN:
                    continue
            result.append(row)
            told = row[1]
    return _ordered(result, rows)


def announced_in_windows(rows: Sequence[Row], windows: Sequence[tuple[str, int, int]], end: int) -> list[Row]:
    """Return the announced transitions; `windows` are globs, begins and ends."""
    result = []
    for node, own in _by_node(rows).items():
        spans: list[tuple[int, int]] = []
        for begin, until in sorted(each[1:] for each in windows if fnmatchcase(node, each[0])):
            if spans and begin <= spans[-1][1]:
                spans[-1] = spans[-1][0], max(spans[-1][1], until)
            else:
                spans.append((begin, until))
        result += [row for row in own if row[1] == "new" or not any(begin <= row[2] < until for begin, until in spans)]
        for begin, until in spans:
            last = [row for row in own if row[2] < until][-1:]
            result += [row for row in last if until < end and row[1] in _DOWN and row[2] >= begin]
    return _ordered(result, rows)


def announced_with_flapping(
    rows: Sequence[Row], most: int, within: int, recover_after: int, end: int
) -> tuple[list[Row], list[Report]]:
    """Return the announced transitions, and the events that replace the others; 0 transitions are no flapping."""
    result: list[Row] = []
    reports: list[Report] = []
    for node, own in _by_node(rows).items():
        waiting: Row | None = None
        flapping = False
        last = count = 0
        for index, row in enumerate([*own, (node, "end", end)]):
            event, at = row[1:]
            if waiting and waiting[2] + recover_after <= (at - 1 if event == "end" else at):
                result.append(waiting)
                waiting = None
            if flapping and last + within < at:
                flapping = False
                reports.append((node, "settled", last + within, count))
                result += [each for each in own[index - 1 : index] if each[1] in _DOWN]
            if event == "end":
                break
            times = [each[2] for each in own[: index + 1] if each[1] != "new"]
            recent = sum(at - within < when <= at for when in times)
            cancelled = event == "timeout" and waiting is not None
            waiting = None if cancelled else waiting
            if flapping:
                last, count = at, count + (event != "new")
            elif event != "new" and most and recent >= most:
                flapping, last, count, waiting = True, at, recent, None
                reports.append((node, "flapping", at, recent))
            elif event == "recover" and recover_after:
                waiting = row
            elif not cancelled:
                result.append(row)
    return _ordered(result, rows), sorted(reports, key=lambda report: (report[2], report[0]))


def _by_node(rows: Sequence[Row]) -> dict[str, list[Row]]:
    own: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        own[row[0]].append(row)
    return own


def _ordered(announced: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    places = {row: place for place, row in enumerate(rows)}
    return sorted(announced, key=lambda row: (row[2], row[0], places[row]))


def misplaced_copies(originals: Sequence[tuple[int, str]], copies: Sequence[int]) -> list[str]:
    """Return the violations of a partitioned stream: each original (sequence, node) has one copy, in order by node.

    `copies` are the sequences of the originals, in order of the target.
    """
    times = Counter(copies)
    problems = [
        f"message {sequence} of {node}: copied {times[sequence]} times"
        for sequence, node in originals
        if times[sequence] != 1
    ]
    nodes, last = dict(originals), dict[str, int]()
    for sequence in copies:
        node = nodes.get(sequence)
        if node is None:
            problems.append(f"message {sequence}: copied, but not in the source")
        elif sequence <= last.get(node, 0):
            problems.append(f"message {sequence} of {node}: copied after {last[node]}")
        else:
            last[node] = sequence
    return problems
