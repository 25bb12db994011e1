"""Commands as a user meets them: whole processes, on a new home and on one in use; no engine runs for the home."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.spark.engine import stop_engine
from sr_assets_bench.rig import ROUNDS, cluster_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sr_assets_bench.rig import Bench

_LOOK_SECONDS: Final = 0.01
_FEW: Final = 2_000
_SENDERS: Final = 1_000
_SAMPLED_BYTES: Final = 7_000
_RULES: Final = {"inspect_field": "sender", "inspect_duration": "1h", "inspect_force_field": "now"}
#: Query → the arguments of its command.
_QUERIES: Final = {"lag": ("lag",), "nodes": ("nodes",), "query": ("query", "SELECT 1")}


def measure_commands(bench: Bench, messages: int) -> dict[str, Any]:
    """Measure `run --once` and three queries as processes; seconds, medians of three rounds.

    `first` is the time from the command to the first copy in the target, `last` the time from the last copy to the
    command's end. *Cold* has a new home. The sampled fleet is known, and one message in ten is due. `nodes` prints its
    10,000 nodes.
    """
    measured: dict[str, list[dict[str, float]]] = {"cold": [], "few": [], "many": [], "sampled": [], "idle": []}
    for name, count in (("FEW", _FEW), ("MANY", messages)):
        bench.create(bench.source, name)
        bench.publish(name, count, _SENDERS, 512)
    bench.create(bench.source, "KNOWN")
    bench.publish("KNOWN", _SENDERS * 10, _SENDERS * 10, _SAMPLED_BYTES)
    for index in range(ROUNDS):
        measured["cold"].append(_cold(bench, f"COLD{index}"))
        bench.forget()
        measured["few"].append(_copied(bench, "FEW", f"FEW{index}", _FEW))
        bench.forget()
        measured["many"].append(_copied(bench, "MANY", f"MANY{index}", messages))
        measured["idle"].append({"whole": _seconds_of(bench, "run", "--once")})
        bench.forget()
        bench.run(bench.settings([_entry("KNOWN", f"KNOWN{index}", **_RULES)]), "KNOWN")
        bench.publish("KNOWN", messages, _SENDERS * 10, _SAMPLED_BYTES, forced_share=0.1)
        measured["sampled"].append(_copied(bench, "KNOWN", f"KNOWN{index}", messages // 10, **_RULES))
    figures: dict[str, Any] = {"few_messages": _FEW, "messages": messages}
    for kind, runs in measured.items():
        for figure in runs[0]:
            figures[f"{kind}_{figure}_seconds"] = _median([run[figure] for run in runs])
    for name, arguments in _QUERIES.items():
        figures[f"{name}_seconds"] = _median([_seconds_of(bench, *arguments) for _ in range(ROUNDS)])
    return figures


def _entry(stream: str, target: str, **keys: Any) -> dict[str, Any]:
    return {"stream": stream, "target_stream": target, "target_subject_prefix": target, **keys}


def _cold(bench: Bench, target: str) -> dict[str, float]:
    cold = replace(bench, home=bench.home / target)
    cold.home.mkdir()
    try:
        return _copied(cold, "FEW", target, _FEW)
    finally:
        stop_engine(cold.home)


def _copied(bench: Bench, stream: str, target: str, copies: int, **keys: Any) -> dict[str, float]:
    """Run the command until it has made these copies; return the seconds to the first copy, after the last, and in all."""
    os.sync()
    bench.settings([_entry(stream, target, **keys)])
    with Cluster(cluster_of(bench.target)) as cluster:
        before = _stored(cluster, target)
        started = time.perf_counter()
        with subprocess.Popen(_command("run", "--once"), env=bench.environ, stdout=subprocess.DEVNULL) as run:
            moments = []
            for wanted in (before + 1, before + copies):
                while run.poll() is None and _stored(cluster, target) < wanted:
                    time.sleep(_LOOK_SECONDS)
                moments.append(time.perf_counter())
        ended = time.perf_counter()
        if run.returncode or _stored(cluster, target) < before + copies:
            raise SystemExit(f"{stream}: the run made {_stored(cluster, target) - before} of {copies} copies")
    first, last = moments
    return {"first": first - started, "last": ended - last, "whole": ended - started}


def _stored(cluster: Cluster, stream: str) -> int:
    info = cluster.find_stream(stream)
    return info.messages if info else 0


def _seconds_of(bench: Bench, *arguments: str) -> float:
    started = time.perf_counter()
    subprocess.run(_command(*arguments), env=bench.environ, check=True, capture_output=True)
    return time.perf_counter() - started


def _command(*arguments: str) -> Sequence[str]:
    return (sys.executable, "-m", "sr_assets", *arguments)


def _median(seconds: list[float]) -> float:
    return round(statistics.median(seconds), 2)
