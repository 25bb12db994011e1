"""The emulated fleet: a reproducible plan, messages like Choria's, and their delivery."""

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import pytest

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.domain.blindness import NO_BLIND_SPANS
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.registration import decode_payload
from sr_assets.domain.tracking.rules import Event, NodeState, Policy, Sighting, sight, splay_ns
from sr_assets.embedded.emulator import Fleet
from sr_assets.embedded.fleet_plan import Churn, FleetPlan, PlannedMessage
from sr_assets.settings import load_cluster, parse_cluster
from sr_assets_tests.rig import Command, wait_until
from sr_assets_tests.secured import Authority
from sr_assets_tests.servers import NatsServer

SECOND_NS = 1_000_000_000
RESTLESS = Churn(share=0.4, short_seconds=12, long_seconds=24)


def story(plan: FleetPlan, until_seconds: float) -> list[PlannedMessage]:
    """Return the publications before `until_seconds`."""
    return list(itertools.takewhile(lambda publication: publication.at_seconds < until_seconds, plan.events()))


def create_stream(server: NatsServer, stream: str) -> None:
    async def create() -> None:
        client = await nats.connect(server.url)
        await client.jetstream().add_stream(name=stream, subjects=[f"{stream}.>"])
        await client.close()

    asyncio.run(create())


def stored(server: NatsServer, stream: str) -> list[tuple[str, bytes]]:
    """Subject and payload of every message of a stream."""

    async def read() -> list[tuple[str, bytes]]:
        client = await nats.connect(server.url)
        jetstream = client.jetstream()
        last = (await jetstream.stream_info(stream)).state.last_seq
        messages = [await jetstream.get_msg(stream, seq=number) for number in range(1, last + 1)]
        await client.close()
        return [(message.subject or "", message.data or b"") for message in messages]

    return asyncio.run(read())


def test_plan_depends_only_on_its_seed() -> None:
    plan = FleetPlan(30, 3, seed=7, churn=RESTLESS)
    assert story(plan, 30) == story(FleetPlan(30, 3, seed=7, churn=RESTLESS), 30)
    assert story(plan, 30) != story(FleetPlan(30, 3, seed=8, churn=RESTLESS), 30)


def test_quiet_fleet_publishes_once_per_node_and_round() -> None:
    publications = story(FleetPlan(20, 5), 20)
    times = [publication.at_seconds for publication in publications]
    assert times == sorted(times)
    for round_ in range(4):
        senders = [p.sender for p in publications if round_ * 5 <= p.at_seconds < (round_ + 1) * 5]
        assert len(senders) == len(set(senders)) == 20


def test_message_contains_the_nodes_inventory() -> None:
    publication = next(FleetPlan(5, 300).events(epoch_seconds=1_773_595_224))
    message, inventory = map(json.loads, map(str, decode_payload(publication.payload)[:2]))
    assert message["sender"] == publication.sender
    assert message["time"].startswith("2026-03-15T17:2")
    assert inventory["facts"]["fqdn"] == inventory["status"]["identity"] == publication.sender


@pytest.mark.parametrize("typical", (3_000, 7_000))
def test_typical_message_size_is_configurable(typical: int) -> None:
    sizes = [len(publication.payload) for publication in story(FleetPlan(500, 10, payload_bytes=typical), 10)]
    assert statistics.median(sizes) == pytest.approx(typical, rel=0.15)
    assert max(sizes) < 4 * typical


@pytest.mark.parametrize(
    "wrong", ({"nodes": 0}, {"interval_seconds": 0}, {"payload_bytes": 999}, {"payload_bytes": 250_001})
)
def test_invalid_plan_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        FleetPlan(**{"nodes": 1, "interval_seconds": 1, **wrong})


def test_one_node_in_ten_grows_by_200_bytes_per_round() -> None:
    sizes: dict[str, list[int]] = {}
    for publication in story(FleetPlan(20, 1), 10):
        sizes.setdefault(publication.sender, []).append(len(publication.payload))
    growth = {sender: [b - a for a, b in itertools.pairwise(sequence)] for sender, sequence in sizes.items()}
    growing = {sender for sender, steps in growth.items() if all(150 < step < 300 for step in steps)}
    steady = {sender for sender, steps in growth.items() if all(abs(step) < 8 for step in steps)}
    assert len(growing) == 2
    assert growing | steady == set(growth)


def test_changing_fleet_causes_every_transition_within_40_seconds() -> None:
    policy = Policy(interval_ns=20 * SECOND_NS, warning_ns=8 * SECOND_NS)
    nodes: dict[str, NodeState] = {}
    events: list[tuple[Event, bool]] = []
    for number, publication in enumerate(story(FleetPlan(10, 3, churn=RESTLESS), 40), start=1):
        at_ns = round(publication.at_seconds * SECOND_NS)
        sighting = Sighting(number, at_ns, len(publication.payload), forced=False)
        splay = splay_ns(publication.sender, policy.interval_ns)
        state, _, transitions = sight(policy, splay, nodes.get(publication.sender), sighting, NO_BLIND_SPANS)
        nodes[publication.sender] = state
        events += [(transition.event, transition.returned) for transition in transitions]
    assert {event for event, _ in events} == set(Event)
    assert (Event.NEW, True) in events


