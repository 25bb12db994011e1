"""The proof of a size: a whole fleet reports at an interval; its copies and advisories are compared with its messages.

`python -m sr_assets_bench.proof 10000 300000 --json docs/scale.json` proves one size after the other. Each begins with an
empty home, so that every node is new. A share of the nodes falls silent by plan; a few of them are silent for long enough
to time out, and come back.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import psutil

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.domain.provenance import Identity, find_copy
from sr_assets.domain.received import LIFE_CYCLE, Advisory, read_message
from sr_assets.embedded.fleet_plan import FleetPlan, Window
from sr_assets.measure.observation import Expectation, StreamLog
from sr_assets_bench.__main__ import describe_machine
from sr_assets_bench.processes import Processes
from sr_assets_bench.rig import cluster_of, open_bench
from sr_assets_bench.sizing import await_condition, replication_value
from sr_assets_bench.trickle import following

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sr_assets.domain.messages import Message
    from sr_assets.settings import ClusterSettings, StreamSettings
    from sr_assets_bench.rig import Bench

_STREAM: Final = "FLEET"
_TARGET: Final = "COPIES"
_ADVISORIES: Final = "ADV"
#: The first message is of this node, which is not the fleet's.
_OUTSIDER: Final = "node0.example.net"
_SHARE: Final = 0.15
_LOOK_SECONDS: Final = 2.0
_PATIENCE_SECONDS: Final = 300.0
#: The usual interval of Choria's registrations, in seconds.
INTERVAL_SECONDS: Final = 300
_UNANNOUNCED: Final = "(SELECT count(*) FROM node_advisories WHERE published_at IS NULL)"


@dataclass(frozen=True, slots=True)
class _Fleet:
    """A fleet whose nodes report every `interval` seconds, and its plan."""

    nodes: int
    interval: int

    @property
    def first(self) -> int:
        """The beginning of the silence: nodes that have reported by then time out, as their next report is left out."""
        return self.interval // 15

    @property
    def warning(self) -> int:
        """The `warn_duration` in seconds: an interval and its tenth."""
        return self.interval + self.interval // 10

    @property
    def seconds(self) -> int:
        """Two intervals, and the return of the nodes that timed out."""
        return 2 * self.interval + self.first + 10

    @property
    def plan(self) -> FleetPlan:
        """The plan that the emulator reads from a file."""
        window = Window(float(self.first), float(self.first + self.interval), share=_SHARE)
        return FleetPlan(self.nodes, float(self.interval), windows=(window,))

    @property
    def silenced(self) -> set[str]:
        """The nodes that time out by the plan: in the window, with a message before it."""
        (window,) = self.plan.windows
        events = takewhile(lambda event: event.at_seconds < self.first, self.plan.events())
        return {event.sender for event in events if window.concerns(event.sender)}


def measure_proof(bench: Bench, nodes: int, interval_seconds: int = INTERVAL_SECONDS) -> dict[str, Any]:
    """Follow a fleet of new nodes for two intervals; return CPU and memory of each process, delays in s, and differences.

    `lag_*` is the age of the watermark, every 2 s; `copied_*` the time from a message to its copy, `announced_*` from an
    event to its stored advisory. `false_alarms` are timeouts of nodes that the plan does not silence.
    """
    fleet = _Fleet(nodes, interval_seconds)
    for stream in (_STREAM, _ADVISORIES):
        bench.create(bench.source, stream)
    entry = {"stream": _STREAM, "target_stream": _TARGET, "target_subject_prefix": "copies", "inspect_field": "sender"}
    times = {"inspect_duration": "1h", "warn_duration": f"{fleet.warning}s"}
    advisory = {"subject": f"{_ADVISORIES}.%s.%v", "reliable": True}
    settings = bench.settings([{**entry, **times, "advisory": advisory}])
    # The outsider's message, because a run without messages publishes nothing.
    bench.publish(_STREAM, 1, 1, 500)
    with following(bench, bench.home / "proof.log", "--stream", _STREAM) as run:
        await_condition(lambda: replication_value(bench, _STREAM, "seen_messages") > 0, "the run's first message")
        with _reporting(bench, fleet) as emulator:
            others = {"source": bench.source.pid, "target": bench.target.pid, "emulator": emulator.pid}
            watched = Processes(bench, run, {name: psutil.Process(pid) for name, pid in others.items()})
            lags = _follow(bench, watched, emulator)
        figures = watched.figures()
    size = {"nodes": nodes, "interval_seconds": interval_seconds}
    return {**size, **figures, **_percentiles("lag", lags), **_verdict(settings.streams[0], fleet)}


@contextmanager
def _reporting(bench: Bench, fleet: _Fleet) -> Iterator[subprocess.Popen[bytes]]:
    """Run the emulated fleet as a process of its own."""
    plan = bench.home / "plan.yaml"
    plan.write_text(f"silences: [{{share: {_SHARE}, from: {fleet.first}s, for: {fleet.interval}s}}]\n")
    options = {
        "url": bench.source.url,
        "nodes": fleet.nodes,
        "subject": f"{_STREAM}.%s",
        "interval": f"{fleet.interval}s",
        "for": f"{fleet.seconds}s",
        "plan": plan,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "sr_assets", "emulate", *words, "--connections", "shared"]
    with subprocess.Popen(command, env=bench.environ, stdout=subprocess.DEVNULL) as emulator:
        try:
            yield emulator
        finally:
            emulator.terminate()


def _follow(bench: Bench, watched: Processes, emulator: subprocess.Popen[bytes]) -> list[float]:
    """Watch until the fleet has ended and everything is processed; return the run's lag in seconds, every 2 s."""
    lags: list[float] = []
    deadline, stored = float("inf"), 0
    while (
        not stored
        or replication_value(bench, _STREAM, "seen_messages") < stored
        or replication_value(bench, _STREAM, "queued_messages")
        or replication_value(bench, _STREAM, _UNANNOUNCED)
    ):
        if time.monotonic() > deadline:
            raise SystemExit(f"the run did not process {stored} messages within {_PATIENCE_SECONDS:.0f} s of the last")
        if not stored and emulator.poll() is not None:
            deadline = time.monotonic() + _PATIENCE_SECONDS
            with Cluster(cluster_of(bench.source)) as source:
                stored = source.stream_info(_STREAM).last_sequence
        time.sleep(_LOOK_SECONDS)
        watched.look()
        lags.append(replication_value(bench, _STREAM, "epoch(now() - watermark)"))
    return lags


