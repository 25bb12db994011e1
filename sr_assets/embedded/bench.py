"""`make bench`: what a site's run costs, measured on real servers on this machine; prints a table and, last, one JSON
object.

Here: the workloads and their measurements. Not here: any assertion: machines are shared and noisy, so figures are read
as ratios within one run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from sr_assets.adapters import wire
from sr_assets.adapters.jetstream import Cluster
from sr_assets.adapters.spark_engine import engine_status, stop_engine
from sr_assets.embedded.bench_feeds import measure_feeds
from sr_assets.embedded.fleet import FleetPlan
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.settings import ClusterSettings, Settings, load_settings
from sr_assets.stages.run import run_site
from sr_assets.stages.site import Site, Stage, StreamReport

_SITE = "bench"
_ONE_AT_A_TIME = 2_000


@dataclass(frozen=True, slots=True)
class Bench:
    """Two servers, a home and the console to talk to."""

    home: Path
    source: NatsServer
    target: NatsServer
    console: Console
    site: str = _SITE

    def settings(self, streams: list[dict[str, Any]], **top: Any) -> Settings:
        """Return the settings of a configuration with these streams, and whatever else stands at its top."""
        common = {"source_url": self.source.url, "target_url": self.target.url}
        told = {"name": _SITE, "state_store": str(self.home), "streams": [{**common, **one} for one in streams], **top}
        file = self.home / "replication.yaml"
        file.write_text(json.dumps(told))
        return load_settings(file, {})

    def publish(self, stream: str, messages: int, senders: int, payload_bytes: int) -> None:
        """Fill a source stream with registrations of `senders` nodes, as fast as the server takes them."""
        with Cluster(_cluster(self.source)) as cluster:
            if not cluster.stream_exists(stream):
                cluster.create_stream({"name": stream, "subjects": [f"{stream}.>"], "storage": "file"})
        # In a process of its own: what an emulated fleet holds is not to be counted as ours.
        filling = get_context("spawn").Process(
            target=_fill, args=(self.source.address, stream, messages, senders, payload_bytes)
        )
        filling.start()
        filling.join()
        if filling.exitcode:
            raise SystemExit(f"publishing into {stream} failed")
        os.sync()

    def run(self, settings: Settings, stream: str) -> tuple[StreamReport, float]:
        """Drain one stream; returns the report and the seconds of the whole run, warm session included."""
        started = time.perf_counter()
        with Site(settings, _SITE, owner="bench", run_id="bench") as site:
            reports = run_site(site, {stream: frozenset(Stage)}, drain_only=True)
        report = reports[stream]
        if report.failure:
            raise SystemExit(report.failure)
        return report, time.perf_counter() - started


def _fill(address: str, stream: str, messages: int, senders: int, payload_bytes: int) -> None:
    plan = FleetPlan(senders, 300.0, payload_bytes=payload_bytes)
    events = enumerate(islice(plan.events(), messages), 1)
    items = (wire.Outgoing(number, f"{stream}.{event.sender}", b"", event.payload) for number, event in events)
    with wire.Connection(ClusterSettings((address,))) as connection:
        refused = [ack.error for ack in wire.Publisher(connection).publish_all(items) if ack.error]
    if refused:
        raise SystemExit(refused[0])


def _cluster(server: NatsServer) -> ClusterSettings:
    return ClusterSettings((server.address,))


def _wire(server: NatsServer) -> wire.Connection:
    return wire.Connection(_cluster(server))


@contextmanager
def opened() -> Iterator[Bench]:
    """Start two servers in a temporary home; everything is gone afterwards."""
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="sr-assets-bench-") as folder:
        home = Path(folder)
        try:
            with NatsServer(home / "source", "source") as source, NatsServer(home / "target", "target") as target:
                yield Bench(home, source, target, console)
        finally:
            stop_engine(home)


def memory_bytes(home: Path) -> int:
    """Return what our processes hold together (sum of PSS): this one, and the Spark engine with its Python workers."""
    engine = engine_status(home)
    processes = [psutil.Process()]
    if engine is not None:
        processes += [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def measure_copy(bench: Bench, name: str, messages: int, payload_bytes: int) -> dict[str, Any]:
    """Measure a plain ordered copy beside the server's own mirror and a copier that waits for each ack."""
    bench.publish(name, messages, 1_000, payload_bytes)
    settings = bench.settings([{"stream": name, "target_subject_prefix": "copy"}])
    report, seconds = bench.run(settings, name)
    return {
        "messages": messages,
        "payload_bytes": payload_bytes,
        "messages_per_second": round(messages / seconds),
        "mirror_per_second": round(messages / _mirror_seconds(bench, name, messages)),
        "one_at_a_time_per_second": round(_one_at_a_time(bench, name, min(messages, _ONE_AT_A_TIME))),
        "copied": report.copied,
    }