def test_fleet_publishes_its_plan_until_its_end(nats_server: NatsServer, unique: Callable[[str], str]) -> None:
    stream = unique("FLEET")
    create_stream(nats_server, stream)
    plan = FleetPlan(10, 1)
    fleet = Fleet(plan, parse_cluster(nats_server.url), f"{stream}.%s", for_seconds=3, paced=False)
    assert fleet.run() == 30
    subjects = [subject for subject, _ in stored(nats_server, stream)]
    assert sorted(subjects) == sorted(f"{stream}.{publication.sender}" for publication in story(plan, 3))
    assert all(decode_payload(payload)[1] for _, payload in stored(nats_server, stream))


def test_fleet_in_a_thread_follows_the_clock_until_stopped(
    nats_server: NatsServer, unique: Callable[[str], str]
) -> None:
    stream = unique("FLEET")
    create_stream(nats_server, stream)
    began = time.monotonic()
    with Fleet(FleetPlan(50, 1), parse_cluster(nats_server.url), f"{stream}.%s") as fleet:
        wait_until(lambda: fleet.published >= 60, "60 messages")
        published, seconds = fleet.published, time.monotonic() - began
    assert published <= 50 * (seconds + 1)
    assert len(stored(nats_server, stream)) == fleet.published


def test_fleet_continues_after_a_server_outage(
    nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with NatsServer(tmp_path_factory.mktemp("nats"), "shaky") as server:
        create_stream(server, "FLEET")
        with Fleet(FleetPlan(50, 1), parse_cluster(server.url), "FLEET.%s") as fleet:
            wait_until(lambda: fleet.published >= 20, "20 messages")
            server.kill()
            server.start()
            wait_until(lambda: fleet.published >= 100, "100 messages")
        assert len(stored(server, "FLEET")) >= fleet.published


def test_unreachable_server_is_one_line_without_the_password() -> None:
    with pytest.raises(RunError, match=r"^no fleet at 127\.0\.0\.1:1: ") as caught:
        Fleet(FleetPlan(1, 1), parse_cluster("nats://user:hunter2@127.0.0.1:1"), "a.%s").run()
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.process
def test_emulate_reports_refusals_and_accepts_a_private_ca(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "ca")
    denied = '{user: mute, password: p, permissions: {publish: {deny: ["FLEET.>"]}}}'
    users = f"authorization {{ users: [{{user: fleet, password: secret}}, {denied}] }}\n"
    config = authority.block(**authority.certify("127.0.0.1")) + users
    monkeypatch.setenv("FLEET_PASSWORD", "secret")

    def emulate(url: str, *options: str) -> tuple[int, str]:
        asked = ("--url", url, "--subject", "FLEET.%s", "--nodes", "3", "--interval", "100ms", "--for", "300ms")
        code, output, errors = command("emulate", *asked, *options)
        assert output == ""
        assert "secret" not in errors
        return code, errors.removesuffix("\n")

    with NatsServer(tmp_path / "nats", "secured", config=config) as server:
        host = server.address
        ca = ("--ca", str(authority.file))
        code, error = emulate(f"tls://fleet:${{FLEET_PASSWORD}}@{host}")
        assert (code, "certificate" in error) == (1, True), error
        code, error = emulate(f"tls://fleet:wrong@{host}", *ca)
        assert (code, "uthorization" in error) == (1, True), error
        good = f"tls://fleet:${{FLEET_PASSWORD}}@{host}?connect_timeout=9s"
        code, error = emulate(good, *ca)
        assert (code, f"no stream at {host} takes FLEET.web1.example.net" in error) == (1, True), error
        cluster = load_cluster(good, {"ca": str(authority.file)})
        with Cluster(cluster) as admin:
            admin.create_stream({"name": "FLEET", "subjects": ["FLEET.>"]})
        code, error = emulate(f"tls://mute:p@{host}", *ca)
        assert (code, "ermissions violation for publish" in error) == (1, True), error
        assert emulate(good, *ca) == (0, "published 9 messages of 3 nodes")
    assert emulate("tls://fleet:${NO_SUCH}@x") == (2, "error: --url: environment variable NO_SUCH is not set")
    assert emulate("tls://x", "--cert", "a.pem")[0] == 2


def test_subject_without_a_stream_fails_immediately(nats_server: NatsServer, unique: Callable[[str], str]) -> None:
    fleet = Fleet(FleetPlan(1, 1), parse_cluster(nats_server.url), f"{unique('nowhere')}.%s").start()
    with pytest.raises(RunError, match=r"^no stream at .* takes nowhere"):
        fleet.stop()
