"""The example `conf/three-tiers`, end to end on real servers: two cities, their region and the centre, in fast motion."""

import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.adapters.wire import Outgoing, Publisher, read_confirmed
from sr_assets.domain.messages import SOURCE_HEADER, Message, header_values, parse_origin
from sr_assets.domain.positions import SequenceRange
from sr_assets.settings import Settings, load_settings, parse_duration
from sr_assets.stages.report import Stage
from sr_assets.stages.run import run_site
from sr_assets.stages.site import Site
from sr_assets_tests.rig import Command, cluster, connection, in_background, wait_until
from sr_assets_tests.servers import NatsServer

EXAMPLE = Path(__file__).parent.parent / "conf" / "three-tiers"
#: Every duration of the files is divided by this.
FASTER = 100
#: Replicator → file and changes that make the example's London another city.
TIERS: dict[str, tuple[str, dict[str, str]]] = {
    "LONDON": ("city", {}),
    "PARIS": ("city", {"LONDON": "PARIS", "london": "paris", ".ldn.": ".par."}),
    "EUROPE": ("region", {}),
    "CENTRE": ("centre", {}),
}
SERVERS = ("broker.ldn", "nats.ldn", "broker.par", "nats.par", "nats.europe", "nats.centre")
REGISTRATION, ADVISORIES = "CHORIA_REGISTRATION", "CHORIA_ADVISORIES"
SUBJECT = "choria.stream.input.registration"
REPORT_SECONDS = 60 / FASTER
NODES = {city: [f"{role}.{city}.example.net" for role in ("web", "db", "log")] for city in ("ldn", "par")}
_DURATION = re.compile(r"(?<=_duration: )\w+")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[dict[str, NatsServer]]:
    """The servers of the example, with the streams that its operators create."""
    with ExitStack() as stack:
        started = {name: stack.enter_context(NatsServer(tmp_path / name, name)) for name in SERVERS}
        for city in NODES:
            with cluster(started[f"broker.{city}"]) as broker, cluster(started[f"nats.{city}"]) as nats:
                broker.create_stream({"name": REGISTRATION, "subjects": [f"{SUBJECT}.>"], "allow_direct": True})
                subjects = ["choria.stream.advisories.>", "sr_assets.observer_alive.>"]
                nats.create_stream({"name": ADVISORIES, "subjects": subjects, "allow_direct": True})
        yield started


@pytest.fixture
def tiers(tmp_path: Path, servers: dict[str, NatsServer]) -> dict[str, Settings]:
    """The settings of each tier's host: the example's files with these servers and shorter durations."""
    tiers = {}
    for host, (name, changes) in TIERS.items():
        text = (EXAMPLE / f"{name}.yaml").read_text()
        for old, new in changes.items():
            text = text.replace(old, new)
        for server_name, server in servers.items():
            text = text.replace(f"nats://{server_name}.example.net:4222", server.url)
        text = text.replace("# state_store: /var/lib/sr-assets", f"state_store: {tmp_path / host}")
        text = _DURATION.sub(lambda match: f"{parse_duration(match[0]) // 1_000_000 // FASTER}ms", text)
        assert "example.net" not in text
        file = tmp_path / f"{host}.yaml"
        file.write_text(text)
        tiers[host] = load_settings(file, {})
    return tiers


class Fleet:
    """The nodes of both cities, which report until they are silenced."""

    def __init__(self, servers: dict[str, NatsServer]) -> None:
        self.silent: set[str] = set()
        self._servers = servers

    def report(self) -> None:
        """Publish one report of each node that is not silenced."""
        for city, nodes in NODES.items():
            bodies = {node: json.dumps({"sender": node}).encode() for node in nodes if node not in self.silent}
            items = [Outgoing(n, f"{SUBJECT}.{node}", b"", body) for n, (node, body) in enumerate(bodies.items(), 1)]
            with connection(self._servers[f"broker.{city}"]) as opened:
                assert all(ack.error is None for ack in Publisher(opened).publish_all(items))

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report at the example's rate within the block, from a thread."""
        ended = threading.Event()

        def work() -> None:
            while not ended.wait(REPORT_SECONDS):
                self.report()

        with in_background(work):
            try:
                yield
            finally:
                ended.set()


