"""Two servers, `hub` and `city`, with a JetStream domain each and a leafnode link that tests can cut."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sr_assets.adapters.wire import Connection, WireError
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.embedded.nats_server import HOST
from sr_assets_tests.rig import wait_until
from sr_assets_tests.servers import NatsServer, free_port


class Linked:
    """The two servers; a client of the hub reaches the city's JetStream at `$JS.city.API` over the link."""

    def __init__(self, home: Path) -> None:
        port = free_port()
        self._home = home
        self.hub = self._server("hub", f"leafnodes {{ listen: {HOST}:{port} }}").start()
        remote = f"leafnodes {{ reconnect: 1, remotes: [ {{ url: nats://{HOST}:{port} }} ] }}"
        self.city = self._server("city", remote).start()

    @property
    def clusters(self) -> dict[str, dict[str, str]]:
        """Both servers in the form of `topology.clusters`."""
        return {"hub": {"url": self.hub.url, "domain": "hub"}, "city": {"url": self.city.url, "domain": "city"}}

    def cut(self) -> None:
        """Restart the city without the link; its streams stay."""
        port = self.city.port
        self.city.stop()
        self.city = self._server("city", "", port).start()

    def await_link(self) -> None:
        """Wait until the hub reaches the city's JetStream."""
        wait_until(
            lambda: ask(self.hub, "$JS.city.API.INFO", seconds=1.0).get("error") is None, "the leafnode to be linked"
        )

    def _server(self, domain: str, link: str, port: int = 0) -> NatsServer:
        return NatsServer(self._home / domain, domain, domain=domain, config=link, port=port)


@contextmanager
def linked(home: Path) -> Iterator[Linked]:
    """Run both servers, linked, within the block."""
    both = Linked(home)
    try:
        both.await_link()
        yield both
    finally:
        both.city.stop()
        both.hub.stop()


def ask(
    server: NatsServer, subject: str, body: dict[str, Any] | None = None, *, seconds: float = 30.0
) -> dict[str, Any]:
    """Send a request to a server and return its response, errors included."""
    try:
        with Connection(ClusterSettings((server.address,)), "test") as opened:
            return opened.request(subject, body or {}, seconds)
    except WireError as error:
        return {"error": str(error)}


def make(server: NatsServer, name: str, **config: Any) -> None:
    """Create a stream."""
    answer = ask(server, f"$JS.API.STREAM.CREATE.{name}", {"name": name, **config})
    assert "error" not in answer, answer


def publish(server: NatsServer, subject: str, count: int) -> None:
    """Publish messages and assert that each is stored."""
    with Connection(ClusterSettings((server.address,)), "test") as opened:
        for number in range(count):
            assert "seq" in opened.request(subject, {"n": number})
