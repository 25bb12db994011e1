"""The lag sensor of each site: requests a run if the site needs one and has no active run."""

import json
import time

import dagster as dg

from sr_assets.adapters.state.lock import lock_owner
from sr_assets.assets.host_run import run_limit
from sr_assets.assets.specs import site_job_name
from sr_assets.automation.observing import find_work
from sr_assets.automation.run_slots import ACTIVE_STATUSES, WITHOUT_LOCK_SECONDS, RunSlots
from sr_assets.automation.stream_info_cache import StreamInfoCache
from sr_assets.domain.errors import RunError
from sr_assets.resources import LINGER, MODE_TAG
from sr_assets.settings import Settings, asset_name


def build_lag_sensor(
    settings: Settings, site: str, stream_infos: StreamInfoCache, run_slots: RunSlots
) -> dg.SensorDefinition:
    """Return the sensor that requests a run of a site whenever it needs one.

    The sensors of all sites share `stream_infos` and `run_slots`.
    """

    @dg.sensor(
        name=f"{asset_name(site)}_lag",
        job_name=site_job_name(site),
        minimum_interval_seconds=max(1, settings.sensor.interval_ns // 1_000_000_000),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=(
            f"Runs site {site} when a source is ahead, a deadline has passed, copies are queued or advisories can be"
            " delivered again."
        ),
    )
    def lag_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        owner = lock_owner(settings.home / "sites" / site)
        active, cursor = _active_run(context, site_job_name(site), holds_lock=owner is not None)
        if owner or active:
            return dg.SensorResult(skip_reason=f"a run is active: {owner or active}", cursor=cursor)
        try:
            reason, skip = find_work(settings, site, stream_infos)
        except RunError as error:
            # Dagster logs a failed tick with a long traceback, every time.
            reason, skip = None, str(error)
        if reason is None:
            return dg.SensorResult(skip_reason=skip, cursor=cursor)
        if not run_slots.acquire(site, context.instance):
            runs, limit = run_limit(settings, context.instance)
            skip = f"queued for an active run: all {runs} run slots are in use ({limit}): {reason}"
            return dg.SensorResult(skip_reason=skip, cursor=cursor)
        return dg.SensorResult(
            run_requests=[dg.RunRequest(tags={MODE_TAG: LINGER, "sr_assets/reason": reason[:200]})], cursor=cursor
        )

    return lag_sensor


def _active_run(context: dg.SensorEvaluationContext, job: str, *, holds_lock: bool) -> tuple[str | None, str]:
    """Return the job's active run, if any, and the cursor: since when each started run lacks its site's lock.

    Report a run that lacks the lock for a minute as failed: its process has ended.
    """
    seen: dict[str, float] = json.loads(context.cursor) if context.cursor else {}
    # Setting the time of day must not age a run.
    now, without_lock, active = time.monotonic(), {}, None
    for run in context.instance.get_runs(filters=dg.RunsFilter(job_name=job, statuses=ACTIVE_STATUSES), limit=10):
        active = f"run {run.run_id} is {run.status.value.lower()}"
        if run.status is not dg.DagsterRunStatus.STARTED or holds_lock:
            continue
        since = min(seen.get(run.run_id, now), now)
        if now - since > WITHOUT_LOCK_SECONDS:
            context.instance.report_run_failed(run, "the run's process has ended: it does not hold its site's lock")
            active = None
        else:
            without_lock[run.run_id] = since
    return active, json.dumps(without_lock)
