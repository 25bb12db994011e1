"""A tree of three servers, city → region → centre: samples and advisories pass up, and the city disconnects and
returns.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sr_assets.domain.advisories import observer_alive
from sr_assets.domain.messages import Message
from sr_assets.stages.report import Stage
from sr_assets.stages.run import run_site
from sr_assets.stages.site import Site
from sr_assets_tests.rig import Rig, Sent, cluster
from sr_assets_tests.servers import NatsServer

NODES = [f"web{number}" for number in range(6)]
SECOND_NS = 1_000_000_000
#: Growth of the nodes' messages in bytes: the city copies changes of 10 bytes, the region of 100.
MORE_BYTES = (0, 0, 20, 40, 200)
_ORIGIN = b"Choria-SR-Source: "
#: Each hop is a separate replicator, as if on another host; only this test keeps them in one configuration.
REPLICATORS = {"city": "LDN", "region": "EUROPE", "centre": "HQ"}
ADVISORIES = ["adv.>", "sr_assets.observer_alive.>"]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[NatsServer]]:
    """The servers of city, region and centre."""
    with ExitStack() as stack:
        yield [stack.enter_context(NatsServer(tmp_path / site_name, site_name)) for site_name in REPLICATORS]


@pytest.fixture
def tree(engine_home: Path, servers: list[NatsServer], unique: Callable[[str], str]) -> Rig:
    """The city's nodes, sampled twice on their way to the centre; the centre folds the advisories of city and harbour."""
    city, region, centre = servers
    rig = Rig(engine_home, region, centre, unique)
    rig.create("NODES", city)
    rig.create("HARBOUR")
    rig.create("ADVISORIES_CITY", city, subjects=ADVISORIES)
    rig.create("ADVISORIES", subjects=ADVISORIES)
    sender = {"inspect_field": "sender", "inspect_duration": "10h"}
    down = {"name": "city", "source_url": city.url, "target_url": region.url}
    rig.add(
        **down,
        stream="NODES",
        target_stream="CITY",
        target_subject_prefix="city",
        **sender,
        warn_duration="2s",
        size_trigger=10,
        advisory={"subject": "adv.city.%s.%v"},
    )
    rig.add(**down, stream="ADVISORIES_CITY", target_stream="ADVISORIES")
    rig.add("CITY", name="region", target_stream="REGION", target_subject_prefix="region", **sender, size_trigger=100)
    rig.add("HARBOUR", name="region", target_subject_prefix="h", **sender, advisory={"subject": "adv.harbour.%s.%v"})
    rig.add("ADVISORIES", name="region", target_stream="ADVISORIES_ALL")
    rig.add_feed("ADVISORIES_ALL", name="centre")
    return rig


def drain_tree(rig: Rig, *sites: str) -> None:
    """Drain the sites in order, by default all; nodes first in each, so that their advisories pass up in the same
    round.
    """
    for site_name in sites or REPLICATORS:
        with rig.open(site_name, name=REPLICATORS[site_name]) as site:
            for tracked in (True, False):
                _drain(site, [entry.stream for entry in site.entries if entry.tracked is tracked])


def _drain(site: Site, streams: list[str]) -> None:
    reports = run_site(site, {stream: frozenset(Stage) for stream in streams}, drain_only=True)
    assert [report.failure for report in reports.values() if report.failure] == []


def send_reports(rig: Rig, server: NatsServer, stream: str, nodes: list[str], more_bytes: int = 0) -> None:
    """Publish one report of each node."""
    rig.publish(stream, [Sent(f'{{"sender": "{node}", "a": "{"x" * more_bytes}"}}'.encode()) for node in nodes], server)


def statuses(rig: Rig, where: str) -> set[tuple[Any, ...]]:
    """Return node, status and time of the status for each node in a table."""
    return {tuple(row.values()) for row in rig.rows(f"SELECT node, status, status_since FROM {where}")}


AT_CITY, AT_HARBOUR = (f"node_availability WHERE stream = '{stream}'" for stream in ("NODES", "HARBOUR"))
CITY, HARBOUR = (f"global_availability WHERE stream = '{stream}'" for stream in ("NODES", "HARBOUR"))


def origins(message: Message) -> list[list[str]]:
    """Return the fields of each hop's header in order."""
    return [line.removeprefix(_ORIGIN).decode().split() for line in message.headers.split(b"\r\n") if _ORIGIN in line]


