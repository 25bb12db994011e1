"""The request to refill a stream's Parquet history, a file in the site's folder with the progress of the refill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sr_assets.adapters.private import own_folder, write_private

if TYPE_CHECKING:
    from sr_assets.settings import StreamSettings


def request_refill(folder: Path, stream: StreamSettings) -> None:
    """Request the refill of a tracked stream by the next runs; `folder` is the site's."""
    if stream.tracked:
        note_refill(folder, stream, {})


def note_refill(folder: Path, stream: StreamSettings, progress: dict[str, Any]) -> None:
    file = _file(folder, stream)
    own_folder(file.parent)
    write_private(file, json.dumps(progress))


def read_refill(folder: Path, stream: StreamSettings) -> dict[str, Any] | None:
    """Return the progress of a requested refill, empty at first, or None without a request."""
    try:
        progress = json.loads(_file(folder, stream).read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return progress if isinstance(progress, dict) else {}


def end_refill(folder: Path, stream: StreamSettings) -> None:
    _file(folder, stream).unlink(missing_ok=True)


def _file(folder: Path, stream: StreamSettings) -> Path:
    return folder / "refill" / f"{stream.asset_prefix[1]}.json"
