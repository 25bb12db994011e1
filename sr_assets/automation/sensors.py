"""The lag sensor of each site: requests a run if the site needs one, has no active run, and a run slot is free.

It also observes the site's sources.

Run slots: at most `concurrency` site runs on this host, longest-waiting site first.
"""

import json
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import dagster as dg

from sr_assets.adapters import times
from sr_assets.adapters.data import current_settings
from sr_assets.adapters.home import open_home, place_of
from sr_assets.adapters.published.manifest import identity
from sr_assets.adapters.state.lock import lock_owner
from sr_assets.adapters.state.site_queue import dequeue_site, enqueue_site, queue_ttl_seconds, queued_sites
from sr_assets.assets.host_run import run_limit
from sr_assets.assets.specs import site_job_name
from sr_assets.automation.decisions import Decision
from sr_assets.automation.observing import StreamInfoCache, find_work
from sr_assets.automation.source_observations import observe_sources
from sr_assets.dagster_internals import is_launched_here, report_failed
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.positions import SECOND_NS
from sr_assets.resources import HOME_TAG, LINGER, MODE_TAG
from sr_assets.settings import Settings, asset_name, load_settings
from sr_assets.stages.leadership import standby_line

ACTIVE_STATUSES: Final = [dg.DagsterRunStatus[name] for name in ("QUEUED", "NOT_STARTED", "STARTING", "STARTED")]
#: A started run that does not hold its site's lock for this long has lost its process.
WITHOUT_LOCK_SECONDS: Final = 60.0
#: A configuration that could not be loaded is read again after this time, also if its file is the same.
_READ_AGAIN_SECONDS: Final = 30.0
#: A requested run appears in Dagster's storage within this time.
_REQUESTED_SECONDS: Final = 10.0


def sensor_status(settings: Settings) -> dg.DefaultSensorStatus:
    """Return whether a new sensor runs."""
    return dg.DefaultSensorStatus.RUNNING if settings.dagster.sensors_run else dg.DefaultSensorStatus.STOPPED


