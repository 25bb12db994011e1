"""The request to refill a stream's Parquet history, a file in the site's folder with the progress of the refill."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.private import own_folder, write_private

if TYPE_CHECKING:
    from sr_assets.settings import StreamSettings

#: Copying and the refill are threads of one process.
_lock: Final = threading.Lock()
_AGAIN: Final = "again"


def request_refill(folder: Path, stream: StreamSettings) -> None:
    """Request the refill of a tracked stream by the next runs; `folder` is the site's."""
    if stream.tracked:
        _write(folder, stream, {})


def request_another_refill(folder: Path, stream: StreamSettings) -> None:
    """Request a refill, after the one under way if there is one."""
    with _lock:
        progress = read_refill(folder, stream)
        _write(folder, stream, {**progress, _AGAIN: True} if progress else {})


def note_refill(folder: Path, stream: StreamSettings, progress: dict[str, Any] | None) -> None:
    """Replace the progress of a refill; None: it has ended."""
    with _lock:
        again = _AGAIN in (read_refill(folder, stream) or {})
        if progress is not None:
            _write(folder, stream, {**progress, _AGAIN: True} if again else progress)
        elif again:
            _write(folder, stream, {})
        else:
            _file(folder, stream).unlink(missing_ok=True)


def read_refill(folder: Path, stream: StreamSettings) -> dict[str, Any] | None:
    """Return the progress of a requested refill, empty at first, or None without a request; `again`: another one follows."""
    try:
        progress = json.loads(_file(folder, stream).read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return progress if isinstance(progress, dict) else {}


def _write(folder: Path, stream: StreamSettings, progress: dict[str, Any]) -> None:
    file = _file(folder, stream)
    own_folder(file.parent)
    write_private(file, json.dumps(progress))


def _file(folder: Path, stream: StreamSettings) -> Path:
    return folder / "refill" / f"{stream.asset_prefix[1]}.json"
