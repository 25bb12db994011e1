"""The lag sensor of each site: asks Dagster for a run when there is something to do and none is under way.

Here: which run is under way, and the request. Not here: whether there is something to do (`observing`, `decisions`).
Nothing is remembered between ticks but since when a run was seen without its site's lock.
"""

import json
import time

import dagster as dg

from sr_assets.adapters.state.lock import lock_owner
from sr_assets.assets.host_run import run_limit
from sr_assets.assets.specs import site_job_name
from sr_assets.automation.observing import find_work
from sr_assets.automation.run_slots import UNDER_WAY, WITHOUT_LOCK_SECONDS, RunSlots
from sr_assets.automation.stream_info_cache import StreamInfoCache
from sr_assets.domain.errors import RunError
from sr_assets.resources import LINGER, MODE_TAG
from sr_assets.settings import Settings, asset_name


def build_lag_sensor(
    settings: Settings, site: str, stream_infos: StreamInfoCache, run_slots: RunSlots
) -> dg.SensorDefinition:
    """Return the sensor that asks for a run of a site whenever there is something to do for it.

    All sites share `stream_infos` and `run_slots`.
    """

    @dg.sensor(
        name=f"{asset_name(site)}_lag",
        job_name=site_job_name(site),
        minimum_interval_seconds=max(1, settings.sensor.interval_ns // 1_000_000_000),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=(
            f"Runs site {site} when a source is ahead, a deadline has passed, copies are queued, or advisories can be"
            " delivered again."
        ),
    )
    def lag_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        owner = lock_owner(settings.home / "sites" / site)
        waiting, cursor = _run_under_way(context, site_job_name(site), holds_lock=owner is not None)
        if owner or waiting:
            return dg.SensorResult(skip_reason=f"under way: {owner or waiting}", cursor=cursor)
        try:
            reason, skip = find_work(settings, site, stream_infos)
        except RunError as error:
            # A tick that fails is logged with a trace of forty lines, each time.
            reason, skip = None, str(error)
        if reason is None:
            return dg.SensorResult(skip_reason=skip, cursor=cursor)
        if not run_slots.acquire(site, context.instance):
            runs, limit = run_limit(settings, context.instance)
            skip = f"no run requested: at most {runs} at a time ({limit}), a run under way takes the site in: {reason}"
            return dg.SensorResult(skip_reason=skip, cursor=cursor)
        return dg.SensorResult(
            run_requests=[dg.RunRequest(tags={MODE_TAG: LINGER, "sr_assets/reason": reason[:200]})], cursor=cursor
        )

    return lag_sensor


def _run_under_way(context: dg.SensorEvaluationContext, job: str, *, holds_lock: bool) -> tuple[str | None, str]:
    """Return which run of the job is on its way, if any, and the cursor: since when which run was seen without its
    lock.

    A run that Dagster calls started but that does not hold its site's lock for a minute has no process any more: it is
    reported as failed.
    """
    seen: dict[str, float] = json.loads(context.cursor) if context.cursor else {}
    # Not the time of day: when that is set forward, a run that has just started would look old.
    now, still, waiting = time.monotonic(), {}, None
    for run in context.instance.get_runs(filters=dg.RunsFilter(job_name=job, statuses=UNDER_WAY), limit=10):
        waiting = f"run {run.run_id} is {run.status.value.lower()}"
        if run.status is not dg.DagsterRunStatus.STARTED or holds_lock:
            continue
        since = min(seen.get(run.run_id, now), now)
        if now - since > WITHOUT_LOCK_SECONDS:
            context.instance.report_run_failed(run, "the run's process has ended: it does not hold its site's lock")
            waiting = None
        else:
            still[run.run_id] = since
    return waiting, json.dumps(still)
