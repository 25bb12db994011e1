"""Fixtures of the wire tests: a connection to a real server, and a new stream for each test."""

from collections.abc import Iterator

import pytest

from sr_assets.adapters.wire import Connection
from sr_assets.embedded.nats_server import NatsServer
from sr_assets_tests.adapters.wire.rig import Names, create_stream
from sr_assets_tests.rig import address


@pytest.fixture
def connection(nats_server: NatsServer) -> Iterator[Connection]:
    with Connection(address(nats_server)) as opened:
        yield opened


@pytest.fixture
def stream(connection: Connection, unique: Names) -> str:
    return create_stream(connection, unique("WIRE"))
