"""A few messages per second: CPU share of all processes, and the delay until a message is queryable."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import psutil

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.spark.engine import engine_status
from sr_assets.embedded.emulator import Fleet
from sr_assets.embedded.fleet_plan import FleetPlan
from sr_assets_bench.rig import cluster_of
from sr_assets_bench.waiting import ARRIVED, PROBED, probe, seconds_until, summarised

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sr_assets_bench.rig import Bench

_INTERVAL_SECONDS: Final = 10.0
_WARM_SECONDS: Final = 60.0
_MEASURED_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 1.0


def measure_trickle(
    bench: Bench, per_second: int, *, warm_seconds: float = _WARM_SECONDS, seconds: float = _MEASURED_SECONDS
) -> dict[str, Any]:
    """Measure `sr-assets run --follow` on a fleet with a fixed rate of messages, in which each node reports every ten
    seconds.

    One message in six is due. First measure our CPU and log lines alone, then the seconds until a new node's message is
    in the target and in the table.
    """
    bench.create(bench.source, PROBED)
    entry = {"stream": PROBED, "target_stream": ARRIVED, "target_subject_prefix": "probe"}
    bench.settings([{**entry, "inspect_field": "sender", "inspect_duration": "1m"}])
    plan = FleetPlan(round(per_second * _INTERVAL_SECONDS), _INTERVAL_SECONDS)
    log = bench.home / "follow.log"
    with Fleet(plan, cluster_of(bench.source), f"{PROBED}.%s"), following(bench, log) as run:
        with Cluster(cluster_of(bench.target)) as target:
            seconds_until(time.perf_counter(), lambda: target.stream_exists(ARRIVED))
        time.sleep(warm_seconds)
        ours = OurProcesses(bench, run)
        began, before, lines, stored = time.monotonic(), ours.cpu_seconds(), _lines(log), _stored(bench)
        while (elapsed := time.monotonic() - began) < seconds:
            time.sleep(min(_LOOK_SECONDS, seconds - elapsed))
            used = ours.cpu_seconds() - before
        figures = {
            "messages_per_second": round((_stored(bench) - stored) / elapsed, 1),
            "percent_of_a_core": round(100 * used / elapsed, 1),
            "log_lines_per_minute": round(60 * (_lines(log) - lines) / elapsed, 1),
        }
        delays = probe(bench, "trickle", lambda: None)
    for end, values in zip(("target", "queryable"), zip(*delays, strict=True), strict=True):
        figures |= summarised(end, values)
    return figures


@contextmanager
def following(bench: Bench, log: Path, *options: str) -> Iterator[psutil.Process]:
    """Run `sr-assets run --follow` with its output in a file."""
    command = [sys.executable, "-m", "sr_assets", "run", "--follow", *options]
    with log.open("wb") as output, subprocess.Popen(command, env=bench.environ, stdout=output, stderr=output) as run:
        try:
            yield psutil.Process(run.pid)
        finally:
            run.terminate()


class OurProcesses:
    """CPU time and memory of our processes: the command with its sites, and the engine with its workers.

    A process that has ended counts with its last measured CPU time.
    """

    def __init__(self, bench: Bench, run: psutil.Process) -> None:
        self._home, self._run = bench.home, run
        self._used: dict[psutil.Process, float] = {}

    def cpu_seconds(self) -> float:
        """Measure the CPU time of each process, and return the sum."""
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                self._used[process] = sum(process.cpu_times()[:2])
        return sum(self._used.values())

    def memory_bytes(self) -> int:
        """Return the sum of the PSS of all processes."""
        total = 0
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return total

    def _processes(self) -> list[psutil.Process]:
        engine = engine_status(self._home)
        roots = [self._run, *([psutil.Process(engine.pid)] if engine else [])]
        children = {child for root in roots for child in root.children(recursive=True)}
        return list({*roots, *children})


def _stored(bench: Bench) -> int:
    with Cluster(cluster_of(bench.source)) as source:
        return source.stream_info(PROBED).last_sequence


def _lines(log: Path) -> int:
    return log.read_bytes().count(b"\n")
