"""Simulated machines: processes with a core, or a share of one, to themselves."""

from __future__ import annotations

import contextlib
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_CGROUPS: Final = Path("/sys/fs/cgroup")
_PERIOD_US: Final = 20_000


def pin(pids: Iterable[int], core: int) -> None:
    """Restrict all threads of processes and their descendants to one core."""
    for pid in _families(pids):
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})


@contextmanager
def limited(name: str, pids: Iterable[int], share: float) -> Iterator[None]:
    """Restrict processes and their descendants together to a share of a core inside `with`, by a cgroup.

    Raises SystemExit if cgroups cannot be written, as without root.
    """
    quota_us = round(share * _PERIOD_US)
    if (_CGROUPS / "cpu").is_dir():
        root = _CGROUPS / "cpu"
        limits = {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}
    else:
        root, limits = _CGROUPS, {"cpu.max": f"{quota_us} {_PERIOD_US}"}
    group = root / f"sr-assets-bench-{os.getpid()}-{name}"
    try:
        group.mkdir()
        for file, value in limits.items():
            (group / file).write_text(value)
        _move(_families(pids), group)
    except OSError as error:
        raise SystemExit(f"cannot limit processes to a share of a core: {error}; run this workload as root") from None
    try:
        yield
    finally:
        # A group with processes cannot be removed.
        _move([int(pid) for pid in (group / "cgroup.procs").read_text().split()], root)
        with contextlib.suppress(OSError):
            group.rmdir()


def _move(pids: Iterable[int], group: Path) -> None:
    for pid in pids:
        # It may have ended since.
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))


def _families(pids: Iterable[int]) -> list[int]:
    families = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            families += [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return families
