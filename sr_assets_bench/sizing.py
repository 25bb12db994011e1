"""The machine that a fleet needs: processor, memory, disk, bandwidth and lag of a site whose nodes report every 5 minutes.

A new site would copy every node first. So the state begins as after hours of work: all nodes are known, and their next
copies are spread over the interval.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import psutil

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.published.fleet_reader import open_fleet, read_rows
from sr_assets.adapters.state.store import SiteState
from sr_assets_bench.rig import SITE, cluster_of
from sr_assets_bench.trickle import OurProcesses, following

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sr_assets.embedded.nats_server import NatsServer
    from sr_assets_bench.rig import Bench

_STREAM: Final = "FLEET"
_REPORT_SECONDS: Final = 300
_SAMPLE_SECONDS: Final = 3_600
_WARM_SECONDS: Final = 20.0
_MEASURED_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 2.0
_START_SECONDS: Final = 300.0
_DAY_SECONDS: Final = 86_400
_MIB: Final = 1 << 20
_GB: Final = 1_000_000_000
#: The nodes of `FleetPlan.sender`, each last copied at another time within the interval.
_KNOWN: Final = """
INSERT INTO nodes BY NAME
SELECT $stream AS stream, node, $now AS first_seen_ns, $now AS seen_ns, 1 AS sequence,
    $now - (i * 7919 % $count) * ($sample // $count) AS copied_ns, 7000 AS copied_bytes, 'up' AS status,
    $now AS status_since_ns, 0 AS times_retired, 1 AS transition, $now + $sample // 4 AS deadline_ns
FROM (SELECT i, ['web', 'app', 'sql', 'mem', 'log'][i % 5 + 1] || (i // 5 + 1) || '.example.net' AS node
    FROM range($count) AS t(i))
WHERE node NOT IN (SELECT node FROM nodes)
"""


def measure_sizing(
    bench: Bench, nodes: int, *, warm_seconds: float = _WARM_SECONDS, seconds: float = _MEASURED_SECONDS
) -> dict[str, Any]:
    """Measure `sr-assets run --follow --stream` on a fleet that reports 7 KB every 5 minutes and is sampled every hour."""
    bench.create(bench.source, _STREAM)
    bench.create(bench.source, "ADV")
    bench.publish(_STREAM, 1, nodes, 7_000)
    entry = {"stream": _STREAM, "target_subject_prefix": "sized", "inspect_field": "sender"}
    times = {"inspect_duration": "1h", "warn_duration": "15m"}
    bench.run(bench.settings([{**entry, **times, "advisory": {"subject": "ADV.%s.%v", "reliable": True}}]), _STREAM)
    _make_known(bench, nodes)
    # Only the stream: the hourly jobs would begin during the measurement.
    with following(bench, bench.home / "sizing.log", "--stream", _STREAM) as run:
        bench.publish(_STREAM, 1, nodes, 7_000)
        await_condition(lambda: replication_value(bench, _STREAM, "seen_messages") > 1, "the run's first message")
        with _reporting(bench, nodes) as emulator:
            await_condition(lambda: _size(bench.source)[0] > 2 + nodes // _REPORT_SECONDS, "the fleet's first messages")
            time.sleep(warm_seconds)
            servers = {"source": psutil.Process(bench.source.pid), "target": psutil.Process(bench.target.pid)}
            return _measure(bench, OurProcesses(bench, run), {**servers, "emulator": emulator}, nodes, seconds)


def _measure(
    bench: Bench, ours: OurProcesses, others: dict[str, psutil.Process], nodes: int, seconds: float
) -> dict[str, Any]:
    def used() -> dict[str, float]:
        return {"ours": ours.cpu_seconds()} | {name: _cpu_seconds(process) for name, process in others.items()}

    began, before, seen = time.monotonic(), used(), replication_value(bench, _STREAM, "seen_messages")
    source, target, home = _size(bench.source), _size(bench.target), _disk_bytes(bench.home / "snapshots")
    lags, memory = [], 0
    while (elapsed := time.monotonic() - began) < seconds:
        time.sleep(min(_POLL_SECONDS, seconds - elapsed))
        lags.append(replication_value(bench, _STREAM, "epoch(now() - watermark)"))
        memory = max(memory, ours.memory_bytes())
    elapsed, after = time.monotonic() - began, used()
    seen = replication_value(bench, _STREAM, "seen_messages") - seen
    read, copied = (
        tuple(now - then for now, then in zip(_size(server), earlier, strict=True))
        for server, earlier in ((bench.source, source), (bench.target, target))
    )
    kept = _disk_bytes(bench.home / "snapshots") - home
    return {
        "nodes": nodes,
        "messages_per_second": round(read[0] / elapsed, 1),
        "copies_per_second": round(copied[0] / elapsed, 2),
        "processed_per_second": round(seen / elapsed, 1),
        **{f"{name}_percent_of_a_core": round(100 * (after[name] - before[name]) / elapsed, 1) for name in before},
        "peak_mib": memory // _MIB,
        "source_mib": others["source"].memory_info().rss // _MIB,
        "read_mbit_per_second": round(8 * read[1] / elapsed / 1e6, 2),
        "written_mbit_per_second": round(8 * copied[1] / elapsed / 1e6, 2),
        "source_gb_per_day": round(read[1] / elapsed * _DAY_SECONDS / _GB, 2),
        "target_gb_per_day": round(copied[1] / elapsed * _DAY_SECONDS / _GB, 2),
        "history_gb_per_day": round(kept / elapsed * _DAY_SECONDS / _GB, 2),
        "slowest_lag_seconds": round(max(lags), 1),
    }


def _make_known(bench: Bench, nodes: int) -> None:
    with SiteState(bench.home / "sites" / SITE) as state, state.transaction():
        keys = {"stream": _STREAM, "count": nodes, "now": time.time_ns(), "sample": _SAMPLE_SECONDS * 1_000_000_000}
        state.connection.execute(_KNOWN, keys)


@contextmanager
def _reporting(bench: Bench, nodes: int) -> Iterator[psutil.Process]:
    """Run the emulated fleet as a process of its own."""
    options = {"url": bench.source.url, "nodes": nodes, "subject": f"{_STREAM}.%s", "interval": f"{_REPORT_SECONDS}s"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "sr_assets", "emulate", *words, "--bytes", "7000", "--connections", "shared"]
    with subprocess.Popen(command, env=bench.environ, stdout=subprocess.DEVNULL) as emulator:
        try:
            yield psutil.Process(emulator.pid)
        finally:
            emulator.terminate()


def await_condition(condition: Callable[[], bool], awaited: str) -> None:
    """Wait for a condition; a busy machine takes minutes to start the processes."""
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {_START_SECONDS:.0f} s for {awaited}")
        time.sleep(_POLL_SECONDS)


def _cpu_seconds(process: psutil.Process) -> float:
    user, system, *_ = process.cpu_times()
    return float(user + system)


def _size(server: NatsServer) -> tuple[int, int]:
    """Return the messages and bytes of the fleet's stream on a server."""
    with Cluster(cluster_of(server)) as cluster:
        state = cluster.stream_info(_STREAM)
    return state.messages, state.bytes


def replication_value(bench: Bench, stream: str, column: str) -> float:
    """Return a value of a stream's row in the published table, 0 before the first publication."""
    if not (bench.home / "fleet.duckdb").exists():
        return 0.0
    with open_fleet(bench.home) as connection:
        values = read_rows(connection, f"SELECT {column} FROM replication WHERE stream = '{stream}'").values
    return float(values[0][0] or 0) if values else 0.0


def _disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
