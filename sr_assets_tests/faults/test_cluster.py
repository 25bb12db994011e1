"""A cluster of three servers with three replicas of source and target: a leader is killed, or a follower lags.

No message is lost or duplicated. Copies keep their order if the writer is connected to the leader: a killed leader
keeps the start of a window, and the next attempt continues there. Through a follower, part of a window may be lost with
the old leader while later messages reach the new one; the lost part is resent after them and counted as disordered.
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

from sr_assets.adapters.copying import copier
from sr_assets.adapters.copying.copier import Copier
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.wire import Connection, WireError, read_confirmed, read_headers
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message, last_origin
from sr_assets.domain.positions import SequenceRange
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.settings import ClusterSettings
from sr_assets_tests.adapters.wire.rig import Names, create_stream, flat, outgoing, publish
from sr_assets_tests.faults.copying import copy_plan
from sr_assets_tests.nats_cluster import NatsCluster
from sr_assets_tests.rig import Rig, Sent, address, stop_process, wait_until

T = TypeVar("T")
_SECONDS = 240.0


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    with NatsCluster(tmp_path_factory.mktemp("cluster"), "trio") as started:
        yield started


@pytest.fixture
def cluster(shared_cluster: NatsCluster) -> Iterator[NatsCluster]:
    """The cluster; all its servers run again afterwards."""
    yield shared_cluster
    for server in shared_cluster.servers:
        server.start()
    shared_cluster.await_quorum()


def create_replicated(cluster: NatsCluster, name: str, subjects: str, count: int = 0) -> str:
    """Create a stream with three replicas, all of which have the same messages."""
    cluster.create(name, subjects)
    with Connection(address(cluster.servers[0])) as connection:
        fill(connection, name, count, size_bytes=300)
    cluster.await_replicas(name)
    return name


def fill(connection: Connection, name: str, last: int, size_bytes: int) -> None:
    """Publish until a stream has this last sequence.

    Publish in portions and repeat refused messages: a new leader is not yet known to all servers, and a leader with a
    stopped follower may refuse a fast publisher.
    """

    def is_full() -> bool:
        held = connection.request(f"$JS.API.STREAM.INFO.{name}", {})["state"]["last_seq"]
        if held < last:
            publish(connection, outgoing(name, min(2_000, last - held), first=held + 1, size_bytes=size_bytes))
        return bool(held >= last)

    wait_until(is_full, f"{last} messages in {name}", every=0.0)


def addresses_from(leader: NatsServer, cluster: NatsCluster) -> tuple[str, ...]:
    """Return all addresses of the cluster, this server's first."""
    return (leader.address, *(server.address for server in cluster.servers if server is not leader))


def copies_of(server: NatsServer, target: str) -> list[Message]:
    """Return all messages of a stream in order."""
    with Connection(address(server)) as connection:
        return retry(lambda: flat(read_confirmed(connection, target, SequenceRange(1, 1 << 40), direct=True)))


@contextmanager
def kill_during_copy(victim: NatsServer, survivor: NatsServer, target: str) -> Iterator[None]:
    """Kill a server with SIGKILL after about 2,000 of the 20,000 messages that the block copies into a target."""

    def kill() -> int:
        held = [0]

        def copied() -> bool:
            held.append(connection.request(f"$JS.API.STREAM.INFO.{target}", {})["state"]["last_seq"])
            return held[-1] >= 2_000

        with Connection(address(survivor)) as connection:
            wait_until(copied, f"2,000 messages in {target}", every=0.005)
        victim.kill()
        return held[-1]

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(kill)
        yield
        assert held.result() < 20_000, "killed too late"


