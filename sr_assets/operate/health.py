"""Health over HTTP: `/healthz` for the process, `/readyz` for the streams; both answer within milliseconds, without NATS.

A process is alive while its parts report progress: Dagster's daemons by their heartbeats, the sites of `run --follow` by
the file `alive`. A part without progress for two minutes hangs. A thread that has failed for two minutes, of this process or
according to the files `alive` of its children, is a problem too.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from sr_assets.adapters import times
from sr_assets.adapters.state.status_file import failing_elsewhere, last_alive, last_idle_poll, read_status
from sr_assets.adapters.threads import BackgroundThread, failing_threads
from sr_assets.dagster_internals import daemon_heartbeats
from sr_assets.domain.durations import duration
from sr_assets.settings import Settings
from sr_assets.stages.leadership import stalled_line, standby_line

if TYPE_CHECKING:
    from dagster import DagsterInstance

HEALTH_PATHS: Final = ("/healthz", "/readyz")
#: The permission in `published_mode` of users outside the group.
OTHERS_MAY_READ: Final = 0o004
_PROGRESS_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 10.0
_SUCCESS_SECONDS: Final = 300.0
_STORAGE: Final = "Dagster's storage"
#: Returns the last progress (unix seconds) of each part of a process by name.
Parts = Callable[[], Mapping[str, float]]


class Health:
    """The health of one process; `parts` returns when each of its parts last made progress.

    A part that has made none yet counts from the start of the process, so that a start of up to two minutes is healthy.
    """

    def __init__(self, settings: Settings, parts: Parts = dict) -> None:
        self._settings, self._parts, self._started = settings, parts, times.time()

    def answer(self, path: str, *, in_full: bool = True) -> tuple[int, str]:
        """Return the status code and the text for a path of `HEALTH_PATHS`; unless `in_full`, without errors' texts."""
        if path == HEALTH_PATHS[0]:
            problems = [*self.hung(), *self.failing_threads(in_full=in_full)]
        else:
            problems = self.failing(in_full=in_full)
        lines = problems or ["ok", *(self._standby(in_full=in_full) if path == HEALTH_PATHS[1] else ())]
        return 503 if problems else 200, "".join(f"{line}\n" for line in lines)

    @property
    def is_public(self) -> bool:
        """Whether every user may read the tables, which have the same errors."""
        return bool(self._settings.published_mode & OTHERS_MAY_READ)

    def hung(self) -> list[str]:
        """Return a line for each part without progress."""
        now = times.time()
        ages = {name: now - max(at, self._started) for name, at in self._parts().items()}
        return [
            f"{name}: no progress for {duration(int(age))}" for name, age in ages.items() if age > _PROGRESS_SECONDS
        ]

    def failing_threads(self, *, in_full: bool = True) -> list[str]:
        """Return a line for each thread that has failed for two minutes, here or in a child that is alive."""
        now, home = times.time(), self._settings.home
        failing = failing_threads()
        for folder in (home, *(home / "sites" / site for site in self._settings.sites)):
            if now - last_alive(folder) <= _PROGRESS_SECONDS:
                failing |= failing_elsewhere(folder)
        return [
            f"{name}: failing for {duration(int(now - since))}{f': {problem}' if in_full else ''}"
            for name, (since, problem) in failing.items()
            if now - since > _PROGRESS_SECONDS
        ]

    def failing(self, *, in_full: bool = True) -> list[str]:
        """Return a line for each member that does not campaign, and each stream that is failing, late or has never succeeded.

        A follower's streams are ready.
        """
        sites = self._settings.sites
        stalled = [f"{site}: {line}" for site in sites if (line := stalled_line(self._settings, site))]
        return stalled + [
            f"{entry.label}: {problem}"
            for site, entries in sites.items()
            if standby_line(self._settings, site) is None
            for entry in entries
            if (problem := self._problem(site, entry.stream, in_full=in_full))
        ]

    def _problem(self, site: str, stream: str, *, in_full: bool) -> str | None:
        folder = self._settings.home / "sites" / site
        status = read_status(folder).of(stream)
        if status.last_error:
            return status.last_error if in_full else "failing"
        succeeded_at = (status.last_success_ns or 0) / 1e9
        if not succeeded_at:
            return "no run has succeeded yet"
        age = times.time() - max(succeeded_at, last_idle_poll(folder))
        limit = max(_SUCCESS_SECONDS, 3 * self._settings.run_budget_ns / 1e9)
        return f"last success {duration(int(age))} ago" if age > limit else None

    def _standby(self, *, in_full: bool) -> Iterator[str]:
        for site in self._settings.sites:
            if line := standby_line(self._settings, site):
                yield f"{site}: standby, {line}" if in_full else f"{site}: standby"


def site_parts(settings: Settings, sites: Sequence[str]) -> Parts:
    """Return the progress of the sites of `run --follow`."""
    return lambda: {f"site {site}": last_alive(settings.home / "sites" / site) for site in sites}


@contextlib.contextmanager
def daemon_parts(
    open_instance: Callable[[], AbstractContextManager[DagsterInstance]],
    beat: Callable[[], float],
    poll_seconds: float = _POLL_SECONDS,
) -> Iterator[Parts]:
    """Yield a function that returns `beat` of `up` and the results of a thread's polls.

    These are the last heartbeats of Dagster's daemons, and the last reading of the storage that holds them.
    """
    seen: dict[str, float] = {_STORAGE: 0.0}

    def read() -> Generator[float]:
        # A storage that cannot be read is opened again; until then, its part and the heartbeats grow old.
        with open_instance() as instance:
            while True:
                seen.update({f"Dagster daemon {name}": at for name, at in daemon_heartbeats(instance).items()})
                seen[_STORAGE] = times.time()
                yield poll_seconds

    with BackgroundThread("daemon heartbeats", read):
        yield lambda: {"up": beat(), **seen}


@contextlib.contextmanager
def watchdog_beside(health: Health) -> Iterator[None]:
    """Tell systemd that the process is ready, that it makes progress, and that it stops; without $NOTIFY_SOCKET, nothing."""
    if not os.environ.get("NOTIFY_SOCKET"):
        yield
        return

    def beat() -> Generator[float]:
        while True:
            yield _POLL_SECONDS / 2
            # A failing thread is no reason to restart the process: on a full disk it would not start again.
            if not health.hung():
                _notify("WATCHDOG=1")

    _notify("READY=1")
    with BackgroundThread("watchdog", beat):
        try:
            yield
        finally:
            _notify("STOPPING=1")


def _notify(state: str) -> None:
    """Send a state to the service manager (sd_notify(3)); `@` stands for the abstract namespace."""
    address = os.environ["NOTIFY_SOCKET"]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
