"""The demo's configuration for any number of cities, its NATS servers and streams, linked by leafnodes.

Our user and the fleets' user have only their least permissions.
"""

import contextlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.domain.clusters import ClusterSettings, domain_api
from sr_assets.domain.errors import RunError
from sr_assets.domain.permissions import Action
from sr_assets.embedded.nats_server import HOST, NatsServer, free_port
from sr_assets.settings import Settings
from sr_assets.settings.permissions import Permission, needed_permissions
from sr_assets.stages.permissions import ask_servers, list_users, nats_blocks

CITIES: Final = (
    *("london", "paris", "berlin", "madrid", "rome", "vienna", "prague", "warsaw", "dublin", "lisbon"),
    *("oslo", "helsinki", "athens", "budapest", "brussels", "zagreb", "sofia", "riga", "vilnius", "tallinn"),
)
CENTRE: Final = "centre"
#: The name of the template, and of the file in the demo's folder.
FILE_NAME: Final = "demo.yaml"
_FEEDS_COMMENT: Final = "\n# The centre's view"


def configuration(cities: Sequence[str], home: Path, urls: Mapping[str, str]) -> str:
    """Return the template's text for these cities, with its last city's entries repeated for each further city.

    `urls` has the URLs of all cities' servers and of `centre`. The text contains them, so that other commands can use
    the file.
    """
    template = files("sr_assets").joinpath("conf", FILE_NAME).read_text(encoding="utf-8")
    head, first_line, rest = template.partition(f"  - name: {CITIES[1]}\n")
    rest, comment, feeds = rest.partition(_FEEDS_COMMENT)
    others = [city for city in cities if city != CITIES[0]]
    entries = [_of_city(first_line + rest, city) for city in others]
    # The centre's part has one line per city.
    centre = [
        _of_city(line, city)
        for line in feeds.splitlines(keepends=True)
        for city in (others if CITIES[1] in line else [CITIES[1]])
    ]
    text = "\n".join([head.rstrip("\n") + "\n", *entries]) + comment + "".join(centre)
    for name, url in urls.items():
        text = text.replace(f"${{SR_DEMO_{name.upper()}_URL}}", url)
    return text.replace("${SR_DEMO_HOME}", json.dumps(str(home), ensure_ascii=False)[1:-1])


def _of_city(text: str, city: str) -> str:
    """Return text about the template's last city for another city."""
    return text.replace(CITIES[1], city).replace(CITIES[1].upper(), city.upper())


#: The prefix of the nodes' subjects.
SUBJECT: Final = "choria.stream.input.registration"
_ADVISORY_SUBJECTS: Final = ["choria.stream.advisories.>", "sr_assets.observer_alive.>"]
_CITY_STREAMS: Final = {"CHORIA_REGISTRATION": [f"{SUBJECT}.>"], "CHORIA_ADVISORIES": _ADVISORY_SUBJECTS}
_CENTRE_STREAMS: Final = {"ADVISORIES": _ADVISORY_SUBJECTS}
#: Leafnodes must not forward messages published in a city; only copies reach the centre.
_NOT_FORWARDED: Final = '["choria.>", "sr_assets.>"]'
_LINK_SECONDS: Final = 30.0
_USER: Final = "sr-assets"
_FLEET: Final = "fleet"
_LEAF: Final = "leaf"


class DemoServers:
    """The running servers with their streams, linked; the stack stops them.

    Each server's name is its JetStream domain, through which the centre reaches a city. `restrict` takes all other
    permissions from the users. Raises RunError.
    """

    def __init__(self, folder: Path, cities: Sequence[str], stack: contextlib.ExitStack) -> None:
        self._cities = cities
        self._passwords = {user: secrets.token_hex(16) for user in (_USER, _FLEET, _LEAF)}
        self._links = self._configure_links(free_port())
        users = ", ".join(f"{{ user: {user}, password: {self._passwords[user]} }}" for user in (_USER, _FLEET))
        self._servers = {
            name: stack.enter_context(
                NatsServer(folder / name, name, domain=name, config=f"{link}\nauthorization {{ users: [ {users} ] }}")
            )
            for name, link in self._links.items()
        }
        for name in self._servers:
            with Cluster(self._login(name, _USER), "sr-assets demo") as cluster:
                for stream, subjects in (_CENTRE_STREAMS if name == CENTRE else _CITY_STREAMS).items():
                    if not cluster.stream_exists(stream):
                        cluster.create_stream({"name": stream, "subjects": subjects, "allow_direct": True})
        for city in cities:
            _await_link(self._login(CENTRE, _USER), city)

    @property
    def urls(self) -> dict[str, str]:
        """The URLs of our user, by name."""
        login = f"{_USER}:{self._passwords[_USER]}"
        return {name: f"nats://{login}@{server.address}" for name, server in self._servers.items()}

    def fleet(self, city: str) -> ClusterSettings:
        """Return the connection of a city's nodes."""
        return self._login(city, _FLEET)

    def restrict(self, settings: Settings) -> None:
        """Leave each user only the permissions that it needs, as `sr-assets permissions` prints them."""
        needs = needed_permissions(settings, ask_servers(settings))
        needs += [need for city in self._cities for need in _fleet_needs(self.fleet(city))]
        blocks = {
            address: nats_blocks([users], self._passwords)
            for users in list_users(needs)
            for address in users[0].servers
        }
        for name, server in self._servers.items():
            server.reload(f"{self._links[name]}\n{blocks[server.address]}")

    def _login(self, name: str, user: str) -> ClusterSettings:
        return ClusterSettings((self._servers[name].address,), user, self._passwords[user])

    def _configure_links(self, port: int) -> dict[str, str]:
        """Return the part of each server's configuration that links it."""
        login, password = f"user: {_LEAF}, password: {self._passwords[_LEAF]}", self._passwords[_LEAF]
        remote = f"url: nats://{_LEAF}:{password}@{HOST}:{port}, deny_imports: {_NOT_FORWARDED}, deny_exports: {_NOT_FORWARDED}"
        links = dict.fromkeys(self._cities, f"leafnodes {{ reconnect: 1, remotes: [ {{ {remote} }} ] }}")
        return {CENTRE: f"leafnodes {{ listen: {HOST}:{port}, authorization {{ {login} }} }}", **links}


def _fleet_needs(cluster: ClusterSettings) -> Iterator[Permission]:
    """Yield the permissions of the emulated nodes."""
    for action, subject, purpose in (
        (Action.PUBLISH, f"{SUBJECT}.>", "report"),
        (Action.PUBLISH, cluster.api("STREAM.NAMES"), "check that a stream takes the reports"),
        (Action.SUBSCRIBE, f"{cluster.inbox_prefix}.>", "receive acknowledgements"),
    ):
        yield Permission(cluster, "source", "the fleet", action, subject, purpose)


def _await_link(centre: ClusterSettings, city: str) -> None:
    """Wait until the centre reaches a city's JetStream."""
    settings = replace(centre, api_prefix=domain_api(city))
    deadline = times.monotonic() + _LINK_SECONDS
    with Cluster(settings, "sr-assets demo") as cluster:
        while True:
            try:
                cluster.request_api("INFO")
            except RunError:
                if times.monotonic() > deadline:
                    raise
                times.sleep(0.1)
            else:
                return
