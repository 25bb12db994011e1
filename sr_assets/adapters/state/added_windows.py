"""The maintenance windows of a site that operators added by command: the file `sites/<name>/maintenance.json`.

The site's lock does not cover the file, so the commands wait for no run; a run reads it at each step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from sr_assets.adapters.locking import locked_folder
from sr_assets.adapters.private import own_folder, write_private
from sr_assets.domain.errors import RunError, cannot_write
from sr_assets.domain.tracking.maintenance import Window

_FILE: Final = "maintenance.json"


def added_windows(folder: Path) -> list[Window]:
    """Return the windows of a site's folder in the order of adding, ended ones included.

    Raises RunError for an unreadable file: an error is better than announcements during planned work.
    """
    file = folder / _FILE
    try:
        return [read_window(row) for row in json.loads(file.read_text())["windows"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} cannot be read ({error}); delete it and add the windows again") from None


def read_window(row: dict[str, Any]) -> Window:
    """Return a window from its JSON; raises TypeError or KeyError if it is none."""
    return Window(**{**row, "globs": tuple(row["globs"]), "classes": tuple(row.get("classes", ()))})


def add_windows(folder: Path, windows: Iterable[Window]) -> None:
    """Add windows to a site, or replace those with the same id. Raises RunError, without a change, if it cannot."""
    added = {window.id: window for window in windows}
    _change(folder, lambda before: [*(each for each in before if each.id not in added), *added.values()])


def end_window(folder: Path, window_id: str, at_ns: int) -> Window | None:
    """End a window of a site; return it, or None if it is unknown or over. One that has not begun is deleted."""
    ended = next((each for each in added_windows(folder) if each.id == window_id and each.to_ns > at_ns), None)
    if ended is None:
        return None

    def end(before: list[Window]) -> Iterator[Window]:
        for each in before:
            if each.id != window_id:
                yield each
            elif each.from_ns < at_ns:
                yield replace(each, to_ns=min(each.to_ns, at_ns))

    _change(folder, lambda before: list(end(before)))
    return ended


def _change(folder: Path, change: Callable[[list[Window]], list[Window]]) -> None:
    try:
        own_folder(folder)
        with locked_folder(folder):
            after = change(added_windows(folder))
            write_private(folder / _FILE, json.dumps({"windows": [asdict(window) for window in after]}))
    except OSError as error:
        raise RunError(cannot_write(folder / _FILE, error)) from None
