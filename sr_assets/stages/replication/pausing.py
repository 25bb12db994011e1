"""Which streams of a site are paused: nothing is copied for them, while watching, tables and advisories go on.

Here: the file `paused.json` in the site's folder, which needs no lock to be read. Not here: who asks (`cli`).
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from sr_assets.settings import Settings, StreamSettings


def paused_streams(folder: Path) -> frozenset[str]:
    """Return the paused streams of a site, by its folder."""
    try:
        names = json.loads((folder / "paused.json").read_text())
    except (OSError, ValueError):
        return frozenset()
    return frozenset(names) if isinstance(names, list) else frozenset()


def set_paused(settings: Settings, stream: StreamSettings, *, paused: bool) -> bool:
    """Pause a stream or let it go on; returns whether that changes anything."""
    folder = settings.home / "sites" / stream.name
    before = paused_streams(folder)
    after = before | {stream.stream} if paused else before - {stream.stream}
    if after == before:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".paused.json.{os.getpid()}"
    draft.write_text(json.dumps(sorted(after)))
    draft.replace(folder / "paused.json")
    return True