@pytest.mark.parametrize(
    ("killed", "through"),
    (
        pytest.param("target", "leader", id="target", marks=pytest.mark.nightly),
        pytest.param("target", "follower", id="target_through_follower"),
        pytest.param("source", "leader", id="source", marks=pytest.mark.nightly),
    ),
)
def test_killed_leader_costs_only_another_attempt(
    cluster: NatsCluster, unique: Names, tmp_path: Path, killed: str, through: str
) -> None:
    name = unique("R")
    source = create_replicated(cluster, name, f"{name}.>", 20_000)
    target = create_replicated(cluster, f"{name}_T", f"to.{name}.>")
    victim = cluster.leader(target if killed == "target" else source)
    survivor = next(server for server in cluster.servers if server is not victim)
    settings = ClusterSettings(
        addresses_from(victim if through == "leader" else survivor, cluster), connect_timeout_seconds=2.0
    )
    plan = copy_plan(tmp_path, settings, source, target)
    with kill_during_copy(victim, survivor, target):
        receipt = retry(lambda: Copier(plan, dict.fromkeys(range(1, 20_001)), 0).run())
    assert (receipt.failure, receipt.missing, receipt.parked) == (None, [], [])
    assert receipt.copied == 20_000
    sequences = [origin.sequence for copy in copies_of(survivor, target) if (origin := last_origin(copy.headers))]
    assert sorted(sequences) == list(range(1, 20_001))
    backwards = sum(after < before for before, after in itertools.pairwise(sequences))
    assert receipt.disordered == backwards
    if (killed, through) != ("target", "follower"):
        assert backwards == 0


def retry(task: Callable[[], T]) -> T:
    """Retry as Spark and later runs do, until the task succeeds."""
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            return task()
        except WireError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def test_range_is_complete_from_a_lagging_follower(cluster: NatsCluster, unique: Names) -> None:
    """A stopped follower is read as soon as it resumes, before it has the messages stored meanwhile.

    After some seconds without its leader, it refuses requests for a moment, which are repeated.
    """
    name = unique("LAG")
    create_replicated(cluster, name, f"{name}.>", 100)
    leader, lagging = cluster.leader(name), cluster.followers(name)[0]
    all_sequences = SequenceRange(1, 20_101)
    with (
        Connection(address(leader)) as to_leader,
        Connection(address(lagging)) as direct_reader,
        Connection(address(lagging)) as header_reader,
        ThreadPoolExecutor(2) as pool,
    ):
        stop_process(lagging.pid)
        try:
            fill(to_leader, name, 20_100, size_bytes=500)
            others = flat(read_confirmed(to_leader, name, all_sequences, direct=True))
            reads = [
                pool.submit(retry, lambda: flat(read_confirmed(direct_reader, name, all_sequences, direct=True))),
                pool.submit(retry, lambda: flat(read_headers(header_reader, name, all_sequences))),
            ]
        finally:
            os.kill(lagging.pid, signal.SIGCONT)
        for read in (others, *(future.result() for future in reads)):
            assert [message.sequence for message in read] == list(range(1, 20_101))


def test_site_survives_the_death_of_its_stream_leader(engine_home: Path, cluster: NatsCluster, unique: Names) -> None:
    name = unique("SITE")
    plain = create_replicated(cluster, f"{name}_P", f"{name}_P.>")
    tracked = create_replicated(cluster, f"{name}_N", f"{name}_N.>")
    feed = create_replicated(cluster, f"{name}_F", f"{name}_F.>")
    for stream in (plain, tracked):
        create_replicated(cluster, f"{stream}_T", f"to.{stream}.>")
    victim = cluster.leader(f"{plain}_T")
    survivor = next(server for server in cluster.servers if server is not victim)
    rig = Rig(engine_home, survivor, survivor, unique)
    rig.publish(tracked, [Sent(json.dumps({"sender": f"n{n % 40}", "n": n}).encode()) for n in range(400)])
    urls = dict.fromkeys(("source_url", "target_url"), ",".join(addresses_from(victim, cluster)))
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
    with kill_during_copy(victim, survivor, f"{plain}_T"):
        run_until_success(rig)
    assert [copy.payload for copy in copies_of(survivor, f"{plain}_T")] == [b"%d" % n * 60 for n in range(20_000)]
    assert [json.loads(copy.payload)["n"] for copy in copies_of(survivor, f"{tracked}_T")] == list(range(40))
    advisories = copies_of(survivor, feed)
    assert len({advisory.headers for advisory in advisories}) == len(advisories) == 40
    rows = {row["stream"]: row for row in rig.rows("replication")}
    assert (rows[plain]["copied_messages"], rows[plain]["gap_messages"]) == (20_000, 0)
    assert (rows[tracked]["seen_messages"], rows[tracked]["copied_messages"]) == (400, 40)


