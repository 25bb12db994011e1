"""Three servers that are one cluster, source and target in three copies: a leader is killed, a follower lags.

What holds then: nothing is lost and nothing stands there twice. In order where the leader itself is asked: what it has left of
a window when it is killed is its beginning, and the next attempt goes on from there. A server between may lose some of a window
with the old leader and bring the rest to the new one: those are sent again behind it, and counted.
"""

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from sr_assets.adapters.copying.copier import Copier
from sr_assets.adapters.wire import Connection, WireError, read_confirmed, read_headers
from sr_assets.domain.messages import Message, last_origin
from sr_assets.domain.positions import SequenceRange
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.settings import ClusterSettings
from sr_assets_tests.adapters.wire.rig import Names, flat, outgoing, publish
from sr_assets_tests.faults.copying import copy_plan
from sr_assets_tests.nats_cluster import NatsCluster
from sr_assets_tests.rig import Rig, Sent, address, stop_process

T = TypeVar("T")
_SECONDS = 240.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    with NatsCluster(tmp_path_factory.mktemp("cluster"), "trio") as started:
        yield started


@pytest.fixture
def cluster(shared: NatsCluster) -> Iterator[NatsCluster]:
    """The cluster, with all its servers again afterwards."""
    yield shared
    for server in shared.servers:
        server.start()
    shared.await_quorum()


def replicated(cluster: NatsCluster, name: str, subjects: str, count: int = 0) -> str:
    """Make a stream in three copies, with some messages that all of them have."""
    cluster.create(name, subjects)
    with Connection(address(cluster.servers[0])) as connection:
        fill(connection, name, count, size_bytes=300)
    cluster.await_replicas(name)
    return name


def fill(connection: Connection, name: str, last: int, size_bytes: int) -> None:
    """Publish until a stream's last sequence is this.

    In portions, and again what was refused: a leader just elected is not yet known to all, one with a member that stands
    still may refuse what comes too fast.
    """
    deadline = time.monotonic() + _SECONDS
    while (held := connection.request(f"$JS.API.STREAM.INFO.{name}", {})["state"]["last_seq"]) < last:
        assert time.monotonic() < deadline, f"{name} holds {held}"
        publish(connection, outgoing(name, min(2_000, last - held), first=held + 1, size_bytes=size_bytes))


def first(leader: NatsServer, cluster: NatsCluster) -> tuple[str, ...]:
    """All addresses, one of them before the others."""
    return (leader.address, *(server.address for server in cluster.servers if server is not leader))


def copied(server: NatsServer, target: str) -> list[Message]:
    """Everything a stream holds, in its order."""
    with Connection(address(server)) as connection:
        return attempts(lambda: flat(read_confirmed(connection, target, SequenceRange(1, 1 << 40), direct=True)))


@contextmanager
def killing(victim: NatsServer, survivor: NatsServer, target: str) -> Iterator[None]:
    """Kill a server, by SIGKILL, in the middle of what `with` copies into a target: of 20,000 messages, 2,000 or a few more."""

    def kill() -> int:
        deadline, held = time.monotonic() + _SECONDS, 0
        with Connection(address(survivor)) as connection:
            while held < 2_000:
                assert time.monotonic() < deadline, f"{target} holds {held}"
                time.sleep(0.005)
                held = connection.request(f"$JS.API.STREAM.INFO.{target}", {})["state"]["last_seq"]
        victim.kill()
        return held

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(kill)
        yield
        assert held.result() < 20_000, "killed too late"


@pytest.mark.parametrize(
    ("killed", "through"),
    (("target", "leader"), ("target", "follower"), ("source", "leader")),
    ids=("target", "target, not asked", "source"),
)
def test_a_leader_killed_in_the_middle_of_a_batch_costs_nothing_but_another_attempt(
    cluster: NatsCluster, unique: Names, tmp_path: Path, killed: str, through: str
) -> None:
    name = unique("R")
    source = replicated(cluster, name, f"{name}.>", 20_000)
    target = replicated(cluster, f"{name}_T", f"to.{name}.>")
    victim = cluster.leader(target if killed == "target" else source)
    survivor = next(server for server in cluster.servers if server is not victim)
    settings = ClusterSettings(first(victim if through == "leader" else survivor, cluster), connect_timeout_seconds=2.0)
    plan = copy_plan(tmp_path, settings, source, target)
    with killing(victim, survivor, target):
        receipt = attempts(lambda: Copier(plan, dict.fromkeys(range(1, 20_001)), 0).run())
    assert (receipt.failure, receipt.missing, receipt.parked) == (None, [], [])
    assert receipt.copied == 20_000
    stands = [origin.sequence for copy in copied(survivor, target) if (origin := last_origin(copy.headers))]
    assert sorted(stands) == list(range(1, 20_001))
    backwards = sum(after < before for before, after in itertools.pairwise(stands))
    assert receipt.disordered == backwards
    if (killed, through) != ("target", "follower"):
        assert backwards == 0


