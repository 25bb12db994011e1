"""The fleet of daemons: connections and subscriptions at the server, adapter, replies, reconnects, outages, refusals."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.wire import Connection
from sr_assets.adapters.wire.frames import encode_pub
from sr_assets.domain.registration import decode_payload
from sr_assets.embedded.choria_rpc import RpcRequest, decode_reply, encode_request
from sr_assets.settings import load_cluster, parse_cluster
from sr_assets_tests.forks import Forked
from sr_assets_tests.rig import PATIENCE_SECONDS, Command, wait_until
from sr_assets_tests.secured import Authority
from sr_assets_tests.servers import NatsServer

pytestmark = pytest.mark.process

INGEST = "mcollective.broadcast.agent.registration"


class Monitored:
    """A server with a monitoring port and a stream."""

    def __init__(self, folder: Path, config: str = "") -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.server = NatsServer(folder, "monitored", config=f"http: 127.0.0.1:{self._port}\n{config}")

    def create(self, login: str = "", **tls: str) -> None:
        """Create the stream REG."""
        with Cluster(load_cluster(f"nats://{login}{self.server.address}", tls)) as admin:
            admin.create_stream({"name": "REG", "subjects": ["REG.>"]})

    def nodes(self) -> list[dict[str, Any]]:
        """Return the connections of nodes, as the server lists them."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self._port}/connz?subs=1&limit=4096", timeout=PATIENCE_SECONDS
        ) as answer:
            return [c for c in json.load(answer)["connections"] if c.get("name", "").endswith(".example.net")]

    def listening(self, *subjects: str) -> int:
        """Return the number of nodes with subscriptions of all these subjects; the server lists connections before that."""
        return sum(set(subjects) <= set(node.get("subscriptions_list", ())) for node in self.nodes())

    def stored(self) -> int:
        """Return the number of messages in REG."""
        with Cluster(parse_cluster(self.server.url)) as admin:
            return admin.stream_info("REG").messages


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    site = Monitored(tmp_path_factory.mktemp("nats"))
    with site.server:
        site.create()
        yield site


