"""A soak of one home: a site runs repeatedly while random faults hit all parts.

Nine streams and a feed: a plain stream, a sampled one, a mirror of the sampled one that also serves direct gets for it,
two with steady nodes (a wrong clock; few messages per subject, read with a filter), two under the rules of operators, of
which one is partitioned, a partitioned plain one, and the advisories, which are copied to the target and folded there by a
feed.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.spark.engine import stop_engine
from sr_assets.domain.errors import RunError
from sr_assets.embedded.nats_server import NatsServer
from sr_assets_bench.comparison.feeds import compare_feed
from sr_assets_bench.comparison.streams import Comparison, compare
from sr_assets_bench.comparison.tables import Difference
from sr_assets_bench.soak.divided import DividedStreams
from sr_assets_bench.soak.faults import Gremlin
from sr_assets_bench.soak.ruled import Troupe, add_ruled_streams
from sr_assets_bench.soak.ruled_verdict import compare_ruled
from sr_assets_bench.soak.runs import Operator, Progress
from sr_assets_bench.soak.servers import LimitedServer, SourceStore
from sr_assets_bench.soak.steady import CLOCK, LATEST, add_steady_streams, compare_steady
from sr_assets_bench.soak.streams import (
    ADVISORY,
    CENTRE,
    COMMON,
    FEED,
    MIRROR,
    PLAIN,
    PLAIN_RULES,
    SAMPLED,
    SAMPLED_RULES,
    TRACKED,
    fleets_of,
)
from sr_assets_bench.soak.verdict import TICK_SECONDS, Verdict, say
from sr_assets_bench.soak.wrong_clock import WrongClock
from sr_assets_tests.rig import Rig, Sent, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sr_assets_bench.comparison.source_rollback import Past

_BEGIN_SECONDS: Final = 300.0


def soak_home(home: Path, seed: int, seconds: float, messages: int) -> Verdict:
    """Run a fleet, a site and faults for a time, then compare; stop all started processes.

    It continues until `messages` messages that the source still holds have been read, even on a slow machine.
    """
    with NatsServer(home / "source", "source") as source, contextlib.ExitStack() as stack:
        target = stack.enter_context(LimitedServer(home / "target", "target"))
        rulers = stack.enter_context(NatsServer(home / "rulers", "rulers"))
        (home / "site").mkdir()
        rig = Rig(home / "site", source, target, str)
        stack.callback(stop_engine, rig.home)
        clock = stack.enter_context(WrongClock(source))
        divided = DividedStreams(rig, rulers, seconds, lambda: _write(rig))
        _configure(rig, clock.url, rulers, divided)
        operator = Operator(rig, random.Random(f"{seed} runs"))
        stack.callback(operator.kill)
        _begin(rig, operator)
        store = SourceStore(rig)
        troupe = Troupe(rig, rulers, random.Random(f"{seed} rules"), seconds, divided.subject)
        chance = random.Random(f"{seed} faults")
        gremlin = Gremlin(rig, target, FEED, store, clock, operator, chance, seconds, troupe.state)
        stack.callback(gremlin.heal)
        fleets = [stack.enter_context(fleet) for fleet in fleets_of(seed, source, steady=True)]
        stack.enter_context(troupe)
        stack.enter_context(divided)
        _tend(operator, gremlin, divided, Progress(rig.home), time.monotonic() + seconds, messages)
        gremlin.heal()
        for fleet in fleets:
            fleet.stop()
        troupe.stop()
        divided.stop()
        operator.finish()
        wait_until(lambda: rig.info(MIRROR).last_sequence == rig.info(SAMPLED).last_sequence, "the mirror to catch up")
        drained = operator.drain()
        troupe.finish()
        ends = rig.info(FEED).last_sequence, rig.info(CENTRE, target).last_sequence
        # The advisories of the first one are copied to the centre; the second one folds them.
        drained = drained and operator.drain()
        pasts = store.pasts((PLAIN, SAMPLED, MIRROR, FEED))
        compared = list(_compare(rig, pasts, ends[0])) if drained else []
        views, rules = _compare_views(rig, target, ends[1], rulers, troupe, divided) if drained else ([], {})
    faults = Counter({str(fault): count for fault, count in gremlin.faults.items()})
    counts = {"beginnings": sum(len(past.beginnings) for past in pasts.values()), **rules}
    complaints = [*operator.complaints, *troupe.complaints, *divided.complaints]
    return Verdict(seed, seconds, operator.ends, faults, counts, compared, views, complaints)


def _tend(
    operator: Operator, gremlin: Gremlin, divided: DividedStreams, progress: Progress, until: float, messages: int
) -> None:
    """Start runs and faults, and move senders, until a time, and until `messages` messages have been read."""
    for after, fault, lasting in gremlin.plan:
        say(f"after {after:.0f} s: {fault}, for {lasting:.1f} s")
    while time.monotonic() < until or sum(progress.positions().values()) < messages:
        operator.tend()
        gremlin.tend()
        divided.tend(operator)
        time.sleep(TICK_SECONDS)


def _compare_views(
    rig: Rig, target: NatsServer, last_sequence: int, rulers: NatsServer, troupe: Troupe, divided: DividedStreams
) -> tuple[list[Difference], dict[str, int]]:
    """Return the differences of the centre's view, of the steady and divided streams and of the rules, and the counts."""
    counts, different = compare_ruled(rig, rulers, troupe)
    steady = [each for stream in (CLOCK, LATEST) for each in compare_steady(rig, stream)]
    return [*compare_feed(rig, CENTRE, target, last_sequence), *steady, *different, *divided.compare()], counts


def _compare(rig: Rig, pasts: dict[str, Past], fed: int) -> Iterator[Comparison]:
    """Compare each stream; the growing stream of advisories was read at least up to `fed`."""
    yield compare(rig, PLAIN_RULES, pasts=pasts)
    yield compare(rig, SAMPLED_RULES, pasts=pasts, feed=FEED)
    yield compare(rig, replace(SAMPLED_RULES, stream=MIRROR), pasts=pasts, prefix=f"{MIRROR}.")
    yield compare(rig, replace(PLAIN_RULES, stream=FEED), pasts=pasts, target=CENTRE, until=fed)


def _configure(rig: Rig, clock_url: str, rulers: NatsServer, divided: DividedStreams) -> None:
    """Create the streams and the configuration."""
    for name in (PLAIN, SAMPLED, FEED):
        rig.create(name)
    config = {"name": MIRROR, "mirror": {"name": SAMPLED}, "allow_direct": True, "mirror_direct": True}
    answer = rig.api(f"STREAM.CREATE.{MIRROR}", config)
    assert "error" not in answer, answer
    rig.create(MIRROR, rig.target)
    rig.add(PLAIN, **COMMON)
    rig.add(SAMPLED, **COMMON, **TRACKED, advisory=ADVISORY)
    rig.add(MIRROR, **COMMON, **TRACKED, target_subject_prefix=MIRROR)
    rig.add(FEED, **COMMON, target_stream=CENTRE)
    rig.add_feed(CENTRE)
    add_steady_streams(rig, clock_url)
    add_ruled_streams(rig, rulers)
    divided.add()
    _write(rig)


def _write(rig: Rig) -> None:
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
        time.sleep(TICK_SECONDS)
