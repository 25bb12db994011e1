"""`status.json`: what the sensor and the command line know of a site without its lock.

Here: replacing and reading the file, and its age by the monotonic clock. Not here: its content (`stages.site`).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

from sr_assets.adapters.private import write_private


def write_status(folder: Path, status: dict[str, Any]) -> None:
    """Replace `status.json`, which the sensor and the command line read, atomically.

    `written_at` is added to it: seconds of the monotonic clock, and the start of the machine from which that counts.
    """
    written_at = [time.monotonic(), _machine_start()]
    write_private(folder / "status.json", json.dumps({**status, "written_at": written_at}, indent=1))


def status_age_seconds(status: dict[str, Any]) -> float | None:
    """Return how long ago a status was written, independent of changes of the time of day.

    None when it was on another machine or before this one's last start.
    """
    seconds, start = status.get("written_at", (math.inf, ""))
    age_seconds = time.monotonic() - seconds
    return age_seconds if start == _machine_start() and age_seconds >= 0 else None


def _machine_start() -> str:
    """Return the id of this start of the machine; empty where the system has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def read_status(folder: Path) -> dict[str, Any]:
    """Return the content of `status.json`; empty before the first run."""
    try:
        status = json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}
