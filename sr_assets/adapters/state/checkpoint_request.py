"""The request of a checkpoint to a site's run: a file in the site's folder.

The run renames the file before it begins: a request that comes later is another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.private import own_folder

if TYPE_CHECKING:
    from sr_assets.settings import Settings

_REQUEST: Final = "checkpoint-now"
_TAKEN: Final = "checkpoint-taken"


def request_checkpoint(settings: Settings, site: str) -> None:
    """Request a checkpoint from the active or the next run of a site that has a store for them."""
    if settings.checkpoint_store(site) is not None:
        folder = settings.home / "sites" / site
        own_folder(folder)
        (folder / _REQUEST).touch(mode=0o600)


def is_requested(settings: Settings, site: str) -> bool:
    """Return whether a checkpoint waits for a run."""
    return (settings.home / "sites" / site / _REQUEST).exists() and settings.checkpoint_store(site) is not None


def is_pending(folder: Path) -> bool:
    """Return whether a checkpoint was requested and is not complete."""
    return (folder / _REQUEST).exists() or (folder / _TAKEN).exists()


def take_request(folder: Path) -> bool:
    """Take the request, also one that a killed run took; return whether there is one."""
    try:
        (folder / _REQUEST).rename(folder / _TAKEN)
    except FileNotFoundError:
        return (folder / _TAKEN).exists()
    return True


def end_request(folder: Path) -> None:
    """Remove the request that was taken."""
    (folder / _TAKEN).unlink(missing_ok=True)


def withdraw_checkpoint_request(folder: Path) -> None:
    """Remove a request that no run has taken."""
    (folder / _REQUEST).unlink(missing_ok=True)
