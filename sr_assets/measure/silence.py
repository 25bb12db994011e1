"""The suite `silence`: from a node's last message to its published timeout, without a false one."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

from sr_assets.embedded.fleet_plan import FleetPlan, Window
from sr_assets.measure.advisory_log import AdvisoryLog
from sr_assets.measure.expectation import Expectation, needs_payloads
from sr_assets.measure.load import patience_seconds, publishing, watch
from sr_assets.measure.measured_stream import Load, MeasuredStream
from sr_assets.measure.results import ResultFolder, Trial
from sr_assets.measure.running import MeasuredRun, following
from sr_assets.measure.stream_log import StreamLog
from sr_assets.measure.tables import PublishedTables


def measure_silence(stream: MeasuredStream, nodes: Sequence[int], load: Load, results: ResultFolder) -> list[str]:
    """Append two tests per number of nodes: all nodes report for `load.for_seconds`, then every fifth one falls silent.

    The others report until all timeouts are published; a timeout of theirs is unexpected. Returns no lines. Raises
    RunError if the run fails, or a server does not respond.
    """
    # Every fifth node has this role; a fleet of one or two nodes has none of them.
    windows = [Window(load.for_seconds, math.inf, "sql*" if number > 2 else "web*") for number in nodes]
    fleets = [(stream.plan(number, load, (window,)), window) for number, window in zip(nodes, windows, strict=True)]
    silent_seconds = load.for_seconds + load.interval_seconds + stream.longest_warning_seconds
    with following(stream, results.path) as run:
        for plan, window in fleets:
            with _Silence(stream, plan, window, run, results.tests) as seen, publishing(stream, plan, None) as end:
                watch(
                    seen.poll,
                    lambda: seen.is_complete or (end.done() and end.result() >= 0),
                    lambda: seen.is_complete,
                    patience_seconds(stream) + silent_seconds,
                )
    return []


class _Silence:
    """The timeouts of a fleet, as a context manager; the tests are complete at its end."""

    def __init__(
        self, stream: MeasuredStream, plan: FleetPlan, window: Window, run: MeasuredRun, tests: list[Trial]
    ) -> None:
        self._silenced = {node for node in plan.senders() if window.concerns(node)}
        self._nodes, self._run = set(plan.senders()), run
        self._expectation = Expectation(stream.entry, stream.subjects(plan))
        self._timeouts: dict[str, int] = {}
        with ExitStack() as stack:
            payloads = needs_payloads(stream.entry)
            self._source = stack.enter_context(
                StreamLog(stream.entry.source, stream.entry.stream, headers_only=not payloads)
            )
            self._advisories = stack.enter_context(AdvisoryLog(stream.entry))
            self._closing = stack.pop_all()
        self._tables = PublishedTables(stream, plan.suffix, self._source.next_sequence)
        expected = len(self._silenced)
        self._tests = [
            Trial(description, plan.nodes, expected)
            for description in ("last message → timeout published", "end of warn_duration → timeout published")
        ]
        tests += self._tests

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._conclude()
        self._closing.close()

    @property
    def is_complete(self) -> bool:
        """Whether all nodes that fell silent have timed out."""
        return self._silenced <= self._timeouts.keys()

    def poll(self) -> int:
        """Read all news; return the number of nodes that timed out."""
        self._run.check()
        published = self._tables.poll() if self._advisories.needs_tables else None
        for announced in self._advisories.poll(published):
            if announced.event == "timeout" and announced.node in self._nodes:
                self._note_timeout(announced.node, announced.at_ns)
        for message in self._source.poll():
            self._expectation.add(message)
        return len(self._timeouts)

    def _note_timeout(self, node: str, at_ns: int) -> None:
        if node not in self._silenced or node in self._timeouts:
            self._refuse(node)
        self._timeouts.setdefault(node, at_ns)

    def _conclude(self) -> None:
        """Compute the times; a node that had not been silent for long enough timed out falsely."""
        whole, late = self._tests
        for node in sorted(self._silenced & self._timeouts.keys() & self._expectation.sequences.keys()):
            last_ns = self._expectation.stored_ns[self._expectation.sequences[node][-1]]
            silence_ns, warning_ns = self._timeouts[node] - last_ns, self._expectation.warning_ns(node)
            if silence_ns < warning_ns:
                self._refuse(node)
            whole.times_ns.append(max(0, silence_ns))
            late.times_ns.append(max(0, silence_ns - warning_ns))
        for test in self._tests:
            test.missing = [f"{node}: timeout" for node in sorted(self._silenced - self._timeouts.keys())]

    def _refuse(self, node: str) -> None:
        for test in self._tests:
            test.unexpected += 1
            test.extra.append(f"{node}: timeout")
