"""A soak of two members: two homes of one site take turns while random faults hit the leader.

Three streams and a feed: a plain stream, a sampled one, and its advisories, which are copied to the target and folded
there by the feed. The keys of the election are in both clusters, checkpoints in the source. One member's clock is wrong
by an hour.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.spark.engine import stop_engine
from sr_assets.embedded.nats_server import NatsServer
from sr_assets_bench.comparison.feeds import compare_feed
from sr_assets_bench.comparison.streams import Comparison, compare
from sr_assets_bench.soak.member_faults import MemberGremlin
from sr_assets_bench.soak.members import Member, Terms
from sr_assets_bench.soak.partition import Network
from sr_assets_bench.soak.streams import (
    ADVISORY,
    CENTRE,
    COMMON,
    FEED,
    PLAIN,
    PLAIN_RULES,
    SAMPLED,
    SAMPLED_RULES,
    TRACKED,
    fleets_of,
)
from sr_assets_bench.soak.verdict import TICK_SECONDS, Verdict
from sr_assets_tests.members import bucket_config, elected
from sr_assets_tests.rig import Rig, Sent, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_BUCKET: Final = "ELECTION"
_TTL_SECONDS: Final = 2.0
_STORE: Final = f"OBJ_{_BUCKET}_STATE"
_CLOCK_SECONDS: Final = 3600
#: The smallest duplicate window that `check` accepts.
_WINDOW_NS: Final = int(2 * _TTL_SECONDS * 1e9)
_LAST_TTL_SECONDS: Final = 30.0
#: Work that is done again after each fail-over must not keep the members behind.
_SLOWER: Final = 3.0
_BEGIN_SECONDS: Final = 300.0
#: A soak that waits for fail-overs or messages ends after so many times its duration, or after this time.
_LATEST: Final = 3.0
_LATEST_SECONDS: Final = 300.0


def soak_members(home: Path, seed: int, seconds: float, messages: int, fail_overs: int) -> Verdict:
    """Run a fleet, two members and faults for a time, then compare; stop all started processes.

    It continues until `messages` messages were read and `fail_overs` counted, up to three times as long.
    """
    latest = max(_LATEST * seconds, _LATEST_SECONDS)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(NatsServer(home / "source", "source"))
        target = stack.enter_context(NatsServer(home / "target", "target"))
        members = [_member(stack, home, name, source, target, seed) for name in ("a", "b")]
        rig = members[0].rig
        _create(rig)
        terms = stack.enter_context(Terms(members))
        _begin(members, terms)
        chance = random.Random(f"{seed} members")
        gremlin = MemberGremlin(members, terms, bucket_config(_BUCKET, _TTL_SECONDS), _STORE, chance, seconds)
        stack.callback(gremlin.heal)
        fleets = [stack.enter_context(fleet) for fleet in fleets_of(seed, source, _SLOWER)]
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < seconds or (
            elapsed < latest and (terms.fail_overs < fail_overs or _read(members) < messages)
        ):
            for member in members:
                member.tend()
            gremlin.tend()
            time.sleep(TICK_SECONDS)
        gremlin.heal()
        for fleet in fleets:
            fleet.stop()
        for member in members:
            member.operator.finish()
        last = chance.choice(members)
        _lengthen_ttl(rig)
        drained = last.operator.drain()
        ends = rig.info(FEED).last_sequence, rig.info(CENTRE, target).last_sequence
        # The advisories of the first one are copied to the centre; the second one folds them.
        drained = drained and last.operator.drain()
        compared = list(_compare(last.rig, ends[0])) if drained else []
        views = list(compare_feed(last.rig, CENTRE, target, ends[1])) if drained else []
    complaints = [each for member in members for each in member.operator.complaints]
    if terms.fail_overs < fail_overs:
        complaints.append(f"{terms.fail_overs} fail-overs of {fail_overs} within {elapsed:.0f} s")
    runs = Counter({f"{end} {member.name}": count for member in members for end, count in member.operator.ends.items()})
    counts = {"fail_overs": terms.fail_overs, "restored": sum(map(_restored, members))}
    return Verdict(seed, seconds, runs, gremlin.faults, counts, compared, [*views, *terms.doubles], complaints)


def _member(
    stack: contextlib.ExitStack, home: Path, name: str, source: NatsServer, target: NatsServer, seed: int
) -> Member:
    """Return a member with a home of its own; the clock of `b` is wrong."""
    folder = home / name
    folder.mkdir()
    rig = Rig(folder, source, target, str)
    networks = {each.name: stack.enter_context(Network(each, _TTL_SECONDS)) for each in (source, target)}
    urls = {"source_url": networks["source"].url, "target_url": networks["target"].url}
    rig.add(PLAIN, **COMMON, **urls)
    rig.add(SAMPLED, **COMMON, **TRACKED, **urls, advisory=ADVISORY)
    rig.add(FEED, **COMMON, **urls, target_stream=CENTRE)
    rig.add_feed(CENTRE, url=networks["target"].url)
    error = random.Random(f"{seed} clock").choice((-_CLOCK_SECONDS, _CLOCK_SECONDS)) if name == "b" else 0
    # Without Spark, because the start of two engines would take longer than most terms.
    keys: dict[str, Any] = {"sensor": {"interval": "2s"}, "run_budget": "20s", "spark": {"from_messages": 10_000}}
    member = Member(name, rig, networks, {**keys, **elected(name, _BUCKET)}, error)
    stack.callback(stop_engine, rig.home)
    stack.callback(member.operator.kill)
    return member


def _create(rig: Rig) -> None:
    """Create the buckets, the sources and the targets, with the shortest possible duplicate windows."""
    for server in (rig.source, rig.target):
        answer = rig.api(f"STREAM.CREATE.KV_{_BUCKET}", bucket_config(_BUCKET, _TTL_SECONDS), server)
        assert "error" not in answer, answer
    for name in (PLAIN, SAMPLED):
        rig.create(name)
        rig.create(name, rig.target, duplicate_window=_WINDOW_NS)
    rig.create(FEED, duplicate_window=_WINDOW_NS)
    rig.create(CENTRE, rig.target, subjects=[f"{FEED}.>"], duplicate_window=_WINDOW_NS)
    rig.publish(PLAIN, [Sent(b"the first")])


def _lengthen_ttl(rig: Rig) -> None:
    """Lengthen the TTL, so that the last runs keep the lease on a busy machine."""
    for server in (rig.source, rig.target):
        answer = rig.api(f"STREAM.UPDATE.KV_{_BUCKET}", bucket_config(_BUCKET, _LAST_TTL_SECONDS), server)
        assert "error" not in answer, answer


def _begin(members: list[Member], terms: Terms) -> None:
    """Wait until a member leads and has published tables, and the other stands by."""

    def ready() -> bool:
        for member in members:
            member.tend()
        return terms.leader is not None and all(
            member.stands_by and (member is not terms.leader or (member.rig.home / "fleet.duckdb").exists())
            for member in members
        )

    wait_until(ready, "a leader with tables and a follower", _BEGIN_SECONDS)


def _read(members: list[Member]) -> int:
    return max(sum(member.progress.positions().values()) for member in members)


def _compare(rig: Rig, fed: int) -> Iterator[Comparison]:
    """Compare each stream; the growing stream of advisories was read at least up to `fed`."""
    yield compare(rig, PLAIN_RULES, whole_history=False)
    yield compare(rig, SAMPLED_RULES, feed=FEED, whole_history=False)
    yield compare(rig, replace(PLAIN_RULES, stream=FEED), target=CENTRE, until=fed, whole_history=False)


def _restored(member: Member) -> int:
    return (member.rig.home / "runs.log").read_text(errors="replace").count(": restored the checkpoint of ")
