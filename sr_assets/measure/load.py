"""The messages of an emulated fleet during a measurement, and the run that works on them."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.logs import print_error
from sr_assets.adapters.progress_lines import LongWork
from sr_assets.adapters.state.lock import lock_owner
from sr_assets.adapters.wire import Connection, Outgoing, Publisher, WireError
from sr_assets.domain.errors import RunError, SrAssetsError, cannot_write
from sr_assets.embedded.emulator import Fleet
from sr_assets.embedded.fleet_plan import FleetPlan
from sr_assets.measure.measured_stream import MeasuredStream
from sr_assets.operate.forking import Copies
from sr_assets.operate.processes import Child, stop_groups

LOG_FILE: Final = "run.log"
#: A busy machine takes long to import Dagster.
START_SECONDS: Final = 180.0
_POLL_SECONDS: Final = 0.05
_SHOWN_MESSAGES: Final = 1_000
#: A server that does not respond for this time ends a measurement.
_UNREACHABLE_SECONDS: Final = 15.0
_STALLED_SECONDS: Final = 60.0


class MeasuredRun:
    """A run of a stream's site; `began_ns` is the beginning of its work (unix ns)."""

    def __init__(self, child: Child | None, log: Path) -> None:
        self.began_ns = times.time_ns()
        self._child, self._log = child, log

    @property
    def has_ended(self) -> bool:
        """Whether our child has ended."""
        return self._child is not None and self._child.poll() is not None

    def check(self) -> None:
        """Raise RunError if our child has failed."""
        code = self._child.poll() if self._child else None
        if code:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            last = lines[-1].removeprefix("error: ") if lines else "no output"
            raise RunError(f"the run ended with exit code {code}: {last}; see {self._log}")

    def wait(self) -> None:
        """Wait until our child has ended; raises RunError if it has failed."""
        if self._child is not None:
            with LongWork("processing waiting messages"):
                self._child.wait()
            self.check()


@contextmanager
def following(stream: MeasuredStream, folder: Path) -> Iterator[MeasuredRun]:
    """Follow the stream inside the block, in a child process unless a run of the site is active.

    The child's log is in `folder`. Raises RunError if it does not begin.
    """
    site = stream.settings.home / "sites" / stream.entry.name
    if lock_owner(site) is not None:
        yield MeasuredRun(None, folder / LOG_FILE)
        return
    with started(stream, folder, "follow") as run:
        yield run


@contextmanager
def started(stream: MeasuredStream, folder: Path, mode: str) -> Iterator[MeasuredRun]:
    """Start a child that runs the stream `once` or `follow`s it, and wait until it works; stop it after the block."""
    log, site = folder / LOG_FILE, stream.settings.home / "sites" / stream.entry.name
    try:
        output = log.open("ab")
    except OSError as error:
        raise RunError(cannot_write(log, error)) from None
    work = partial(_run_site, stream.entry.name, stream.entry.label, once=mode == "once")
    with (
        output,
        Copies() as copies,
        copies.start(site.name, work, errors=output.fileno(), output=output.fileno()) as child,
    ):
        try:
            deadline = times.monotonic() + START_SECONDS
            with LongWork("starting the run"):
                while lock_owner(site) is None and child.poll() is None:
                    if times.monotonic() > deadline:
                        raise RunError(f"the run did not begin within {START_SECONDS:.0f} s; see {log}")
                    times.sleep(_POLL_SECONDS)
            run = MeasuredRun(child, log)
            run.check()
            yield run
        finally:
            stop_groups([child])


def _run_site(site: str, label: str, *, once: bool) -> int:
    """Prepare the home, then run the site like its child process of `run`."""
    from sr_assets.operate.instance import mark_start, prepare_instance
    from sr_assets.operate.site_job import site_process
    from sr_assets.settings import load_settings

    try:
        settings = load_settings()
        prepare_instance(settings)
        mark_start(settings)
    except SrAssetsError as error:
        print_error(str(error))
        return 1
    return site_process(site, [label], once=once, bars=False)


@contextmanager
def publishing(stream: MeasuredStream, plan: FleetPlan, for_seconds: float | None) -> Iterator[Future[int]]:
    """Publish a plan inside the block over one connection; yield its end, with the number of acknowledged messages."""
    fleet = Fleet(plan, stream.entry.source, stream.subject, for_seconds=for_seconds)
    with ThreadPoolExecutor(1, "fleet") as pool:
        end = pool.submit(fleet.run)
        try:
            yield end
        finally:
            fleet.stop()


def publish_backlog(stream: MeasuredStream, plan: FleetPlan, for_seconds: float) -> int:
    """Publish the messages of a fleet's first `for_seconds` at the server's speed, and return their number.

    Raises RunError if the server refuses one.
    """
    events = takewhile(lambda event: event.at_seconds < for_seconds, plan.events(times.time()))
    items = (
        Outgoing(number, stream.subject.replace("%s", event.sender), b"", event.payload)
        for number, event in enumerate(events, 1)
    )
    published = 0
    with (
        Connection(stream.entry.source, "sr-assets measure") as connection,
        LongWork(f"publishing the backlog of {plan.nodes} nodes") as progress,
    ):
        for ack in Publisher(connection).publish_all(items):
            if ack.error:
                raise RunError(f"{stream.entry.source.label}: refused a message of the backlog: {ack.error}")
            published += 1
            if not published % _SHOWN_MESSAGES:
                progress.reached(published)
    return published


def patience_seconds(stream: MeasuredStream) -> float:
    """Return how long nothing new may be found: a run polls a quiet source once per interval of the sensor."""
    return _STALLED_SECONDS + stream.settings.sensor.interval_ns / 1e9


def watch(
    work: str,
    poll: Callable[[], int],
    has_ended: Callable[[], bool],
    is_complete: Callable[[], bool],
    patience: float,
    *,
    load_seconds: float | None = None,
) -> None:
    """Poll until the load has ended and everything is found, or until nothing new was found for `patience` seconds.

    `poll` returns the number of items found so far. The progress of `work` is in seconds of the load, or else in items. Raises
    RunError if a server does not respond for 15 s.
    """
    most = 0
    began_at = changed_at = answered_at = times.monotonic()
    total = None if load_seconds is None else math.ceil(load_seconds)
    with LongWork(f"{work}, {'items found' if total is None else 'seconds'}:", total) as progress:
        while True:
            ended = has_ended()
            try:
                count = poll()
                answered_at = times.monotonic()
            except WireError as error:
                if times.monotonic() - answered_at > _UNREACHABLE_SECONDS:
                    raise RunError(f"{error}; no result") from None
                count = most
            complete = is_complete()
            if ended and complete:
                return
            if count > most or complete:
                most, changed_at = count, times.monotonic()
            if times.monotonic() - changed_at > patience:
                return
            if total is None:
                progress.reached(most)
            else:
                progress.reached(min(int(times.monotonic() - began_at), total), f"{most} items found")
            times.sleep(_POLL_SECONDS)
