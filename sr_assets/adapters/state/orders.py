"""Orders to a site's process: a checkpoint, the end of this member's leadership, the refill of a stream's history.

The process takes an order before it begins: one that comes later is another one. The order "yield" remains while this home
lacks the site's state; it is new in the term that has found this out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sr_assets.adapters import control

if TYPE_CHECKING:
    from sr_assets.settings import Settings, StreamSettings

Order = Literal["checkpoint", "step down", "yield"]


def request_checkpoint(settings: Settings, site: str) -> None:
    """Order a checkpoint from the active or the next run of a site that has a store for them."""
    if settings.checkpoint_store(site) is not None:
        give_order(settings.home / "sites" / site, "checkpoint")


def checkpoint_waits(settings: Settings, site: str) -> bool:
    """Return whether an ordered checkpoint waits for a run."""
    return settings.checkpoint_store(site) is not None and is_new(settings.home / "sites" / site, "checkpoint")


def give_order(folder: Path, order: Order) -> None:
    """Give an order to the process of a site's folder."""
    home, site = control.place_of(folder)
    control.change(home, "INSERT OR IGNORE INTO orders VALUES (?, ?, 0)", site, order)


def is_pending(folder: Path, order: Order) -> bool:
    """Return whether an order was given that is not completed."""
    return bool(_orders(folder, order))


def is_new(folder: Path, order: Order) -> bool:
    """Return whether an order was given that no process has taken."""
    return 0 in _orders(folder, order)


def take_order(folder: Path, order: Order) -> bool:
    """Take an order, also one that a killed process took; return whether there is one."""
    home, site = control.place_of(folder)
    if orders := _orders(folder, order):
        control.change(home, "UPDATE OR REPLACE orders SET taken = 1 WHERE site = ? AND name = ?", site, order)
    return bool(orders)


def end_order(folder: Path, order: Order) -> None:
    """Remove the order that was taken."""
    _remove(folder, order, since=1)


def withdraw_order(folder: Path, order: Order) -> None:
    """Remove an order, also one that was taken."""
    _remove(folder, order, since=0)


def _remove(folder: Path, order: Order, *, since: int) -> None:
    home, site = control.place_of(folder)
    if any(taken >= since for taken in _orders(folder, order)):
        control.change(home, "DELETE FROM orders WHERE site = ? AND name = ? AND taken >= ?", site, order, since)


def _orders(folder: Path, order: Order) -> list[int]:
    home, site = control.place_of(folder)
    statement = "SELECT taken FROM orders WHERE site = ? AND name = ? ORDER BY taken"
    return [taken for (taken,) in control.query(home, statement, site, order)]


def request_refill(folder: Path, stream: StreamSettings) -> None:
    """Request the refill of a tracked stream by the next runs; `folder` is the site's."""
    if stream.tracked:
        home, site = control.place_of(folder)
        control.change(home, "INSERT OR REPLACE INTO refills VALUES (?, ?, '{}', 0)", site, stream.stream)


def request_another_refill(folder: Path, stream: StreamSettings) -> None:
    """Request a refill, after the one under way if there is one."""
    home, site = control.place_of(folder)
    statement = "INSERT INTO refills VALUES (?, ?, '{}', 0) ON CONFLICT DO UPDATE SET again = progress <> '{}'"
    control.change(home, statement, site, stream.stream)


def note_refill(folder: Path, stream: StreamSettings, progress: dict[str, Any] | None) -> None:
    """Replace the progress of a refill; None: it has ended."""
    (home, site), name = control.place_of(folder), stream.stream
    with control.transaction(home) as connection:
        if progress is not None:
            statement = "INSERT INTO refills VALUES (?, ?, ?, 0) ON CONFLICT DO UPDATE SET progress = excluded.progress"
            connection.execute(statement, [site, name, json.dumps(progress)])
        else:
            connection.execute("DELETE FROM refills WHERE site = ? AND stream = ? AND again = 0", [site, name])
            statement = "UPDATE refills SET progress = '{}', again = 0 WHERE site = ? AND stream = ?"
            connection.execute(statement, [site, name])


def read_refill(folder: Path, stream: StreamSettings) -> dict[str, Any] | None:
    """Return the progress of a requested refill, empty at first, or None without a request."""
    home, site = control.place_of(folder)
    rows = control.query(home, "SELECT progress FROM refills WHERE site = ? AND stream = ?", site, stream.stream)
    progress: dict[str, Any] | None = json.loads(rows[0][0]) if rows else None
    return progress
