"""The work of Dagster's daemon next to the sites' runs: hourly and nightly jobs, native streams, and failed runs.

`run` does it in one child process, `python -m sr_assets.operate.due_work`. The schedules and sensors of the definitions
decide here as in the daemon, so work of both kinds is listed in one place and done in one way.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sr_assets.adapters.logs import print_error
from sr_assets.adapters.private import write_private
from sr_assets.domain.errors import ConfigurationError, SrAssetsError
from sr_assets.operate.instance import open_instance, storage_errors
from sr_assets.operate.processes import INTERRUPTED, end_with_parent, recorded_signals, signals_as_interrupt
from sr_assets.settings import Settings, load_settings

if TYPE_CHECKING:
    from dagster import DagsterInstance

_STAMP: Final = "due_work.json"
#: A job is due when its last run is older than this; other jobs are hourly.
_PERIODS: Final = {"retention": timedelta(days=1)}
_HOURLY: Final = timedelta(hours=1)
_JOBS_EVERY_SECONDS: Final = 20.0
#: As the sensor's interval: a dead link is shown within seconds.
_SURVEY_SECONDS: Final = 3.0
_TOPOLOGY_SENSOR: Final = "topology_watch"


class _DueJob(NamedTuple):
    name: str
    tags: Mapping[str, str]


def is_due(settings: Settings) -> bool:
    """Return whether `run --once` has to start the child process; it costs seconds, so most short runs leave it out."""
    try:
        checked_at = float(json.loads((settings.home / _STAMP).read_text())["checked_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return True
    return bool(settings.topology) or not 0 <= time.time() - checked_at < _HOURLY.total_seconds()


def note_checked(home: Path) -> None:
    """Record that the jobs were checked now: until the next hour, `is_due` need not import Dagster to find that none is due."""
    write_private(home / _STAMP, json.dumps({"checked_at": time.time()}))


def command(*, once: bool, since: float) -> list[str]:
    """Return the child's command; `since` (unix seconds) is the time from which failed runs are reported."""
    mode = "once" if once else "follow"
    return [sys.executable, "-W", "ignore", "-m", __name__, "--mode", mode, "--since", f"{since:.6f}"]


class DueWork:
    """The due work of one instance; each method does a part of the work that is due now.

    Raises KeyboardInterrupt if a job ended because this process was `interrupted`.
    """

    def __init__(
        self, settings: Settings, instance: DagsterInstance, since: datetime, interrupted: Callable[[], bool]
    ) -> None:
        from sr_assets.definitions import build

        self._settings, self._instance, self._since, self._interrupted = settings, instance, since, interrupted
        self._repository = build(settings).get_repository_def()
        self._cursor: str | None = None
        # Before this time a job is not due again, so that only a due job asks the database and the published tables.
        self._not_before: dict[str, datetime] = {}

    def due_jobs(self) -> list[_DueJob]:
        """Return the hourly and nightly jobs without a recent run, in the order of their schedules."""
        import dagster as dg

        due, now = [], datetime.now(UTC)
        for schedule in self._repository.schedule_defs:
            if schedule.default_status is not dg.DefaultScheduleStatus.RUNNING:
                continue
            name, period = schedule.job_name, _PERIODS.get(schedule.job_name, _HOURLY)
            if now < self._not_before.get(name, now):
                continue
            recent = self._instance.get_run_records(dg.RunsFilter(job_name=name, created_after=now - period), limit=1)
            if recent:
                self._not_before[name] = recent[0].create_timestamp.replace(tzinfo=UTC) + period
                continue
            context = dg.build_schedule_context(instance=self._instance, scheduled_execution_time=now)
            requests = schedule.evaluate_tick(context).run_requests or ()
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

        if not self._settings.topology:
            return True
        sensor = self._repository.get_sensor_def(_TOPOLOGY_SENSOR)
        result: Any = sensor(dg.build_sensor_context(instance=self._instance, cursor=self._cursor))
        for event in result.asset_events:
            self._instance.report_runless_asset_event(event)
        # Not before: the next survey would not report these results again.
        self._cursor = result.cursor
        requests = result.run_requests or ()
        succeeded = [self._run_job(_DueJob(str(sensor.job_name), dict(request.tags))) for request in requests]
        return all(succeeded)

    def note_failures(self) -> None:
        """Record the runs that failed since the last call, for `notify`."""
        from sr_assets.automation.failures import record_failures_since

        self._since = record_failures_since(self._settings, self._instance, self._since)

    def _run_job(self, job: _DueJob) -> bool:
        from sr_assets.automation.failures import failures
        from sr_assets.automation.jobs import RUN_CONFIG

        definition = self._repository.get_job(job.name)
        # A partitioned job ignores its own configuration in this process, and would print each event.
        quiet = RUN_CONFIG if definition.partitions_def else None
        result = definition.execute_in_process(
            run_config=quiet, instance=self._instance, tags=dict(job.tags), raise_on_error=False
        )
        if self._interrupted():
            raise KeyboardInterrupt
        for line in [] if result.success else failures(result.all_events):
            print_error(f"{job.name}: {line}")
        return result.success


def _follow(settings: Settings, work: DueWork) -> None:
    """Do the due work until an interrupt; the jobs run in a thread, so that they delay no survey of native streams."""
    pause_seconds = _SURVEY_SECONDS if settings.topology else _JOBS_EVERY_SECONDS
    check_at, running = 0.0, None
    with ThreadPoolExecutor(1, thread_name_prefix="jobs") as pool:
        while True:
            _attempt(work.watch_topology)
            if time.monotonic() >= check_at and (running is None or running.done()):
                check_at = time.monotonic() + _JOBS_EVERY_SECONDS
                running = pool.submit(_attempt, work.run_jobs)
            _attempt(work.note_failures)
            time.sleep(pause_seconds)


def _attempt(part: Callable[[], object]) -> None:
    """Do a part of the work; print an error, because the next turn tries again."""
    try:
        with storage_errors(Path(os.environ["DAGSTER_HOME"])):
            part()
    except SrAssetsError as error:
        print_error(str(error))


def _main() -> int:
    """Do the due work of the configured platform and return the exit code."""
    from sr_assets.resources import configure_logging

    parser = argparse.ArgumentParser(prog="sr_assets.operate.due_work")
    parser.add_argument("--mode", choices=("once", "follow"), default="once")
    parser.add_argument("--since", type=float, default=0.0)
    arguments = parser.parse_args()
    end_with_parent()
    try:
        with (
            signals_as_interrupt(),
            recorded_signals() as interrupted,
            storage_errors(Path(os.environ["DAGSTER_HOME"])),
            open_instance() as instance,
        ):
            settings = load_settings()
            configure_logging(settings)
            work = DueWork(settings, instance, datetime.fromtimestamp(arguments.since, UTC), interrupted)
            if arguments.mode == "follow":
                _follow(settings, work)
            surveyed, succeeded = work.watch_topology(), work.run_jobs()
            work.note_failures()
            note_checked(settings.home)
            return int(not (surveyed and succeeded))
    except SrAssetsError as error:
        print_error(str(error))
        return 2 if isinstance(error, ConfigurationError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(_main())
