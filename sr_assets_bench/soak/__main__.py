"""`make soak`: a fleet reports and a site runs repeatedly while random faults hit all parts.

Six streams and a feed: a plain stream, a sampled one, a mirror of the sampled one that also serves direct gets for it,
two with steady nodes (a wrong clock; few messages per subject, read with a filter), and the advisories, which are copied
to the target and folded there by a feed.

At the end the faults and the fleet stop, and two last runs drain the streams. Then the target, the tables, the
advisories and the centre's view are compared with the source's history. Only messages that the source stored count.

It prints the seed and the counts. If any message is lost, duplicated or wrong, it exits with 1 and keeps the home.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from sr_assets.adapters.spark.engine import stop_engine
from sr_assets.domain.errors import RunError
from sr_assets.embedded.emulator import Fleet
from sr_assets.embedded.fleet_plan import Churn, FleetPlan
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.operate.processes import INTERRUPTED, signals_as_interrupt
from sr_assets.settings import parse_cluster
from sr_assets_bench.comparison.feeds import compare_feed
from sr_assets_bench.comparison.streams import Comparison, compare
from sr_assets_bench.comparison.tables import Difference, Kind
from sr_assets_bench.soak.fault_plan import Fault
from sr_assets_bench.soak.faults import Gremlin
from sr_assets_bench.soak.runs import Operator, Progress
from sr_assets_bench.soak.servers import LimitedServer, SourceStore
from sr_assets_bench.soak.steady import CLOCK, INTERVAL_SECONDS, LATEST, NODES, add_steady_streams, compare_steady
from sr_assets_bench.soak.wrong_clock import WrongClock
from sr_assets_tests.marked import marked
from sr_assets_tests.reference import SECOND, Rules, by_field
from sr_assets_tests.rig import SITE, Rig, Sent, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sr_assets_bench.comparison.source_rollback import Past

PLAIN, SAMPLED, MIRROR, FEED, CENTRE = "PLAIN", "SAMPLED", "MIRROR", "FEED", "CENTRE"
INTERVAL, WARNING, TRIGGER_BYTES = 6 * SECOND, 3 * SECOND, 500
_CHURN: Final = Churn(share=0.6, short_seconds=4.5, long_seconds=9.0)
_MARK: Final = "SR_ASSETS_SOAK"
_TICK_SECONDS: Final = 0.05
#: A writer that outlives its run may wait 30 s for acknowledgements before it fails.
_LEAVE_SECONDS: Final = 45.0
_BEGIN_SECONDS: Final = 300.0
#: The maximum number of printed differences of each kind.
_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class Verdict:
    """The counts of a soak; `beginnings` counts the restarts of streams after a rollback of their source.

    `views` are the differences at the centre and of the steady streams, `complaints` the problems of runs and processes.
    """

    seed: int
    seconds: float
    runs: Counter[str]
    faults: Counter[Fault]
    beginnings: int
    comparisons: list[Comparison]
    views: list[Difference]
    complaints: list[str]

    @property
    def _all(self) -> list[Difference]:
        return [*(difference for comparison in self.comparisons for difference in comparison.differences), *self.views]

    @property
    def differences(self) -> Counter[Kind]:
        """The number of differences of each kind; an order that a refusal has changed is counted but allowed."""
        return Counter(difference.kind for difference in self._all)

    @property
    def failed(self) -> bool:
        """Whether there is any difference that is not allowed."""
        return bool(self.complaints) or any(kind is not Kind.DISORDERED for kind in self.differences)

    def counts(self) -> dict[str, Any]:
        """Return all counts."""
        expected = [comparison.expected for comparison in self.comparisons]
        return {
            "seed": self.seed,
            "seconds": self.seconds,
            "messages": sum(comparison.messages for comparison in self.comparisons),
            "copies": sum(len(expectation.copied) for expectation in expected),
            "transitions": dict(
                Counter(advisory["event"] for expectation in expected for advisory in expectation.advisories)
            ),
            "beginnings": self.beginnings,
            "faults": dict(self.faults),
            "runs": dict(self.runs),
            **{kind: self.differences[kind] for kind in Kind},
            "complaints": len(self.complaints),
        }

    def findings(self) -> Iterator[str]:
        """Print some differences of each kind."""
        yield from self.complaints
        shown: Counter[Kind] = Counter()
        for difference in self._all:
            shown[difference.kind] += 1
            if shown[difference.kind] <= _SHOWN:
                yield f"{difference.kind}: {difference.text}"


def soak(home: Path, seed: int, seconds: float, messages: int = 0, *, steady: bool = False) -> Verdict:
    """Run a fleet, a site and faults for a time, then compare; stop all started processes.

    It continues until `messages` messages that the source still holds have been read, even on a slow machine.
    """
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(NatsServer(home / "source", "source"))
        target = stack.enter_context(LimitedServer(home / "target", "target"))
        (home / "site").mkdir()
        rig = Rig(home / "site", source, target, str)
        stack.callback(stop_engine, rig.home)
        clock = stack.enter_context(WrongClock(source))
        _configure(rig, clock.url if steady else None)
        operator = Operator(rig, random.Random(f"{seed} runs"))
        stack.callback(operator.kill)
        _begin(rig, operator)
        store = SourceStore(rig)
        gremlin = Gremlin(rig, target, FEED, store, clock, operator, random.Random(f"{seed} faults"), seconds)
        for after, fault, lasting in gremlin.plan:
            _say(f"after {after:.0f} s: {fault}, for {lasting:.1f} s")
        stack.callback(gremlin.heal)
        fleets = [stack.enter_context(fleet) for fleet in _fleets(seed, source, steady=steady)]
        until = time.monotonic() + seconds
        progress = Progress(rig.home)
        while time.monotonic() < until or sum(progress.positions().values()) < messages:
            operator.tend()
            gremlin.tend()
            time.sleep(_TICK_SECONDS)
        gremlin.heal()
        for fleet in fleets:
            fleet.stop()
        operator.finish()
        wait_until(lambda: rig.info(MIRROR).last_sequence == rig.info(SAMPLED).last_sequence, "the mirror to catch up")
        drained = operator.drain()
        ends = rig.info(FEED).last_sequence, rig.info(CENTRE, target).last_sequence
        # The advisories of the first one are copied to the centre; the second one folds them.
        drained = drained and operator.drain()
        pasts = store.pasts((PLAIN, SAMPLED, MIRROR, FEED))
        compared = list(_compare(rig, pasts, ends[0])) if drained else []
        views = list(compare_feed(rig, CENTRE, target, ends[1])) if drained else []
        if steady and drained:
            views += [each for stream in (CLOCK, LATEST) for each in compare_steady(rig, stream)]
    beginnings = sum(len(past.beginnings) for past in pasts.values())
    complaints = [*operator.complaints, *_left_behind()]
    return Verdict(seed, seconds, operator.ends, gremlin.faults, beginnings, compared, views, complaints)


def _compare(rig: Rig, pasts: dict[str, Past], fed: int) -> Iterator[Comparison]:
    """Compare each stream; the growing stream of advisories was read at least up to `fed`."""
    plain = Rules(SITE, SITE, PLAIN, INTERVAL, WARNING, "", sender=lambda _: None)
    sampled = Rules(SITE, SITE, SAMPLED, INTERVAL, WARNING, "sender", by_field, trigger_bytes=TRIGGER_BYTES)
    yield compare(rig, plain, pasts=pasts)
    yield compare(rig, sampled, pasts=pasts, feed=FEED)
    yield compare(rig, replace(sampled, stream=MIRROR), pasts=pasts, prefix=f"{MIRROR}.")
    yield compare(rig, replace(plain, stream=FEED), pasts=pasts, target=CENTRE, until=fed)


def _configure(rig: Rig, clock_url: str | None) -> None:
    """Create the streams and the configuration, with small batches and short intervals, so that faults interrupt much
    work.
    """
    for name in (PLAIN, SAMPLED, FEED):
        rig.create(name)
    config = {"name": MIRROR, "mirror": {"name": SAMPLED}, "allow_direct": True, "mirror_direct": True}
    answer = rig.api(f"STREAM.CREATE.{MIRROR}", config)
    assert "error" not in answer, answer
    rig.create(MIRROR, rig.target)
    common = {"batch_messages": 1_000, "on_source_reset": "recopy"}
    tracked = {
        "inspect_field": "sender",
        "inspect_duration": f"{INTERVAL // SECOND}s",
        "warn_duration": f"{WARNING // SECOND}s",
        "size_trigger": TRIGGER_BYTES,
    }
    rig.add(PLAIN, **common)
    rig.add(SAMPLED, **common, **tracked, advisory={"subject": f"{FEED}.%s.%v", "reliable": True})
    rig.add(MIRROR, **common, **tracked, target_subject_prefix=MIRROR)
    rig.add(FEED, **common, target_stream=CENTRE)
    rig.add_feed(CENTRE)
    if clock_url:
        add_steady_streams(rig, clock_url)
    # Some batches are large enough for Spark; the others are read and copied in the run's own process.
    rig.settings(sensor={"interval": "2s"}, run_budget="20s", spark={"from_messages": 100})


def _begin(rig: Rig, operator: Operator) -> None:
    """Let the first run publish its first tables: before that, faults have little effect."""
    rig.publish(PLAIN, [Sent(b"the first")])
    deadline = time.monotonic() + _BEGIN_SECONDS
    while not (rig.home / "fleet.duckdb").exists():
        if time.monotonic() > deadline:
            raise RunError(
                f"no tables were published within {_BEGIN_SECONDS:.0f} s; the output of the runs is in {rig.home}"
            )
        operator.tend()
        time.sleep(_TICK_SECONDS)


def _fleets(seed: int, source: NatsServer, *, steady: bool) -> list[Fleet]:
    """Return the publishers of each stream: up to 150 messages a second each."""
    plans = {
        PLAIN: FleetPlan(150, 1.0, seed, payload_bytes=1_000),
        SAMPLED: FleetPlan(75, 0.5, seed, _CHURN, payload_bytes=1_000),
        **{
            stream: FleetPlan(NODES, INTERVAL_SECONDS, seed, payload_bytes=1_000)
            for stream in (CLOCK, LATEST)
            if steady
        },
    }
    return [Fleet(plan, parse_cluster(source.url), f"{name}.%s") for name, plan in plans.items()]


def _left_behind() -> list[str]:
    """Return the processes that are still active some time after everything was stopped, and end them."""
    deadline = time.monotonic() + _LEAVE_SECONDS
    while (left := marked(_MARK, os.environ[_MARK])) and time.monotonic() < deadline:
        time.sleep(_TICK_SECONDS)
    lines = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            lines.append(f"left behind: {' '.join(process.cmdline())[:200]}")
            process.kill()
    return lines


def main() -> int:
    """Run a soak, print the results, return the exit code."""
    parser = argparse.ArgumentParser(
        prog="make soak", description="Kill everything at random; lose and double nothing."
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="duration of the faults (default: 300)")
    parser.add_argument("--messages", type=int, default=0, help="minimum number of messages to read (default: 0)")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(10**6), help="default: a random one"
    )
    parser.add_argument("--steady", action="store_true", help="also read two streams of nodes that never fall silent")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    arguments = parser.parse_args()
    os.environ[_MARK] = uuid.uuid4().hex
    home = Path(tempfile.mkdtemp(prefix="sr-assets-soak-")).resolve()
    _say(f"seed {arguments.seed}, {arguments.seconds:g} s, in {home}")
    try:
        with signals_as_interrupt():
            verdict = soak(home, arguments.seed, arguments.seconds, arguments.messages, steady=arguments.steady)
    except KeyboardInterrupt:
        shutil.rmtree(home)
        return INTERRUPTED
    for line in verdict.findings():
        _say(line)
    for name, count in verdict.counts().items():
        text = ", ".join(f"{key} {number}" for key, number in count.items()) if isinstance(count, dict) else count
        _say(f"{name.replace('_', ' ')}: {text}")
    if verdict.failed:
        _say(f"all files are kept in {home}")
    else:
        shutil.rmtree(home)
    if arguments.json:
        sys.stdout.write(json.dumps(verdict.counts()) + "\n")
    return int(verdict.failed)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
