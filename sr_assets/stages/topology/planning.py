"""Planning the steps for each configured native stream, and the problems that prevent them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sr_assets.domain.errors import ConfigurationError
from sr_assets.domain.topology.drift import Drift, compare
from sr_assets.domain.topology.plan import Action, Step, in_order, plan_adoption, plan_stream
from sr_assets.domain.topology.wanted import Upstream, WantedStream

if TYPE_CHECKING:
    from sr_assets.settings import Settings, TopologySettings
    from sr_assets.stages.topology.survey import ClusterSurvey, Survey

#: Problem of a stream that its cluster lists but that does not respond.
NO_LEADER: Final = "the stream does not respond because it has no leader; check that a majority of its servers is up"
#: Mirrors and sources of a stream without limits retention remove its messages before they are safe.
_SAFE_RETENTION: Final = (2, 14, 0)


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
