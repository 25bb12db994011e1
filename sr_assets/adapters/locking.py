"""File locks, by which processes exclude each other. The kernel frees a lock however its holder ends."""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from sr_assets.adapters import times

_POLL_SECONDS: Final = 0.02
_PID: Final = re.compile(r"\(pid ([0-9]+)\)")


def lock(file: IO[Any] | int, wait_seconds: float | None = 0.0, *, shared: bool = False) -> bool:
    """Lock an open file until it is closed, or return False if another process still holds it after `wait_seconds`.

    With `wait_seconds=None` the wait has no limit. Several processes may hold a `shared` lock.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if wait_seconds is None:
        fcntl.flock(file, kind)
        return True
    deadline = times.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if times.monotonic() >= deadline:
                return False
            times.sleep(_POLL_SECONDS)
        else:
            return True


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Lock a folder, so that concurrent changes of a file in it all take effect."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle, None)
        yield
    finally:
        os.close(handle)


def write_holder(file: IO[str], holder: str) -> None:
    """Replace the content of a locked file by the name of its holder, with `(pid N)`."""
    file.seek(0)
    file.truncate()
    file.write(holder)
    file.flush()


def read_holder(file: IO[str]) -> str:
    """Return the holder that a lock file names, or a phrase for an unknown one."""
    return living_holder(file.read()) or "an unknown process"


def living_holder(text: str) -> str | None:
    """Return the text of a lock file if the process that it names as `(pid N)` is alive, else None.

    A killed process may leave its name in a file that another process locks now.
    """
    named = _PID.search(text)
    if named is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(int(named[1]), 0)
            return text.strip()
    return None
