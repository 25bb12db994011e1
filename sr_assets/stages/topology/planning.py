"""Planning the steps for each native stream, and executing them; only explicitly named streams are deleted and recreated."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sr_assets.adapters import times
from sr_assets.adapters.jetstream import BODY_NOT_EMPTY, NAME_MISMATCH, NAME_TAKEN, ApiError
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.topology.found import read_stream
from sr_assets.domain.topology.plan import (
    Action,
    Drift,
    Step,
    compare,
    depends_on,
    in_order,
    plan_adoption,
    plan_stream,
)
from sr_assets.domain.topology.wanted import Upstream, WantedStream

if TYPE_CHECKING:
    from sr_assets.adapters.nats.administration import Cluster
    from sr_assets.settings import Settings, TopologySettings
    from sr_assets.stages.topology.survey import ClusterSurvey, Survey

#: Problem of a stream that its cluster lists but that does not respond.
NO_LEADER: Final = "the stream does not respond because it has no leader; check that a majority of its servers is up"
#: Mirrors and sources of a stream without limits retention remove its messages before they are safe.
_SAFE_RETENTION: Final = (2, 14, 0)
_OPERATIONS: Final = {
    Action.CREATE: "CREATE",
    Action.RECREATE: "CREATE",
    Action.UPDATE: "UPDATE",
    Action.ADOPT: "UPDATE",
}
#: Time for the servers to connect the links of a new stream before they are evaluated.
_CONNECT_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps in dependency order; any of the `problems` prevents all of them."""

    steps: list[Step]
    problems: list[str]


def topology_of(settings: Settings) -> TopologySettings:
    """Return the block `topology`; raises ConfigurationError if there is none."""
    if settings.topology is None:
        raise ConfigurationError("topology is not configured; add a block with clusters and streams")
    return settings.topology


def make_plan(settings: Settings, survey: Survey, recreate: Sequence[str] = ()) -> Plan:
    """Compare a survey with the configuration; `recreate` names the streams, by name or label, that may be recreated.

    Raises ConfigurationError if one of them is not configured.
    """
    topology = topology_of(settings)
    again = {stream.label for name in recreate for stream in find_streams(topology, name)}
    steps, problems = [], list[str]()
    for wanted, surveyed in _available(topology.streams, survey, problems):
        step = plan_stream(
            wanted,
            surveyed.streams.get(wanted.stream),
            owner=settings.replicator,
            manage=topology.manage,
            version=surveyed.version,
            recreate=wanted.label in again,
        )
        steps.append(step)
        if step.action is not Action.NONE:
            problems += [f"{wanted.label}: {problem}" for problem in _problems(topology, survey, wanted)]
    return Plan(in_order(steps), problems)


def make_adoption(settings: Settings, survey: Survey, names: Sequence[str]) -> Plan:
    """Plan the adoption of existing configured streams; `names` selects streams, even of another replicator."""
    topology = topology_of(settings)
    named = {stream.label for name in names for stream in find_streams(topology, name)}
    chosen = [wanted for wanted in topology.streams if not named or wanted.label in named]
    steps, problems = [], list[str]()
    for wanted, surveyed in _available(chosen, survey, problems):
        existing = surveyed.streams.get(wanted.stream)
        steps.append(plan_adoption(wanted, existing, settings.replicator, named=wanted.label in named))
    return Plan(steps, problems)


def _available(
    chosen: Iterable[WantedStream], survey: Survey, problems: list[str]
) -> Iterator[tuple[WantedStream, ClusterSurvey]]:
    """Yield each stream whose cluster responded, with the response; the others add to the problems."""
    for wanted in chosen:
        surveyed = survey.of[wanted.cluster]
        home = surveyed.elsewhere.get(wanted.stream)
        if surveyed.error is not None:
            problems.append(f"{wanted.label}: cluster {wanted.cluster} is unreachable: {surveyed.error}")
        elif wanted.stream in surveyed.silent:
            problems.append(f"{wanted.label}: {NO_LEADER}")
        elif home is not None:
            problems.append(
                f"{wanted.label}: is {home}/{wanted.stream}: {wanted.cluster} and {home} are one JetStream;"
                " remove one of them from topology.streams"
            )
        else:
            yield wanted, surveyed


def find_streams(topology: TopologySettings, name: str) -> list[WantedStream]:
    """Return the stream with a name, given alone or as cluster/stream.

    Raises ConfigurationError if it is unknown or ambiguous.
    """
    streams = [stream for stream in topology.streams if name in (stream.stream, stream.label)]
    labels = ", ".join(stream.label for stream in streams or topology.streams)
    if not streams:
        raise ConfigurationError(f"{name} is not a stream of topology; configured: {labels or 'none'}")
    if len(streams) > 1:
        raise ConfigurationError(f"{name} is ambiguous; choose one of: {labels}")
    return streams


def find_drift(settings: Settings, survey: Survey) -> Iterator[tuple[WantedStream, Drift]]:
    """Yield every difference between configuration and server, at the reachable clusters."""
    for wanted in topology_of(settings).streams:
        surveyed = survey.of[wanted.cluster]
        if surveyed.error is None and wanted.stream not in surveyed.silent and wanted.stream not in surveyed.elsewhere:
            existing = surveyed.streams.get(wanted.stream)
            for drift in compare(wanted, existing, settings.replicator, surveyed.version):
                yield wanted, drift


def _problems(topology: TopologySettings, survey: Survey, wanted: WantedStream) -> Iterator[str]:
    made = {stream.label for stream in topology.streams} if topology.manage != "observe" else set()
    for upstream in wanted.upstreams:
        # An unreachable cluster, or one behind an API prefix, may have the stream; the server keeps trying.
        surveyed, elsewhere = (
            survey.of[upstream.cluster],
            upstream.api not in (None, topology.clusters[upstream.cluster].api),
        )
        if surveyed.error is None and not elsewhere:
            yield from _problems_with(upstream, surveyed, wanted, made)


def _problems_with(
    upstream: Upstream, surveyed: ClusterSurvey, wanted: WantedStream, made: Collection[str]
) -> Iterator[str]:
    origin = surveyed.streams.get(upstream.stream)
    label = f"{upstream.cluster}/{upstream.stream}"
    if origin is None:
        if label not in made and upstream.stream not in surveyed.silent:
            yield f"{label} does not exist, and is not in topology.streams; create it, or correct its name"
        return
    most, theirs = wanted.config.get("max_msg_size", -1), origin.config.get("max_msg_size", -1)
    if most != -1 and (theirs == -1 or theirs > most):
        yield f"max_msg_size: {most} is less than the size of {label} ({theirs}); the server refuses that"
    retention = origin.config.get("retention", "limits")
    if retention != "limits" and surveyed.version < _SAFE_RETENTION:
        version = ".".join(map(str, surveyed.version))
        yield f"{label} has retention {retention}, which is safe to copy from since server 2.14; it is {version}"


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