def test_each_hop_of_a_tree_appends_its_header(tree: Rig, servers: list[NatsServer]) -> None:
    city, region, centre = servers
    for more_bytes in MORE_BYTES:
        send_reports(tree, city, "NODES", NODES, more_bytes)
    send_reports(tree, region, "HARBOUR", ["ship"])
    drain_tree(tree)
    reported, at_region, at_centre = (
        {message.sequence: message for message in tree.stored(stream, server)}
        for stream, server in (("NODES", city), ("CITY", region), ("REGION", centre))
    )
    assert [len(messages) for messages in (reported, at_region, at_centre)] == [
        5 * len(NODES),
        4 * len(NODES),
        2 * len(NODES),
    ]
    for message in at_centre.values():
        first, second = origins(message)
        assert [origin[0] for origin in (first, second)] == ["NODES", "CITY"]
        assert [origin[2:4] for origin in (first, second)] == [["LDN", "city"], ["EUROPE", "region"]]
        below = at_region[int(second[1])]
        assert origins(below) == [first]
        assert int(second[4]) == below.stored_ns // 1_000_000
        assert reported[int(first[1])].payload == below.payload == message.payload
        assert message.subject == "region.city.NODES.m"
    advisories = tree.stored("ADVISORIES_ALL", centre)
    hops = {
        message.subject.split(".")[1]: [origin[2] for origin in origins(message)]
        for message in advisories
        if "adv" in message.subject
    }
    assert hops == {"city": ["LDN", "EUROPE"], "harbour": ["EUROPE"]}
    assert statuses(tree, CITY) == statuses(tree, AT_CITY)
    assert {node for node, *_ in statuses(tree, CITY)} == set(NODES)
    assert statuses(tree, HARBOUR) == statuses(tree, AT_HARBOUR)


def test_disconnected_city_is_blind_until_it_returns(tree: Rig, servers: list[NatsServer]) -> None:
    city, region, _ = servers
    send_reports(tree, city, "NODES", NODES)
    drain_tree(tree)
    silent, *active = NODES
    while {node: status for node, status, _ in statuses(tree, CITY)}[silent] == "up":
        send_reports(tree, city, "NODES", active)
        drain_tree(tree)
    assert statuses(tree, CITY) == statuses(tree, AT_CITY)
    _promise_heartbeat_within_a_second(tree, city)
    drain_tree(tree, "region", "centre")
    last_received = statuses(tree, CITY)

    city.stop()
    assert all(report.failure for report in tree.run("city", name=REPLICATORS["city"]).values())
    send_reports(tree, region, "HARBOUR", ["ship"])
    drain_tree(tree, "region", "centre")
    while not tree.row("SELECT blind FROM global_summary WHERE stream = 'NODES'")["blind"]:
        drain_tree(tree, "region", "centre")
    assert statuses(tree, CITY) == last_received
    assert {node for node, *_ in statuses(tree, HARBOUR)} == {"ship"}
    assert statuses(tree, HARBOUR) == statuses(tree, AT_HARBOUR)
    columns = "stream, observer, up + timeout + retired AS known"
    assert {tuple(row.values()) for row in tree.rows(f"SELECT {columns} FROM global_summary")} == {
        ("NODES", "blind", len(NODES)),
        ("HARBOUR", "ok", 1),
    }

    city.start()
    send_reports(tree, city, "NODES", [*NODES, "late"])
    drain_tree(tree)
    assert statuses(tree, CITY) == statuses(tree, AT_CITY)
    assert {node for node, *_ in statuses(tree, CITY)} == {*NODES, "late"}
    assert tree.row("SELECT observer FROM global_summary WHERE stream = 'NODES'")["observer"] == "ok"
    events = tree.rows(f"SELECT event FROM global_advisories WHERE node = '{silent}' ORDER BY transition")
    assert [row["event"] for row in events][:3] == ["new", "timeout", "recover"]


def _promise_heartbeat_within_a_second(rig: Rig, city: NatsServer) -> None:
    """Publish a heartbeat of the city that promises the next one in a second; a real promise allows for slow starts."""
    body = observer_alive(
        replicator=REPLICATORS["city"],
        name="city",
        stream="NODES",
        ts_ns=0,
        watermark_ns=None,
        position=1,
        lag_messages=0,
        lag_ns=0,
        nodes=len(NODES),
        next_within_ns=SECOND_NS,
    )
    with cluster(city) as opened:
        opened.publish_many([("sr_assets.observer_alive.LDN.city.NODES", body, "hasty")])
    with rig.open("city", name=REPLICATORS["city"]) as site:
        _drain(site, ["ADVISORIES_CITY"])
