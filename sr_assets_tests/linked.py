"""Two servers with a JetStream domain each, linked by a leafnode that can be cut: `hub` and `city`.

Not here: streams and what is done to them (the tests), a cluster of servers (`nats_cluster`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sr_assets.adapters.wire import Connection, WireError
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.embedded.nats_server import HOST, NatsServer, free_port
from sr_assets_tests.rig import wait_until


class Linked:
    """The two servers; a user of the hub asks the city's JetStream at `$JS.city.API`, as long as the link stands."""

    def __init__(self, home: Path) -> None:
        port = free_port()
        self._home = home
        self.hub = self._server("hub", f"leafnodes {{ listen: {HOST}:{port} }}").start()
        remote = f"leafnodes {{ reconnect: 1, remotes: [ {{ url: nats://{HOST}:{port} }} ] }}"
        self.city = self._server("city", remote).start()

    @property
    def clusters(self) -> dict[str, dict[str, str]]:
        """Both as `topology.clusters` has them."""
        return {"hub": {"url": self.hub.url, "domain": "hub"}, "city": {"url": self.city.url, "domain": "city"}}

    def cut(self) -> None:
        """Start the city again without its link; its streams are as they were."""
        port = self.city.port
        self.city.stop()
        self.city = self._server("city", "", port).start()

    def await_link(self) -> None:
        """Wait until the hub can ask the city's JetStream."""
        wait_until(lambda: ask(self.hub, "$JS.city.API.INFO").get("error") is None, "the leafnode to be linked")

    def _server(self, domain: str, link: str, port: int = 0) -> NatsServer:
        return NatsServer(self._home / domain, domain, domain=domain, config=link, port=port)


@contextmanager
def linked(home: Path) -> Iterator[Linked]:
    """Start both servers, linked, and stop them at the end of `with`."""
    both = Linked(home)
    try:
        both.await_link()
        yield both
    finally:
        both.city.stop()
        both.hub.stop()


def ask(server: NatsServer, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask a server; returns the answer, errors included."""
    try:
        with Connection(ClusterSettings((server.address,)), "test") as opened:
            return opened.request(subject, body or {}, 1.0)
    except WireError as error:
        return {"error": str(error)}


def make(server: NatsServer, name: str, **config: Any) -> None:
    """Create a stream by hand."""
    answer = ask(server, f"$JS.API.STREAM.CREATE.{name}", {"name": name, **config})
    assert "error" not in answer, answer


def publish(server: NatsServer, subject: str, count: int) -> None:
    """Publish messages, and see each stored."""
    with Connection(ClusterSettings((server.address,)), "test") as opened:
        for number in range(count):
            assert "seq" in opened.request(subject, {"n": number})
