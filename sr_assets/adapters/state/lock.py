"""The right to work on a site: a file lock that the kernel frees however its holder ends.

Here: taking it, and asking who holds it. Not here: what is done with the site (`store`).
"""

from __future__ import annotations

import fcntl
import os
import time
from typing import TYPE_CHECKING, Self

from sr_assets.adapters.private import living_holder, open_private, own_folder
from sr_assets.domain.errors import RunError

if TYPE_CHECKING:
    from pathlib import Path


class SiteBusyError(RunError):
    """Another run holds the site."""


class SiteLock:
    """The right to work on a site, held from `with` to its end; the kernel frees it however the holder ends.

    Its file names the holder and since when. Raises SiteBusyError when another run still holds it after `wait_seconds`.
    """

    def __init__(self, folder: Path, owner: str, wait_seconds: float) -> None:
        """Name the site's folder and who asks."""
        self._file = folder / "lock"
        self._owner = owner
        self._wait_seconds = wait_seconds

    def __enter__(self) -> Self:
        """Take the lock."""
        own_folder(self._file.parent)
        self._handle = open_private(self._file)
        deadline = time.monotonic() + self._wait_seconds
        while True:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    self._handle.close()
                    raise SiteBusyError(
                        f"site {self._file.parent.name} is under way: {lock_owner(self._file.parent)}"
                    ) from None
                time.sleep(0.1)
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._handle.seek(0)
        self._handle.truncate()
        self._handle.write(f"{self._owner} (pid {os.getpid()}) since {since}\n")
        self._handle.flush()
        return self

    def __exit__(self, *_: object) -> None:
        """Free the lock, and take our name off it."""
        os.ftruncate(self._handle.fileno(), 0)
        self._handle.close()


def lock_owner(folder: Path) -> str | None:
    """Return who holds a site's lock and since when; None when it is free. A holder whose process is gone is not named."""
    try:
        with (folder / "lock").open() as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return living_holder(handle.read()) or "a process that has not said who it is"
    except FileNotFoundError:
        return None
    return None