def run_until_success(rig: Rig) -> None:
    """Run the site, again after each failure as the sensor would; each failure is one line."""
    wait_until(lambda: not failures_of_a_run(rig), "a run without a failure", every=0.0)


def failures_of_a_run(rig: Rig) -> list[str]:
    """Run the site; each failure is one line."""
    failures = [report.failure for report in rig.run().values() if report.failure]
    assert not any("\n" in failure or "Traceback" in failure for failure in failures), failures
    return failures


def test_follower_that_knows_no_leader_is_not_believed(rig: Rig, tmp_path: Path) -> None:
    """It answers with its own state: by it, the source would end before messages that were copied."""
    with NatsCluster(tmp_path, "quintet", size=5) as cluster:
        stream = rig.unique("BEHIND")
        create_replicated(cluster, stream, f"{stream}.>")
        leader, (other, behind) = cluster.leader(stream), cluster.followers(stream)
        rig.source = leader
        rig.add(stream, source_url=cluster.url, target_subject_prefix="copy", on_source_reset="recopy")
        rig.publish(stream, [Sent(b"%d" % n) for n in range(5)])
        cluster.await_replicas(stream)
        behind.stop()
        rig.publish(stream, [Sent(b"%d" % n) for n in range(5, 10)])
        run_until_success(rig)
        leader.kill()
        other.kill()
        # With the two that do not hold the stream, it can make decisions, but not lead the stream.
        behind.start()
        with Connection(address(behind)) as alone:
            wait_until(lambda: last_sequence(alone, stream) == 5, "the follower to answer")
            with pytest.raises(WireError, match="the stream has no leader"):
                alone.request_api(f"STREAM.INFO.{stream}")
        with Cluster(address(behind), "test") as alone_too:
            assert stream not in {info["config"]["name"] for info in alone_too.list_streams()}
        assert "the stream has no leader" in rig.failure()
        leader.start()
        other.start()
        cluster.await_replicas(stream)
        run_until_success(rig)
        assert [copy.payload for copy in rig.copies(stream)] == [b"%d" % n for n in range(10)]


def last_sequence(connection: Connection, stream: str) -> int | None:
    """Return a stream's last sequence in whatever answer comes, or None without a state."""
    try:
        answer = connection.request(f"$JS.API.STREAM.INFO.{stream}", {}, 1.0)
    except WireError:
        return None
    return answer["state"]["last_seq"] if "state" in answer else None


def test_stream_whose_server_is_offline_is_not_listed_as_empty(cluster: NatsCluster, unique: Names) -> None:
    name, kept = unique("OFFLINE"), create_replicated(cluster, unique("KEPT"), "kept.>")
    with Connection(address(cluster.servers[0])) as connection:
        create_stream(connection, name, num_replicas=1)
        publish(connection, outgoing(name, 10))
        leader = connection.request(f"$JS.API.STREAM.INFO.{name}", {})["cluster"]["leader"]
    holder, other, _ = sorted(cluster.servers, key=lambda server: server.name != leader)
    holder.stop()
    with Cluster(address(other), "test") as remaining:
        # The others learn of it within seconds, and the server that stopped may have led them.
        wait_until(
            lambda: missing(remaining) & {name, kept} == {name}, "only the stream without a server to be missing"
        )
        listed = {info["config"]["name"]: info["state"]["messages"] for info in remaining.list_streams()}
    assert (name in listed, kept in listed) == (False, True)


