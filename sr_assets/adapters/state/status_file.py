"""`status.json`: what the sensor and the command line know of a site without its lock.

Here: replacing and reading the file, its age by the monotonic clock, and the time of the last look at an idle site. Not
here: its content (`stages.site`).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.private import write_private

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sr_assets.settings import Entry

STATUS_FILE: Final = "status.json"
_LOOK: Final = "looked"


def write_status(folder: Path, status: dict[str, Any]) -> None:
    """Replace `status.json`, which the sensor and the command line read, atomically.

    `written_at` is added to it: seconds of the monotonic clock, and the start of the machine from which that counts.
    """
    written_at = [time.monotonic(), _machine_start()]
    write_private(folder / STATUS_FILE, json.dumps({**status, "written_at": written_at}, indent=1))


def status_age_seconds(status: dict[str, Any]) -> float | None:
    """Return how long ago a status was written, independent of changes of the time of day.

    None when it was on another machine or before this one's last start.
    """
    seconds, start = status.get("written_at", (math.inf, ""))
    age_seconds = time.monotonic() - seconds
    return age_seconds if start == _machine_start() and age_seconds >= 0 else None


def record_idle_poll(folder: Path) -> None:
    """Note that a site was looked at just now and nothing was left to do: no run says so of a site that is idle."""
    with contextlib.suppress(OSError):
        (folder / _LOOK).touch(mode=0o600)


def last_look(folder: Path) -> float:
    """Return when nothing was left to do for a site, in unix seconds; 0 when that was never seen."""
    try:
        return (folder / _LOOK).stat().st_mtime
    except OSError:
        return 0.0


def _machine_start() -> str:
    """Return the id of this start of the machine; empty where the system has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def read_status(folder: Path) -> dict[str, Any]:
    """Return the content of `status.json`; empty before the first run."""
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
