"""The plain copy, compared with the server's mirror, with one message at a time, and with two workers."""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters import wire
from sr_assets.adapters.nats.administration import Cluster
from sr_assets_bench.rig import ROUNDS, cluster_of

if TYPE_CHECKING:
    from sr_assets_bench.rig import Bench

_ONE_AT_A_TIME: Final = 2_000
_SENDERS: Final = 1_000
_SHORT_SHARE: Final = 10


def measure_copy(bench: Bench, payload_bytes: int, messages: int, *, direct: bool = True) -> dict[str, Any]:
    """Measure a plain ordered copy of messages of one size; rates are messages per second, medians of three rounds.

    Ours is the whole run, from opening the site to the published tables. *Steady* is its rate without the costs of each
    run: the additional messages, compared with a run of a tenth of them. *Async* has a target that acknowledges before
    it has synced its files.
    """
    stream = f"PLAIN_{payload_bytes}" if direct else f"PULLED_{payload_bytes}"
    bench.create(bench.source, stream, allow_direct=direct)
    bench.publish(stream, messages, _SENDERS, payload_bytes)
    few, short = messages // _SHORT_SHARE, f"SHORT_{stream}"
    bench.create(bench.source, short, allow_direct=direct)
    bench.publish(short, few, _SENDERS, payload_bytes)
    rates: dict[str, list[float]] = {"ours": [], "steady": [], "async": [], "mirror": [], "one_at_a_time": []}
    for index in range(ROUNDS):
        few_rate = _ours(bench, short, f"S{index}_{stream}", few)
        rate = _ours(bench, stream, f"T{index}_{stream}", messages)
        rates["ours"].append(rate)
        rates["steady"].append((messages - few) / (messages / rate - few / few_rate))
        rates["async"].append(_ours(bench, stream, f"A{index}_{stream}", messages, target={"persist": "async"}))
        rates["mirror"].append(_mirror(bench, stream, messages))
        rates["one_at_a_time"].append(
            _one_at_a_time(bench, stream, f"O{index}_{stream}", min(messages, _ONE_AT_A_TIME))
        )
    for name in (stream, short):
        _delete(bench, name)
    figures: dict[str, Any] = {"messages": messages, "payload_bytes": payload_bytes, "direct_get": direct}
    figures |= {f"{kind}_per_second": round(statistics.median(measured)) for kind, measured in rates.items()}
    for kind, figure in (("ours", "times_mirror"), ("steady", "steady_times_mirror"), ("async", "async_times_mirror")):
        figures[figure] = round(_ratio(rates[kind], rates["mirror"]), 2)
    figures["times_one_at_a_time"] = round(_ratio(rates["ours"], rates["one_at_a_time"]), 1)
    return figures


def measure_workers(bench: Bench, payload_bytes: int, messages: int) -> dict[str, Any]:
    """Measure the plain copy with one worker and with two, without an order between their copies."""
    stream = "SPREAD"
    bench.create(bench.source, stream)
    bench.publish(stream, messages, _SENDERS, payload_bytes)
    rates: dict[int, list[float]] = {1: [], 2: []}
    for index in range(ROUNDS):
        for workers, measured in rates.items():
            keys = {"workers": workers, "order": "none"}
            measured.append(_ours(bench, stream, f"W{workers}_{index}", messages, **keys))
    _delete(bench, stream)
    medians = {
        f"workers_{workers}_per_second": round(statistics.median(measured)) for workers, measured in rates.items()
    }
    return {"messages": messages, "payload_bytes": payload_bytes, **medians}


def _ratio(ours: list[float], others: list[float]) -> float:
    return statistics.median(our / other for our, other in zip(ours, others, strict=True))


def _ours(bench: Bench, stream: str, name: str, messages: int, **keys: Any) -> float:
    """Copy all messages into a new target, which is deleted afterwards; return messages per second."""
    bench.forget()
    os.sync()
    entry = {"stream": stream, "target_stream": name, "target_subject_prefix": name, **keys}
    report, seconds = bench.run(bench.settings([entry]), stream)
    if report.copied != messages:
        raise SystemExit(f"{stream}: {report.copied} of {messages} were copied")
    with Cluster(cluster_of(bench.target)) as cluster:
        cluster.request_api(f"STREAM.DELETE.{name}")
    return messages / seconds


def _mirror(bench: Bench, stream: str, messages: int) -> float:
    """Mirror the stream into a second file stream of the source's server."""
    os.sync()
    with Cluster(cluster_of(bench.source)) as cluster:
        started = time.perf_counter()
        cluster.create_stream({"name": f"{stream}_MIRROR", "mirror": {"name": stream}, "storage": "file"})
        while cluster.stream_info(f"{stream}_MIRROR").messages < messages:
            time.sleep(0.01)
        seconds = time.perf_counter() - started
        cluster.request_api(f"STREAM.DELETE.{stream}_MIRROR")
        return messages / seconds


def _one_at_a_time(bench: Bench, stream: str, target: str, messages: int) -> float:
    """Copy one message at a time: request the next one when the last one is acknowledged."""
    os.sync()
    bench.create(bench.target, target)
    with wire.Connection(cluster_of(bench.source)) as source, wire.Connection(cluster_of(bench.target)) as copied:
        publisher = wire.Publisher(copied)
        started = time.perf_counter()
        for sequence in range(1, messages + 1):
            message = wire.stored_message(source, stream, sequence)
            assert message is not None
            copy = wire.Outgoing(sequence, f"{target}.{message.subject}", message.headers, message.payload)
            list(publisher.publish_all([copy]))
        seconds = time.perf_counter() - started
    with Cluster(cluster_of(bench.target)) as cluster:
        cluster.request_api(f"STREAM.DELETE.{target}")
    return messages / seconds


def _delete(bench: Bench, stream: str) -> None:
    with Cluster(cluster_of(bench.source)) as cluster:
        cluster.request_api(f"STREAM.DELETE.{stream}")
