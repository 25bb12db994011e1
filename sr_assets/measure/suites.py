"""The suites `pipeline`, `catch-up` and `silence`: a message's way, a backlog of hours, a node's timeout."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from sr_assets.adapters.state.lock import lock_owner
from sr_assets.domain.errors import RunError
from sr_assets.embedded.fleet_plan import FleetPlan, Window
from sr_assets.measure.load import (
    START_SECONDS,
    MeasuredRun,
    following,
    patience_seconds,
    publish_backlog,
    publishing,
    started,
    watch,
)
from sr_assets.measure.measured_stream import Load, MeasuredStream
from sr_assets.measure.observation import (
    AdvisoryLog,
    Expectation,
    Observation,
    PublishedTables,
    StreamLog,
    needs_payloads,
)
from sr_assets.measure.results import ResultFolder, Trial
from sr_assets.stages.source.lag import measure_lag


def measure_pipeline(stream: MeasuredStream, nodes: Sequence[int], load: Load, results: ResultFolder) -> list[str]:
    """Append up to four tests per number of nodes, while a fleet of new nodes publishes and the site's run works;
    return no lines.

    Raises RunError if the run fails, or a server does not respond.
    """
    plans = [stream.plan(number, load) for number in nodes]
    with following(stream, results.path) as run:
        for plan in plans:
            with (
                Observation(stream, plan, results.tests) as seen,
                publishing(stream, plan, load.for_seconds) as end,
            ):
                watch(
                    f"measuring {plan.nodes} nodes",
                    lambda: _poll(seen, run),
                    end.done,
                    lambda: seen.is_complete,
                    patience_seconds(stream),
                    load_seconds=load.for_seconds,
                )
                published, stored = end.result() if end.done() else 0, len(seen.expectation.stored_ns)
            if stored < published:
                raise RunError(
                    f"{stream.entry.label}: the source holds {stored} of {published} published messages; raise its limits"
                )
    return []


def _poll(seen: Observation, run: MeasuredRun) -> int:
    run.check()
    return seen.poll()


def measure_catch_up(stream: MeasuredStream, nodes: Sequence[int], load: Load, results: ResultFolder) -> list[str]:
    """Append up to four tests per number of nodes; return a line with the rate of each number.

    The backlog has the messages of `load.for_seconds`, published at once. Times count from the beginning of the run's work,
    without the start of its process. Raises RunError if a run is active or fails.
    """
    rates = [_drain(stream, stream.plan(number, load), load, results) for number in nodes]
    results.note(
        backlog_messages=[messages for messages, _ in rates],
        drained_seconds=[round(seconds, 3) for _, seconds in rates],
        messages_per_second=[round(messages / seconds, 1) for messages, seconds in rates],
    )
    return [
        f"{number} nodes: {messages} messages in {seconds:.1f} s, {messages / seconds:.0f} messages/s"
        for number, (messages, seconds) in zip(nodes, rates, strict=True)
    ]


def _drain(stream: MeasuredStream, plan: FleetPlan, load: Load, results: ResultFolder) -> tuple[int, float]:
    """Measure one backlog; return its number of messages, and the seconds until the last one was found."""
    _prepare(stream, results.path)
    with Observation(stream, plan, results.tests, from_start=True) as seen:
        published = publish_backlog(stream, plan, load.for_seconds)
        seen.read_source()
        stored = len(seen.expectation.stored_ns)
        if stored < published:
            raise RunError(
                f"{stream.entry.label}: the source holds {stored} of {published} published messages; raise its limits"
            )
        with started(stream, results.path, "once") as run:
            seen.began_ns = run.began_ns
            watch(
                f"draining {published} messages",
                seen.poll,
                lambda: run.has_ended,
                lambda: seen.is_complete or run.has_ended,
                # A run limits itself; a target that stops is noticed earlier.
                START_SECONDS + stream.settings.run_budget_ns / 1e9,
            )
            if not seen.is_complete:
                run.check()
    results.check()
    return published, max(max(items.test.times_ns) for items in seen.items.values()) / 1e9


def _prepare(stream: MeasuredStream, folder: Path) -> None:
    """Process the messages that wait; raises RunError if a run is active, which would drain the backlog early."""
    label = stream.entry.label
    if (owner := lock_owner(stream.settings.home / "sites" / stream.entry.name)) is not None:
        raise RunError(f"{label}: a run is active: {owner}; stop it, because it would drain the backlog early")
    if next(lag for lag in measure_lag(stream.settings) if f"{lag.name}/{lag.stream}" == label).messages != 0:
        with started(stream, folder, "once") as run:
            run.wait()


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
                    f"measuring {plan.nodes} nodes",
                    seen.poll,
                    lambda: seen.is_complete or (end.done() and end.result() >= 0),
                    lambda: seen.is_complete,
                    patience_seconds(stream) + silent_seconds,
                    load_seconds=silent_seconds,
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
