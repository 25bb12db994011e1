"""The site lock: a process must hold it to work on a site."""

import os
from pathlib import Path
from typing import Self

from sr_assets.adapters import times
from sr_assets.adapters.locking import lock, read_holder, write_holder
from sr_assets.adapters.private import open_private, own_folder
from sr_assets.adapters.progress_lines import LongWork
from sr_assets.domain.errors import RunError


class SiteBusyError(RunError):
    """Another run holds the site's lock."""


class SiteLock:
    """The lock of a site, as a context manager.

    Its file names the holder and the time. Raises SiteBusyError if another run still holds it after `wait_seconds`.
    """

    def __init__(self, folder: Path, owner: str, wait_seconds: float) -> None:
        self._file = folder / "lock"
        self._owner = owner
        self._wait_seconds = wait_seconds

    def __enter__(self) -> Self:
        """Acquire the lock."""
        own_folder(self._file.parent)
        self._handle = open_private(self._file)
        try:
            if not lock(self._handle):
                self._wait(self._file.parent)
        except BaseException:
            self._handle.close()
            raise
        since = f"{times.utc_now():%Y-%m-%dT%H:%M:%SZ}"
        write_holder(self._handle, f"{self._owner} (pid {os.getpid()}) since {since}\n")
        return self

    def _wait(self, folder: Path) -> None:
        with LongWork(f"{folder.name}: waiting for {read_holder(self._handle)}"):
            if not lock(self._handle, self._wait_seconds):
                raise SiteBusyError(f"site {folder.name} is under way: {lock_owner(folder)}")

    def __exit__(self, *_: object) -> None:
        """Clear the holder's name and release the lock."""
        os.ftruncate(self._handle.fileno(), 0)
        self._handle.close()


def lock_owner(folder: Path) -> str | None:
    """Return the holder of a site's lock and the time of locking, or None if it is free."""
    try:
        with (folder / "lock").open() as handle:
            return None if lock(handle, shared=True) else read_holder(handle)
    except FileNotFoundError:
        return None
