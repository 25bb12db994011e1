"""Reads from a cluster of three servers return the messages of the stream's leader."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, cast

import pytest

from sr_assets.adapters.wire import Connection, WireError, read_confirmed, read_headers, reading
from sr_assets.domain.positions import SequenceRange
from sr_assets.settings import ClusterSettings
from sr_assets_tests.adapters.wire.rig import Names, consumer_count, create_stream, flat, outgoing, publish
from sr_assets_tests.nats_cluster import NatsCluster
from sr_assets_tests.rig import address, wait_until

WHOLE = SequenceRange(1, 2001)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    with NatsCluster(tmp_path_factory.mktemp("cluster"), "leading") as started:
        yield started


@pytest.mark.process
@pytest.mark.parametrize("replicas", (1, 3))
def test_read_creates_consumer_on_stream_leader(cluster: NatsCluster, unique: Names, replicas: int) -> None:
    """If the server placed the consumers at random, all eight would be correct once in 6,561 runs."""
    name = unique("LED")
    with Connection(address(cluster.servers[0])) as connection:
        create_stream(connection, name, num_replicas=replicas)
        publish(connection, outgoing(name, 2000))
        purge = connection.request(f"$JS.API.STREAM.PURGE.{name}", {"filter": f"{name}.3"})
        remaining = [n for n in range(1, 2001) if n % 7 != 3]
        assert purge["purged"] == 2000 - len(remaining)
        if replicas > 1:
            # A follower that lags behind the purge serves direct gets of a range without holes.
            cluster.await_replicas(name)
        newest = ""
        for direct in (True, False) * 4:
            leaders = {stream_leader(connection, name)}
            reading = read_confirmed(connection, name, WHOLE, direct=direct, max_bytes=30_000)
            sequences = []
            for number, messages in enumerate(reading):
                sequences += [message.sequence for message in messages]
                if number == 2:
                    newest = next_consumer(connection, name, newest)
                    # Query the consumer by name: the list of all omits members that respond late.
                    answer = connection.request(f"$JS.API.CONSUMER.INFO.{name}.{newest}", {})
                    # On a busy machine the stream may have elected another leader during the read.
                    assert answer["cluster"]["leader"] in leaders | {stream_leader(connection, name)}
            assert number > 2
            assert sequences == remaining
        assert [message.sequence for message in flat(read_headers(connection, name, WHOLE))] == remaining
        assert consumer_count(connection, name) == 0


def next_consumer(connection: Connection, stream: str, previous: str) -> str:
    """Return a stream's only consumer: the server that lists consumers may learn late of a new and of a deleted one."""
    wait_until(lambda: consumer_names(connection, stream) not in ([], [previous]), "the consumer to be listed")
    (consumer,) = consumer_names(connection, stream)
    return consumer


def consumer_names(connection: Connection, stream: str) -> list[str]:
    """Return the names of a stream's consumers."""
    return connection.request(f"$JS.API.CONSUMER.NAMES.{stream}", {})["consumers"] or []


def stream_leader(connection: Connection, stream: str) -> str:
    """Return the name of the server that leads a stream."""
    name: str = connection.request(f"$JS.API.STREAM.INFO.{stream}", {})["cluster"]["leader"]
    return name


@dataclass
class Placing:
    """A stand-in for a connection to a cluster: it records the deleted consumers and answers for the stream."""

    leaders: Iterator[str | None]
    address: str = "127.0.0.1:4222"
    cluster: ClusterSettings = field(default_factory=lambda: ClusterSettings(("a:1",)))
    deleted: int = 0

    def request(self, _subject: str, _body: dict[str, Any]) -> dict[str, Any]:
        """Return the stream's info."""
        leader = next(self.leaders)
        return {"cluster": {"replicas": [{"name": "x"}], **({"leader": leader} if leader else {})}}

    def check(self, _operation: str, answer: dict[str, Any]) -> dict[str, Any]:
        """Return an answer."""
        return answer


@dataclass
class Placed:
    """A stand-in for a consumer."""

    connection: Placing
    server: str | None
    clustered: bool = True

    def delete(self) -> None:
        """Count the deletion."""
        self.connection.deleted += 1


@pytest.mark.parametrize(
    ("servers", "leaders", "deleted"),
    (
        (["b"] * 400 + ["a"], repeat("a"), 400),
        (["a", "b", "c", "b"], chain("ccb", repeat("b")), 3),
        (["a", "a", "a"], chain([None, None], repeat("a")), 2),
        ([None, "a"], repeat("a"), 1),
    ),
    ids=["many followers", "another leader", "no leader of the stream", "no leader of the consumer"],
)
def test_consumer_is_placed_until_it_is_on_the_leader(
    monkeypatch: pytest.MonkeyPatch, servers: list[str | None], leaders: Iterator[str | None], deleted: int
) -> None:
    connection, names = Placing(leaders), iter(servers)
    monkeypatch.setattr(reading, "_create", lambda *_: Placed(connection, next(names)))
    placed = reading._create_on_leader(cast("Connection", connection), "S", {}, time.monotonic() + 30)
    assert (placed.server, connection.deleted) == (servers[deleted], deleted)


def test_consumer_on_a_follower_is_refused_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Placing(repeat("a"))
    monkeypatch.setattr(reading, "_create", lambda *_: Placed(connection, "b"))
    with pytest.raises(WireError, match="no consumer was placed on the stream's leader in time"):
        reading._create_on_leader(cast("Connection", connection), "S", {}, time.monotonic())
    assert connection.deleted == 1
