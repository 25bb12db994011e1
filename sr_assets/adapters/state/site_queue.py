"""The queue of sites that wait for a run: one file per site in `<home>/waiting`.

A file has the times of queueing and of the last renewal. They come from the system's monotonic clock, which all
processes share and which cannot be set.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sr_assets.adapters import times
from sr_assets.adapters.private import own_folder, write_private

if TYPE_CHECKING:
    from sr_assets.settings import Settings

_FOLDER: Final = "waiting"
_TTL_TICKS: Final = 3.0
#: Time between a site's removal from the queue and the visible start of its run.
_START_SECONDS: Final = 20.0


def queue_ttl_seconds(settings: Settings) -> float:
    """Return the lifetime of a queue entry: after three missed ticks, the site's sensor was stopped."""
    return _TTL_TICKS * max(10.0, settings.sensor.interval_ns / 1e9)


def enqueue_site(home: Path, site: str, queue_ttl_seconds: float) -> None:
    """Queue a site, or renew its entry if it was last renewed within `queue_ttl_seconds`.

    A site that was just dequeued is not queued again.
    """
    folder, now = home / _FOLDER, times.monotonic()
    _, dequeued = _read(folder / _dequeued_name(site))
    if 0 <= now - dequeued < _START_SECONDS:
        return
    since, renewed = _read(folder / site)
    own_folder(folder)
    write_private(folder / site, f"{since if now - queue_ttl_seconds < renewed <= now else now} {now}\n", durable=False)


def dequeue_site(home: Path, site: str) -> bool:
    """Remove a site from the queue; return False if it was not queued or another process removed it first."""
    folder = home / _FOLDER
    try:
        (folder / site).rename(folder / _dequeued_name(site))
    except FileNotFoundError:
        return False
    now = times.monotonic()
    write_private(folder / _dequeued_name(site), f"{now} {now}\n", durable=False)
    return True


def queued_sites(home: Path, queue_ttl_seconds: float) -> list[str]:
    """Return the queued sites, longest-waiting first, without entries that were not renewed within `queue_ttl_seconds`."""
    now = times.monotonic()
    with contextlib.suppress(FileNotFoundError):
        # A name with a leading dot is a draft or a dequeued site.
        entries = [(_read(file), file.name) for file in (home / _FOLDER).iterdir() if not file.name.startswith(".")]
        return [site for (_, renewed), site in sorted(entries) if now - queue_ttl_seconds < renewed <= now]
    return []


def _dequeued_name(site: str) -> str:
    return f".{site} taken"


def _read(file: Path) -> tuple[float, float]:
    """Return the times of queueing and renewal, or infinity for a site that is not queued."""
    try:
        since, renewed = file.read_text().split()
        return float(since), float(renewed)
    except (FileNotFoundError, ValueError):
        return float("inf"), float("inf")
