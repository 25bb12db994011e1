"""`status.json`: what the sensor and the command line know of a site without its lock.

Here: replacing and reading the file, and its age by a clock that nobody sets. Not here: what is in it (`stages.site`).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any


def write_status(folder: Path, status: dict[str, Any]) -> None:
    """Replace `status.json`, which the sensor and the command line read, at once.

    `written_at` is put into it: seconds by the clock that nobody sets, and since which start of the machine it counts.
    """
    draft = folder / ".status.json"
    draft.write_text(json.dumps({**status, "written_at": [time.monotonic(), _machine_start()]}, indent=1))
    draft.replace(folder / "status.json")


def status_age_seconds(status: dict[str, Any]) -> float | None:
    """Return how long ago a status was written, whatever became of the time of day since.

    None when it was on another machine or before this one's last start.
    """
    seconds, start = status.get("written_at", (math.inf, ""))
    age_seconds = time.monotonic() - seconds
    return age_seconds if start == _machine_start() and age_seconds >= 0 else None


def _machine_start() -> str:
    """Return what tells this start of this machine from every other; empty where the system does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def read_status(folder: Path) -> dict[str, Any]:
    """Return what `status.json` says; empty before the first run."""
    try:
        found = json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