def _verdict(entry: StreamSettings, fleet: _Fleet) -> dict[str, Any]:
    """Compare the copies with the rules, and the advisories with the times of each node's messages."""
    required = Expectation(entry, {f"{_STREAM}.{node}": node for node in fleet.plan.senders()})
    for message in _stored(entry.source, _STREAM, headers_only=True):
        required.add(message)
    return {"messages": len(required.stored_ns), **_copies(entry, required), **_advisories(entry, required, fleet)}


def _copies(entry: StreamSettings, required: Expectation) -> dict[str, Any]:
    identity = Identity(entry.stream, entry.replicator, entry.name)
    copied: Counter[int] = Counter()
    seconds = []
    for message in _stored(entry.target, _TARGET, headers_only=True):
        if copy := find_copy(message.headers, identity):
            copied[copy.sequence] += 1
            seconds.append((message.stored_ns - required.stored_ns[copy.sequence]) / 1e9)
    return {
        "copies": copied.total(),
        "missing_copies": len(required.due - copied.keys()),
        "wrong_copies": (copied - Counter(required.due)).total(),
        **_percentiles("copied", seconds),
    }


def _advisories(entry: StreamSettings, required: Expectation, fleet: _Fleet) -> dict[str, Any]:
    end_ns = max(required.stored_ns.values())
    announced: Counter[tuple[str, str, int]] = Counter()
    seconds = []
    for message in _stored(entry.source, _ADVISORIES):
        advisory = read_message(message.payload, message.stored_ns)
        if not isinstance(advisory, Advisory):
            raise SystemExit(f"the advisory {message.sequence} is invalid: {advisory}")
        # Silence after the fleet's end is no part of the plan.
        if advisory.event_ns <= end_ns and advisory.node != _OUTSIDER:
            announced[advisory.node, LIFE_CYCLE[advisory.event_code], advisory.event_ns] += 1
            seconds.append((message.stored_ns - advisory.event_ns) / 1e9)
    expected = Counter(
        (node, event, at_ns)
        for node, sequences in required.sequences.items()
        for event, at_ns in _life([required.stored_ns[seen] for seen in sequences], end_ns, fleet.warning * 10**9)
    )
    events = Counter(event for _, event, _ in announced.elements())
    silenced = fleet.silenced
    return {
        **{f"{event}_advisories": events[event] for event in LIFE_CYCLE},
        "planned_timeouts": len(silenced),
        "missing_advisories": (expected - announced).total(),
        "wrong_advisories": (announced - expected).total(),
        "false_alarms": sum(event == "timeout" and node not in silenced for node, event, _ in announced.elements()),
        **_percentiles("announced", seconds),
    }


def _life(times_ns: Sequence[int], end_ns: int, warning_ns: int) -> Iterator[tuple[str, int]]:
    """Yield the transitions until `end_ns` of a node that reported at these times: the naive fold of the rules."""
    yield "new", times_ns[0]
    for last_ns, next_ns in pairwise([*times_ns, end_ns + 1]):
        if next_ns - last_ns > warning_ns:
            yield "timeout", last_ns + warning_ns
            if next_ns <= end_ns:
                yield "recover", next_ns


def _stored(cluster: ClusterSettings, stream: str, *, headers_only: bool = False) -> Iterator[Message]:
    """Yield the messages of a stream after its first one, which is the outsider's."""
    with StreamLog(cluster, stream, headers_only=headers_only) as log:
        log.next_sequence = 2
        yield from log.poll()


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    p50, p95, most = np.percentile(seconds, (50, 95, 100)) if seconds else (0.0, 0.0, 0.0)
    return {f"{name}_p50": round(p50, 2), f"{name}_p95": round(p95, 2), f"{name}_max": round(most, 2)}


def main() -> None:
    """Prove each size on new servers and an empty home; add its figures to a file."""
    parser = argparse.ArgumentParser(prog="proof", description="Prove sizes of a fleet on this machine.")
    parser.add_argument("nodes", type=int, nargs="+", help="numbers of nodes")
    parser.add_argument("--interval", type=int, default=INTERVAL_SECONDS, help="seconds between two messages of a node")
    parser.add_argument("--json", type=Path, help="also write the figures to this file, keeping those of other fleets")
    arguments = parser.parse_args()
    for nodes in arguments.nodes:
        with open_bench() as bench:
            figures = measure_proof(bench, nodes, arguments.interval)
        sys.stdout.write(json.dumps(figures) + "\n")
        if arguments.json:
            earlier = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
            kept = {**earlier, "machine": describe_machine(), f"proof_{nodes}_{arguments.interval}s": figures}
            arguments.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