def _mirror_seconds(bench: Bench, stream: str, messages: int) -> float:
    """Let the source's own server mirror the stream into a second file stream."""
    with Cluster(_cluster(bench.source)) as cluster:
        started = time.perf_counter()
        cluster.create_stream({"name": f"{stream}_MIRROR", "mirror": {"name": stream}, "storage": "file"})
        while cluster.stream_info(f"{stream}_MIRROR").messages < messages:
            time.sleep(0.01)
        seconds = time.perf_counter() - started
        cluster.request_api(f"STREAM.DELETE.{stream}_MIRROR")
        return seconds


def _one_at_a_time(bench: Bench, stream: str, messages: int) -> float:
    """Copy like a replicator that asks for the next message once the last is acknowledged.

    Returns messages per second.
    """
    with Cluster(_cluster(bench.target)) as cluster:
        cluster.create_stream({"name": f"{stream}_ONE", "subjects": [f"{stream}_ONE.>"], "storage": "file"})
    with _wire(bench.source) as source, _wire(bench.target) as target:
        publisher = wire.Publisher(target)
        started = time.perf_counter()
        for sequence in range(1, messages + 1):
            message = wire.stored_message(source, stream, sequence)
            assert message is not None
            list(
                publisher.publish_all(
                    [wire.Outgoing(sequence, f"{stream}_ONE.{message.subject}", message.headers, message.payload)]
                )
            )
        return messages / (time.perf_counter() - started)


def measure_sampled(bench: Bench, name: str, messages: int, senders: int, payload_bytes: int) -> dict[str, Any]:
    """Measure the sampled path: first every sender once (all new), then a backlog of which about a tenth is due."""
    bench.publish(name, senders, senders, payload_bytes)
    sampled = {
        "stream": name,
        "target_subject_prefix": "sample",
        "inspect_field": "sender",
        "inspect_duration": "1h",
        "warn_duration": "30m",
    }
    settings = bench.settings([sampled])
    first, first_seconds = bench.run(settings, name)
    before = memory_bytes(bench.home)
    # A tenth is due: a force flag would need other payloads, so a tenth of the messages comes from new senders instead.
    plan_senders = senders + messages // 10
    bench.publish(name, messages, plan_senders, payload_bytes)
    second, seconds = bench.run(settings, name)
    return {
        "senders": senders,
        "messages": second.messages,
        "all_new_per_second": round(first.messages / first_seconds),
        "messages_per_second": round(second.messages / seconds),
        "copied_share": round(second.copied / max(1, second.messages), 3),
        "memory_mib_before": before >> 20,
        "memory_mib_after": memory_bytes(bench.home) >> 20,
    }


