"""What every test may ask for: real servers on loopback, and names nobody else uses. No fakes, no settings."""

import itertools
from collections.abc import Callable, Iterator

import pytest

from sr_assets.embedded.nats_server import NatsServer

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def nats_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NatsServer, NatsServer]]:
    """Two servers with JetStream: source, target. Shared by all tests: use `unique` names."""
    home = tmp_path_factory.mktemp("nats")
    with NatsServer(home / "source", "source") as source, NatsServer(home / "target", "target") as target:
        yield source, target


@pytest.fixture(scope="session")
def nats_server(nats_pair: tuple[NatsServer, NatsServer]) -> NatsServer:
    """One server with JetStream: the source of `nats_pair`. Shared by all tests: use `unique` names."""
    return nats_pair[0]


@pytest.fixture
def unique() -> Callable[[str], str]:
    """A function that makes a name no other test has, for streams and subjects: `unique("ORDERS")` → `ORDERS_17`."""

    def name(stem: str = "S") -> str:
        return f"{stem}_{next(_numbers)}"

    return name
