"""The work of a site's child process: runs of its job, as a follower or a leader."""

from __future__ import annotations

import gc
import logging
import sys
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sr_assets.adapters import times
from sr_assets.adapters.data import current_settings
from sr_assets.adapters.logs import configure_logging, print_error
from sr_assets.adapters.progress_lines import show_on
from sr_assets.adapters.spark.engine import KEEP_ONCE_SECONDS, KEEP_SECONDS
from sr_assets.adapters.spark.run_session import HomeEngine
from sr_assets.adapters.state.status_file import record_alive
from sr_assets.adapters.threads import in_background
from sr_assets.domain.errors import ConfigurationError, SrAssetsError, StandbyError
from sr_assets.domain.positions import SECOND_NS
from sr_assets.operate.bars import progress_bars
from sr_assets.operate.processes import INTERRUPTED, recorded_signals, signals_as_interrupt
from sr_assets.operate.run_output import print_line, report_run
from sr_assets.settings import Entry, Settings, load_settings
from sr_assets.stages.leadership import Leadership
from sr_assets.stages.leadership import logger as leadership_logger
from sr_assets.stages.report import stages_of
from sr_assets.stages.standby_tables import FollowedSite, follow_checkpoints

if TYPE_CHECKING:
    from sr_assets.operate.job_execution import SiteJob

_SHARED_SECONDS: Final = 0.0005
_STANDBY_SECONDS: Final = 0.2
#: A changed interval takes effect within this time.
_INTERVAL_SECONDS: Final = 5.0


def site_process(site: str, labels: Sequence[str], *, once: bool, bars: bool) -> int:
    """Do the work of a site's child process, print its error if it fails, and return the exit code.

    `bars` draws progress bars.
    """
    try:
        with signals_as_interrupt():
            settings = load_settings()
            configure_logging(settings)
            _leave_reported_lines_out(once=once)
            # A copy of `measure` has the bars of its parent.
            with progress_bars() if bars else show_on(None):
                return execute_site(settings, site, labels, once=once)
    except SrAssetsError as error:
        print_error(str(error))
        return 2 if isinstance(error, ConfigurationError) else 1
    except KeyboardInterrupt:
        pass
    # Generators that the interrupt left open publish what they hold; at the interpreter's end it would be too late.
    gc.collect()
    return INTERRUPTED


def _leave_reported_lines_out(*, once: bool) -> None:
    """Keep lines out of the log on stderr that the report prints: each stream's failure, and the leader of a single run.

    A defect's traceback stays, because the report does not print it.
    """

    def is_reported(record: logging.LogRecord) -> bool:
        names_leader = once and record.name == leadership_logger.name and record.levelno == logging.INFO
        return names_leader or (record.levelno >= logging.ERROR and record.exc_info is None)

    for handler in logging.getLogger("sr_assets").handlers:
        if not isinstance(handler, logging.FileHandler):
            handler.addFilter(lambda record: not is_reported(record))


def execute_site(settings: Settings, site: str, labels: Sequence[str], *, once: bool) -> int:
    """Execute a site's job in this process, print its result, and return the exit code.

    Without `once`, repeat the job until an interrupt, whenever the site's sensor would request a run. A follower prints the
    line about its leader, shows the newest checkpoint and executes nothing: `once`, it returns 0; otherwise it stands by.
    """
    job = in_background("importing Dagster", partial(_site_job, settings, site))
    streams = [stream for stream in settings.sites[site] if stream.label in labels]
    folder = settings.home / "sites" / site
    with (
        recorded_signals() as interrupted,
        Leadership(settings, site, patient=not once) as leadership,
        follow_checkpoints(settings, () if once else (site,)),
    ):
        while True:
            if not _await_leadership(leadership, folder, once=once):
                FollowedSite(settings, site).show_if_due()
                return 0
            run_id = str(uuid.uuid4())
            with _head_start(settings, site, streams, run_id, job, once=once):
                result = job.result().execute(run_id, streams, once=once)
            if interrupted():
                raise KeyboardInterrupt
            if result is None:
                _await_poll(settings, leadership, folder)
                continue
            if not result.success and not leadership.leads and leadership.lease.leader:
                # Another member leads since the run began, and continues its work.
                continue
            code = report_run(streams, result)
            if once:
                return code
            if code:
                _await_poll(settings, leadership, folder)
            while leadership.leads and not _has_work(current_settings(settings), site):
                _await_poll(settings, leadership, folder)


def _site_job(settings: Settings, site: str) -> SiteJob:
    # The head start waits often and shortly; with Python's default of 5 ms, each wait costs it a turn of the import.
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SHARED_SECONDS)
    from sr_assets.operate.job_execution import SiteJob

    sys.setswitchinterval(before)
    return SiteJob(settings, site)


def _head_start(
    settings: Settings, site: str, streams: Sequence[Entry], run_id: str, job: Future[SiteJob], *, once: bool
) -> AbstractContextManager[None]:
    """Do the work of a run until its job is imported, and let the run continue it inside the block."""
    if job.done():
        return nullcontext()
    from sr_assets.stages.site import site_of_run
    from sr_assets.stages.site_work import SiteWork, head_start

    settings = current_settings(settings)
    engine = HomeEngine(settings.spark, settings.home.resolve(), KEEP_ONCE_SECONDS if once else KEEP_SECONDS)
    selection = {entry.stream: frozenset(stages_of(entry)) for entry in streams}

    def begin() -> SiteWork:
        return SiteWork(site_of_run(settings, site, run_id, engine), selection, lingers=not once)

    return head_start(run_id, begin, job)


def _await_poll(settings: Settings, leadership: Leadership, folder: Path) -> None:
    """Wait for the interval of the sensor, which may change meanwhile."""
    began = times.monotonic()
    while leadership.leads:
        record_alive(folder)
        interval_seconds = current_settings(settings).sensor.interval_ns / SECOND_NS
        left_seconds = began + interval_seconds - times.monotonic()
        if left_seconds <= 0:
            return
        ends = times.monotonic() + min(left_seconds, _INTERVAL_SECONDS)
        while leadership.leads and times.monotonic() < ends:
            times.sleep(min(_STANDBY_SECONDS, left_seconds))


def _await_leadership(leadership: Leadership, folder: Path, *, once: bool) -> bool:
    """Wait until this home leads, and print each leader once; `once`, return False if another member leads."""
    printed = None
    while True:
        record_alive(folder)
        try:
            leadership.require()
        except StandbyError as standby:
            line = str(standby)
            if once or (line != printed and leadership.lease.leader):
                printed = line
                print_line(line)
            if once:
                return False
        else:
            return True
        leadership.begin()
        times.sleep(_STANDBY_SECONDS)


def _has_work(settings: Settings, site: str) -> bool:
    from sr_assets.automation.observing import find_work

    try:
        return find_work(settings, site)[0] is not None
    except SrAssetsError as error:
        print_error(str(error))
        return False
