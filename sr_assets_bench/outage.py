"""A target outage: the delay of transitions during it, and draining the copy queue after it."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters import wire
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.stages.report import Stage
from sr_assets.stages.run import run_site
from sr_assets.stages.site import Site
from sr_assets_bench.rig import SITE, PeakMemory, cluster_of
from sr_assets_bench.waiting import ARRIVED, PROBED, PROBES, lingering, seconds_until, summarised

if TYPE_CHECKING:
    from sr_assets.settings import Settings
    from sr_assets_bench.rig import Bench

_ADVISED: Final = "ADVISED"
_QUEUED: Final = "QUEUED"
_NODES: Final = 1_000
_LINGERING: Final[dict[str, Any]] = {"run_budget": "10m", "linger": "15s"}


def measure_transitions(bench: Bench) -> dict[str, Any]:
    """Measure the seconds from a new node's stored message to its stored advisory, with the target up, then down."""
    bench.create(bench.source, PROBED)
    bench.create(bench.source, _ADVISED)
    bench.publish(PROBED, _NODES, _NODES, 1_000)
    entry = {"stream": PROBED, "target_stream": ARRIVED, "target_subject_prefix": "probe", "inspect_field": "sender"}
    advisory = {"subject": f"{_ADVISED}.%s.%v", "reliable": True}
    entries = [{**entry, "inspect_duration": "1h", "advisory": advisory}]
    bench.run(bench.settings(entries), PROBED)
    bench.settings(entries, **_LINGERING)
    with lingering(bench):
        figures = {"probes": PROBES, **summarised("target_up", _announced(bench, "up"))}
        bench.target.stop()
        try:
            figures |= summarised("target_down", _announced(bench, "down"))
        finally:
            bench.target.start()
    return figures


def _announced(bench: Bench, label: str) -> list[float]:
    """Publish new nodes one after the other; return the seconds until each is announced, without the first, which
    starts the run.
    """
    delays = []
    with wire.Connection(cluster_of(bench.source)) as connection, Cluster(cluster_of(bench.source)) as source:
        for number in range(PROBES + 1):
            node = f"{label}{number}.example.net"
            before = source.stream_info(_ADVISED).last_sequence
            item = wire.Outgoing(1, f"{PROBED}.{node}", b"", b'{"sender":"%b"}' % node.encode())
            started = time.perf_counter()
            list(wire.Publisher(connection).publish_all([item]))
            delays.append(seconds_until(started, partial(_has_more, source, before)))
    return delays[1:]


def _has_more(source: Cluster, last_sequence: int) -> bool:
    return source.stream_info(_ADVISED).last_sequence > last_sequence


def measure_queue(bench: Bench, messages: int) -> dict[str, Any]:
    """Measure copying a queue of copies, all due before the first one is made, and a tenth of it; also the peak memory."""
    figures: dict[str, Any] = {}
    for label, count in (("short", messages // 10), ("long", messages)):
        stream = f"{_QUEUED}_{label.upper()}"
        bench.create(bench.source, stream)
        bench.publish(stream, count, count, 512)
        settings = bench.settings(
            [{"stream": stream, "target_subject_prefix": "q", "inspect_field": "sender", "inspect_duration": "1d"}]
        )
        _run(settings, stream, frozenset({Stage.NODE_STATE}))
        with PeakMemory(bench.home) as memory:
            seconds = _run(settings, stream, frozenset({Stage.REPLICA, Stage.NODE_SNAPSHOTS}))
        figures |= {
            f"{label}_messages": count,
            f"{label}_per_second": round(count / seconds),
            f"{label}_peak_mib": memory.most_bytes >> 20,
        }
        bench.forget()
    return figures


def _run(settings: Settings, stream: str, stages: frozenset[Stage]) -> float:
    """Run some stages of one stream; return the seconds."""
    started = time.perf_counter()
    with Site(settings, SITE, owner="bench", run_id="bench") as site:
        failure = run_site(site, {stream: stages}, drain_only=True)[stream].failure
    if failure:
        raise SystemExit(failure)
    return time.perf_counter() - started
