"""The lock of the published file, `fleet.lock`: who makes a new `fleet.duckdb` holds it.

Not here: what is done with it (`index`, `shown`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.private import living_holder, open_private
from sr_assets.domain.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: How long a run waits for another site that publishes: one that stands still must not stop all the others.
LOCK_SECONDS: Final = 30.0


class FleetBusyError(RunError):
    """Another site publishes, or stands still while it does."""


@contextlib.contextmanager
def locked(home: Path, name: str, wait_seconds: float) -> Iterator[None]:
    """Hold the lock of a home's published file, whose text says who does.

    Raises FleetBusyError when another one holds it for `wait_seconds` on.
    """
    file = home / "fleet.lock"
    with open_private(file) as lock:
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = living_holder(lock.read()) or "a process that has not said who it is"
                    raise FleetBusyError(
                        f"{file} has been held by {holder} for {wait_seconds:.0f} s;"
                        " nothing was published, the next run does it; if that process stands still, end it"
                    ) from None
                time.sleep(0.02)
        lock.seek(0)
        lock.truncate()
        lock.write(f"{name} (pid {os.getpid()})\n")
        lock.flush()
        yield
