"""The steps that bring streams to their configuration, their order, and the reasons against a step."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from sr_assets.domain.topology.drift import Drift, Remedy, Version, compare, kept_metadata, updated
from sr_assets.domain.topology.found import FoundStream
from sr_assets.domain.topology.wanted import OWNER, WantedStream

Manage = Literal["observe", "create", "reconcile"]


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
