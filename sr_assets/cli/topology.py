"""The commands `topology plan`, `apply` and `adopt`: the native mirrors and sources of the configuration.

Not here: what is compared and done (`stages.topology`), the report of what there is (`report`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from sr_assets.cli.base import cli, configured, form_option, print_error
from sr_assets.cli.render import Format, print_note, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sr_assets.domain.topology.plan import Step
    from sr_assets.settings import Settings
    from sr_assets.stages.topology.planning import Plan
    from sr_assets.stages.topology.survey import Survey

_PLAN: Final = ("cluster", "stream", "action", "key", "wanted", "found", "remedy", "reason")
#: How long a command waits for the lock: a tick of the sensor ends sooner, a run or another `apply` may take longer.
_PATIENCE_SECONDS: Final = 10.0
_DONE: Final = ("cluster", "stream", "action", "result", "detail")


@cli.group()
def topology() -> None:
    """The servers' own mirrors and sources, as `topology` configures them."""


@topology.command("plan")
@click.option(
    "--recreate",
    multiple=True,
    metavar="STREAM",
    help="Plan as `apply --recreate` would for this stream; may be repeated.",
)
@form_option
@configured
def plan_command(settings: Settings, recreate: tuple[str, ...], form: Format) -> int:
    """Show how the streams differ from the configuration, and what `apply` would do; changes nothing.

    Exit code 1 when it is already known that `apply` would refuse.
    """
    from sr_assets.stages.topology.planning import make_plan, topology_of
    from sr_assets.stages.topology.survey import Survey

    topology_of(settings)
    with Survey(settings) as survey:
        plan = make_plan(settings, survey.take(), recreate)
    _show_plan(plan, form)
    for problem in plan.problems:
        print_error(problem)
    return int(bool(plan.problems))


@topology.command("apply")
@click.option(
    "--recreate",
    multiple=True,
    metavar="STREAM",
    help="Delete this stream with all its messages and make it again, where nothing else helps; may be repeated.",
)
@form_option
@configured
def apply_command(settings: Settings, recreate: tuple[str, ...], form: Format) -> int:
    """Make what is missing and, with `manage: reconcile`, change what differs; nothing is deleted that is not named.

    Exit code 1 when something could not be done: what was done is shown, and another `apply` goes on.
    """
    from sr_assets.domain.errors import ConfigurationError
    from sr_assets.stages.topology.evaluation import topology_lock
    from sr_assets.stages.topology.planning import make_plan, topology_of
    from sr_assets.stages.topology.survey import Survey

    if topology_of(settings).manage == "observe":
        raise ConfigurationError("topology.manage is observe, so nothing is changed: set create or reconcile")
    with topology_lock(settings, "topology apply", _PATIENCE_SECONDS), Survey(settings) as survey:
        return _do(settings, survey, make_plan(settings, survey.take(), recreate), form)


@topology.command("adopt")
@click.option(
    "--stream",
    "names",
    multiple=True,
    metavar="STREAM",
    help="Only this stream, also when another replicator owns it; may be repeated.",
)
@form_option
@configured
def adopt_command(settings: Settings, names: tuple[str, ...], form: Format) -> int:
    """Take over streams that others made: `apply` then changes them too. Nothing but their metadata is changed."""
    from sr_assets.stages.topology.evaluation import topology_lock
    from sr_assets.stages.topology.planning import make_adoption, topology_of
    from sr_assets.stages.topology.survey import Survey

    topology_of(settings)
    with topology_lock(settings, "topology adopt", _PATIENCE_SECONDS), Survey(settings) as survey:
        return _do(settings, survey, make_adoption(settings, survey.take(), names), form)


def _do(settings: Settings, survey: Survey, plan: Plan, form: Format) -> int:
    """Take the steps of a plan and show what became of each; nothing is done when it is known that a part would fail."""
    from sr_assets.stages.topology.applying import apply_steps, refused

    problems = plan.problems or refused(survey, plan.steps)
    outcomes = [] if problems else list(apply_steps(survey, plan.steps, settings.replicator))
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
        print_error(f"{problem}; nothing was changed")
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
