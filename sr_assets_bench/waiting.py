"""The delay of one message to its target and the tables, with and without a lingering run; the cost of idle streams."""

from __future__ import annotations

import os
import random
import statistics
import time
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from sr_assets.adapters import wire
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.published.fleet_reader import open_fleet, read_rows
from sr_assets.adapters.state.lock import lock_owner
from sr_assets.automation.observing import find_work
from sr_assets.domain.errors import RunError
from sr_assets.operate.services import Services
from sr_assets.settings import load_settings
from sr_assets.stages.report import Stage
from sr_assets.stages.run import run_site
from sr_assets.stages.site import Site
from sr_assets_bench.rig import SITE, cluster_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sr_assets.settings import Settings
    from sr_assets_bench.rig import Bench

PROBED: Final = "PROBED"
ARRIVED: Final = "ARRIVED"
PROBES: Final = 12
_PROBE_SECONDS: Final = 120.0
_LOOK_SECONDS: Final = 0.02
_NODES: Final = 1_000
# Every probe prolongs the lingering run, which ends after the last one.
_LINGERING: Final[dict[str, Any]] = {"run_budget": "10m", "linger": "15s"}
_SHORT: Final[dict[str, Any]] = {"linger": "1s", "sensor": {"interval": "5s"}}
_TICKS: Final = 30
_TICK_SECONDS: Final = 30.0


def measure_latency(bench: Bench) -> dict[str, Any]:
    """Measure messages of new nodes, one after the other: seconds from stored to the target and to the table."""
    entry = {"stream": PROBED, "target_stream": ARRIVED, "target_subject_prefix": "probe"}
    entries = [{**entry, "inspect_field": "sender", "inspect_duration": "1h", "warn_duration": "30m"}]
    bench.create(bench.source, PROBED)
    bench.publish(PROBED, _NODES, _NODES, 1_000)
    bench.run(bench.settings(entries), PROBED)
    bench.settings(entries, **_LINGERING)
    with lingering(bench):
        awake = probe(bench, "lingering", lambda: None)
    settings = bench.settings(entries, **_SHORT)
    with sensing(bench, settings):
        sensed = probe(bench, "sensed", lambda: _await_idle(settings))
    figures: dict[str, Any] = {"probes": len(awake)}
    for label, delays in (("lingering", awake), ("sensed", sensed)):
        for end, values in zip(("target", "queryable"), zip(*delays, strict=True), strict=True):
            figures |= summarised(f"{label}_{end}", values)
    return figures


def summarised(label: str, delays: Sequence[float]) -> dict[str, float]:
    """Return the median and the slowest of some delays in seconds."""
    return {f"{label}_p50": round(statistics.median(delays), 2), f"{label}_max": round(max(delays), 2)}


@contextmanager
def lingering(bench: Bench) -> Iterator[None]:
    """Run the site in a separate process, until it has lingered without new messages."""
    run = get_context("spawn").Process(target=linger, args=(str(bench.file), PROBED))
    run.start()
    try:
        yield
    finally:
        run.join()


def linger(file: str, stream: str) -> None:
    """Run a site like a sensor's run, until it has lingered without new messages."""
    with Site(load_settings(Path(file), {}), SITE, owner="bench", run_id="linger") as site:
        run_site(site, {stream: frozenset(Stage)}, drain_only=False)


@contextmanager
def sensing(bench: Bench, settings: Settings) -> Iterator[None]:
    """Run Dagster's daemon with the site's sensor, as `sr-assets up` does."""
    before = dict(os.environ)
    os.environ |= bench.environ
    os.environ.pop("DAGSTER_HOME", None)
    try:
        with Services(settings.changed(logfile=bench.home / "dagster.log"), None):
            yield
    finally:
        os.environ.clear()
        os.environ |= before


def _await_idle(settings: Settings) -> None:
    """Wait until no run is active, and then for a random part of the sensor's interval."""
    while lock_owner(settings.home / "sites" / SITE):
        time.sleep(0.1)
    time.sleep(2.0 + random.random() * settings.sensor.interval_ns / 1e9)  # noqa: S311  a delay, not a secret


def probe(bench: Bench, label: str, prepare: Callable[[], None]) -> list[tuple[float, float]]:
    """Publish some messages; return the seconds of each to the target and to the table, without the first, which starts
    the run.
    """
    delays = []
    with wire.Connection(cluster_of(bench.source)) as connection, Cluster(cluster_of(bench.target)) as target:
        for number in range(PROBES + 1):
            prepare()
            node = f"{label}{number}.example.net"
            before = target.stream_info(ARRIVED).last_sequence
            item = wire.Outgoing(1, f"{PROBED}.{node}", b"", b'{"sender":"%b"}' % node.encode())
            started = time.perf_counter()
            list(wire.Publisher(connection).publish_all([item]))
            arrived = seconds_until(started, partial(_has_more, target, before))
            known = seconds_until(started, partial(_is_known, bench, node))
            delays.append((arrived, known))
    return delays[1:]


def seconds_until(started: float, condition: Callable[[], bool], within: float = _PROBE_SECONDS) -> float:
    """Wait for a condition; return the seconds since `started`. Raises RunError after two minutes, or `within` seconds."""
    while not condition():
        if time.perf_counter() - started > within:
            raise RunError(f"a message was not copied and published within {within:.0f} s")
        time.sleep(_LOOK_SECONDS)
    return time.perf_counter() - started


def _has_more(target: Cluster, last_sequence: int) -> bool:
    return target.stream_info(ARRIVED).last_sequence > last_sequence


def _is_known(bench: Bench, node: str) -> bool:
    with open_fleet(bench.home) as connection:
        return bool(read_rows(connection, "SELECT 1 FROM last_seen_nodes WHERE node = ?", [node]).values)


def measure_quiet(bench: Bench, streams: int) -> dict[str, Any]:
    """Measure the sensor's tick over idle streams: our CPU and the source server's, with a tick every 30 s.

    A requested run is an error.
    """
    names = [f"QUIET{streams}_{number}" for number in range(streams)]
    for name in names:
        bench.create(bench.source, name)
        bench.publish(name, 10, 10, 512)
    settings = bench.settings([{"stream": name, "target_subject_prefix": "quiet"} for name in names])
    for name in names:
        bench.run(settings, name)
    server = psutil.Process(bench.source.pid)
    find_work(settings, SITE)
    before = time.process_time() + sum(server.cpu_times()[:2])
    for _ in range(_TICKS):
        reason, _ = find_work(settings, SITE)
        if reason is not None:
            raise SystemExit(f"a run was requested: {reason}")
    tick_seconds = (time.process_time() + sum(server.cpu_times()[:2]) - before) / _TICKS
    return {
        "streams": streams,
        "cpu_seconds_per_hour": round(tick_seconds * 3_600 / _TICK_SECONDS, 2),
        "percent_of_a_core_per_stream": round(100 * tick_seconds / _TICK_SECONDS / streams, 4),
    }
