"""The queue of sites that wait for a run. Its times are monotonic: no correction of the machine's time moves them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from sr_assets.adapters import control, times

if TYPE_CHECKING:
    from sr_assets.settings import Settings

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
    now = times.monotonic()
    with control.transaction(home, durable=False) as connection:
        # Times from before the machine's start may be later than now.
        connection.execute(
            "DELETE FROM site_queue WHERE NOT coalesce(taken, renewed) BETWEEN ? AND ?", [now - 1e6, now]
        )
        connection.execute("DELETE FROM site_queue WHERE taken <= ?", [now - _START_SECONDS])
        connection.execute("DELETE FROM site_queue WHERE taken IS NULL AND renewed <= ?", [now - queue_ttl_seconds])
        connection.execute(
            "INSERT INTO site_queue VALUES (?, ?, ?, NULL)"
            " ON CONFLICT DO UPDATE SET renewed = excluded.renewed WHERE taken IS NULL",
            [site, now, now],
        )


def dequeue_site(home: Path, site: str) -> bool:
    """Remove a site from the queue; return False if it was not queued or another process removed it first."""
    statement = "UPDATE site_queue SET taken = ? WHERE site = ? AND taken IS NULL"
    return bool(control.change(home, statement, times.monotonic(), site, durable=False))


def queued_sites(home: Path, queue_ttl_seconds: float) -> list[str]:
    """Return the queued sites, longest-waiting first, without entries that were not renewed within `queue_ttl_seconds`."""
    now = times.monotonic()
    statement = (
        "SELECT site FROM site_queue WHERE taken IS NULL AND renewed > ? AND renewed <= ? ORDER BY since, renewed, site"
    )
    return [site for (site,) in control.query(home, statement, now - queue_ttl_seconds, now)]
