"""CPU and memory of each process that takes part in a measurement."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import psutil

from sr_assets.adapters.spark.engine import engine_status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sr_assets_bench.rig import Bench

_MIB: Final = 1 << 20


class Processes:
    """CPU and memory of each part from the first message on; memory is the highest sum of the PSS of its processes.

    The parts are the `command`, its children (`site`), the `engine` with its workers, and the `others`. A process that has
    ended counts with its last CPU time.
    """

    def __init__(self, bench: Bench, run: psutil.Process, others: dict[str, psutil.Process]) -> None:
        self._bench, self._run, self._others = bench, run, others
        self._memory: Counter[str] = Counter()
        self._used: dict[tuple[str, psutil.Process], float] = {}
        self._machine, self._began = psutil.cpu_times(), time.monotonic()
        self.look()
        self._before = self._sums()

    def look(self) -> None:
        """Measure all processes once."""
        memory: Counter[str] = Counter()
        for name, process in self._named():
            with suppress(psutil.NoSuchProcess):
                self._used[name, process] = sum(process.cpu_times()[:2])
                memory[name] += process.memory_full_info().pss
        self._memory |= memory

    def figures(self) -> dict[str, Any]:
        """Return the percentages of a core, the MiB of each process, and the machine's whole load in percent."""
        names = ("command", "site", "engine", *self._others)
        elapsed, used = time.monotonic() - self._began, self._sums()
        shares = {
            f"{name}_percent_of_a_core": round(100 * (used[name] - self._before[name]) / elapsed, 1) for name in names
        }
        now, then = psutil.cpu_times(), self._machine
        idle = (now.idle + now.iowait - then.idle - then.iowait) / (psutil.cpu_count() or 1)
        memory = {f"{name}_mib": self._memory[name] // _MIB for name in names}
        return {**shares, **memory, "machine_percent": round(100 * (1 - idle / elapsed), 1)}

    def _sums(self) -> defaultdict[str, float]:
        sums: defaultdict[str, float] = defaultdict(float)
        for (name, _), seconds in self._used.items():
            sums[name] += seconds
        return sums

    def _named(self) -> Iterator[tuple[str, psutil.Process]]:
        engine = engine_status(self._bench.home)
        engines = [psutil.Process(engine.pid)] if engine else []
        engines += [child for each in engines for child in each.children(recursive=True)]
        yield "command", self._run
        yield from (("site", child) for child in self._run.children(recursive=True) if child not in engines)
        yield from (("engine", each) for each in engines)
        yield from self._others.items()
