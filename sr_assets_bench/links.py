"""Copies through a leafnode by a native mirror, a native source and a replica; and a report of many streams."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.embedded.nats_server import HOST, NatsServer, free_port
from sr_assets_bench.rig import ROUNDS, Bench, cluster_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_STREAM: Final = "CITY"
_SENDERS: Final = 1_000
_PAYLOAD_BYTES: Final = 7_000
_ORIGIN: Final = {"name": _STREAM, "external": {"api": "$JS.city.API", "deliver": ""}}
_WAIT_SECONDS: Final = 600.0


def measure_links(bench: Bench, messages: int) -> dict[str, Any]:
    """Measure copies of 7 KB messages from a leafnode to its hub; rates per second, medians of three alternating
    rounds.

    All three read through the leafnode. Ours is the whole run, from opening the site to the published tables.
    """
    rates: dict[str, list[float]] = {"mirror": [], "source": [], "ours": []}
    with _linked(bench.home / "linked") as (hub, city):
        through = Bench(bench.home, city, hub)
        through.create(city, _STREAM)
        through.publish(_STREAM, messages, _SENDERS, _PAYLOAD_BYTES)
        for index in range(ROUNDS):
            for kind, config in (("mirror", {"mirror": _ORIGIN}), ("source", {"sources": [_ORIGIN]})):
                rates[kind].append(messages / _seconds_of(hub, f"{kind}_{index}", config, messages))
            settings = through.settings(
                [
                    {
                        "stream": _STREAM,
                        "source_url": hub.url,
                        "source_domain": "city",
                        "target_url": hub.url,
                        "target_stream": f"OURS_{index}",
                        "target_subject_prefix": f"ours{index}",
                    }
                ]
            )
            _, seconds = through.run(settings, _STREAM)
            rates["ours"].append(messages / seconds)
            through.forget()
            with Cluster(cluster_of(hub)) as cluster:
                cluster.request_api(f"STREAM.DELETE.OURS_{index}")
    figures = {f"{kind}_per_second": round(statistics.median(measured)) for kind, measured in rates.items()}
    return {"messages": messages, "payload_bytes": _PAYLOAD_BYTES, **figures}


def measure_report(bench: Bench, clusters: int, streams: int) -> dict[str, Any]:
    """Measure `sr-assets report` of a number of streams, half of which mirror the other half; seconds."""
    each = streams // clusters
    with ExitStack() as stack:
        servers = [
            stack.enter_context(NatsServer(bench.home / f"c{number}", f"c{number}")) for number in range(clusters)
        ]
        for server in servers:
            with Cluster(cluster_of(server)) as cluster:
                for number in range(each):
                    config = {"subjects": [f"s{number}"]} if number % 2 == 0 else {"mirror": {"name": f"S{number - 1}"}}
                    cluster.create_stream({"name": f"S{number}", "storage": "memory", **config})
        known = {server.name: {"url": server.url} for server in servers}
        bench.file.write_text(json.dumps({"name": "bench", "topology": {"clusters": known}}))
        command, seconds = [sys.executable, "-m", "sr_assets", "report", "--format", "json"], []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            shown = subprocess.run(command, env=bench.environ, capture_output=True, check=True)
            seconds.append(time.perf_counter() - started)
        report = json.loads(shown.stdout)
    return {
        "clusters": clusters,
        "streams": len(report["streams"]),
        "links": len(report["links"]),
        "seconds": round(statistics.median(seconds), 2),
    }


def _seconds_of(hub: NatsServer, name: str, config: dict[str, Any], messages: int) -> float:
    """Return the seconds until the server has filled its own stream, which is then deleted."""
    with Cluster(cluster_of(hub)) as cluster:
        started = time.perf_counter()
        cluster.create_stream({"name": name, **config})
        while cluster.stream_info(name).messages < messages:
            if time.perf_counter() - started > _WAIT_SECONDS:
                raise SystemExit(f"{name} was not filled in {_WAIT_SECONDS:.0f} s")
            time.sleep(0.01)
        seconds = time.perf_counter() - started
        cluster.request_api(f"STREAM.DELETE.{name}")
    return seconds


@contextmanager
def _linked(home: Path) -> Iterator[tuple[NatsServer, NatsServer]]:
    """Start a hub and its leafnode, each with its own JetStream domain."""
    port = free_port()
    links = {
        "hub": f"leafnodes {{ listen: {HOST}:{port} }}",
        "city": f"leafnodes {{ reconnect: 1, remotes: [ {{ url: nats://{HOST}:{port} }} ] }}",
    }
    with ExitStack() as stack:
        hub, city = (
            stack.enter_context(NatsServer(home / name, name, domain=name, config=link)) for name, link in links.items()
        )
        yield hub, city
