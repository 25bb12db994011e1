"""The Stream Replicator's heartbeats, published by `run --follow` even without streams."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from sr_assets.adapters import wire
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.domain.exposition import labels
from sr_assets.domain.messages import header_values
from sr_assets.domain.positions import SequenceRange
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.operate.metrics.samples import heartbeat_lines
from sr_assets.settings import load_settings
from sr_assets.stages.heartbeat_publisher import HeartbeatPublisher, heartbeat_leadership, publisher_of
from sr_assets_tests.forks import Forked
from sr_assets_tests.members import make_bucket
from sr_assets_tests.rig import PATIENCE_SECONDS, Command, Rig, address, wait_until

pytestmark = pytest.mark.process


def test_follow_publishes_heartbeats_that_check_does_not_store(
    nats_server: NatsServer,
    tmp_path: Path,
    unique: Callable[[str], str],
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = unique("BEATS")
    block = {
        "url": nats_server.url,
        "interval": "200ms",
        "headers": {"Path": "north", "Kind": "all"},
        "subjects": [
            {"subject": f"{stream}.a"},
            {"subject": f"{stream}.b", "interval": "1h", "headers": {"Kind": "own"}},
        ],
    }
    file = tmp_path / "replication.yaml"
    file.write_text(yaml.safe_dump({"name": "EAST", "state_store": str(tmp_path / "home"), "heartbeats": block}))
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
    for name in ("SR_ASSETS_HOME", "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)
    with Cluster(address(nats_server), "test") as opened:
        assert command("check", "--connect")[0] == 1
        opened.create_stream({"name": stream, "subjects": [f"{stream}.>"], "allow_direct": True})
        assert command("check", "--connect")[0] == 0
        assert command("run", "--once") == (0, "", "")
        assert opened.stream_info(stream).messages == 0
        began = int(time.time())
        following = Forked([sys.executable, "-m", "sr_assets", "run", "--follow"], stderr=subprocess.PIPE, text=True)
        try:
            wait_until(lambda: opened.stream_info(stream).messages >= 4, "some heartbeats")
        finally:
            following.send_signal(signal.SIGINT)
            _, errors = following.communicate(timeout=PATIENCE_SECONDS)
        assert (following.returncode, errors) == (0, "")
        for subject, kind in (("a", "all"), ("b", "own")):
            beat = opened.last_message(stream, f"{stream}.{subject}")
            assert beat is not None
            assert began <= int(beat.payload) <= time.time()
            lines = beat.headers.decode().splitlines()
            assert {"Path: north", f"Kind: {kind}", f"Choria-SR-Subject: {stream}.{subject}"} <= set(lines)
            assert any(line.startswith("Choria-SR-Originator: ") for line in lines)
        assert len({opened.next_message(stream, 1, f"{stream}.b"), opened.last_message(stream, f"{stream}.b")}) == 1


def test_heartbeat_fails_until_a_stream_stores_its_subject(
    nats_server: NatsServer, tmp_path: Path, unique: Callable[[str], str]
) -> None:
    stream = unique("BEATS")
    said: list[str] = []
    file = tmp_path / "replication.yaml"
    subjects = json.dumps([{"subject": f"{stream}.a"}])
    file.write_text(f"name: EAST\nheartbeats: {{url: '{nats_server.url}', interval: 50ms, subjects: {subjects}}}\n")
    with (
        HeartbeatPublisher(load_settings(file, {}).heartbeats, said.append),
        Cluster(address(nats_server), "test") as opened,
    ):
        wait_until(lambda: bool(said), "the error")
        assert said == [f"heartbeat {stream}.a: {nats_server.address}: {stream}.a: no stream takes this subject"]
        opened.create_stream({"name": stream, "subjects": [f"{stream}.>"]})
        wait_until(lambda: len(said) > 1, "the end of the error")
    assert said[1:] == [f"heartbeat {stream}.a: stored again"]


def test_only_the_leader_publishes_heartbeats(
    rig: Rig, nats_server: NatsServer, tmp_path: Path, unique: Callable[[str], str]
) -> None:
    stream, bucket = unique("BEATS"), make_bucket(rig)
    said: list[str] = []
    block = {
        "url": nats_server.url,
        "interval": "50ms",
        "leader_election": True,
        "subjects": [{"subject": f"{stream}.a"}],
    }

    def publisher(home: str) -> HeartbeatPublisher:
        file = tmp_path / f"{home}.yaml"
        top = {"name": stream, "state_store": str(tmp_path / home), "leader_election": {"bucket": bucket}}
        file.write_text(yaml.safe_dump({**top, "heartbeats": {**block, "headers": {"Home": home}}}))
        settings = load_settings(file, {})
        return HeartbeatPublisher(settings.heartbeats, said.append, heartbeat_leadership(settings))

    def homes() -> set[bytes]:
        with wire.Connection(address(nats_server), "test") as connection:
            whole = SequenceRange(1, opened.stream_info(stream).last_sequence + 1)
            lists = wire.read_confirmed(connection, stream, whole, direct=False)
            return {header_values(message.headers, b"Home")[0] for messages in lists for message in messages}

    with Cluster(address(nats_server), "test") as opened:
        opened.create_stream({"name": stream, "subjects": [f"{stream}.>"]})
        with publisher("first") as first:
            wait_until(lambda: opened.stream_info(stream).messages > 2, "heartbeats of the first host")
            key = opened.last_message(f"KV_{bucket}", f"$KV.{bucket}.SR_{stream}_HB")
            assert key is not None
            assert key.payload.decode() == socket.gethostname()
            with publisher("second"):
                count = opened.stream_info(stream).messages
                wait_until(lambda: opened.stream_info(stream).messages > count + 5, "more heartbeats")
                assert homes() == {b"first"}
                first.__exit__()
                wait_until(lambda: homes() == {b"first", b"second"}, "heartbeats of the second host")
    assert said == []


def test_metrics_count_published_and_failed_heartbeats(
    nats_server: NatsServer, tmp_path: Path, unique: Callable[[str], str]
) -> None:
    stream = unique("BEATS")
    subjects = [{"subject": f"{stream}.a"}, {"subject": f"{stream}.b", "interval": "1h"}]
    block = {"url": nats_server.url, "interval": "50ms", "subjects": subjects}
    file = tmp_path / "replication.yaml"
    file.write_text(yaml.safe_dump({"name": "EAST", "state_store": str(tmp_path / "home"), "heartbeats": block}))
    settings = load_settings(file, {})

    def metric(name: str, **named: str) -> float | None:
        start = f"choria_stream_replicator_heartbeat_{name}{{{labels(**named)}}} "
        lines = [line for line in heartbeat_lines(settings) if line.startswith(start)]
        return float(lines[0].removeprefix(start)) if lines else None

    a, b = ({"replicator": "EAST", "subject": f"{stream}.{token}"} for token in "ab")
    assert (metric("subjects_count", replicator="EAST"), metric("published_count", **a)) == (2, 0)
    said: list[str] = []
    with publisher_of(settings, said.append), Cluster(address(nats_server), "test") as opened:
        wait_until(lambda: (metric("published_error_count", **a) or 0) >= 1, "a failed heartbeat")
        opened.create_stream({"name": stream, "subjects": [f"{stream}.>"]})
        wait_until(
            lambda: (metric("published_count", **a) or 0) > (metric("published_error_count", **a) or 0), "a stored one"
        )
    assert (metric("published_count", **b), metric("published_error_count", **b)) == (1, 1)
    assert (metric("publish_time_sum", **a) or 0) > 0
    assert metric("publish_time_count", **a) == metric("published_count", **a)
    assert metric("paused", replicator="EAST", hostname=socket.gethostname()) == 0
    with publisher_of(settings, said.append):
        wait_until(lambda: (metric("published_count", **b) or 0) == 2, "the count of the next publisher")
