"""Health over HTTP: `/healthz` for the process, `/readyz` for the streams; both answer within milliseconds, without NATS.

A process is alive while its parts report progress: Dagster's daemons by their heartbeats, the sites of `run --follow` by
the file `alive`. A part without progress for two minutes hangs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.state.status_file import last_alive, last_idle_poll, read_status
from sr_assets.domain.durations import duration
from sr_assets.settings import Settings
from sr_assets.stages.leadership import standby_line

if TYPE_CHECKING:
    from dagster import DagsterInstance

HEALTH_PATHS: Final = ("/healthz", "/readyz")
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
        self._settings, self._parts, self._started = settings, parts, time.time()

    def answer(self, path: str) -> tuple[int, str]:
        """Return the status code and the text for a path of `HEALTH_PATHS`."""
        problems = self.hung() if path == HEALTH_PATHS[0] else self.failing()
        lines = problems or ["ok", *(self._standby() if path == HEALTH_PATHS[1] else ())]
        return 503 if problems else 200, "".join(f"{line}\n" for line in lines)

    def hung(self) -> list[str]:
        """Return a line for each part without progress."""
        now = time.time()
        ages = {name: now - max(at, self._started) for name, at in self._parts().items()}
        return [
            f"{name}: no progress for {duration(int(age))}" for name, age in ages.items() if age > _PROGRESS_SECONDS
        ]

    def failing(self) -> list[str]:
        """Return a line for each stream that is failing, late or has never succeeded; a follower's streams are ready."""
        return [
            f"{entry.label}: {problem}"
            for site, entries in self._settings.sites.items()
            if standby_line(self._settings, site) is None
            for entry in entries
            if (problem := self._problem(site, entry.stream))
        ]

    def _problem(self, site: str, stream: str) -> str | None:
        folder = self._settings.home / "sites" / site
        status = read_status(folder).get("streams", {}).get(stream, {})
        if error := status.get("last_error"):
            return str(error)
        succeeded_at = (status.get("last_success_ns") or 0) / 1e9
        if not succeeded_at:
            return "no run has succeeded yet"
        age = time.time() - max(succeeded_at, last_idle_poll(folder))
        limit = max(_SUCCESS_SECONDS, 3 * self._settings.run_budget_ns / 1e9)
        return f"last success {duration(int(age))} ago" if age > limit else None

    def _standby(self) -> Iterator[str]:
        for site in self._settings.sites:
            if line := standby_line(self._settings, site):
                yield f"{site}: standby, {line}"


def site_parts(settings: Settings, sites: list[str]) -> Parts:
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
    ended = threading.Event()

    def poll() -> None:
        while not ended.is_set():
            # A storage that cannot be read is opened again; until then, its part and the heartbeats grow old.
            with contextlib.suppress(Exception), open_instance() as instance:
                read(instance)
            ended.wait(poll_seconds)

    def read(instance: DagsterInstance) -> None:
        while not ended.is_set():
            for name, status in instance.get_daemon_statuses().items():
                if status.required:
                    last = status.last_heartbeat
                    seen[f"Dagster daemon {name}"] = last.timestamp if last else 0.0
            seen[_STORAGE] = time.time()
            ended.wait(poll_seconds)

    thread = threading.Thread(target=poll, name="daemon heartbeats", daemon=True)
    thread.start()
    try:
        yield lambda: {"up": beat(), **seen}
    finally:
        ended.set()
        thread.join(_POLL_SECONDS)


@contextlib.contextmanager
def watchdog_beside(health: Health) -> Iterator[None]:
    """Tell systemd that the process is ready, that it makes progress, and that it stops; without $NOTIFY_SOCKET, nothing."""
    if not os.environ.get("NOTIFY_SOCKET"):
        yield
        return
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_POLL_SECONDS / 2):
            if not health.hung():
                _notify("WATCHDOG=1")

    _notify("READY=1")
    thread = threading.Thread(target=beat, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        _notify("STOPPING=1")
        ended.set()
        # At the interpreter's end, a thread would keep DuckDB's objects alive, which it reports on stderr.
        thread.join(_POLL_SECONDS)


def _notify(state: str) -> None:
    """Send a state to the service manager (sd_notify(3)); `@` stands for the abstract namespace."""
    address = os.environ["NOTIFY_SOCKET"]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
