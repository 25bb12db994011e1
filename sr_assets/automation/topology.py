"""The sensor of the native streams: each tick records its survey and requests a run if a stream must change."""

import json
from typing import Any, Final

import dagster as dg

from sr_assets.adapters import times
from sr_assets.adapters.state.lock import SiteBusyError
from sr_assets.adapters.state.status_file import SiteStatus, read_status
from sr_assets.assets.specs import topology_key
from sr_assets.assets.topology import evaluations, metadata
from sr_assets.automation.sensors import active_runs, end_dead_runs, sensor_status
from sr_assets.domain.errors import SrAssetsError
from sr_assets.domain.topology.plan import Action
from sr_assets.settings import Settings
from sr_assets.stages.topology.evaluation import Evaluation, evaluate, publish_evaluation, topology_lock
from sr_assets.stages.topology.planning import make_plan, topology_of
from sr_assets.stages.topology.survey import Survey

JOB: Final = "topology"
SENSOR: Final = "topology_watch"
#: A link is dead after 10 s of silence, and must be flagged within 5 s more. Dagster's daemon checks for due sensors every 5 s;
#: a sensor with an interval of 5 s would often miss its turn.
_TICK_SECONDS: Final = 3
_RETRY_SECONDS: Final = 300.0
#: A tick does not wait for sites that publish; the next tick retries.
_WAIT_SECONDS: Final = 2.0


def build_topology_sensor(settings: Settings) -> dg.SensorDefinition:
    """Return the sensor that surveys each cluster once per tick, publishes the result and records changed check results."""
    interval_seconds = max(1, settings.sensor.interval_ns // 1_000_000_000)

    @dg.sensor(
        name=settings.dagster.name(SENSOR),
        job_name=settings.dagster.name(JOB),
        minimum_interval_seconds=min(_TICK_SECONDS, interval_seconds),
        default_status=sensor_status(settings),
        description="Checks that every native mirror and source is alive, caught up and as configured.",
    )
    def topology_watch(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        # Level-triggered: the cursor holds the recorded check results, the time of the last publication, and since when a
        # started run lacks the lock.
        cursor: dict[str, Any] = json.loads(context.cursor) if context.cursor else {}
        try:
            with (
                topology_lock(settings, "the sensor topology_watch", 0) as folder,
                Survey(settings, "sr-assets topology watch") as survey,
            ):
                seen = evaluate(settings, survey.refresh())
                recorded = cursor.get("problems", {})
                changed = [label for label, failing in seen.problems().items() if recorded.get(label) != failing]
                # Negative after a reboot, which resets the monotonic clock.
                age_seconds = times.monotonic() - cursor.get("published_at", -float("inf"))
                if changed or not 0 <= age_seconds < interval_seconds:
                    publish_evaluation(settings, seen, "topology_watch", _WAIT_SECONDS)
                    cursor["published_at"] = times.monotonic()
                reason = _reason(settings, survey, read_status(folder))
                # A working run would hold the lock that this tick holds.
                runs = active_runs(context.instance, job_name=settings.dagster.name(JOB))
                alive, cursor["without_lock"] = end_dead_runs(
                    context.instance, runs, cursor.get("without_lock", {}), None
                )
        except SiteBusyError as error:
            return dg.SensorResult(skip_reason=f"busy: {error}", cursor=context.cursor)
        except SrAssetsError as error:
            return dg.SensorResult(skip_reason=str(error), cursor=context.cursor)
        cursor["problems"] = seen.problems()
        events = [event for label in changed for event in _events(settings, seen, label)]
        if alive:
            reason = None
        return dg.SensorResult(
            run_requests=[] if reason is None else [dg.RunRequest(tags={"sr_assets/reason": reason[:200]})],
            skip_reason=None if reason is not None or events else _summary(seen),
            cursor=json.dumps(cursor),
            asset_events=events,
        )

    return topology_watch


def _events(
    settings: Settings, seen: Evaluation, label: str
) -> list[dg.AssetObservation | dg.AssetMaterialization | dg.AssetCheckEvaluation]:
    wanted = next(stream for stream in topology_of(settings).streams if stream.label == label)
    observed = dg.AssetObservation(
        topology_key(settings, wanted.cluster, wanted.stream), metadata=metadata(seen, wanted)
    )
    return [observed, *evaluations(settings, seen, wanted)]


def _reason(settings: Settings, survey: Survey, status: SiteStatus) -> str | None:
    """Return why a run is needed, or None; a failed run is not repeated before `_RETRY_SECONDS`."""
    if not status.exists:
        return "first run"
    plan = make_plan(settings, survey)
    steps = [f"{step.action} {step.wanted.label}" for step in plan.steps if step.action is not Action.NONE]
    failed_lately = status.failed and status.age_seconds is not None and status.age_seconds < _RETRY_SECONDS
    if not steps or plan.problems or failed_lately:
        return None
    return ", ".join(steps)


def _summary(seen: Evaluation) -> str:
    failing = [f"{label}: {', '.join(checks)}" for label, checks in seen.problems().items() if checks]
    return "; ".join(failing) or "every native stream is alive, caught up and as configured"
