"""Two members of a site: the time from a leader's end to the first copy by the next one, and the cost of checkpoints."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters import times, wire
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.spark.engine import stop_engine
from sr_assets.adapters.state.checkpoint import last_stored
from sr_assets.adapters.state.lease import Lease
from sr_assets.stages.checkpointing import open_store, store_state
from sr_assets.stages.leadership import campaigns_here, step_down
from sr_assets.stages.site import Site
from sr_assets_bench.rig import ROUNDS, SITE, Bench, cluster_of
from sr_assets_bench.waiting import ARRIVED, PROBED, seconds_until

if TYPE_CHECKING:
    from collections.abc import Callable

_STEP_DOWN_SECONDS: Final = 30.0
_BEGIN_SECONDS: Final = 600.0
_ENTRY: Final[dict[str, Any]] = {
    "stream": PROBED,
    "target_stream": ARRIVED,
    "target_subject_prefix": "probe",
    "inspect_field": "sender",
    "inspect_duration": "1h",
    "warn_duration": "30m",
}


def measure_fail_over(bench: Bench, nodes: int) -> dict[str, Any]:
    """Kill the leader of two members and let the leader step down, in turn, three times each; every node is known.

    A message of a new node is published at the same time. The first copy is the new leader's: the old one is dead or has
    stopped its work before it gives up its keys.
    """
    bench.create(bench.source, PROBED)
    bench.publish(PROBED, nodes, nodes, 1_000)
    killed, planned = [], []
    with contextlib.ExitStack() as stack:
        hosts = [_Host(stack, bench, name) for name in ("a", "b")]
        for host in hosts:
            host.start()
        # The first leader waits until the bucket is as old as its TTL.
        seconds_until(time.perf_counter(), lambda: _copied(bench) >= nodes, _BEGIN_SECONDS)
        # Before the first checkpoint, the other member would need `recover`.
        seconds_until(time.perf_counter(), lambda: any(host.has_stored for host in hosts), _BEGIN_SECONDS)
        for number in range(ROUNDS):
            leader = _leader(hosts)
            killed.append(_first_copy(bench, f"killed{number}", leader.kill))
            leader.start()
            planned.append(_first_copy(bench, f"planned{number}", _leader(hosts).step_down))
        for host in hosts:
            host.kill()
        checkpoints = _checkpoints(hosts[0].bench)
    seconds = {"killed": killed, "planned": planned}
    return {
        "nodes": nodes,
        **{f"{kind}_seconds": round(statistics.median(values), 2) for kind, values in seconds.items()},
        **{f"{kind}_slowest_seconds": round(max(values), 2) for kind, values in seconds.items()},
        **checkpoints,
    }


class _Host:
    """A home with `sr-assets run --follow`, for one member."""

    def __init__(self, stack: contextlib.ExitStack, bench: Bench, name: str) -> None:
        self.bench = replace(bench, home=bench.home / name)
        self.bench.home.mkdir()
        self.settings = self.bench.settings([_ENTRY], leader_election_name=name)
        self._folder = self.settings.home / "sites" / SITE
        self._process: subprocess.Popen[bytes] | None = None
        stack.callback(stop_engine, self.bench.home)
        stack.callback(self.kill)

    @property
    def leads(self) -> bool:
        """Whether it leads now."""
        return Lease.read(self._folder).holds

    @property
    def campaigns(self) -> bool:
        """Whether it campaigns and knows the leader."""
        lease = Lease.read(self._folder)
        return campaigns_here(self._folder) and lease.leader is not None and times.boot_seconds() > lease.rests_until

    @property
    def has_stored(self) -> bool:
        """Whether it has stored a checkpoint."""
        return last_stored(self._folder) is not None

    def start(self) -> None:
        """Start its process."""
        command = [sys.executable, "-m", "sr_assets", "run", "--follow"]
        with (self.bench.home / "follow.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=self.bench.environ, stdout=log, stderr=log)

    def kill(self) -> None:
        """Kill its process, whose children end with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def step_down(self) -> None:
        """Do the work of the command `step-down`."""
        step_down(self.settings, SITE, _STEP_DOWN_SECONDS)


def _leader(hosts: list[_Host]) -> _Host:
    """Wait until one member leads and the other one would; return the first one."""
    seconds_until(
        time.perf_counter(), lambda: sum(host.leads for host in hosts) == 1 and all(host.campaigns for host in hosts)
    )
    return next(host for host in hosts if host.leads)


def _first_copy(bench: Bench, node: str, end_leader: Callable[[], None]) -> float:
    """End the leader and publish a message; return the seconds until its copy is in the target."""
    before, began = _copied(bench), time.perf_counter()
    end_leader()
    # Only now, so that the old leader cannot copy it.
    with wire.Connection(cluster_of(bench.source)) as connection:
        item = wire.Outgoing(1, f"{PROBED}.{node}", b"", b'{"sender":"%b"}' % node.encode())
        list(wire.Publisher(connection).publish_all([item]))
    return seconds_until(began, lambda: _copied(bench) > before)


def _copied(bench: Bench) -> int:
    with Cluster(cluster_of(bench.target)) as target:
        return target.stream_info(ARRIVED).last_sequence if target.stream_exists(ARRIVED) else 0


def _checkpoints(bench: Bench) -> dict[str, Any]:
    """Store a checkpoint some times; return its size, and the share of a core if each interval has one."""
    settings, used = bench.settings([_ENTRY], checkpoint={}), []
    store = settings.checkpoint_store(SITE)
    assert store is not None
    with Site(settings, SITE, owner="bench", run_id="bench") as site:
        for _ in range(ROUNDS):
            began = time.process_time()
            store_state(settings, store, SITE, site.state)
            used.append(time.process_time() - began)
    with open_store(store) as bucket:
        stored = bucket.find(settings.checkpoint_name(SITE))
    assert stored is not None
    return {
        "checkpoint_bytes": stored.size_bytes,
        "checkpoint_cpu_seconds": round(statistics.median(used), 2),
        "checkpoint_percent_of_a_core": round(100 * statistics.median(used) / (store.interval_ns / 1e9), 2),
    }
