"""The local engine, a cluster of one worker and one of two, with cores that the servers do not use.

The servers have one core. On the other one, each host has the same share: this one, with the driver or the local engine,
and each worker.
"""

from __future__ import annotations

import os
import statistics
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.adapters.spark.engine import engine_status, stop_engine
from sr_assets.settings import load_settings
from sr_assets_bench.machines import limited, pin
from sr_assets_bench.partitions import distant
from sr_assets_bench.rig import ROUNDS, Bench, cluster_of, drain
from sr_assets_bench.spark_cluster import SparkCluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

_SHARE: Final = 0.33
_SERVERS_CORE, _OUR_CORE = 0, 1
#: Engine → its number of workers.
_ENGINES: Final = {"local": 0, "one": 1, "two": 2}
_DISTANCES_MS: Final = (0, 20)
_LANES: Final = 2
_PLAIN_BYTES: Final = 900
_SAMPLED_BYTES: Final = 7_000
#: Messages of each sender in the sampled stream, whose first one is copied.
_REPORTS: Final = 10


@dataclass(frozen=True, slots=True)
class _Engine:
    """A process that runs streams on one engine, with a home of its own."""

    bench: Bench
    spark: dict[str, Any]
    process: BaseProcess
    pipe: Connection
    workers: tuple[int, ...]

    def seconds(self, entry: dict[str, Any], messages: int) -> float:
        """Run an entry into a new target, which is deleted afterwards; return the seconds of the whole run."""
        self.bench.forget()
        os.sync()
        self.bench.settings([entry], spark=self.spark)
        self.pipe.send((str(self.bench.file), entry["stream"]))
        done, seconds = self.pipe.recv()
        if done != messages:
            raise SystemExit(f"{entry['stream']}: {done} of {messages} messages were processed")
        with Cluster(cluster_of(self.bench.target)) as cluster:
            cluster.request_api(f"STREAM.DELETE.{entry['target_stream']}")
        return float(seconds)


def measure_free_cores(bench: Bench, messages: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure a plain copy by two lanes and a new sampled fleet with two writers, near and 20 ms from the target.

    Rates are messages per second of whole runs, medians of the rounds, which alternate. An additional first round warms the
    sessions; it is not counted. The sampled stream has half as many messages, one in ten of them due.
    """
    counts = {"plain": messages, "sampled": messages // 2}
    bench.create(bench.source, "PLAIN")
    bench.publish("PLAIN", counts["plain"], _LANES, _PLAIN_BYTES)
    bench.create(bench.source, "SAMPLED")
    bench.publish("SAMPLED", counts["sampled"], max(1, counts["sampled"] // _REPORTS), _SAMPLED_BYTES)
    pin((bench.source.pid, bench.target.pid), _SERVERS_CORE)
    entries: dict[str, dict[str, Any]] = {
        "plain": {
            "stream": "PLAIN",
            "partitions": {"subjects": [f"PLAIN.node{number}.>" for number in range(_LANES)]},
        },
        "sampled": {"stream": "SAMPLED", "inspect_field": "sender", "inspect_duration": "1h", "workers": _LANES},
    }
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        urls = {distance_ms: stack.enter_context(distant(bench.target, distance_ms)) for distance_ms in _DISTANCES_MS}
        engines = {name: stack.enter_context(_engine(bench, name, workers)) for name, workers in _ENGINES.items()}

        def measure(index: int) -> None:
            for distance_ms, url in urls.items():
                for kind, entry in entries.items():
                    for name, engine in engines.items():
                        target = f"F{index}_{kind}_{name}"
                        keys = {"target_url": url, "target_stream": target, "target_subject_prefix": target}
                        rate = counts[kind] / engine.seconds({**entry, **keys}, counts[kind])
                        rates.setdefault(f"{kind}_{name}_{distance_ms}ms_per_second", []).append(rate)

        measure(0)
        rates.clear()
        for name, engine in engines.items():
            stack.enter_context(_on_hosts(name, engine))
        for index in range(1, 1 + rounds):
            measure(index)
    medians = {name: round(statistics.median(measured)) for name, measured in rates.items()}
    return {"messages": messages, "share": _SHARE, "rounds": rounds, **medians}


@contextmanager
def _engine(bench: Bench, name: str, workers: int) -> Iterator[_Engine]:
    """Start a process for the runs of an engine, and its cluster of workers, if any."""
    own = replace(bench, home=bench.home / name)
    own.home.mkdir()
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_all, args=(theirs,), daemon=True)
    with ExitStack() as stack:
        spark: dict[str, Any] = {"mode": "connect-local"}
        pids: tuple[int, ...] = ()
        if workers:
            cluster = stack.enter_context(SparkCluster(own.home / "cluster", workers))
            spark = {"mode": cluster.mode, "config": {"spark.pyspark.python": sys.executable}}
            pids = cluster.worker_pids
        process.start()
        stack.callback(stop_engine, own.home)
        stack.callback(process.join)
        stack.callback(ours.send, None)
        yield _Engine(own, spark, process, ours, pids)


@contextmanager
def _on_hosts(name: str, engine: _Engine) -> Iterator[None]:
    """Give this host and each worker their share of a core inside `with`."""
    local = engine_status(engine.bench.home)
    hosts = [(engine.process.pid or 0, *((local.pid,) if local else ())), *((pid,) for pid in engine.workers)]
    with ExitStack() as stack:
        for number, pids in enumerate(hosts):
            pin(pids, _OUR_CORE)
            stack.enter_context(limited(f"{name}-{number}", pids, _SHARE))
        yield


def _run_all(pipe: Connection) -> None:
    for file, stream in iter(pipe.recv, None):
        report, seconds = drain(load_settings(Path(file), {}), stream)
        pipe.send((report.messages, seconds))
