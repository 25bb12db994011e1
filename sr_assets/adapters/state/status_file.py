"""`status.json`: a site's status for readers without its lock; the last idle poll, and the last progress of a process."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters import times
from sr_assets.adapters.private import write_private
from sr_assets.adapters.threads import Failure, failing_threads

if TYPE_CHECKING:
    from sr_assets.settings import Entry

STATUS_FILE: Final = "status.json"
_IDLE_POLL: Final = "looked"
_ALIVE: Final = "alive"
_CLOSED: Final = "closed"
_STATE_FILE: Final = "state.duckdb"


def write_status(folder: Path, status: dict[str, Any]) -> None:
    """Replace `status.json` atomically for the sensor and the command line.

    The field `written_at` holds the monotonic time in seconds and the id of the machine's boot.
    """
    written_at = [times.monotonic(), boot_id()]
    write_private(folder / STATUS_FILE, json.dumps({**status, "written_at": written_at}, indent=1))


def note_closed_state(folder: Path) -> None:
    """Record the size and time of the state's file after a run has closed it."""
    with contextlib.suppress(OSError):
        # Without it, the next run opens the state.
        write_private(folder / _CLOSED, json.dumps(_state_stamp(folder)), durable=False)


def is_state_untouched(folder: Path) -> bool:
    """Return whether the state's file is as the last run has closed it."""
    try:
        return bool(json.loads((folder / _CLOSED).read_text()) == _state_stamp(folder))
    except (OSError, ValueError):
        return False


def _state_stamp(folder: Path) -> list[int]:
    stat = (folder / _STATE_FILE).stat()
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns]


def outdate_status(folder: Path) -> None:
    """Mark the status of a state that was replaced or changed as `is_outdated`; its positions remain until the next run."""
    if status := read_status(folder):
        status.pop("written_at", None)
        write_private(folder / STATUS_FILE, json.dumps(status, indent=1))


def is_outdated(status: dict[str, Any]) -> bool:
    """Return whether a command has changed the state after this status was written: a run is due."""
    return bool(status) and "written_at" not in status


def status_age_seconds(status: dict[str, Any]) -> float | None:
    """Return the age of a status, independent of changes of the time of day.

    None if another machine or an earlier boot wrote it.
    """
    seconds, boot = status.get("written_at", (math.inf, ""))
    age_seconds = times.monotonic() - seconds
    return age_seconds if boot == boot_id() and age_seconds >= 0 else None


def record_idle_poll(folder: Path) -> None:
    """Record that a poll of a site found no work: no run records this for an idle site."""
    _touch(folder / _IDLE_POLL)


def last_idle_poll(folder: Path) -> float:
    """Return the time of the last idle poll in unix seconds, or 0."""
    return _touched_at(folder / _IDLE_POLL)


def record_alive(folder: Path) -> None:
    """Record that the process of a site, or of the due work, makes progress, and which of its threads fail."""
    file, failing = folder / _ALIVE, failing_threads()
    _touch(file)
    with contextlib.suppress(OSError):
        if failing or file.stat().st_size:
            file.write_text(json.dumps(failing))


def failing_elsewhere(folder: Path) -> dict[str, Failure]:
    """Return the failing threads at the last progress of a process, by name."""
    try:
        failing = json.loads((folder / _ALIVE).read_text() or "{}")
        return {name: Failure(float(since), str(problem)) for name, (since, problem) in failing.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def last_alive(folder: Path) -> float:
    """Return the time of the last progress of a process in unix seconds, or 0."""
    return _touched_at(folder / _ALIVE)


def _touch(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.touch(mode=0o600)


def _touched_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


@functools.cache
def boot_id() -> str:
    """Return the machine's boot id, or an empty text if the system has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def read_status(folder: Path) -> dict[str, Any]:
    """Return the content of `status.json`, or an empty dict before the first run."""
    try:
        status = json.loads((folder / STATUS_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def streams_without_error(home: Path, entries: Sequence[Entry]) -> tuple[str, ...]:
    """Return the entries' streams that have no error in their site's status."""
    return tuple(
        entry.stream
        for entry in entries
        if not read_status(home / "sites" / entry.name).get("streams", {}).get(entry.stream, {}).get("last_error")
    )
