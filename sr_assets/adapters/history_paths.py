"""The names of the files of a stream's Parquet history: `snapshots/name=…/stream=…/date=…/<file>` in the home."""

import re
from pathlib import Path
from typing import Final
from urllib.parse import quote

from sr_assets.settings.values import shown

_NAME: Final = re.compile(r"/date=[0-9]{4}-[0-9]{2}-[0-9]{2}/[0-9]+(-[0-9]+)+\.parquet")


def relative_name(file: Path) -> str:
    """Return a file's path relative to its home: `snapshots/name=…/stream=…/date=…/<file>`."""
    return "/".join(file.parts[-5:])


def history_path(home: Path, name: str, stream: str, file: str) -> Path:
    """Return the path of a file of a stream's history, given relative to the home.

    Raises ValueError for a file anywhere else: a state may come from somebody else's checkpoint.
    """
    folder, path = f"snapshots/name={quote(name, safe='')}/stream={quote(stream, safe='')}", home / file
    inside = path.resolve().is_relative_to((home / folder).resolve())
    if not (inside and file.startswith(folder) and _NAME.fullmatch(file, len(folder))):
        raise ValueError(f"{shown(file)} is not a file of the history of {name}/{shown(stream)}")
    return path
