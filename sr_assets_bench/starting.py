"""The start of a sensor's run: from the request of the run to its first read of the stream."""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import nats

from sr_assets.adapters.state.lock import lock_owner
from sr_assets.operate.instance import open_instance
from sr_assets_bench.rig import SITE
from sr_assets_bench.waiting import ARRIVED, PROBED, sensing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sr_assets_bench.rig import Bench

_RUNS: Final = 3
_LOOK_SECONDS: Final = 0.01
_NODES: Final = 100


def measure_start(bench: Bench) -> dict[str, Any]:
    """Measure some runs of a sensor, one after the other: the seconds from the request of a run to its process's first
    event, to its step, and to its first read.
    """
    entry = {"stream": PROBED, "target_stream": ARRIVED, "target_subject_prefix": "probe"}
    entries = [{**entry, "inspect_field": "sender", "inspect_duration": "1h", "warn_duration": "30m"}]
    bench.create(bench.source, PROBED)
    bench.publish(PROBED, _NODES, _NODES, 1_000)
    bench.run(bench.settings(entries), PROBED)
    settings = bench.settings(entries, linger="1s", sensor={"interval": "5s"})
    runs = []
    with sensing(bench, settings), _reads(bench) as reads:
        for _ in range(_RUNS):
            while lock_owner(settings.home / "sites" / SITE):
                time.sleep(_LOOK_SECONDS)
            reads.clear()
            bench.publish(PROBED, 1, 1, 1_000)
            while not reads:
                time.sleep(_LOOK_SECONDS)
            runs.append(_phases(reads[0]))
    names = ("process", "step", "read")
    return {
        f"{name}_seconds": round(statistics.median(values), 2)
        for name, values in zip(names, zip(*runs, strict=True), strict=True)
    }


def _phases(read_at: float) -> tuple[float, float, float]:
    """Return the seconds from the request of the newest run to its process, step and first read, which was at `read_at`."""
    os.environ.setdefault("DAGSTER_HOME", "")
    with open_instance() as instance:
        (record,) = instance.get_run_records(limit=1)
        requested = record.create_timestamp.timestamp()
        events = {
            entry.dagster_event.event_type_value: entry.timestamp
            for entry in reversed(instance.all_logs(record.dagster_run.run_id))
            if entry.dagster_event is not None
        }
    return events["PIPELINE_START"] - requested, events["STEP_START"] - requested, read_at - requested


@contextmanager
def _reads(bench: Bench) -> Iterator[list[float]]:
    """Yield a list to which each request for messages of the stream adds its time (unix seconds)."""
    reads: list[float] = []
    loop, ended = asyncio.new_event_loop(), asyncio.Event()

    async def watch() -> None:
        async def note(_: object) -> None:
            reads.append(time.time())

        client = await nats.connect(bench.source.url)
        for subject in (
            f"$JS.API.DIRECT.GET.{PROBED}",
            f"$JS.API.DIRECT.GET.{PROBED}.>",
            f"$JS.API.CONSUMER.CREATE.{PROBED}.>",
        ):
            await client.subscribe(subject, cb=note)
        await ended.wait()
        await client.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(watch()), daemon=True)
    thread.start()
    try:
        yield reads
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()
