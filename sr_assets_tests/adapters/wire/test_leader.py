"""Reads from a cluster of three servers return the messages of the stream's leader."""

from collections.abc import Iterator

import pytest

from sr_assets.adapters.wire import Connection, read_confirmed, read_headers
from sr_assets.domain.positions import SequenceRange
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
        consumer = ""
        for direct in (True, False) * 4:
            leaders = {stream_leader(connection, name)}
            reading = read_confirmed(connection, name, WHOLE, direct=direct, max_bytes=30_000)
            sequences = []
            for number, messages in enumerate(reading):
                sequences += [message.sequence for message in messages]
                if number == 2:
                    consumer = next_consumer(connection, name, consumer)
                    # Query the consumer by name: the list of all omits members that respond late.
                    answer = connection.request(f"$JS.API.CONSUMER.INFO.{name}.{consumer}", {})
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
