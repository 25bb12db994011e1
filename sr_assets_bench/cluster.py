"""The same work on a standalone cluster of two workers and on this host alone, alternately."""

from __future__ import annotations

import os
import statistics
import sys
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.nats.administration import Cluster
from sr_assets_bench.rig import ROUNDS, cluster_of
from sr_assets_bench.spark_cluster import SparkCluster

if TYPE_CHECKING:
    from sr_assets_bench.rig import Bench

_WORKERS: Final = 2
_PAYLOAD_BYTES: Final = 7_000
_SENDERS: Final = 1_000
_RULES: Final[dict[str, dict[str, str]]] = {
    "plain": {},
    "sampled": {"inspect_field": "sender", "inspect_duration": "1h"},
}


def measure_cluster(bench: Bench, messages: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure a plain copy and a new sampled fleet; rates are messages per second of whole runs, medians of the rounds.

    An additional first round warms the sessions; it is not counted.
    """
    stream = "CLUSTERED"
    bench.create(bench.source, stream)
    bench.publish(stream, messages, _SENDERS, _PAYLOAD_BYTES)
    rates: dict[str, list[float]] = {f"{kind}_{where}": [] for kind in _RULES for where in ("local", "cluster")}
    with SparkCluster(bench.home / "cluster", _WORKERS) as cluster:
        engines: dict[str, dict[str, Any]] = {
            "local": {"mode": "connect-local"},
            "cluster": {"mode": cluster.mode, "config": {"spark.pyspark.python": sys.executable}},
        }
        for index in range(1 + rounds):
            for kind, rules in _RULES.items():
                for where, spark in engines.items():
                    target = f"C{index}_{kind}_{where}"
                    rates[f"{kind}_{where}"].append(_rate(bench, stream, target, spark, rules))
    medians = {name: round(statistics.median(measured[1:])) for name, measured in rates.items()}
    figures: dict[str, Any] = {"messages": messages, "workers": _WORKERS, "payload_bytes": _PAYLOAD_BYTES}
    figures |= {f"{name}_per_second": rate for name, rate in medians.items()}
    figures |= {f"{kind}_to_local": round(medians[f"{kind}_cluster"] / medians[f"{kind}_local"], 2) for kind in _RULES}
    return figures


def _rate(bench: Bench, stream: str, target: str, spark: dict[str, Any], rules: dict[str, str]) -> float:
    """Run the stream into a new target, which is deleted afterwards; return messages per second."""
    bench.forget()
    os.sync()
    entry = {"stream": stream, "target_stream": target, "target_subject_prefix": target, **rules}
    report, seconds = bench.run(bench.settings([entry], spark=spark), stream)
    with Cluster(cluster_of(bench.target)) as cluster:
        cluster.request_api(f"STREAM.DELETE.{target}")
    return report.messages / seconds