def attempts(task: Callable[[], T]) -> T:
    """Try again as Spark does, and the next run after it, until nothing is in the way."""
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            return task()
        except WireError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def test_a_range_is_whole_although_the_follower_that_is_asked_lags(cluster: NatsCluster, unique: Names) -> None:
    """A follower that was stopped is asked as soon as it goes on, before it can know what was stored meanwhile."""
    name = unique("LAG")
    replicated(cluster, name, f"{name}.>", 100)
    leader, lagging = cluster.leader(name), cluster.followers(name)[0]
    whole = SequenceRange(1, 20_101)
    with (
        Connection(address(leader)) as writing,
        Connection(address(lagging)) as directly,
        Connection(address(lagging)) as looking,
        ThreadPoolExecutor(2) as pool,
    ):
        stop_process(lagging.pid)
        try:
            fill(writing, name, 20_100, size_bytes=500)
            others = flat(read_confirmed(writing, name, whole, direct=True))
            reads = [
                pool.submit(flat, read_confirmed(directly, name, whole, direct=True)),
                pool.submit(flat, read_headers(looking, name, whole)),
            ]
        finally:
            os.kill(lagging.pid, signal.SIGCONT)
        for read in (others, *(future.result() for future in reads)):
            assert [message.sequence for message in read] == list(range(1, 20_101))


def test_a_whole_site_outlives_the_leader_of_its_streams(
    engine_home: Path, cluster: NatsCluster, unique: Names
) -> None:
    name = unique("SITE")
    plain = replicated(cluster, f"{name}_P", f"{name}_P.>")
    tracked = replicated(cluster, f"{name}_N", f"{name}_N.>")
    feed = replicated(cluster, f"{name}_F", f"{name}_F.>")
    for stream in (plain, tracked):
        replicated(cluster, f"{stream}_T", f"to.{stream}.>")
    victim = cluster.leader(f"{plain}_T")
    survivor = next(server for server in cluster.servers if server is not victim)
    rig = Rig(engine_home, survivor, survivor, unique)
    rig.publish(tracked, [Sent(json.dumps({"sender": f"n{n % 40}", "n": n}).encode()) for n in range(400)])
    urls = dict.fromkeys(("source_url", "target_url"), ",".join(first(victim, cluster)))
    rig.add(plain, target_stream=f"{plain}_T", target_subject_prefix="to", **urls)
    rig.add(
        tracked,
        target_stream=f"{tracked}_T",
        target_subject_prefix="to",
        inspect_field="sender",
        inspect_duration="10m",
        advisory={"subject": f"{feed}.%s.%v", "reliable": True},
        **urls,
    )
    rig.publish(plain, [Sent(b"%d" % n * 60) for n in range(20_000)])
    with killing(victim, survivor, f"{plain}_T"):
        runs(rig)
    assert [copy.payload for copy in copied(survivor, f"{plain}_T")] == [b"%d" % n * 60 for n in range(20_000)]
    assert [json.loads(copy.payload)["n"] for copy in copied(survivor, f"{tracked}_T")] == list(range(40))
    advisories = copied(survivor, feed)
    assert len({advisory.headers for advisory in advisories}) == len(advisories) == 40
    rows = {row["stream"]: row for row in rig.rows("replication")}
    assert (rows[plain]["copied_messages"], rows[plain]["gap_messages"]) == (20_000, 0)
    assert (rows[tracked]["seen_messages"], rows[tracked]["copied_messages"]) == (400, 40)


def runs(rig: Rig) -> None:
    """Run the site, and once more after each failure, as the sensor does; each is one line."""
    deadline = time.monotonic() + _SECONDS
    while failures := [report.failure for report in rig.run().values() if report.failure]:
        assert not any("\n" in failure or "Traceback" in failure for failure in failures), failures
        assert time.monotonic() < deadline, failures
