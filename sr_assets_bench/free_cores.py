"""This host alone, a cluster of one worker and one of two, with cores that the servers do not use.

The servers have one core. On the other one, each host has the same share: this one, with the run and Spark's driver or
engine, and each worker.
"""

from __future__ import annotations

import os
import statistics
import sys
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.nats.administration import Cluster
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
_WORKERS: Final = 2
#: Engine → its number of workers.
_ENGINES: Final = {"local": 0, "one": 1, "two": _WORKERS}
_DISTANCES_MS: Final = (0, 20)
_LANES: Final = 2
_PLAIN_BYTES: Final = 900
_SAMPLED_BYTES: Final = 7_000
#: Messages of each sender in the sampled stream, whose first one is copied.
_REPORTS: Final = 10


_ENTRIES: Final[dict[str, dict[str, Any]]] = {
    "plain": {"stream": "PLAIN", "partitions": {"subjects": [f"PLAIN.node{number}.>" for number in range(_LANES)]}},
    "sampled": {"stream": "SAMPLED", "inspect_field": "sender", "inspect_duration": "1h", "workers": _LANES},
}


@dataclass(frozen=True, slots=True)
class _Engine:
    """A process that runs streams on one engine, with a home of its own."""

    bench: Bench
    spark: dict[str, Any]
    process: BaseProcess
    pipe: Connection

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes on this host: the run with its driver, and the local engine, if any."""
        local = engine_status(self.bench.home)
        return (self.process.pid or 0, *((local.pid,) if local else ()))

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
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        urls = {distance_ms: stack.enter_context(distant(bench.target, distance_ms)) for distance_ms in _DISTANCES_MS}
        cluster = stack.enter_context(SparkCluster(bench.home / "cluster", _WORKERS, cores=len(_ENGINES) - 1))
        engines = {}
        for name, workers in _ENGINES.items():
            config = {"spark.pyspark.python": sys.executable, "spark.cores.max": str(workers)}
            spark = {"mode": cluster.mode, "config": config} if workers else {"mode": "connect-local"}
            engines[name] = stack.enter_context(_engine(bench, name, spark))

        def measure(index: int) -> None:
            for distance_ms, url in urls.items():
                for kind, entry in _ENTRIES.items():
                    for name, engine in engines.items():
                        target = f"F{index}_{kind}_{name}"
                        keys = {"target_url": url, "target_stream": target, "target_subject_prefix": target}
                        rate = counts[kind] / engine.seconds({**entry, **keys}, counts[kind])
                        rates.setdefault(f"{kind}_{name}_{distance_ms}ms_per_second", []).append(rate)

        measure(0)
        rates.clear()
        hosts = [engine.pids for engine in engines.values()] + [(pid,) for pid in cluster.worker_pids]
        for number, pids in enumerate(hosts):
            pin(pids, _OUR_CORE)
            stack.enter_context(limited(str(number), pids, _SHARE))
        for index in range(1, 1 + rounds):
            measure(index)
    medians = {name: round(statistics.median(measured)) for name, measured in rates.items()}
    return {"messages": messages, "share": _SHARE, "rounds": rounds, **medians}


@contextmanager
def _engine(bench: Bench, name: str, spark: dict[str, Any]) -> Iterator[_Engine]:
    """Start a process for the runs of an engine: its classic session lasts until its end."""
    own = replace(bench, home=bench.home / name)
    own.home.mkdir()
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_all, args=(theirs,), daemon=True)
    with ExitStack() as stack:
        process.start()
        # With our copy closed too, a process that has failed ends the wait for its answer.
        theirs.close()
        stack.callback(stop_engine, own.home)
        stack.callback(process.join)
        stack.callback(ours.close)
        yield _Engine(own, spark, process, ours)


def _run_all(pipe: Connection) -> None:
    """Run the streams of configuration files until the other end is closed."""
    with suppress(EOFError):
        while True:
            file, stream = pipe.recv()
            report, seconds = drain(load_settings(Path(file), {}), stream)
            pipe.send((report.messages, seconds))
