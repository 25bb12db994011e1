"""The sites that wait for a run, one file for each in `<home>/waiting`: since when, and when it said so last.

Here: getting in line and out of it, and who waits longest. Times are of the system's monotonic clock, which all processes
share and nobody sets. Not here: who serves a site (`automation.hosting`), how many at a time (`automation.places`).
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.private import own_folder, write_private

if TYPE_CHECKING:
    from pathlib import Path

    from sr_assets.settings import Settings

_FOLDER: Final = "waiting"
_TTL_TICKS: Final = 3.0
#: How long after it was taken out of the line a site is on its way to a run that nobody can see yet.
_TAKEN_SECONDS: Final = 20.0


def queue_ttl_seconds(settings: Settings) -> float:
    """Return how long a queue entry lasts without renewal: three ticks of the site's sensor, or it was stopped."""
    return _TTL_TICKS * max(10.0, settings.sensor.interval_ns / 1e9)


def enqueue_site(home: Path, site: str, queue_ttl_seconds: float) -> None:
    """Put a site in line, unless it was just taken out; one that said so `fresh_seconds` ago or later still waits."""
    folder, now = home / _FOLDER, time.monotonic()
    _, taken = _read(folder / _taken(site))
    if 0 <= now - taken < _TAKEN_SECONDS:
        return
    since, renewed = _read(folder / site)
    own_folder(folder)
    write_private(folder / site, f"{since if now - queue_ttl_seconds < renewed <= now else now} {now}\n")


def dequeue_site(home: Path, site: str) -> bool:
    """Take a site out of the line; returns whether it was there: of several who do so at once only one took it."""
    folder = home / _FOLDER
    try:
        (folder / site).rename(folder / _taken(site))
    except FileNotFoundError:
        return False
    now = time.monotonic()
    write_private(folder / _taken(site), f"{now} {now}\n")
    return True


def queued_sites(home: Path, queue_ttl_seconds: float) -> list[str]:
    """Return the sites in line, the one that waits longest first; one that has said nothing for so long has gone."""
    now = time.monotonic()
    with contextlib.suppress(FileNotFoundError):
        # A name with a dot in front is a draft, or was taken.
        line = [(_read(file), file.name) for file in (home / _FOLDER).iterdir() if not file.name.startswith(".")]
        return [site for (_, renewed), site in sorted(line) if now - queue_ttl_seconds < renewed <= now]
    return []


def _taken(site: str) -> str:
    return f".{site} taken"


def _read(file: Path) -> tuple[float, float]:
    """Return since when a site waits, and when it said so last: infinity when it does not."""
    try:
        since, renewed = file.read_text().split()
        return float(since), float(renewed)
    except (FileNotFoundError, ValueError):
        return float("inf"), float("inf")
