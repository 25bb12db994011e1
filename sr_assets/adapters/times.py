"""The platform's clocks. No other module reads one or sleeps, so a test can move them all (`rig.travel`)."""

import contextlib
import functools
import time as _time
from datetime import UTC, datetime
from pathlib import Path

#: Nanoseconds by which a test has moved the clocks.
moved_ns = 0


def time_ns() -> int:
    """Return this machine's time (unix ns)."""
    return _time.time_ns() + moved_ns


def time() -> float:
    """Return this machine's time (unix seconds)."""
    return _time.time() + moved_ns / 1e9


def utc_now() -> datetime:
    """Return this machine's time in UTC."""
    return datetime.fromtimestamp(time(), UTC)


def monotonic() -> float:
    """Return the seconds of a clock that no correction of the machine's time moves."""
    return _time.monotonic() + moved_ns / 1e9


def boot_seconds() -> float:
    """Return the seconds since the machine's start; unlike `monotonic`, they count while it is suspended."""
    return _time.clock_gettime(getattr(_time, "CLOCK_BOOTTIME", _time.CLOCK_MONOTONIC)) + moved_ns / 1e9


def sleep(seconds: float) -> None:
    """Wait; a moved clock does not shorten it."""
    _time.sleep(seconds)


@functools.cache
def boot_id() -> str:
    """Return the machine's boot id, or an empty text if the system has none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
