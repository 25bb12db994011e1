"""The differences between streams and their configuration, the steps that remove them, and the reasons against a step."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple

from sr_assets.domain.positions import parse_rfc3339_ns
from sr_assets.domain.topology.found import FoundStream, upstream_identity
from sr_assets.domain.topology.wanted import DEFAULTS, OUR_NAMES, OWNER, SET_BY_SEALING, WantedStream

Version = tuple[int, int, int]

#: Servers since this version can turn a mirror into a normal stream.
_PROMOTION: Final[Version] = (2, 12, 0)
#: Settings that a server never turns off.
_PERMANENT: Final = frozenset({"deny_delete", "deny_purge", "sealed"})
Manage = Literal["observe", "create", "reconcile"]


class Remedy(StrEnum):
    """The remedy of a difference: an update, a new stream, or none if the server ignores the setting."""

    UPDATABLE = "updatable"
    NEEDS_RECREATE = "needs_recreate"
    IGNORED = "ignored_by_server"


class Drift(NamedTuple):
    """A difference between a configured stream and the existing one.

    `found` None: the stream, or this source of it, does not exist. `wanted` None: it should not exist.
    """

    key: str
    wanted: str | None
    found: str | None
    remedy: Remedy


def compare(wanted: WantedStream, existing: FoundStream | None, owner: str, version: Version) -> list[Drift]:
    """Return the differences between a stream and its configuration.

    For a stream of `owner` every setting counts, for any other stream only the configured ones.
    """
    if existing is None:
        return [Drift("stream", "exists", None, Remedy.UPDATABLE)]
    return [
        *_settings(wanted, existing, owned=existing.metadata.get(OWNER) == owner),
        *_mirror(wanted, existing, version),
        *_sources(wanted, existing),
    ]


def _settings(wanted: WantedStream, existing: FoundStream, *, owned: bool) -> Iterator[Drift]:
    settings = dict(wanted.config)
    if owned:
        without_subjects: dict[str, Any] = {"subjects": []} if wanted.upstreams else {}
        settings = {**DEFAULTS, **without_subjects, **settings}
    metadata = settings.pop("metadata", {})
    if settings.get("sealed") and existing.config.get("sealed"):
        settings = {key: value for key, value in settings.items() if key not in SET_BY_SEALING}
    for key, value in settings.items():
        there = existing.config.get(key, DEFAULTS.get(key))
        if _comparable(value) != _comparable(there):
            yield Drift(OUR_NAMES.get(key, key), _text(value), _text(there), _remedy(key, value, there))
    for key, value in metadata.items():
        if existing.metadata.get(key) != value:
            yield Drift(f"metadata.{key}", value, existing.metadata.get(key), Remedy.UPDATABLE)


def _remedy(key: str, wanted: object, existing: object) -> Remedy:
    fixed = (
        key in ("storage", "max_consumers")
        or (key == "retention" and "workqueue" in (wanted, existing))
        or (key in _PERMANENT and not wanted)
    )
    return Remedy.NEEDS_RECREATE if fixed else Remedy.UPDATABLE


def _mirror(wanted: WantedStream, existing: FoundStream, version: Version) -> Iterator[Drift]:
    ours, there = wanted.mirror.wire if wanted.mirror else None, existing.config.get("mirror")
    if ours is None and there is None:
        return
    if (
        ours is None
        or there is None
        or (upstream_identity(ours), _start(ours))
        != (
            upstream_identity(there),
            _start(there),
        )
    ):
        promoted = ours is None and version >= _PROMOTION
        remedy = Remedy.UPDATABLE if promoted else Remedy.NEEDS_RECREATE
        yield Drift("mirror", upstream_text(ours), upstream_text(there), remedy)


def _sources(wanted: WantedStream, existing: FoundStream) -> Iterator[Drift]:
    ours = {upstream_identity(wire): wire for wire in (source.wire for source in wanted.sources)}
    there = {upstream_identity(wire): wire for wire in existing.config.get("sources") or ()}
    for identity, source in ours.items():
        other = there.get(identity)
        if other is None:
            yield Drift("sources", upstream_text(source), None, Remedy.UPDATABLE)
        elif _start(source) != _start(other):
            # A start counts only when a source is added to the stream.
            yield Drift("sources", upstream_text(source), upstream_text(other), Remedy.IGNORED)
    for identity, source in there.items():
        if identity not in ours:
            yield Drift("sources", None, upstream_text(source), Remedy.UPDATABLE)


def updated(wanted: WantedStream, existing: FoundStream, drift: list[Drift]) -> dict[str, Any]:
    """Return the configuration of an update that fixes the updatable differences and changes nothing else."""
    mended = {difference.key for difference in drift if difference.remedy is Remedy.UPDATABLE}
    settings = {**DEFAULTS, "subjects": [], **wanted.config}
    changed = {key: value for key, value in settings.items() if OUR_NAMES.get(key, key) in mended}
    config = {
        **existing.config,
        **changed,
        "metadata": kept_metadata(existing) | dict(wanted.config.get("metadata", {})),
    }
    most_ns = config.get("max_age") or 0
    if 0 < most_ns < (config.get("duplicate_window") or 0) and "duplicate_window" not in wanted.config:
        # The server's own default, for a stream with a longer retention.
        config["duplicate_window"] = most_ns
    if "mirror" in mended:
        config.pop("mirror")
        config |= {"subjects": wanted.config.get("subjects", [])}
    if "sources" in mended:
        there = {upstream_identity(wire): wire for wire in existing.config.get("sources") or ()}
        ours = (source.wire for source in wanted.sources)
        # The server would accept a new start of an existing source and ignore it.
        config["sources"] = [there.get(upstream_identity(wire), wire) for wire in ours]
    return config


def kept_metadata(existing: FoundStream) -> dict[str, str]:
    """Return a stream's metadata without the server's own keys."""
    return {key: value for key, value in existing.metadata.items() if not key.startswith("_nats.")}


def upstream_text(part: Mapping[str, Any] | None) -> str | None:
    """Return a mirror or source as text: origin, API, filter or transforms, start."""
    if part is None:
        return None
    external = part.get("external") or {}
    transforms = ", ".join(
        f"{transform['src']} to {transform['dest']}" if transform.get("dest") else f"{transform['src']} untransformed"
        for transform in part.get("subject_transforms") or ()
    )
    notes = (
        (external.get("api"), f"at {external.get('api')}"),
        (part.get("filter_subject"), f"filter {part.get('filter_subject')}"),
        (transforms, transforms),
        (part.get("opt_start_seq"), f"from sequence {part.get('opt_start_seq')}"),
        (part.get("opt_start_time"), f"from {part.get('opt_start_time')}"),
    )
    return "; ".join([str(part["name"]), *(text for given, text in notes if given)])


def _start(part: Mapping[str, Any]) -> tuple[int, int]:
    time = part.get("opt_start_time")
    return part.get("opt_start_seq") or 0, parse_rfc3339_ns(time) if time else 0


def _comparable(value: object) -> object:
    """Return a normalized value: list order, empty values and missing limits do not count."""
    # Servers have both for "no limit", and omit empty values.
    if not value or value == -1:
        return 0
    if isinstance(value, (list, tuple)):
        return Counter(value)
    if isinstance(value, Mapping):
        return {key: _comparable(item) for key, item in value.items() if item}
    return value


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


class Action(StrEnum):
    """The action of a step."""

    CREATE = "create"
    UPDATE = "update"
    RECREATE = "recreate"
    ADOPT = "adopt"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Step:
    """The step for one stream, with its new configuration; `reason` explains remaining differences in `drift`."""

    wanted: WantedStream
    action: Action
    drift: tuple[Drift, ...] = ()
    config: Mapping[str, Any] | None = None
    reason: str | None = None


def plan_stream(
    wanted: WantedStream,
    existing: FoundStream | None,
    *,
    owner: str,
    manage: Manage,
    version: Version,
    recreate: bool = False,
) -> Step:
    """Return the step for a stream; `recreate` permits its deletion and re-creation, whatever it holds."""
    drift = compare(wanted, existing, owner, version)
    if existing is None:
        if manage == "observe":
            return Step(wanted, Action.NONE, tuple(drift), reason="manage is observe; set create or reconcile")
        return Step(wanted, Action.CREATE, tuple(drift), wanted.whole(owner))
    if not drift:
        return Step(wanted, Action.NONE)
    refusal = _refusal(existing, owner, manage, recreate=recreate)
    if refusal is not None:
        return Step(wanted, Action.NONE, tuple(drift), reason=refusal)
    kept = [difference for difference in drift if difference.remedy is not Remedy.UPDATABLE]
    if recreate and kept:
        return Step(wanted, Action.RECREATE, tuple(drift), wanted.whole(owner))
    reason = _why_kept(kept, wanted) if kept else None
    if len(kept) == len(drift):
        return Step(wanted, Action.NONE, tuple(drift), reason=reason)
    return Step(wanted, Action.UPDATE, tuple(drift), updated(wanted, existing, drift), reason)


def plan_adoption(wanted: WantedStream, existing: FoundStream | None, owner: str, *, named: bool) -> Step:
    """Return the adoption of a stream, which changes only its metadata.

    A stream of another replicator is adopted only if it is `named`.
    """
    if existing is None:
        return Step(wanted, Action.NONE, reason="does not exist; apply creates it")
    before = existing.metadata.get(OWNER)
    if before == owner:
        return Step(wanted, Action.NONE, reason="is ours already")
    if before is not None and not named:
        return Step(wanted, Action.NONE, reason=f"belongs to replicator {before}; select it with --stream to adopt it")
    change = Drift(f"metadata.{OWNER}", owner, before, Remedy.UPDATABLE)
    return Step(
        wanted, Action.ADOPT, (change,), {**existing.config, "metadata": kept_metadata(existing) | {OWNER: owner}}
    )


def _refusal(existing: FoundStream, owner: str, manage: Manage, *, recreate: bool) -> str | None:
    """Return the reason to leave an existing stream unchanged."""
    if manage == "observe":
        return "manage is observe; set reconcile"
    before = existing.metadata.get(OWNER)
    if before != owner:
        return f"belongs to replicator {before}" if before else "has no owner; adopt it with `topology adopt`"
    return "manage is create; set reconcile" if manage == "create" and not recreate else None


def _why_kept(kept: Sequence[Drift], wanted: WantedStream) -> str:
    if all(difference.remedy is Remedy.IGNORED for difference in kept):
        return "the server would accept the new start and ignore it; a start counts only when a source is added"
    return f"cannot be changed; `topology apply --recreate {wanted.label}` deletes and recreates the stream"


def in_order(steps: Iterable[Step]) -> list[Step]:
    """Return steps in dependency order: a mirror created before its origin waits long for it."""
    waiting = {(step.wanted.cluster, step.wanted.stream): step for step in steps}
    ordered: list[Step] = []
    while waiting:
        ready = [
            step
            for step in waiting.values()
            if not any(
                (upstream.cluster, upstream.stream) in waiting
                and (upstream.cluster, upstream.stream) != (step.wanted.cluster, step.wanted.stream)
                for upstream in step.wanted.upstreams
            )
        ]
        # Streams that copy each other have no first one.
        for step in ready or list(waiting.values()):
            ordered.append(step)
            del waiting[step.wanted.cluster, step.wanted.stream]
    return ordered


def depends_on(step: Step, labels: Collection[str]) -> str | None:
    """Return the given streams that a step's stream copies from."""
    return next(
        (
            f"{upstream.cluster}/{upstream.stream}"
            for upstream in step.wanted.upstreams
            if f"{upstream.cluster}/{upstream.stream}" in labels
        ),
        None,
    )
