"""The stream that a suite measures: its choice, the subject of the emulated nodes, and checks before the start."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.senders import SubjectToken
from sr_assets.embedded.fleet_plan import FleetPlan, Window
from sr_assets.settings import Settings, StreamSettings

#: Times of different clocks are compared.
_CLOCKS_NS: Final = 250_000_000
_PROBES: Final = 3
_MOST_INTERVAL_SECONDS: Final = 300.0
_TIMES: Final = 3


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a suite: a message of each node every interval, the duration of a test, and the typical size."""

    interval_seconds: float
    for_seconds: float
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class MeasuredStream:
    """A configured stream, and the subject of a node's messages (`%s` is the node)."""

    settings: Settings
    entry: StreamSettings
    subject: str

    def plan(self, nodes: int, load: Load, windows: tuple[Window, ...] = ()) -> FleetPlan:
        """Return the plan of a fleet whose nodes have new names, each one token of a subject."""
        suffix = f"-{secrets.token_hex(4)}"
        plan = FleetPlan(nodes, load.interval_seconds, payload_bytes=load.payload_bytes, windows=windows, suffix=suffix)
        first = next(plan.events())
        extractor, subject = self.entry.extractor, self.subject.replace("%s", first.sender)
        if extractor is not None and extractor.extract(subject, b"", first.payload) != first.sender:
            raise ConfigurationError(
                f"{self.entry.label}: {extractor.key} does not find the sender of an emulated node; measure a stream with"
                " `inspect_field: sender`, or name a subject whose token is `%s` by --subject"
            )
        return plan

    @property
    def longest_warning_seconds(self) -> float:
        """The longest `warn_duration` of its nodes; 0 without tracking."""
        entry = self.entry
        if entry.policy is None:
            return 0.0
        classes = entry.node_classes.policies.policies if entry.node_classes else ()
        return max(policy.warning_ns for policy in (entry.policy, *classes)) / 1e9

    def subjects(self, plan: FleetPlan) -> Mapping[str, str]:
        return {self.subject.replace("%s", node): node for node in plan.senders()}


def choose_entry(settings: Settings, name: str | None, *, announced: bool) -> StreamSettings:
    """Return the stream with a name, else the first tracked one, else the first; `announced`: with advisories.

    Raises ConfigurationError if there is none, or several.
    """
    named = settings.streams if name is None else [each for each in settings.find(name) if each in settings.streams]
    suitable = [each for each in named if not announced or (each.tracked and each.advisory is not None)]
    if not suitable:
        kind = "stream with `inspect_duration` and an `advisory` block" if announced else "stream"
        raise ConfigurationError(f"measure: no {kind} is configured{f' as {name}' if name else ''}; add one")
    if name is not None and len(suitable) > 1:
        labels = ", ".join(each.label for each in suitable)
        raise ConfigurationError(f"--stream {name} is ambiguous; choose one of: {labels}")
    return next((each for each in suitable if each.tracked), suitable[0])


def open_stream(settings: Settings, entry: StreamSettings, subject: str | None) -> MeasuredStream:
    """Return a stream with the nodes' subject, by default one that its source's subjects allow.

    Raises ConfigurationError for an unsuitable subject, RunError if the source does not respond, does not exist or has a
    clock that differs from ours.
    """
    with Cluster(entry.source, "sr-assets measure") as source:
        info = source.stream_info(entry.stream)
        chosen = subject or default_subject(entry, info.subjects)
        if "%s" not in chosen or entry.stream not in source.stream_names(chosen.replace("%s", "node")):
            raise ConfigurationError(
                f"--subject {chosen}: is not a subject with %s that stream {entry.stream} takes; name one by --subject"
            )
        _check_clock(source, entry.stream)
    return MeasuredStream(settings, entry, chosen)


def default_subject(entry: StreamSettings, subjects: tuple[str, ...]) -> str:
    """Return a subject with `%s` that matches the filter, else the first subject: its last wildcard, or the sender's
    token, is the node.
    """
    tokens = (entry.filter_subject or (subjects[0] if subjects else "")).split(".")
    wild = [index for index, part in enumerate(tokens) if part in ("*", ">")]
    node = wild[-1] if wild else None
    extractor = entry.extractor
    if isinstance(extractor, SubjectToken) and extractor.number > 0:
        if tokens[-1] == ">":
            tokens += [">"] * (extractor.number - len(tokens))
        node = extractor.number - 1
    return ".".join(
        part if part not in ("*", ">") else "%s" if index == node else "measured" for index, part in enumerate(tokens)
    )


def default_load(
    entry: StreamSettings, interval: float | None, for_seconds: float | None, payload_bytes: int | None, *, paced: bool
) -> Load:
    """Return interval, duration and size with defaults; raises ConfigurationError if they contradict the stream.

    By default a node sends a message every 5 minutes, and three in all. A `paced` fleet does so in real time: then the
    interval must be shorter than the shortest `warn_duration`, and is by default at most a third of it.
    """
    warning = (entry.shortest_warning_ns or 0) / 1e9 if paced else 0.0
    if interval is None:
        interval = min(_MOST_INTERVAL_SECONDS, warning / _TIMES or _MOST_INTERVAL_SECONDS)
    if for_seconds is None:
        for_seconds = _TIMES * interval
    if warning and interval >= warning:
        raise ConfigurationError(
            f"--interval {interval:g}s: must be shorter than warn_duration ({warning:g}s) of {entry.label}, or nodes time out"
        )
    if for_seconds < interval:
        raise ConfigurationError(
            f"{for_seconds:g}s of messages every {interval:g}s: each node must send one; use a longer time"
        )
    return Load(interval, for_seconds, 7_000 if payload_bytes is None else payload_bytes)


def _check_clock(cluster: Cluster, stream: str) -> None:
    """Raise RunError if the server's clock certainly differs from ours."""
    differences = []
    for _ in range(_PROBES):
        before_ns = times.time_ns()
        ts_ns = cluster.stream_info(stream).ts_ns
        after_ns = times.time_ns()
        if ts_ns is None:
            return
        differences.append(max(before_ns - ts_ns, ts_ns - after_ns, 0))
    if min(differences) > _CLOCKS_NS:
        raise RunError(
            f"{cluster.settings.label}: its clock differs from this host's by {min(differences) / 1e9:.1f} s or more;"
            " synchronise the clocks"
        )
