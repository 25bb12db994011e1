"""The paused streams of a site: the marker file `sites/<name>/paused.json`.

The site's lock does not cover the marker, so `pause` and `resume` wait for no run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.locking import locked_folder
from sr_assets.adapters.private import own_folder, write_private
from sr_assets.domain.errors import RunError, cannot_write

if TYPE_CHECKING:
    from sr_assets.settings import Entry, Settings, StreamSettings

_MARKER: Final = "paused.json"


def set_paused(settings: Settings, stream: StreamSettings, paused: bool) -> bool:
    """Pause or resume a stream's copying; return whether that changed anything.

    Raises RunError, without a change, if the marker cannot be read or written.
    """
    return _mark(settings.home / "sites" / stream.name, stream.stream, paused=paused)


def forget_paused(folder: Path, stream: str) -> None:
    """Remove a deleted stream from the marker of its site. Raises RunError as `set_paused`."""
    if stream in paused_streams(folder):
        _mark(folder, stream, paused=False)


def _mark(folder: Path, stream: str, *, paused: bool) -> bool:
    try:
        own_folder(folder)
        with locked_folder(folder):
            before = paused_streams(folder)
            after = before | {stream} if paused else before - {stream}
            if after != before:
                write_private(folder / _MARKER, json.dumps({"streams": sorted(after)}))
    except OSError as error:
        raise RunError(cannot_write(folder / _MARKER, error)) from None
    return after != before


def paused_streams(folder: Path) -> frozenset[str]:
    """Return the paused source streams of a site's folder.

    Raises RunError for an unreadable marker: an error is better than copying a paused stream.
    """
    file = folder / _MARKER
    try:
        streams = json.loads(file.read_text())["streams"]
        return frozenset(map(str, streams))
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{file} cannot be read ({error}); delete it and pause the streams again that must stay paused"
        ) from None


def paused_entries(folder: Path, entries: Iterable[Entry]) -> frozenset[str]:
    """Return the streams among a site's entries that the command or the configuration pauses. Raises as `paused_streams`."""
    return paused_streams(folder) | {entry.stream for entry in entries if entry.paused}