class RunSlots:
    """The run slots that the sensors of all sites share; thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._guard = threading.Lock()
        self._requested: dict[str, float] = {}
        self._without_lock: dict[str, float] = {}

    def acquire(self, site: str, instance: dg.DagsterInstance) -> bool:
        """Return whether the sensor may request a run of a site; queue the site if no slot is free.

        Also return False, without queueing the site, if a run of it has started or a host has just dequeued it.
        """
        settings, job = current_settings(self._settings), site_job_name(self._settings, site)
        slots, _ = run_limit(settings, instance)
        if len(settings.sites) <= slots:
            return True
        with self._guard:
            now = times.monotonic()
            if lock_owner(settings.home / "sites" / site) or active_runs(instance, job_name=job):
                return False
            active = self._active_jobs(instance)
            self._requested = {
                other: at
                for other, at in self._requested.items()
                if other not in active and now - at < _REQUESTED_SECONDS
            }
            queue = queued_sites(settings.home, queue_ttl_seconds(settings))
            before = queue.index(site) if site in queue else len(queue)
            if len(active | self._requested.keys()) + before >= slots:
                enqueue_site(settings.home, site, queue_ttl_seconds(settings))
                return False
            if site in queue and not dequeue_site(settings.home, site):
                return False
            self._requested[job] = now
        return True

    def _active_jobs(self, instance: dg.DagsterInstance) -> set[str]:
        """Return the jobs that hold a slot, without jobs of removed sites and runs that lost their process."""
        sites = {site_job_name(self._settings, site): site for site in self._settings.sites}
        now, jobs, without_lock = times.monotonic(), set(), {}
        for run in active_runs(instance, tags={MODE_TAG: LINGER}):
            if run.job_name not in sites:
                continue
            folder = self._settings.home / "sites" / sites[run.job_name]
            if run.status is dg.DagsterRunStatus.STARTED and lock_owner(folder) is None:
                without_lock[run.run_id] = self._without_lock.get(run.run_id, now)
                if now - without_lock[run.run_id] > WITHOUT_LOCK_SECONDS:
                    continue
            jobs.add(run.job_name)
        self._without_lock = without_lock
        return jobs


class ConfigurationFile:
    """The configuration's file, which may change while this process has the definitions of its earlier content; thread-safe.

    A run's process reads the file again, so a run of a removed site would fail in Dagster's own code.
    """

    def __init__(self, settings: Settings) -> None:
        self._path = None if settings.loaded is None else settings.loaded.path
        self._guard = threading.Lock()
        self._read = None if self._path is None else identity(self._path)
        self._read_again_at, self._problem = math.inf, ""
        self._sites = frozenset(settings.sites)

    def problem(self, site: str) -> str | None:
        """Return why a run of a site could not start, in one line."""
        if self._path is None:
            return None
        present, now = identity(self._path), times.monotonic()
        with self._guard:
            changed = present != self._read or now >= self._read_again_at
            self._read, self._read_again_at = present, now + _READ_AGAIN_SECONDS if changed else self._read_again_at
        if changed:
            self._load(self._path)
        if self._problem:
            return f"the configuration has changed, and a run could not load it: {self._problem}"
        if site not in self._sites:
            return f"site {site} is no longer in {self._path}; reload this code location"
        return None

    def _load(self, path: Path) -> None:
        """Load the file, without the guard: a source of its values may be slow."""
        try:
            self._sites, self._problem = frozenset(load_settings(path).sites), ""
        except ConfigurationError as error:
            # Permissions and variables are no content of the file.
            self._problem = str(error)
        except RunError:
            # A source of values is unavailable; a run says so itself.
            self._problem = ""
        else:
            self._read_again_at = math.inf


class _Polls:
    """The last poll of a sensor with a dynamic interval."""

    def __init__(self) -> None:
        self._polled_at = -math.inf

    def wait_seconds(self, settings: Settings) -> float:
        """Return the time until the next poll; 0 begins one."""
        wait_seconds = self._polled_at + settings.sensor.interval_ns / SECOND_NS - times.monotonic()
        if wait_seconds > 0:
            return wait_seconds
        self._polled_at = times.monotonic()
        return 0.0


def build_lag_sensor(
    settings: Settings, site: str, stream_infos: StreamInfoCache, run_slots: RunSlots, file: ConfigurationFile
) -> dg.SensorDefinition:
    """Return the sensor that requests a run of a site whenever it needs one.

    The sensors of all sites share `stream_infos`, `run_slots` and `file`.
    """
    is_dynamic = any(key[:1] == ("sensor",) for key in settings.dynamic_keys)
    polls = _Polls()

    @dg.sensor(
        name=settings.dagster.name(f"{asset_name(site)}_lag"),
        job_name=site_job_name(settings, site),
        # With a dynamic interval, each evaluation of the daemon reads it.
        minimum_interval_seconds=1 if is_dynamic else max(1, settings.sensor.interval_ns // SECOND_NS),
        default_status=sensor_status(settings),
        description=(
            f"Runs site {site} when a source is ahead, a deadline has passed, copies are queued or advisories can be"
            " delivered again."
        ),
    )
    def lag_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        current = current_settings(settings)
        if is_dynamic and (wait_seconds := polls.wait_seconds(current)):
            return dg.SensorResult(skip_reason=f"next poll in {wait_seconds:.0f} s", cursor=context.cursor)
        return _evaluate(context, current, site, stream_infos, run_slots, file)

    return lag_sensor


def _evaluate(
    context: dg.SensorEvaluationContext,
    settings: Settings,
    site: str,
    stream_infos: StreamInfoCache,
    run_slots: RunSlots,
    file: ConfigurationFile,
) -> dg.SensorResult:
    """Request a run of a site if it needs one, or return why not; observe its sources."""
    if line := standby_line(settings, site):
        return dg.SensorResult(skip_reason=line, cursor=context.cursor)
    cursor = _read_cursor(context.cursor)
    owner = lock_owner(settings.home / "sites" / site)
    runs = active_runs(context.instance, job_name=site_job_name(settings, site))
    alive, cursor["without_lock"] = end_dead_runs(context.instance, runs, cursor.get("without_lock", {}), owner)
    active = f"run {alive[0].run_id} is {alive[0].status.value.lower()}" if alive else None
    if owner or active:
        reason, skip = None, f"a run is active: {owner or active}"
    else:
        reason, skip = _find_work(context, settings, site, stream_infos, run_slots, file)
    events, cursor["observed"] = observe_sources(settings, site, stream_infos, cursor.get("observed", {}))
    requests = [dg.RunRequest(tags=_tags(context.instance, settings, reason))] if reason else []
    return dg.SensorResult(
        run_requests=requests,
        skip_reason=None if requests else skip,
        cursor=json.dumps(cursor),
        asset_events=events,
    )


def _tags(instance: dg.DagsterInstance, settings: Settings, reason: str) -> dict[str, str]:
    tags = {MODE_TAG: LINGER, "sr_assets/reason": reason[:200]}
    if is_launched_here(instance):
        return tags
    # The run proves that it has this home.
    open_home(settings.home, settings.published_mode)
    return {**tags, HOME_TAG: place_of(settings.home)}


def _find_work(
    context: dg.SensorEvaluationContext,
    settings: Settings,
    site: str,
    stream_infos: StreamInfoCache,
    run_slots: RunSlots,
    file: ConfigurationFile,
) -> Decision:
    """Return why a site without an active run needs one and has a run slot, or why it gets none."""
    if problem := file.problem(site):
        return Decision(None, problem)
    try:
        reason, skip = find_work(settings, site, stream_infos)
    except RunError as error:
        # Dagster logs a failed tick with a long traceback, every time.
        return Decision(None, str(error))
    if reason is not None and not run_slots.acquire(site, context.instance):
        runs, limit = run_limit(settings, context.instance)
        return Decision(None, f"queued for an active run: all {runs} run slots are in use ({limit}): {reason}")
    return Decision(reason, skip)


def _read_cursor(text: str | None) -> dict[str, Any]:
    """Return what a sensor remembers between ticks; nothing if the cursor is not one of this version."""
    try:
        cursor = json.loads(text or "{}")
        return {name: cursor[name] for name in ("without_lock", "observed") if name in cursor}
    except (ValueError, TypeError):
        return {}


def active_runs(
    instance: dg.DagsterInstance, *, job_name: str | None = None, tags: Mapping[str, str] | None = None
) -> list[dg.DagsterRun]:
    """Return the active runs of a job, or with these tags, newest first."""
    filters = dg.RunsFilter(job_name=job_name, tags=tags, statuses=ACTIVE_STATUSES)
    return [record.dagster_run for record in instance.get_run_records(filters)]


def end_dead_runs(
    instance: dg.DagsterInstance,
    runs: Sequence[dg.DagsterRun],
    without_lock: Mapping[str, float],
    holder: str | None,
) -> tuple[list[dg.DagsterRun], dict[str, float]]:
    """Report the started runs as failed that have lacked their lock for a minute: their processes have ended.

    `runs` are active runs of one job, `holder` holds its lock now, and `without_lock` is since when each run lacks it
    (monotonic seconds). Return the other runs, and the new `without_lock`.
    """
    alive, lacking, now = [], {}, times.monotonic()
    if not is_launched_here(instance):
        # Their processes may be on another host, and Dagster's run monitoring watches them.
        return list(runs), {}
    for run in runs:
        # A command that holds the lock keeps a run waiting; another run of the job proves that this one has lost it.
        holds = holder is not None and (run.run_id in holder or not holder.startswith("run "))
        if run.status is dg.DagsterRunStatus.STARTED and not holds:
            # Setting the time of day, or a reboot, must not age a run.
            lacking[run.run_id] = min(without_lock.get(run.run_id, now), now)
            if now - lacking[run.run_id] > WITHOUT_LOCK_SECONDS:
                del lacking[run.run_id]
                report_failed(instance, run, "the run's process has ended: it does not hold its lock")
                continue
        alive.append(run)
    return alive, lacking
