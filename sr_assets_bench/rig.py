"""Common parts of all workloads: two servers, a home, a fleet that fills streams, a run, memory of processes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import psutil

from sr_assets.adapters import wire
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.spark.engine import engine_status, stop_engine
from sr_assets.embedded.fleet_plan import FleetPlan
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.settings import ClusterSettings, Settings, load_settings
from sr_assets.stages.report import Stage, StreamReport
from sr_assets.stages.run import run_site
from sr_assets.stages.site import Site

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

SITE: Final = "bench"
#: Number of rounds of compared workloads, which alternate; the median counts.
ROUNDS: Final = 3
_SMALLEST_BYTES: Final = 1_000


@dataclass(frozen=True, slots=True)
class Bench:
    """Two servers and a home."""

    home: Path
    source: NatsServer
    target: NatsServer

    def settings(self, streams: list[dict[str, Any]], **top: Any) -> Settings:
        """Return the settings of a configuration with these streams and these other keys of the top level."""
        common = {"source_url": self.source.url, "target_url": self.target.url}
        entries = [{**common, **stream} for stream in streams]
        tree = {"name": SITE, "state_store": str(self.home), "streams": entries, **top}
        self.file.write_text(json.dumps(tree))
        return load_settings(self.file, {})

    @property
    def file(self) -> Path:
        """The configuration file written by the last call of `settings`."""
        return self.home / "replication.yaml"

    @property
    def environ(self) -> dict[str, str]:
        """The environment of a process that uses this configuration and home."""
        environ = {key: value for key, value in os.environ.items() if key != "DAGSTER_HOME"}
        return environ | {"SR_ASSETS_CONFIG": str(self.file), "SR_ASSETS_HOME": str(self.home)}

    def create(self, server: NatsServer, stream: str, **config: Any) -> None:
        """Create a file stream for the subjects `<stream>.>`, with direct gets, as `nats stream add` does."""
        with Cluster(cluster_of(server)) as cluster:
            cluster.create_stream(
                {"name": stream, "subjects": [f"{stream}.>"], "storage": "file", "allow_direct": True, **config}
            )

    def publish(
        self, stream: str, messages: int, senders: int, payload_bytes: int, *, forced_share: float = 0.0
    ) -> None:
        """Fill a source stream with registrations of `senders` nodes in turn, at the server's speed.

        `forced_share` of them have `"now":true`, spread evenly. Payloads of less than 1,000 bytes contain little more
        than the sender.
        """
        # In a separate process, so that the emulated fleet's memory does not count as ours.
        filling = get_context("spawn").Process(
            target=_fill, args=(self.source.address, stream, messages, senders, payload_bytes, forced_share)
        )
        filling.start()
        filling.join()
        if filling.exitcode:
            raise SystemExit(f"publishing into {stream} failed")
        os.sync()

    def run(self, settings: Settings, stream: str) -> tuple[StreamReport, float]:
        """Drain one stream with a warm Spark session; return the report and the seconds of the whole run."""
        return drain(settings, stream)

    def forget(self) -> None:
        """Delete the site's state; its Spark session stays warm."""
        shutil.rmtree(self.home / "sites" / SITE, ignore_errors=True)


def drain(settings: Settings, stream: str) -> tuple[StreamReport, float]:
    """Drain one stream in this process; return the report and the seconds of the whole run."""
    started = time.perf_counter()
    with Site(settings, SITE, owner="bench", run_id="bench") as site:
        reports = run_site(site, {stream: frozenset(Stage)}, drain_only=True)
    report = reports[stream]
    if report.failure:
        raise SystemExit(report.failure)
    return report, time.perf_counter() - started


def _fill(address: str, stream: str, messages: int, senders: int, payload_bytes: int, forced_share: float) -> None:
    if payload_bytes < _SMALLEST_BYTES:
        named = (f"node{number % senders}.example.net" for number in range(messages))
        payloads = ((name, b'{"sender":"%b"}' % name.encode()) for name in named)
        events = ((name, payload.ljust(payload_bytes)) for name, payload in payloads)
    else:
        plan = FleetPlan(senders, 300.0, payload_bytes=payload_bytes)
        events = ((event.sender, event.payload) for event in islice(plan.events(), messages))
    every = round(1 / forced_share) if forced_share else messages + 1
    items = (
        wire.Outgoing(
            number,
            f"{stream}.{sender}",
            b"",
            payload.replace(b"{", b'{"now":true,', 1) if number % every == 0 else payload,
        )
        for number, (sender, payload) in enumerate(events, 1)
    )
    with wire.Connection(ClusterSettings((address,))) as connection:
        refused = [ack.error for ack in wire.Publisher(connection).publish_all(items) if ack.error]
    if refused:
        raise SystemExit(refused[0])


def cluster_of(server: NatsServer) -> ClusterSettings:
    """Return the connection parameters of a server."""
    return ClusterSettings((server.address,))


@contextmanager
def open_bench() -> Iterator[Bench]:
    """Start two servers in a temporary home, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="sr-assets-bench-") as folder:
        home = Path(folder)
        try:
            with NatsServer(home / "source", "source") as source, NatsServer(home / "target", "target") as target:
                yield Bench(home, source, target)
        finally:
            stop_engine(home)


def memory_bytes(home: Path) -> int:
    """Return the memory of our processes (sum of PSS): this process, and the Spark engine with its Python workers."""
    engine = engine_status(home)
    total, processes = 0, [psutil.Process()]
    try:
        if engine is not None:
            processes += [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
        for process in processes:
            total += process.memory_full_info().pss
    except psutil.Error:
        return total
    return total


class PeakMemory:
    """The peak memory of our processes inside `with`, measured twice a second."""

    def __init__(self, home: Path) -> None:
        self.most_bytes = 0
        self._home = home
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            self.most_bytes = max(self.most_bytes, memory_bytes(self._home))

    def __enter__(self) -> Self:
        """Start the measurement."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
