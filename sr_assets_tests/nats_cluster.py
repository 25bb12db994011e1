"""A JetStream cluster of nats-servers on loopback, for tests that kill or stop servers."""

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sr_assets.adapters.jetstream import STREAM_NOT_FOUND, encode_json
from sr_assets.adapters.wire import Connection, WireError
from sr_assets.adapters.wire.frames import encode_pub
from sr_assets.embedded.nats_server import HOST
from sr_assets.settings import ClusterSettings
from sr_assets_tests.rig import wait_until
from sr_assets_tests.servers import NatsServer, free_port


class NatsCluster:
    """A cluster of servers inside `with`, which starts when a stream with three replicas can be created."""

    def __init__(self, home: Path, name: str, *, size: int = 3, binary: Path | None = None) -> None:
        routes = [free_port() for _ in range(size)]
        urls = ", ".join(f"nats://{HOST}:{port}" for port in routes)
        self.servers = [
            NatsServer(
                home / f"{name}-{number}",
                f"{name}-{number}",
                binary=binary,
                config=f"cluster {{ name: {name}, listen: {HOST}:{port}, routes: [{urls}] }}",
            )
            for number, port in enumerate(routes, 1)
        ]
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server)
            self.await_quorum()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """All servers, in the syntax of the configuration."""
        return ",".join(server.url for server in self.servers)

    def leader(self, stream: str) -> NatsServer:
        """Return the server that leads a stream."""
        name = self._cluster_info(stream)["leader"]
        return next(server for server in self.servers if server.name == name)

    def followers(self, stream: str) -> list[NatsServer]:
        """Return the servers that hold a stream and do not lead it."""
        names = {replica["name"] for replica in self._cluster_info(stream)["replicas"]}
        return [server for server in self.servers if server.name in names]

    def await_replicas(self, stream: str) -> None:
        """Wait until a stream has a leader and up-to-date followers."""

        def caught_up() -> bool:
            return all(replica.get("current") for replica in self._cluster_info(stream)["replicas"])

        wait_until(caught_up, f"the replicas of {stream}", every=0.05)

    def create(self, stream: str, subjects: str) -> None:
        """Create a stream with three replicas, as soon as enough servers are available.

        A restarted server accepts clients before the leader that places streams knows it.
        """
        config = {"name": stream, "subjects": [subjects], "num_replicas": 3, "allow_direct": True}
        request = f"STREAM.CREATE.{stream}"
        wait_until(lambda: "config" in _ask(self.servers[0], request, config), f"the creation of {stream}", every=0.1)

    def await_quorum(self) -> None:
        """Wait until the servers have connected and can store a stream with three replicas."""
        self.create("PROBE", "probe")

        def deleted() -> bool:
            answer = _ask(self.servers[0], "STREAM.DELETE.PROBE")
            # The response to a first request may have come too late.
            return bool(answer.get("success")) or (answer.get("error") or {}).get("err_code") == STREAM_NOT_FOUND

        wait_until(deleted, "the cluster to stay together", every=0.1)

    def _cluster_info(self, stream: str) -> dict[str, Any]:
        """Return the first server's information about a stream's leader and replicas."""
        led = list[dict[str, Any]]()

        def ask_all() -> bool:
            for server in self.servers:
                cluster = _ask(server, f"STREAM.INFO.{stream}").get("cluster") or {}
                if cluster.get("leader") and cluster.get("replicas"):
                    led.append(cluster)
            return bool(led)

        wait_until(ask_all, f"a leader of {stream}", every=0.05)
        return led[0]


def _ask(server: NatsServer, request: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send a JetStream request to one server; return its response, or an empty one without a response: without a leader
    there is none.
    """
    if not server.running:
        return {}
    try:
        with Connection(ClusterSettings((server.address,), connect_timeout_seconds=1.0)) as connection:
            inbox = connection.new_inbox()
            connection.send(encode_pub(f"$JS.API.{request}", inbox, b"", encode_json(body) if body else b""))
            answers = [answer for answer in connection.receive(1.0) if answer.status is None]
            return dict(json.loads(answers[0].payload)) if answers else {}
    except WireError:
        return {}
