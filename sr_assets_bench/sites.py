"""Many busy sites on one host: the delay until each site's transitions are published and queryable."""

from __future__ import annotations

import json
import statistics
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

import psutil

from sr_assets.adapters import wire
from sr_assets.adapters.published.fleet_reader import open_fleet, read_rows
from sr_assets.adapters.spark.engine import engine_status
from sr_assets.domain.errors import RunError
from sr_assets.domain.positions import SequenceRange
from sr_assets.embedded.emulator import Fleet
from sr_assets.embedded.fleet_plan import FleetPlan
from sr_assets_bench.rig import cluster_of
from sr_assets_bench.waiting import sensing, summarised

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sr_assets_bench.rig import Bench

_NODES: Final = 200
_INTERVAL_SECONDS: Final = 60.0
_ADVISED: Final = "ADVISED"
_PROBE_SECONDS: Final = 180.0
_BEGIN_SECONDS: Final = 300.0
_LAST_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 1.0


def measure_sites(bench: Bench, sites: int) -> dict[str, Any]:
    """Measure `up` without its UI on `sites` sites of 200 nodes that report once a minute, with sensors at 5 seconds.

    For three minutes a new node appears each second, at one site after the other. The figures are the seconds from its
    first message to its stored advisory and to its row in the tables, and our CPU and memory.
    """
    names = [f"S{number:03}" for number in range(sites)]
    bench.create(bench.source, _ADVISED)
    for name in names:
        bench.create(bench.source, name)
    advisory = {"subject": f"{_ADVISED}.%s.%v", "reliable": True}
    tracked = {"inspect_field": "sender", "inspect_duration": "10m", "warn_duration": "3m", "advisory": advisory}
    settings = bench.settings(
        [{"name": name.lower(), "stream": name, "target_subject_prefix": "to", **tracked} for name in names],
        sensor={"interval": "5s"},
    )
    with ExitStack() as stack:
        for number, name in enumerate(names):
            plan = FleetPlan(_NODES, _INTERVAL_SECONDS, number, payload_bytes=1_000)
            stack.enter_context(Fleet(plan, cluster_of(bench.source), f"{name}.%s"))
        started = time.monotonic()
        stack.enter_context(sensing(bench, settings))
        _await_sites(bench, sites)
        figures: dict[str, Any] = {"sites": sites, "all_begun_seconds": round(time.monotonic() - started, 1)}
        used, began = _cpu_seconds(bench), time.monotonic()
        sent, known = _probe(bench, names)
        figures["percent_of_a_core"] = round(100 * (_cpu_seconds(bench) - used) / (time.monotonic() - began))
        figures["processes_mib"] = sum(_memory_bytes(process) for process in _ours(bench)) >> 20
        announced = _announced(bench)
        figures["unannounced"] = len(sent.keys() - announced.keys())
        figures["unpublished"] = len(sent.keys() - known.keys())
    for label, ends in (("announced", announced), ("queryable", known)):
        delays = [ends[node] - at for node, at in sent.items() if node in ends]
        figures |= {**summarised(label, delays), f"{label}_p95": round(statistics.quantiles(delays, n=20)[-1], 2)}
    return figures


def _await_sites(bench: Bench, sites: int) -> None:
    deadline = time.monotonic() + _BEGIN_SECONDS
    while len(_known_of(bench, "SELECT name FROM site_summary WHERE up > 0")) < sites:
        if time.monotonic() > deadline:
            raise RunError(f"not all of {sites} sites published within {_BEGIN_SECONDS:.0f} s")
        time.sleep(_LOOK_SECONDS)


def _probe(bench: Bench, names: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the time of each new node's message, and the time when its row appeared: unix seconds."""
    sent: dict[str, float] = {}
    known: dict[str, float] = {}
    until = time.monotonic() + _PROBE_SECONDS
    with wire.Connection(cluster_of(bench.source)) as connection:
        while time.monotonic() < until + _LAST_SECONDS and (time.monotonic() < until or sent.keys() - known.keys()):
            looked = time.monotonic()
            if looked < until:
                node, stream = f"probe{len(sent)}.example.net", names[len(sent) % len(names)]
                item = wire.Outgoing(1, f"{stream}.{node}", b"", b'{"sender":"%b"}' % node.encode())
                sent[node] = time.time()
                list(wire.Publisher(connection).publish_all([item]))
            rows = _known_of(bench, "SELECT node FROM last_seen_nodes WHERE node LIKE 'probe%'")
            for node in rows - known.keys():
                known[node] = time.time()
            time.sleep(max(0.0, looked + _LOOK_SECONDS - time.monotonic()))
    return sent, known


def _known_of(bench: Bench, sql: str) -> set[str]:
    with suppress(RunError), open_fleet(bench.home) as connection:
        return {values[0] for values in read_rows(connection, sql, []).values}
    return set()


def _announced(bench: Bench) -> dict[str, float]:
    """Return the time when each new node's advisory was stored: unix seconds."""
    with wire.Connection(cluster_of(bench.source)) as connection:
        parts = wire.read_confirmed(connection, _ADVISED, SequenceRange(1, 1 << 40), direct=True)
        advisories = ((json.loads(message.payload), message.stored_ns) for part in parts for message in part)
        return {advisory["value"]: stored_ns / 1e9 for advisory, stored_ns in advisories if advisory["event"] == "new"}


def _ours(bench: Bench) -> Iterable[psutil.Process]:
    """Return our processes: Dagster's, the runs, and the engine with its workers."""
    engine = engine_status(bench.home)
    dagster = [child for child in psutil.Process().children() if child.name() in ("code server", "daemon")]
    roots = [*dagster, *([psutil.Process(engine.pid)] if engine else [])]
    for root in roots:
        with suppress(psutil.Error):
            yield from (root, *root.children(recursive=True))


def _cpu_seconds(bench: Bench) -> float:
    total = 0.0
    for process in _ours(bench):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


def _memory_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0