def drain(tiers: dict[str, Settings]) -> None:
    """Drain every site from the cities upwards, nodes before advisories, so that one round reaches the centre."""
    for host, settings in tiers.items():
        for site in settings.sites:
            with Site(settings, site, owner="test", run_id="test", wait_seconds=0) as opened:
                for tracked in (True, False):
                    streams = [entry.stream for entry in opened.entries if entry.tracked is tracked]
                    reports = run_site(opened, {stream: frozenset(Stage) for stream in streams}, drain_only=True)
                    assert [report.failure for report in reports.values() if report.failure] == [], host


def rows(settings: Settings, query: str) -> list[tuple[Any, ...]]:
    with open_fleet(settings.home) as opened:
        return opened.execute(query).fetchall()


def copies(server: NatsServer) -> list[Message]:
    with cluster(server) as opened:
        if not opened.stream_exists(REGISTRATION):
            return []
        last = opened.stream_info(REGISTRATION).last_sequence
    with connection(server) as opened:
        return list(chain.from_iterable(read_confirmed(opened, REGISTRATION, SequenceRange(1, last + 1), direct=False)))


def by_node(messages: list[Message]) -> dict[str, list[Message]]:
    """Return each node's messages in order."""
    by_sender = defaultdict(list)
    for message in messages:
        by_sender[json.loads(message.payload)["sender"]].append(message)
    return by_sender


# The tests of a tree sample and announce over three tiers, and those below check these files.
@pytest.mark.nightly
@pytest.mark.process
def test_three_tiers_sample_and_announce_up_to_the_centre(
    tiers: dict[str, Settings], servers: dict[str, NatsServer]
) -> None:
    centre, fleet = servers["nats.centre"], Fleet(servers)
    everyone = set(chain.from_iterable(NODES.values()))
    silenced = NODES["ldn"][0]

    def after_round(condition: Callable[[], bool]) -> bool:
        drain(tiers)
        return condition()

    def global_status(host: str) -> dict[str, str]:
        return dict(rows(tiers[host], "SELECT node, status FROM global_availability"))

    def sampled_twice() -> bool:
        copied = by_node(copies(centre))
        return set(copied) == everyone and all(len(messages) > 1 for messages in copied.values())

    with fleet.reporting():
        wait_until(lambda: after_round(sampled_twice), "the centre's second sample of each node")
        fleet.silent.add(silenced)
        wait_until(lambda: after_round(lambda: global_status("CENTRE")[silenced] == "retired"), "a retired node")
    drain(tiers)

    # Each tier has its own sample, and every copy records the tiers that it passed.
    reports = [by_node(copies(servers[name])) for name in ("broker.ldn", "nats.ldn", "nats.europe", "nats.centre")]
    for node in NODES["ldn"]:
        counts = [len(tier[node]) for tier in reports]
        assert counts == sorted(counts, reverse=True), counts
        assert counts[0] > 2 * counts[1] > 4 * counts[2], counts
    hops = [
        [origin.replicator, origin.name]
        for origin in map(parse_origin, header_values(by_node(copies(centre))[silenced][0].headers, SOURCE_HEADER))
        if origin
    ]
    assert hops == [["LONDON", "LONDON"], ["EUROPE", "london"], ["CENTRE", "europe"]]

    # Region and centre know of each node what its city announced.
    columns = "replicator, node, status, status_since FROM global_availability ORDER BY ALL"
    announced = sorted(
        (host, *row)
        for host in ("LONDON", "PARIS")
        for row in rows(tiers[host], "SELECT node, status, status_since FROM node_availability")
    )
    assert {node for _, node, *_ in announced} == everyone
    for host in ("EUROPE", "CENTRE"):
        assert rows(tiers[host], f"SELECT {columns}") == announced
    blind = "SELECT replicator, blind FROM global_summary ORDER BY ALL"
    assert rows(tiers["CENTRE"], blind) == [("LONDON", False), ("PARIS", False)]


@pytest.mark.parametrize("tier", ("city", "region", "centre"))
def test_file_of_each_tier_passes_check(
    tier: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SR_ASSETS_HOME", str(tmp_path))  # the clone may have a home of its own
    code, output, errors = command("--config", str(EXAMPLE / f"{tier}.yaml"), "check")
    assert (code, errors) == (0, "")
    assert f"by sender every {({'city': '5m', 'region': '30m', 'centre': '1h'})[tier]}" in output
