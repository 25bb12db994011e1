"""A centre: folding the advisories of many sites into one view, the delay of one advisory, and queries on the view."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import uuid
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from sr_assets.adapters import wire
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.published.fleet_reader import open_fleet, read_rows
from sr_assets.domain.advisories import PROTOCOL
from sr_assets.domain.errors import RunError
from sr_assets.settings import ClusterSettings
from sr_assets_bench.rig import SITE, PeakMemory, cluster_of
from sr_assets_bench.waiting import linger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sr_assets_bench.rig import Bench

_FEED = "ADVISORIES"
_SITES = 100
_WARM_NODES = 10_000
_BASE = 1_700_000_000
_PROBES = 10
_PROBE_SECONDS = 120.0
# Every probe prolongs the lingering run, which ends after the last one.
_LINGER = {"run_budget": "10m", "linger": "15s"}


def measure_feeds(bench: Bench, advisories: int) -> dict[str, Any]:
    """Measure a feed of 100 sites: the delay of single advisories in a small view, then a backlog of one advisory per
    node.
    """
    with Cluster(cluster_of(bench.target)) as cluster:
        cluster.create_stream({"name": _FEED, "subjects": [f"{_FEED}.>"], "allow_direct": True})
    feeds = [{"name": SITE, "stream": _FEED, "url": bench.target.url}]
    _publish(bench, 0, _WARM_NODES)
    bench.run(bench.settings([], feeds=feeds), _FEED)
    bench.settings([], feeds=feeds, **_LINGER)
    delays = _delays(bench)
    settings = bench.settings([], feeds=feeds)
    bench.run(settings, _FEED)
    _publish(bench, _WARM_NODES, advisories)
    with PeakMemory(bench.home) as memory:
        report, seconds = bench.run(settings, _FEED)
    with Cluster(cluster_of(bench.target)) as cluster:
        stream = cluster.stream_info(_FEED)
    folders = {"state": bench.home / "sites", "published": bench.home / "published"}
    return {
        "sites": _SITES,
        "advisories": report.copied,
        "folded_per_second": round(report.copied / report.seconds),
        "run_per_second": round(report.copied / seconds),
        "peak_mib": memory.most_bytes >> 20,
        "stream_bytes_per_advisory": round(stream.bytes / stream.messages),
        **{f"{name}_bytes_per_node": round(_disk_bytes(path) / advisories) for name, path in folders.items()},
        "queryable_seconds_p50": round(statistics.median(delays), 2),
        "queryable_seconds_max": round(max(delays), 2),
        "nodes_global_seconds": round(min(_seconds_of_nodes(bench) for _ in range(3)), 2),
    }


def _disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _publish(bench: Bench, first: int, after: int) -> None:
    """Publish one advisory for each node from number `first` to before `after`, in a separate process."""
    filling = get_context("spawn").Process(target=_fill, args=(bench.target.address, first, after))
    filling.start()
    filling.join()
    if filling.exitcode:
        raise SystemExit(f"publishing into {_FEED} failed")


def _fill(address: str, first: int, after: int) -> None:
    items = (
        wire.Outgoing(number + 1, f"{_FEED}.new.{number}", b"", _advisory(number)) for number in range(first, after)
    )
    with wire.Connection(ClusterSettings((address,))) as connection:
        refused = [ack.error for ack in wire.Publisher(connection).publish_all(items) if ack.error]
    if refused:
        raise SystemExit(refused[0])


def _advisory(number: int) -> bytes:
    """Return the first advisory of a node, as a site writes it."""
    site, at = number % _SITES, _BASE + number // 1_000
    event_id = uuid.UUID(int=number)
    return (
        f'{{"protocol":"{PROTOCOL}","event_id":"{event_id}","inspect_field":"sender","age":0,"seen":{at},'
        f'"replicator":"BENCH","timestamp":{at},"event":"new","value":"node{number}.site{site}.example.net",'
        f'"stream":"CHORIA_REGISTRATION","name":"site{site}","event_time":"{_iso(at)}.{number % 1_000:03}000000Z",'
        f'"sequence":{number + 1},"transition":1,"previous":null,"late":false,"returned":false,"age_seconds":0.0,'
        '"outage_seconds":null}'
    ).encode()


def _iso(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _delays(bench: Bench) -> list[float]:
    """Publish some advisories one after the other; return the seconds from each to its node in the table."""
    lingering = get_context("spawn").Process(target=linger, args=(str(bench.file), _FEED))
    lingering.start()
    try:
        return list(_probe(bench))
    finally:
        lingering.join()


def _probe(bench: Bench) -> Iterator[float]:
    with wire.Connection(cluster_of(bench.target)) as connection:
        for probe in range(_PROBES):
            number = 1_000_000_000 + probe
            item = wire.Outgoing(1, f"{_FEED}.new.{number}", b"", _advisory(number))
            started = time.perf_counter()
            list(wire.Publisher(connection).publish_all([item]))
            while not _known(bench, f"node{number}.%"):
                if time.perf_counter() - started > _PROBE_SECONDS:
                    raise RunError(f"an advisory did not reach the table within {_PROBE_SECONDS:.0f} s")
                time.sleep(0.02)
            # The first one waits for the start of the run.
            if probe:
                yield time.perf_counter() - started


def _known(bench: Bench, pattern: str) -> bool:
    with open_fleet(bench.home) as connection:
        return bool(read_rows(connection, "SELECT 1 FROM global_availability WHERE node LIKE ?", [pattern]).values)


def _seconds_of_nodes(bench: Bench) -> float:
    """Return the duration in seconds of the command that lists the nodes of all sites."""
    command = [sys.executable, "-m", "sr_assets", "nodes", "--global"]
    started = time.perf_counter()
    subprocess.run(command, env=bench.environ, check=True, capture_output=True)
    return time.perf_counter() - started