@contextlib.contextmanager
def emulating(url: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run `sr-assets emulate` until the end of the block."""
    asked = ["--url", url, "--subject", "REG.%s", *options]
    child = Forked([sys.executable, "-m", "sr_assets", "emulate", *asked], stderr=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.send_signal(signal.SIGINT)
        child.wait(PATIENCE_SECONDS)
        assert child.stderr is not None
        child.stderr.close()


def asked(server: NatsServer, subject: str, payload: bytes, reply_to: bytes, count: int) -> list[bytes]:
    """Send a request as a second client and return the replies, as soon as `count` have arrived."""
    replies: list[bytes] = []
    with Connection(parse_cluster(server.url)) as client:
        client.send(b"SUB %b 9\r\n" % reply_to + encode_pub(subject, reply_to, b"", payload))
        wait_until(lambda: len(replies.extend(f.payload for f in client.receive(0.1)) or replies) >= count, "replies")  # type: ignore[func-returns-value]
    return replies


@pytest.mark.parametrize("processes", ("1", "2"))
def test_each_node_has_a_connection_with_its_subscriptions(monitored: Monitored, processes: str) -> None:
    options = ("--nodes", "40", "--interval", "5s", "--agents", "4", "--collectives", "3", "--processes", processes)
    with emulating(monitored.server.url, *options):
        # A broadcast per agent and a node's own subject in each collective, and the inbox of acknowledgements.
        expected = [3 * (4 + 1) + 1] * 40
        wait_until(lambda: [node["subscriptions"] for node in monitored.nodes()] == expected, "40 nodes")
        nodes = monitored.nodes()
    subjects = set(nodes[0]["subscriptions_list"])
    assert f"collective2.node.{nodes[0]['name']}" in subjects
    assert "collective1.broadcast.agent.emulated2" in subjects
    wait_until(lambda: not monitored.nodes(), "no connection")


@pytest.mark.parametrize("processes", ("1", "2"))
def test_adapter_stores_every_registration_without_headers(
    monitored: Monitored, command: Command, processes: str
) -> None:
    before = monitored.stored()
    options = ("--url", monitored.server.url, "--subject", "REG.%s", "--nodes", "30", "--interval", "500ms")
    code, output, errors = command("emulate", *options, "--for", "1s", "--adapter", "--processes", processes)
    assert (code, output) == (0, "")
    assert "30 nodes need " in errors
    assert "published 60 messages of 30 nodes\nthe adapter stored 60 messages and dropped 0\n" in errors
    with Cluster(parse_cluster(monitored.server.url)) as admin:
        info = admin.stream_info("REG")
        message = admin.message("REG", info.last_sequence)
    assert info.messages - before == 60
    assert message is not None
    assert message.headers == b""
    assert message.subject == f"REG.{json.loads(message.payload)['sender']}"
    assert decode_payload(message.payload).metadata is not None


def test_nodes_answer_a_second_client(monitored: Monitored) -> None:
    with emulating(monitored.server.url, "--nodes", "25", "--interval", "1m", "--rpc"):
        broadcast = [f"mcollective.broadcast.agent.{agent}" for agent in ("discovery", "emulated0")]
        wait_until(lambda: monitored.listening(*broadcast) == 25, "25 nodes")
        ping = encode_request(RpcRequest("discovery", b"ping", "mcollective.reply.a", "1" * 32), "client")
        subject = "mcollective.broadcast.agent.discovery"
        pongs = [decode_reply(reply) for reply in asked(monitored.server, subject, ping, b"mcollective.reply.a", 25)]
        body = b'{"agent":"emulated0","action":"generate","data":{"size":500}}'
        sized = encode_request(RpcRequest("emulated0", body, "mcollective.reply.b", "2" * 32), "client")
        subject = "mcollective.broadcast.agent.emulated0"
        generated = [decode_reply(r) for r in asked(monitored.server, subject, sized, b"mcollective.reply.b", 25)]
        bare = asked(monitored.server, "mcollective.node.web1.example.net", body, b"_INBOX.c", 1)
    assert len({pong[0] for pong in pongs if pong}) == 25
    assert {pong[1] for pong in pongs if pong} == {b"pong"}
    assert {len(json.loads(reply[1])["data"]["message"]) for reply in generated if reply} == {500}
    assert json.loads(bare[0])["sender"] == "web1.example.net"
    assert len(json.loads(bare[0])["data"]["message"]) == 500


@pytest.mark.parametrize("options", ((), ("--adapter",)), ids=("direct", "adapter"))
def test_nodes_and_adapter_reconnect_after_a_server_outage(tmp_path: Path, options: tuple[str, ...]) -> None:
    site = Monitored(tmp_path)
    with site.server:
        site.create()
        with emulating(site.server.url, "--nodes", "20", "--interval", "1s", *options):
            wait_until(lambda: site.stored() >= 20, "20 messages")
            site.server.kill()
            # Longer than the pause before the first attempt to reconnect.
            time.sleep(1.5)
            site.server.start()
            wait_until(lambda: len(site.nodes()) == 20, "20 connections again")
            stored = site.stored()
            wait_until(lambda: site.stored() >= stored + 40, "40 more messages")


@pytest.mark.nightly
def test_plan_file_closes_and_restores_connections(monitored: Monitored, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("silences: [{match: 'web*', from: 0}]\noutages: [{match: 'sql*', from: 5s, for: 8s}]\n")
    before = monitored.stored()
    with emulating(monitored.server.url, "--nodes", "10", "--interval", "200ms", "--plan", str(plan)):
        wait_until(lambda: len(monitored.nodes()) == 10, "all connected")
        wait_until(lambda: len(monitored.nodes()) == 8, "an outage")
        wait_until(lambda: len(monitored.nodes()) == 10, "the end of the outage")
    with Cluster(parse_cluster(monitored.server.url)) as admin:
        info = admin.stream_info("REG")
        senders = {admin.message("REG", number).subject for number in range(before + 1, info.last_sequence + 1)}  # type: ignore[union-attr]
    assert {subject[4:7] for subject in senders} == {"app", "sql", "mem", "log"}


@pytest.mark.parametrize(
    ("text", "problem"),
    (
        ("outage: []", "'outage' is not a key; did you mean 'outages'?"),
        ("silences: [{share: 2}]", "silences[0]: share: 2 is not a share"),
        ("silences: [{from: soon}]", "silences[0]: from: 'soon' is not a duration"),
        ("churn: {share: 0.1}", "churn: short is missing"),
        ("silences: {share: 1}", "is not a list"),
        ("[", "cannot be read"),
    ),
)
def test_bad_plan_file_is_one_line(tmp_path: Path, command: Command, text: str, problem: str) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(text)
    code, output, errors = command("emulate", "--url", "nats://127.0.0.1:1", "--nodes", "1", "--plan", str(plan))
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert problem in errors


def test_counters_are_served_for_people_and_prometheus(monitored: Monitored) -> None:
    options = ("--nodes", "10", "--interval", "200ms", "--http-port", "0")
    with emulating(monitored.server.url, *options) as child:
        assert child.stderr is not None
        base = (
            next(line for line in child.stderr if line.startswith("Counters: ")).split()[1].removesuffix("/debug/vars,")
        )

        def variables() -> dict[str, Any]:
            with urllib.request.urlopen(f"{base}/debug/vars", timeout=PATIENCE_SECONDS) as answer:
                return dict(json.load(answer))

        wait_until(lambda: variables()["published"] >= 20, "20 messages")
        assert variables()["config"]["instances"] == variables()["connected"] == 10
        with urllib.request.urlopen(f"{base}/metrics", timeout=PATIENCE_SECONDS) as answer:
            metrics = answer.read().decode()
    assert "\nsr_assets_emulate_connected 10\n" in metrics
    assert "\n# TYPE sr_assets_emulate_published_total counter\n" in metrics


def test_missing_open_files_are_one_line(monitored: Monitored, command: Command) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    try:
        code, output, errors = command("emulate", "--url", monitored.server.url, "--nodes", "1000", "--for", "1s")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (code, output, errors.count("\n")) == (1, "", 1)
    assert "1000 nodes need 1064 open files (limit 512)" in errors
    assert "run `ulimit -n 1064` first" in errors


def test_adapter_without_a_stream_is_one_line(monitored: Monitored, command: Command) -> None:
    options = ("--url", monitored.server.url, "--nodes", "2", "--subject", "nowhere.%s", "--adapter")
    code, _, errors = command("emulate", *options)
    assert code == 1
    assert "takes nowhere.web1.example.net; create one that does\n" in errors.splitlines(keepends=True)[-1]
    assert command("emulate", *options[:4], "--subject", INGEST, "--adapter")[0] == 2
    assert command("emulate", *options, "--connections", "shared")[0] == 2


def test_connection_takes_less_than_60_kb_with_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    users = "authorization { users: [{user: fleet, password: secret}] }\n"
    site = Monitored(tmp_path / "nats", authority.block(**authority.certify("127.0.0.1")) + users)
    memory: dict[str, int] = {}
    with site.server:
        site.create("fleet:secret@", ca=str(authority.file))
        for nodes in ("10", "510"):
            url = f"tls://fleet:secret@{site.server.address}?connect_timeout=30s"
            with emulating(url, "--ca", str(authority.file), "--nodes", nodes, "--interval", "1h") as child:
                wait_until(lambda nodes=nodes: len(site.nodes()) == int(nodes), f"{nodes} connections")  # type: ignore[misc]
                memory[nodes] = psutil.Process(child.pid).memory_info().rss
    assert (memory["510"] - memory["10"]) / 500 < 60_000


def test_interrupted_fleet_ends_with_its_processes(monitored: Monitored) -> None:
    options = ("--nodes", "10", "--interval", "100ms", "--processes", "2", "--adapter")
    before = monitored.stored()
    with emulating(monitored.server.url, *options) as child:
        wait_until(lambda: monitored.stored() > before, "a stored message")
        children = psutil.Process(child.pid).children(recursive=True)
        assert len(children) >= 3
        os.kill(child.pid, signal.SIGINT)
        assert child.wait(PATIENCE_SECONDS) == 130
        assert not psutil.wait_procs(children, PATIENCE_SECONDS)[1]
        assert child.stderr is not None
        assert "messages of 10 nodes" in child.stderr.read()
