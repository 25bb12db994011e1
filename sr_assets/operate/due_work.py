"""The work of Dagster's daemon next to the sites' runs: hourly and nightly jobs, native streams, and failed runs.

`run` does it in one child process. The schedules and sensors of the definitions decide here as in the daemon, so work of
both kinds is listed in one place and done in one way. The jobs run in threads: in the main thread, Dagster would end a run at
a signal, but not the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sr_assets.adapters import control, times
from sr_assets.adapters.locking import lock
from sr_assets.adapters.logs import configure_logging, print_error
from sr_assets.adapters.private import open_private
from sr_assets.adapters.state.lock import lock_owner
from sr_assets.adapters.state.status_file import record_alive
from sr_assets.adapters.threads import BackgroundThread, Body
from sr_assets.dagster_internals import report_canceled, report_failed, repository_of, requested_runs
from sr_assets.domain.errors import ConfigurationError, RunError, SrAssetsError
from sr_assets.operate.instance import prepared_instance, storage_errors
from sr_assets.operate.processes import INTERRUPTED, await_result, signals_as_interrupt
from sr_assets.settings import Settings, load_settings

if TYPE_CHECKING:
    from dagster import DagsterInstance

_LOCK: Final = "due_work.lock"
#: The tag of the runs in processes of the due work; its value identifies the home.
_HOME_TAG: Final = "sr_assets/due_work"
#: A job is due when its last run is older than this.
_HOURLY: Final = timedelta(hours=1)
_NIGHTLY: Final = timedelta(days=1)
_JOBS_EVERY_SECONDS: Final = 20.0
#: As the sensor's interval: a dead link is shown within seconds.
_SURVEY_SECONDS: Final = 3.0
_ALIVE_SECONDS: Final = 5.0
#: After a signal, jobs have this time to end by themselves.
_STOP_SECONDS: Final = 3.0


class _DueJob(NamedTuple):
    name: str
    tags: Mapping[str, str]


def is_due(settings: Settings) -> bool:
    """Return whether `run --once` has to start the child process; it costs seconds, so most short runs leave it out."""
    try:
        checked_at = float(_remembered(settings.home)["checked_at"])
    except (ValueError, KeyError, TypeError):
        return True
    level = bool(settings.topology) or any(stream.lake for stream in settings.streams)
    return level or not 0 <= times.time() - checked_at < _HOURLY.total_seconds()


def note_checked(home: Path) -> None:
    """Record that the jobs were checked now: until the next hour, `is_due` need not import Dagster to find that none is due."""
    _remember(home, checked_at=times.time())


def _remembered(home: Path) -> dict[str, Any]:
    """Return what the next process must know.

    That is `checked_at`, the sensor's `cursor`, the failures recorded `until`, the site runs `without_lock`, and the `id` of the
    home in the tag of its runs.
    """
    return {name: json.loads(value) for name, value in control.query(home, "SELECT name, value FROM due_work")}


def _remember(home: Path, **changes: object) -> None:
    before = _remembered(home)
    rows = [(name, json.dumps(value)) for name, value in changes.items() if name not in before or before[name] != value]
    if rows:
        with control.transaction(home) as connection:
            connection.executemany("INSERT OR REPLACE INTO due_work VALUES (?, ?)", rows)


class DueWork:
    """The due work of one instance; each method does a part of the work that is due now, in any thread.

    `since` is the time from which failed runs are reported, except failures that an earlier process reported. `once`: it is the
    work of a single run.
    """

    def __init__(self, settings: Settings, instance: DagsterInstance, since: datetime, *, once: bool = False) -> None:
        from sr_assets.definitions import build

        self._settings, self._instance, self._once = settings, instance, once
        self._repository = repository_of(build(settings))
        memory = _remembered(settings.home)
        self._id = str(memory.get("id") or uuid.uuid4())
        self._cursor: str | None = memory.get("cursor")
        self._without_lock: dict[str, float] = memory.get("without_lock", {})
        with contextlib.suppress(KeyError, TypeError, ValueError):
            until = datetime.fromisoformat(memory["until"])
            since = max(since, until) if until <= times.utc_now() else since
        self._since = since
        # Before this time a job is not due again, so that only a due job asks the database and the published tables.
        self._not_before: dict[str, datetime] = {}
        self._active: set[str] = set()
        self._remember()

    def _remember(self) -> None:
        # On a full disk, the next process repeats some events.
        with contextlib.suppress(RunError):
            _remember(
                self._settings.home,
                id=self._id,
                cursor=self._cursor,
                without_lock=self._without_lock,
                until=self._since.isoformat(),
            )

    def due_jobs(self) -> list[_DueJob]:
        """Return the hourly and nightly jobs without a recent run, in the order of their schedules."""
        import dagster as dg

        from sr_assets.automation.jobs import LAKES
        from sr_assets.automation.old_runs import JOB

        due, now = [], times.utc_now()
        for schedule in self._repository.schedule_defs:
            if schedule.default_status is not dg.DefaultScheduleStatus.RUNNING:
                continue
            name = schedule.job_name
            period = _NIGHTLY if name == self._settings.dagster.name(JOB) else _HOURLY
            if now < self._not_before.get(name, now):
                continue
            recent = self._instance.get_run_records(dg.RunsFilter(job_name=name, created_after=now - period), limit=1)
            # A single run fills the lakes each time: it must leave no message of the sources behind.
            if recent and not (self._once and name == self._settings.dagster.name(LAKES)):
                self._not_before[name] = recent[0].create_timestamp.replace(tzinfo=UTC) + period
                continue
            requests = requested_runs(schedule, self._instance, now)
            due += [_DueJob(name, dict(request.tags)) for request in requests]
        return due

    def run_jobs(self) -> bool:
        """Run the due jobs one after the other; return whether all succeeded."""
        succeeded = [self._run_job(job) for job in self.due_jobs()]
        return all(succeeded)

    def watch_topology(self) -> bool:
        """Survey the native streams once, publish the result, and create or update streams as `manage` allows.

        Return whether that succeeded.
        """
        import dagster as dg

        from sr_assets.automation.topology import SENSOR

        if not self._settings.topology:
            return True
        sensor = self._repository.get_sensor_def(self._settings.dagster.name(SENSOR))
        result: Any = sensor(dg.build_sensor_context(instance=self._instance, cursor=self._cursor))
        for event in result.asset_events:
            self._instance.report_runless_asset_event(event)
        # Not before: the next survey would not report these results again.
        self._cursor = result.cursor
        self._remember()
        requests = result.run_requests or ()
        succeeded = [self._run_job(_DueJob(str(sensor.job_name), dict(request.tags))) for request in requests]
        return all(succeeded)

    def note_failures(self) -> None:
        """Record the runs that failed since the last call, for `notify`."""
        from sr_assets.automation.failures import record_failures_since

        self._since = record_failures_since(self._settings, self._instance, self._since)
        self._remember()

    def end_own_dead_runs(self) -> None:
        """Report the runs of earlier processes as failed that were killed; call it once, inside the lock."""
        from sr_assets.automation.sensors import active_runs

        for run in active_runs(self._instance, tags={_HOME_TAG: self._id}):
            report_failed(self._instance, run, "the process of the due work has ended")

    def end_dead_site_runs(self) -> None:
        """Report the sites' runs as failed that have lost their process, as the sensors do."""
        import dagster as dg

        from sr_assets.assets.specs import site_job_name
        from sr_assets.automation.sensors import end_dead_runs
        from sr_assets.resources import MODE_TAG

        sites = {site_job_name(self._settings, site): site for site in self._settings.sites}
        runs = defaultdict(list)
        for record in self._instance.get_run_records(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED])):
            run = record.dagster_run
            if run.job_name in sites and MODE_TAG in run.tags:
                runs[run.job_name].append(run)
        without_lock: dict[str, float] = {}
        for job, started in runs.items():
            holder = lock_owner(self._settings.home / "sites" / sites[job])
            without_lock |= end_dead_runs(self._instance, started, self._without_lock, holder)[1]
        self._without_lock = without_lock
        self._remember()

    def cancel(self) -> None:
        """Report the active jobs as canceled unless they soon end: this process is about to end."""
        deadline = times.monotonic() + _STOP_SECONDS
        while self._active and times.monotonic() < deadline:
            times.sleep(0.05)
        for run_id in list(self._active):
            if (run := self._instance.get_run_by_id(run_id)) is not None and not run.is_finished:
                report_canceled(self._instance, run)

    def _run_job(self, job: _DueJob) -> bool:
        from sr_assets.automation.failures import failures
        from sr_assets.automation.jobs import RUN_CONFIG

        definition = self._repository.get_job(job.name)
        # A partitioned job ignores its own configuration in this process, and would print each event.
        quiet = RUN_CONFIG if definition.partitions_def else None
        run_id, tags = str(uuid.uuid4()), {**job.tags, _HOME_TAG: self._id}
        self._active.add(run_id)
        try:
            result = definition.execute_in_process(
                run_config=quiet, instance=self._instance, tags=tags, raise_on_error=False, run_id=run_id
            )
        finally:
            self._active.discard(run_id)
        for line in [] if result.success else failures(result.all_events):
            print_error(f"{job.name}: {line}")
        return result.success


