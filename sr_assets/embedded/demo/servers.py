"""The demo's NATS servers and streams: one server per city and one for the centre, linked by leafnodes."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.domain.clusters import ClusterSettings, domain_api
from sr_assets.domain.errors import RunError
from sr_assets.embedded.demo.configuration import CENTRE
from sr_assets.embedded.nats_server import HOST, NatsServer, free_port

#: The prefix of the nodes' subjects.
SUBJECT: Final = "choria.stream.input.registration"
_ADVISORY_SUBJECTS: Final = ["choria.stream.advisories.>", "sr_assets.observer_alive.>"]
_CITY_STREAMS: Final = {"CHORIA_REGISTRATION": [f"{SUBJECT}.>"], "CHORIA_ADVISORIES": _ADVISORY_SUBJECTS}
_CENTRE_STREAMS: Final = {"ADVISORIES": _ADVISORY_SUBJECTS}
#: Leafnodes must not forward messages published in a city; only copies reach the centre.
_NOT_FORWARDED: Final = '["choria.>", "sr_assets.>"]'
_LINK_SECONDS: Final = 30.0


def start_servers(folder: Path, cities: Sequence[str], stack: contextlib.ExitStack) -> dict[str, str]:
    """Start every server with its streams and wait for the links; returns the URLs by name. The stack stops the servers.

    Each server's name is its JetStream domain, through which the centre reaches a city. Raises RunError.
    """
    port = free_port()
    remote = f"url: nats://{HOST}:{port}, deny_imports: {_NOT_FORWARDED}, deny_exports: {_NOT_FORWARDED}"
    links = dict.fromkeys(cities, f"leafnodes {{ reconnect: 1, remotes: [ {{ {remote} }} ] }}")
    servers = {
        name: stack.enter_context(NatsServer(folder / name, name, domain=name, config=link))
        for name, link in {CENTRE: f"leafnodes {{ listen: {HOST}:{port} }}", **links}.items()
    }
    for name, server in servers.items():
        with Cluster(ClusterSettings((server.address,)), "sr-assets demo") as cluster:
            for stream, subjects in (_CENTRE_STREAMS if name == CENTRE else _CITY_STREAMS).items():
                if not cluster.stream_exists(stream):
                    cluster.create_stream({"name": stream, "subjects": subjects, "allow_direct": True})
    for city in cities:
        _await_link(servers[CENTRE], city)
    return {name: server.url for name, server in servers.items()}


def _await_link(centre: NatsServer, city: str) -> None:
    """Wait until the centre reaches a city's JetStream."""
    settings = replace(ClusterSettings((centre.address,)), api_prefix=domain_api(city))
    deadline = time.monotonic() + _LINK_SECONDS
    with Cluster(settings, "sr-assets demo") as cluster:
        while True:
            try:
                cluster.request_api("INFO")
            except RunError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return
