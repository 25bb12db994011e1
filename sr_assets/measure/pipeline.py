"""The suite `pipeline`: from a message in the source to its copy, its node's advisory, and its rows in the tables."""

from collections.abc import Sequence

from sr_assets.domain.errors import RunError
from sr_assets.measure.load import patience_seconds, publishing, watch
from sr_assets.measure.measured_stream import Load, MeasuredStream
from sr_assets.measure.observation import Observation
from sr_assets.measure.results import ResultFolder
from sr_assets.measure.running import MeasuredRun, following


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
                watch(lambda: _poll(seen, run), end.done, lambda: seen.is_complete, patience_seconds(stream))
                published, stored = end.result() if end.done() else 0, len(seen.expectation.stored_ns)
            if stored < published:
                raise RunError(
                    f"{stream.entry.label}: the source holds {stored} of {published} published messages; raise its limits"
                )
    return []


def _poll(seen: Observation, run: MeasuredRun) -> int:
    run.check()
    return seen.poll()