def _repeated(part: Callable[[], object], pause_seconds: float) -> Body:
    """Return the body of a thread that repeats a part of the work."""

    def body() -> Generator[float]:
        while True:
            with storage_errors(Path(os.environ["DAGSTER_HOME"])):
                part()
            yield pause_seconds

    return body


def _follow(settings: Settings, work: DueWork) -> None:
    """Do the due work until an interrupt; the jobs delay no survey of native streams."""
    pause_seconds = _SURVEY_SECONDS if settings.topology else _JOBS_EVERY_SECONDS
    parts = {
        "native streams": (work.watch_topology, pause_seconds),
        "due jobs": (work.run_jobs, _JOBS_EVERY_SECONDS),
        "failed runs": (work.note_failures, pause_seconds),
        "dead runs": (work.end_dead_site_runs, _JOBS_EVERY_SECONDS),
    }
    for name, (part, seconds) in parts.items():
        BackgroundThread(name, _repeated(part, seconds)).start()
    while True:
        record_alive(settings.home)
        times.sleep(_ALIVE_SECONDS)


def _once(settings: Settings, work: DueWork) -> int:
    """Do the due work once and return the exit code."""
    surveyed, succeeded = work.watch_topology(), work.run_jobs()
    work.end_dead_site_runs()
    work.note_failures()
    note_checked(settings.home)
    return int(not (surveyed and succeeded))


@contextlib.contextmanager
def _locked(home: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of the due work inside the block, or yield False if another process holds it and this one must not wait."""
    with open_private(home / _LOCK) as file:
        yield lock(file, None if wait else 0.0)


def due_work_process(*, once: bool, since: float) -> int:
    """Do the due work in this process and return the exit code; report runs that failed after `since` (unix seconds)."""
    try:
        with signals_as_interrupt(), prepared_instance() as instance:
            settings = load_settings()
            configure_logging(settings)
            with _locked(settings.home, wait=not once) as is_ours:
                if not is_ours:
                    # The process of another `run` does it.
                    return 0
                work = DueWork(settings, instance, datetime.fromtimestamp(since, UTC), once=once)
                try:
                    work.end_own_dead_runs()
                    if not once:
                        _follow(settings, work)
                    return await_result(ThreadPoolExecutor(1).submit(_once, settings, work))
                except KeyboardInterrupt:
                    work.cancel()
                    # Threads may be anywhere in DuckDB or Spark.
                    os._exit(INTERRUPTED)
    except SrAssetsError as error:
        print_error(str(error))
        return 2 if isinstance(error, ConfigurationError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED
