"""The suite `catch-up`: a backlog of hours, drained by one run."""

from collections.abc import Sequence
from pathlib import Path

from sr_assets.adapters.state.lock import lock_owner
from sr_assets.domain.errors import RunError
from sr_assets.embedded.fleet_plan import FleetPlan
from sr_assets.measure.load import publish_backlog, watch
from sr_assets.measure.measured_stream import Load, MeasuredStream
from sr_assets.measure.observation import Observation
from sr_assets.measure.results import ResultFolder
from sr_assets.measure.running import START_SECONDS, started
from sr_assets.stages.source.lag import measure_lag


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
