"""Three servers that are one cluster: what the leader of a stream has counts, whichever server is asked."""

from collections.abc import Iterator

import pytest

from sr_assets.adapters.wire import Connection, read_confirmed, read_headers
from sr_assets.domain.positions import SequenceRange
from sr_assets_tests.adapters.wire.rig import Names, consumers, flat, made, outgoing, publish
from sr_assets_tests.nats_cluster import NatsCluster
from sr_assets_tests.rig import address

WHOLE = SequenceRange(1, 2001)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    with NatsCluster(tmp_path_factory.mktemp("cluster"), "leading") as started:
        yield started


@pytest.mark.process
@pytest.mark.parametrize("replicas", (1, 3))
def test_a_consumer_is_where_the_leader_is(cluster: NatsCluster, unique: Names, replicas: int) -> None:
    """The server places it at random: of eight times, all would be right by chance once in 6,561."""
    name = unique("LED")
    with Connection(address(cluster.servers[0])) as connection:
        made(connection, name, num_replicas=replicas)
        publish(connection, outgoing(name, 2000))
        leader = connection.request(f"$JS.API.STREAM.INFO.{name}", {})["cluster"]["leader"]
        purge = connection.request(f"$JS.API.STREAM.PURGE.{name}", {"filter": f"{name}.3"})
        there = [n for n in range(1, 2001) if n % 7 != 3]
        assert purge["purged"] == 2000 - len(there)
        for direct in (True, False) * 4:
            reading = read_confirmed(connection, name, WHOLE, direct=direct, max_bytes=30_000)
            sequences = []
            for number, messages in enumerate(reading):
                sequences += [message.sequence for message in messages]
                if number == 2:
                    # Not the list of all: a member that answers late is left out of it.
                    (consumer,) = connection.request(f"$JS.API.CONSUMER.NAMES.{name}", {})["consumers"]
                    answer = connection.request(f"$JS.API.CONSUMER.INFO.{name}.{consumer}", {})
                    assert answer["cluster"]["leader"] == leader
            assert number > 2
            assert sequences == there
        assert [message.sequence for message in flat(read_headers(connection, name, WHOLE))] == there
        assert consumers(connection, name) == 0