def measure_memory(bench: Bench, name: str, messages: int) -> dict[str, Any]:
    """Measure what our processes hold after a tenth, four tenths and all of a backlog of 1 KB messages."""
    sampled = {"stream": name, "target_subject_prefix": "sample", "inspect_field": "sender", "inspect_duration": "1h"}
    settings = bench.settings([sampled])
    found: dict[str, Any] = {}
    done = 0
    for so_far in (messages // 10, messages * 4 // 10, messages):
        bench.publish(name, so_far - done, 30_000, 1_000)
        report, seconds = bench.run(settings, name)
        done = so_far
        found[f"mib_after_{done}"] = memory_bytes(bench.home) >> 20
        found["messages_per_second"] = round(report.messages / seconds)
    return found


def measure_idle(bench: Bench, streams: list[str]) -> dict[str, Any]:
    """Measure a run of a site with these streams and nothing to do, engine warm.

    Alone, and through Dagster in a process of its own.
    """
    settings = bench.settings(
        [{"stream": stream, "target_subject_prefix": "idle", "target_stream": f"{stream}_IDLE"} for stream in streams]
    )
    for stream in streams:
        bench.run(settings, stream)
    started = time.perf_counter()
    with Site(settings, _SITE, owner="bench", run_id="bench") as site:
        run_site(site, {stream: frozenset({Stage.REPLICA}) for stream in streams}, drain_only=True)
    alone = time.perf_counter() - started
    environ = {key: value for key, value in os.environ.items() if key != "DAGSTER_HOME"}
    environ |= {"SR_ASSETS_CONFIG": str(bench.home / "replication.yaml"), "SR_ASSETS_HOME": str(bench.home)}
    command = [sys.executable, "-m", "sr_assets", "run", "--once"]
    subprocess.run(command, env=environ, check=True, capture_output=True)
    started = time.perf_counter()
    subprocess.run(command, env=environ, check=True, capture_output=True)
    return {
        "streams": len(streams),
        "run_seconds": round(alone, 3),
        "cli_seconds": round(time.perf_counter() - started, 2),
    }


def measure_import() -> dict[str, Any]:
    """Measure importing the definitions in a fresh interpreter, best of three."""
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import sr_assets.definitions"], check=True)
        seconds.append(time.perf_counter() - started)
    return {"seconds": round(min(seconds), 2)}


def main() -> None:
    """Run the benches that were asked for and print what they found."""
    parser = argparse.ArgumentParser(description="Measure sr-assets on this machine.")
    parser.add_argument("--messages", type=int, default=100_000, help="messages of the 7 KB benches")
    parser.add_argument(
        "--only",
        choices=("copy", "sampled", "feeds", "memory", "idle", "import"),
        action="append",
        help="leave out the others",
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    wanted = arguments.only or ["copy", "sampled", "feeds", "idle", "import"]
    found: dict[str, Any] = {}
    with opened() as bench:
        bench.publish("WARM", 100, 100, 1_000)
        bench.run(
            bench.settings(
                [
                    {
                        "stream": "WARM",
                        "target_subject_prefix": "warm",
                        "inspect_field": "sender",
                        "inspect_duration": "1h",
                    }
                ]
            ),
            "WARM",
        )
        if "copy" in wanted:
            found["copy_1kb"] = measure_copy(bench, "SMALL", arguments.messages, 1_000)
            found["copy_7kb"] = measure_copy(bench, "LARGE", arguments.messages // 2, 7_000)
        if "sampled" in wanted:
            found["sampled_7kb"] = measure_sampled(bench, "SAMPLED", arguments.messages, 20_000, 7_000)
        if "feeds" in wanted:
            found["feeds"] = measure_feeds(bench, 10 * arguments.messages)
        if "memory" in wanted:
            found["memory"] = measure_memory(bench, "MEMORY", 10 * arguments.messages)
        if "idle" in wanted:
            bench.publish("QUIET", 100, 100, 1_000)
            found["idle"] = measure_idle(bench, ["WARM", "QUIET"])
        if "import" in wanted:
            found["import"] = measure_import()
        _show(bench.console, found)
    text = json.dumps(found)
    if arguments.json:
        arguments.json.write_text(text)
    sys.stdout.write(text + "\n")


def _show(console: Console, found: dict[str, Any]) -> None:
    table = Table("bench", "figure", "value")
    for bench, figures in found.items():
        for figure, value in figures.items():
            table.add_row(bench, figure, f"{value:,}" if isinstance(value, int) else str(value))
    console.print(table)


if __name__ == "__main__":
    main()