def missing(cluster: Cluster) -> set[str]:
    """Return the streams whose servers do not respond; none without a leader of the cluster."""
    try:
        return set(cluster.request_api("STREAM.LIST").get("missing") or ())
    except RunError:
        return set()


@pytest.mark.nightly
def test_leader_without_followers_proves_no_silence(rig: Rig, cluster: NatsCluster) -> None:
    """A leader in a minority answers for 20 s with an old end and its own clock, while nodes report to the next leader."""
    stream = rig.unique("QUIET")
    create_replicated(cluster, stream, f"{stream}.>")
    rig.source = cluster.leader(stream)
    rig.create(stream, rig.target)
    rig.add(stream, source_url=rig.source.url, inspect_field="sender", inspect_duration="1h", warn_duration="4s")
    followers = cluster.followers(stream)
    rig.drain()
    rig.publish(stream, [Sent(b'{"sender": "n%d"}' % node) for node in range(3)])
    try:
        # Immediately: later the leader would prove a real silence.
        for server in followers:
            stop_process(server.pid)
        stopped = time.monotonic()
        # Twice the silence that a node's timeout needs, with the margin of a watermark.
        while time.monotonic() < stopped + 12:
            # A leader that has stepped down refuses requests, so that a run may fail.
            failures_of_a_run(rig)
        assert rig.row("SELECT count(*) AS n FROM node_advisories WHERE event = 'timeout'")["n"] == 0
    finally:
        for server in followers:
            os.kill(server.pid, signal.SIGCONT)
    cluster.await_replicas(stream)
    last_ns = rig.info(stream).last_stored_ns
    rig.source = cluster.leader(stream)
    rig.await_clock(stream, (last_ns or 0) + 20 * 10**9)
    rig.drain(sensor={"interval": "5s"})
    rows = rig.rows(
        "SELECT node, event_ns - epoch_ns(last_seen) AS silence_ns FROM node_advisories"
        " JOIN node_availability USING (node) WHERE event = 'timeout' ORDER BY node"
    )
    assert [(row["node"], row["silence_ns"] // 10**9) for row in rows] == [("n0", 4), ("n1", 4), ("n2", 4)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "silent_seconds",
    (
        pytest.param(4.0, id="still_leader"),
        # Then it refuses copies, as the new leader's followers do after a kill.
        pytest.param(25.0, id="stepped_down"),
    ),
)
def test_leader_that_commits_nothing_loses_and_doubles_no_copy(
    rig: Rig, cluster: NatsCluster, monkeypatch: pytest.MonkeyPatch, silent_seconds: float
) -> None:
    """The target's leader answers requests, but acknowledges no copy; later it may commit those that it has appended."""
    monkeypatch.setattr(copier, "_ACK_SECONDS", 1.5)
    stream, target = rig.make(), rig.unique("TARGET")
    create_replicated(cluster, target, f"{target}.>")
    rig.target = cluster.leader(target)
    rig.add(stream, target_stream=target, target_url=rig.target.url, target_subject_prefix=target)
    rig.publish(stream, [Sent(b"%d" % n) for n in range(3)])
    rig.drain()
    rig.publish(stream, [Sent(b"%d" % n) for n in range(3, 40)])
    stopped, followers = time.monotonic(), cluster.followers(target)
    try:
        for server in followers:
            stop_process(server.pid)
        while time.monotonic() < stopped + silent_seconds:
            failure = rig.failure()
        assert "Traceback" not in failure
    finally:
        for server in followers:
            os.kill(server.pid, signal.SIGCONT)
    cluster.await_replicas(target)
    rig.target = cluster.leader(target)
    rig.entries[0]["target_url"] = rig.target.url
    rig.drain()
    assert sorted(int(copy.payload) for copy in rig.copies(target)) == list(range(40))
    counts = rig.row("SELECT copied_messages, parked_messages, gap_messages FROM replication")
    assert counts == {"copied_messages": 40, "parked_messages": 0, "gap_messages": 0}
