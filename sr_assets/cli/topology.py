"""The commands `topology plan`, `apply` and `adopt`: the native mirrors and sources of the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import click

from sr_assets.adapters.logs import print_error
from sr_assets.cli.base import cli, configured, form_option, note_action
from sr_assets.cli.render import Format, print_note, show
from sr_assets.domain.topology.plan import Step

if TYPE_CHECKING:
    from sr_assets.settings import Settings
    from sr_assets.stages.topology.planning import Plan
    from sr_assets.stages.topology.survey import Survey

_PLAN: Final = ("cluster", "stream", "action", "key", "wanted", "found", "remedy", "reason")
#: How long a command waits for the lock. A sensor's tick ends sooner; a run or another `apply` may take longer.
_LOCK_WAIT_SECONDS: Final = 10.0
_DONE: Final = ("cluster", "stream", "action", "result", "detail")


@cli.group()
def topology() -> None:
    """Manage the native mirrors and sources of the block `topology`."""


@topology.command("plan", epilog="Example: sr-assets topology plan")
@click.option(
    "--recreate",
    multiple=True,
    metavar="STREAM",
    help="Plan `apply --recreate` of this stream; repeatable.",
)
@form_option
@configured
def plan_command(settings: Settings, recreate: tuple[str, ...], form: Format) -> int:
    """List the differences between streams and configuration, and the steps of `apply`, without changing anything.

    Exit code 1 if `apply` would refuse.
    """
    from sr_assets.stages.topology.planning import make_plan, topology_of
    from sr_assets.stages.topology.survey import Survey

    topology_of(settings)
    with Survey(settings) as survey:
        plan = make_plan(settings, survey.refresh(), recreate)
    _show_plan(plan, form)
    for problem in plan.problems:
        print_error(problem)
    return int(bool(plan.problems))


@topology.command("apply", epilog="Example: sr-assets topology apply")
@click.option(
    "--recreate",
    multiple=True,
    metavar="STREAM",
    help="Delete this stream with all its messages and recreate it, if an update cannot help; repeatable.",
)
@form_option
@configured
def apply_command(settings: Settings, recreate: tuple[str, ...], form: Format) -> int:
    """Create missing streams and, with `manage: reconcile`, change different ones; delete only the streams of --recreate.

    Exit code 1 if a step failed: the completed steps are listed, and the next `apply` continues.
    """
    from sr_assets.domain.errors import ConfigurationError
    from sr_assets.stages.topology.evaluation import topology_lock
    from sr_assets.stages.topology.planning import make_plan, topology_of
    from sr_assets.stages.topology.survey import Survey

    if topology_of(settings).manage == "observe":
        raise ConfigurationError("topology.manage is observe, which changes no stream; set create or reconcile")
    with topology_lock(settings, "topology apply", _LOCK_WAIT_SECONDS), Survey(settings) as survey:
        return _execute(settings, survey, make_plan(settings, survey.refresh(), recreate), form, "topology apply")


@topology.command("adopt", epilog="Example: sr-assets topology adopt --stream NODES")
@click.option(
    "--stream",
    "names",
    multiple=True,
    metavar="STREAM",
    help="Adopt only this stream, even if another replicator owns it; repeatable.",
)
@form_option
@configured
def adopt_command(settings: Settings, names: tuple[str, ...], form: Format) -> int:
    """Mark existing streams as managed, so that `apply` changes them too; change only their metadata."""
    from sr_assets.stages.topology.evaluation import topology_lock
    from sr_assets.stages.topology.planning import make_adoption, topology_of
    from sr_assets.stages.topology.survey import Survey

    topology_of(settings)
    with topology_lock(settings, "topology adopt", _LOCK_WAIT_SECONDS), Survey(settings) as survey:
        return _execute(settings, survey, make_adoption(settings, survey.refresh(), names), form, "topology adopt")


def _execute(settings: Settings, survey: Survey, plan: Plan, form: Format, action: str) -> int:
    """Execute the steps of a plan and print their results; execute none if a failure is predictable."""
    from sr_assets.stages.topology.planning import apply_steps, refused

    problems = plan.problems or refused(survey, plan.steps)
    outcomes = [] if problems else list(apply_steps(survey, plan.steps, settings.replicator))
    for outcome in outcomes:
        if outcome.result == "done":
            note_action(settings, action, outcome.step.wanted.label, str(outcome.step.action))
    rows = [
        (outcome.step.wanted.cluster, outcome.step.wanted.stream, outcome.step.action, outcome.result, outcome.detail)
        for outcome in outcomes
    ]
    left = [step for step in plan.steps if step.reason]
    rows += [
        (step.wanted.cluster, step.wanted.stream, step.action, "left", step.reason) for step in left if not problems
    ]
    if rows or form in ("json", "csv"):
        show(_DONE, rows, form, first=_DONE)
    elif not problems:
        print_note("nothing to do: every stream is as configured")
    for problem in problems:
        print_error(f"{problem}; no stream was changed")
    return int(bool(problems) or any(outcome.result != "done" for outcome in outcomes))


def _show_plan(plan: Plan, form: Format) -> None:
    rows = list(_plan_rows(plan.steps))
    if rows or form in ("json", "csv"):
        show(_PLAN, rows, form, first=("cluster", "stream", "action", "key", "wanted", "found"))
    elif not plan.problems:
        print_note("nothing to do: every stream is as configured")


def _plan_rows(steps: Sequence[Step]) -> Iterable[tuple[str | None, ...]]:
    for step in steps:
        for drift in step.drift:
            yield step.wanted.cluster, step.wanted.stream, step.action, *drift, step.reason
