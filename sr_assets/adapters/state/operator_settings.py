"""What operators have set for a site by command: paused streams and maintenance windows.

The site's lock does not cover them, so the commands wait for no run; a run reads them at each step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sr_assets.adapters import control
from sr_assets.domain.tracking.maintenance import Window

if TYPE_CHECKING:
    from sr_assets.settings import Entry, Settings, StreamSettings


def set_paused(settings: Settings, stream: StreamSettings, paused: bool) -> bool:
    """Pause or resume a stream's copying; return whether that changed anything.

    Raises RunError, without a change, if that cannot be stored.
    """
    statement = (
        "INSERT OR IGNORE INTO paused VALUES (?, ?)" if paused else "DELETE FROM paused WHERE site = ? AND stream = ?"
    )
    return bool(control.change(settings.home, statement, stream.name, stream.stream))


def paused_streams(folder: Path) -> frozenset[str]:
    """Return the paused source streams of a site's folder.

    Raises RunError if they cannot be read: an error is better than copying a paused stream.
    """
    home, site = control.place_of(folder)
    return frozenset(stream for (stream,) in control.query(home, "SELECT stream FROM paused WHERE site = ?", site))


def paused_entries(folder: Path, entries: Iterable[Entry]) -> frozenset[str]:
    """Return the streams among a site's entries that the command or the configuration pauses. Raises as `paused_streams`."""
    return paused_streams(folder) | {entry.stream for entry in entries if entry.paused}


def added_windows(folder: Path) -> list[Window]:
    """Return the windows of a site's folder in the order of adding, ended ones included.

    Raises RunError if they cannot be read: an error is better than announcements during planned work.
    """
    home, site = control.place_of(folder)
    rows = control.query(home, "SELECT rule FROM windows WHERE site = ? ORDER BY number", site)
    return [read_window(json.loads(rule)) for (rule,) in rows]


def read_window(row: dict[str, Any]) -> Window:
    """Return a window from its JSON; raises TypeError or KeyError if it is none."""
    return Window(**{**row, "globs": tuple(row["globs"]), "classes": tuple(row.get("classes", ()))})


def add_windows(folder: Path, windows: Iterable[Window]) -> None:
    """Add windows to a site, or replace those with the same id. Raises RunError, without a change, if it cannot."""
    home, site = control.place_of(folder)
    rows = [(site, window.id, json.dumps(asdict(window))) for window in windows]
    with control.transaction(home) as connection:
        connection.executemany("INSERT OR REPLACE INTO windows (site, id, rule) VALUES (?, ?, ?)", rows)


def end_window(folder: Path, window_id: str, at_ns: int) -> Window | None:
    """End a window of a site; return it, or None if it is unknown or over. One that has not begun is deleted."""
    home, site = control.place_of(folder)
    with control.transaction(home) as connection:
        rows = connection.execute("SELECT rule FROM windows WHERE site = ? AND id = ?", [site, window_id]).fetchall()
        window = read_window(json.loads(rows[0][0])) if rows else None
        if window is None or window.to_ns <= at_ns:
            return None
        if window.from_ns < at_ns:
            rule = json.dumps(asdict(replace(window, to_ns=at_ns)))
            connection.execute("UPDATE windows SET rule = ? WHERE site = ? AND id = ?", [rule, site, window_id])
        else:
            connection.execute("DELETE FROM windows WHERE site = ? AND id = ?", [site, window_id])
    return window
