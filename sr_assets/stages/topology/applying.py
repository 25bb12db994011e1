"""Executing a plan: streams are created, changed and adopted; only explicitly named ones are deleted and recreated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sr_assets.adapters import times
from sr_assets.adapters.jetstream import BODY_NOT_EMPTY, NAME_MISMATCH, NAME_TAKEN, ApiError
from sr_assets.domain.errors import RunError
from sr_assets.domain.topology.drift import compare
from sr_assets.domain.topology.found import read_stream
from sr_assets.domain.topology.plan import Action, Step, depends_on
from sr_assets.domain.topology.wanted import WantedStream

if TYPE_CHECKING:
    from sr_assets.adapters.nats.cluster import Cluster
    from sr_assets.stages.topology.survey import Survey

_OPERATIONS: Final = {
    Action.CREATE: "CREATE",
    Action.RECREATE: "CREATE",
    Action.UPDATE: "UPDATE",
    Action.ADOPT: "UPDATE",
}
#: Time for the servers to connect the links of a new stream before they are evaluated.
_CONNECT_SECONDS: Final = 3.0


class Outcome(NamedTuple):
    """The result of a step: done, failed or skipped, with details."""

    step: Step
    result: str
    detail: str | None = None


def refused(survey: Survey, steps: Sequence[Step]) -> list[str]:
    """Return the steps that permissions or servers forbid, one line each, without changing anything."""
    tried = [step for step in steps if step.action is not Action.NONE]
    return [problem for problem in survey.side_by_side(lambda step: _refusal(survey, step), tried) if problem]


def apply_steps(survey: Survey, steps: Sequence[Step], owner: str) -> Iterator[Outcome]:
    """Execute the steps in order; skip steps that copy from the stream of a failed step."""
    failed: set[str] = set()
    for step in steps:
        if step.action is Action.NONE:
            continue
        before = depends_on(step, failed)
        if before is not None:
            failed.add(step.wanted.label)
            yield Outcome(step, "not done", f"it copies from {before}")
            continue
        outcome = _execute(survey, step, owner)
        if outcome.result != "done":
            failed.add(step.wanted.label)
        yield outcome


def await_links(survey: Survey, outcomes: Sequence[Outcome]) -> None:
    """Survey again once every link of the new streams is active: servers connect them after their response."""
    made = [outcome.step.wanted for outcome in outcomes if outcome.result == "done"]
    deadline = times.monotonic() + _CONNECT_SECONDS
    while not _links_active(survey.refresh(), made) and times.monotonic() < deadline:
        times.sleep(0.3)


def _links_active(survey: Survey, made: Sequence[WantedStream]) -> bool:
    streams = [survey.of[wanted.cluster].streams.get(wanted.stream) for wanted in made]
    return all(link.active_ns is not None for stream in streams if stream is not None for link in stream.links)


def _execute(survey: Survey, step: Step, owner: str) -> Outcome:
    cluster, name, deleted = survey.cluster(step.wanted.cluster), step.wanted.stream, False
    try:
        if step.action is Action.RECREATE:
            cluster.request_api(f"STREAM.DELETE.{name}")
            deleted = True
        config, operation = dict(step.config or {}), _OPERATIONS[step.action]
        response = cluster.request_api(f"STREAM.{operation}.{name}", config)
        if operation == "CREATE" and step.wanted.config.get("sealed"):
            # A server seals only existing streams.
            response = cluster.request_api(f"STREAM.UPDATE.{name}", {**config, "sealed": True})
    except RunError as error:
        note = (
            "; the stream was deleted and no longer exists; run `topology apply` again to create it" if deleted else ""
        )
        return Outcome(step, "failed", f"{error}{note}")
    if step.action is Action.ADOPT:
        return Outcome(step, "done")
    version = survey.of[step.wanted.cluster].version
    left = compare(step.wanted, read_stream(response), owner, version)
    text = ", ".join(f"{difference.key} ({difference.remedy})" for difference in left)
    return Outcome(step, "done", f"still different: {text}" if left else None)


def _refusal(survey: Survey, step: Step) -> str | None:
    cluster, name = survey.cluster(step.wanted.cluster), step.wanted.stream
    try:
        if step.action is Action.RECREATE:
            # The server first validates a new configuration, even while the old stream exists.
            _expect(cluster, f"STREAM.CREATE.{name}", dict(step.config or {}), NAME_TAKEN)
            probe_deletion(cluster, name)
        else:
            probe_update(cluster, _OPERATIONS[step.action], name)
    except RunError as error:
        return f"{step.wanted.label}: {error}"
    return None


def probe_update(cluster: Cluster, operation: str, stream: str) -> None:
    """Raise RunError if the user may not create or update a stream; a name that contradicts the subject changes
    nothing.
    """
    _expect(cluster, f"STREAM.{operation}.{stream}", {"name": f"{stream}-not"}, NAME_MISMATCH)


def probe_deletion(cluster: Cluster, stream: str) -> None:
    """Raise RunError if the user may not delete a stream: the server refuses a request with a payload."""
    _expect(cluster, f"STREAM.DELETE.{stream}", {"only": "asked"}, BODY_NOT_EMPTY)


def _expect(cluster: Cluster, subject: str, body: dict[str, Any], code: int) -> None:
    """Send a request that must fail with this code; raises RunError for any other failure."""
    try:
        cluster.request_api(subject, body)
    except ApiError as error:
        if error.code != code:
            raise
    else:
        raise RunError(f"{cluster.settings.label}: {subject}: the server accepted a request that it should refuse")
