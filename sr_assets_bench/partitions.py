"""The plain copy by one writer and by the lanes of partitions, into a target nearby and one at a distance."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import statistics
import threading
import time
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.embedded.nats_server import HOST, free_port
from sr_assets_bench.rig import ROUNDS, Bench, cluster_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sr_assets.embedded.nats_server import NatsServer

_LANES: Final = (1, 2, 4)
_DISTANCES_MS: Final = (0, 20)
_CHUNK: Final = 1 << 18


def measure_partitions(bench: Bench, payload_bytes: int, messages: int) -> dict[str, Any]:
    """Measure a plain copy with 1, 2 and 4 lanes, 0 and 20 ms (both ways together) from the target; medians of three
    rounds, which alternate.

    `off` is one lane without fast-ingest batches, which several lanes cannot use. Ours is the whole run.
    """
    for lanes in _LANES:
        bench.create(bench.source, f"LANES_{lanes}")
        bench.publish(f"LANES_{lanes}", messages, lanes, payload_bytes)
    rates: dict[str, list[float]] = {}
    for index in range(ROUNDS):
        for distance_ms in _DISTANCES_MS:
            with distant(bench.target, distance_ms) as url:
                for lanes, batched in ((1, "auto"), (1, "off"), (2, "off"), (4, "off")):
                    key = f"{'batched' if batched == 'auto' else f'lanes_{lanes}'}_{distance_ms}ms"
                    rates.setdefault(key, []).append(_rate(bench, url, lanes, batched, f"T{index}", messages))
    medians = {f"{key}_per_second": round(statistics.median(measured)) for key, measured in rates.items()}
    return {"messages": messages, "payload_bytes": payload_bytes, **medians}


def _rate(bench: Bench, url: str, lanes: int, batched: str, target: str, messages: int) -> float:
    """Copy a stream into a new target, which is deleted afterwards; return messages per second."""
    bench.forget()
    os.sync()
    stream = f"LANES_{lanes}"
    entry = {
        "stream": stream,
        "target_url": url,
        "target_stream": target,
        "target_subject_prefix": target,
        "allow_batched": batched,
        "partitions": {"subjects": [f"{stream}.node{number}.>" for number in range(lanes)]},
    }
    report, seconds = bench.run(bench.settings([entry]), stream)
    if report.copied != messages:
        raise SystemExit(f"{stream}: {report.copied} of {messages} were copied")
    with Cluster(cluster_of(bench.target)) as cluster:
        cluster.request_api(f"STREAM.DELETE.{target}")
    return messages / seconds


@contextmanager
def distant(server: NatsServer, milliseconds: float) -> Iterator[str]:
    """Yield a URL of a server to which a request and its response take this much longer."""
    if not milliseconds:
        yield server.url
        return
    port = free_port()
    # A separate process, so that the delay does not take our own time.
    proxy = get_context("spawn").Process(target=_serve, args=(port, server.port, milliseconds / 2_000), daemon=True)
    proxy.start()
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection((HOST, port)):
                break
            time.sleep(0.05)
        yield f"nats://{HOST}:{port}"
    finally:
        proxy.terminate()
        proxy.join()


def _serve(port: int, behind: int, seconds: float) -> None:
    listener = socket.create_server((HOST, port))
    while True:
        client, _ = listener.accept()
        server = socket.create_connection((HOST, behind))
        for sender, receiver in ((client, server), (server, client)):
            receiver.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            chunks: queue.Queue[tuple[float, bytes]] = queue.Queue()
            threading.Thread(target=_take, args=(sender, chunks, seconds), daemon=True).start()
            threading.Thread(target=_deliver, args=(chunks, receiver), daemon=True).start()


def _take(sender: socket.socket, chunks: queue.Queue[tuple[float, bytes]], seconds: float) -> None:
    chunk = b"-"
    while chunk:
        try:
            chunk = sender.recv(_CHUNK)
        except OSError:
            chunk = b""
        chunks.put((time.monotonic() + seconds, chunk))


def _deliver(chunks: queue.Queue[tuple[float, bytes]], receiver: socket.socket) -> None:
    while True:
        due, chunk = chunks.get()
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            if not chunk:
                receiver.shutdown(socket.SHUT_RDWR)
                return
            receiver.sendall(chunk)
        except OSError:
            return
