"""CPU and memory of each process that takes part in a measurement."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import psutil

from sr_assets.adapters.spark.engine import engine_status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sr_assets_bench.rig import Bench

_MIB: Final = 1 << 20


class Processes:
    """CPU and memory of each process from the first message on; memory is the highest PSS of the process.

    A process that has ended counts with its last values.
    """

    def __init__(self, bench: Bench, run: psutil.Process, others: dict[str, psutil.Process]) -> None:
        self._bench, self._run, self._others = bench, run, others
        self._memory: Counter[str] = Counter()
        self._used: dict[str, float] = {}
        self._machine, self._began = psutil.cpu_times(), time.monotonic()
        self.look()
        self._before = dict(self._used)

    def look(self) -> None:
        """Measure all processes once."""
        for name, process in self._named():
            with suppress(psutil.NoSuchProcess):
                self._used[name] = sum(process.cpu_times()[:2])
                self._memory[name] = max(self._memory[name], process.memory_full_info().pss)

    def figures(self) -> dict[str, Any]:
        """Return the percentages of a core, the MiB of each process, and the machine's whole load in percent."""
        elapsed = time.monotonic() - self._began
        shares = {
            f"{name}_percent_of_a_core": round(100 * (used - self._before.get(name, 0.0)) / elapsed, 1)
            for name, used in self._used.items()
        }
        now, then = psutil.cpu_times(), self._machine
        idle = (now.idle + now.iowait - then.idle - then.iowait) / (psutil.cpu_count() or 1)
        memory = {f"{name}_mib": used // _MIB for name, used in self._memory.items()}
        return {**shares, **memory, "machine_percent": round(100 * (1 - idle / elapsed), 1)}

    def _named(self) -> Iterator[tuple[str, psutil.Process]]:
        yield "command", self._run
        for child in self._run.children():
            yield "site", child
        if engine := engine_status(self._bench.home):
            yield "engine", psutil.Process(engine.pid)
        yield from self._others.items()
