"""Administration of real servers: stream info, creation of streams, acknowledgements and errors."""

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters import times
from sr_assets.adapters.jetstream import ApiError, PermissionDeniedError
from sr_assets.adapters.nats import client
from sr_assets.adapters.nats.administration import Cluster, Delivery
from sr_assets.adapters.nats.client import PublishRules, SecuredClient
from sr_assets.adapters.nats.stream_info import StreamInfo, Version
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import RunError, TransientError
from sr_assets.domain.target_stream import target_config
from sr_assets_tests import rig
from sr_assets_tests.servers import NatsServer

Names = Callable[[str], str]
MINUTE_NS = 60 * 1_000_000_000


@pytest.fixture
def cluster(nats_server: NatsServer) -> Iterator[Cluster]:
    with Cluster(ClusterSettings((nats_server.address,))) as opened:
        yield opened


def made(cluster: Cluster, name: str, **config: Any) -> StreamInfo:
    return cluster.create_stream({"name": name, "subjects": [f"{name}.>"], **config})


def test_client_connects_again_after_a_lack_of_descriptors(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_loop() -> asyncio.AbstractEventLoop:
        raise OSError(errno.EMFILE, "Too many open files")

    cluster = Cluster(ClusterSettings((nats_server.address,)))
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "new_event_loop", no_loop)
        with pytest.raises(TransientError, match="Too many open files"):
            cluster.__enter__()
    with cluster:
        assert cluster.server_version >= (2, 10, 0)


def test_stream_info_has_position_and_clock(cluster: Cluster, unique: Names) -> None:
    name = unique("INFO")
    empty = made(cluster, name, allow_direct=True, max_msgs_per_subject=5)
    assert (empty.last_sequence, empty.messages, empty.last_stored_ns) == (0, 0, None)
    cluster.publish_many([(f"{name}.{n}", b"x", f"{name}-{n}") for n in range(6)])
    for sequence in (2, 3, 5):
        cluster.request_api(f"STREAM.MSG.DELETE.{name}", {"seq": sequence})
    info = cluster.stream_info(name)
    assert (info.first_sequence, info.last_sequence, info.messages) == (1, 6, 3)
    assert info.num_deleted == 3
    assert info.created_ns == empty.created_ns
    assert info.ts_ns is not None
    assert info.last_stored_ns is not None
    assert info.created_ns < info.last_stored_ns < info.ts_ns
    assert (info.allow_direct, info.max_msgs_per_subject, info.mirror, info.no_ack) == (True, 5, False, False)
    assert (info.retention, info.replicas, info.config["storage"]) == ("limits", 1, "file")
    assert info.server_version == cluster.server_version >= (2, 10, 0)


@pytest.mark.parametrize(
    ("allow_direct", "version", "supported"),
    ((True, (2, 11, 0), True), (True, (2, 10, 25), False), (False, (2, 15, 1), False)),
)
def test_direct_get_support_needs_stream_and_server(
    cluster: Cluster, unique: Names, allow_direct: bool, version: Version, supported: bool
) -> None:
    info = made(cluster, unique("DIRECT"), allow_direct=allow_direct)
    assert replace(info, server_version=version).supports_batched_direct_get is supported


def test_missing_stream_is_named_with_cluster(cluster: Cluster) -> None:
    with pytest.raises(RunError, match=rf"NOT_HERE does not exist on {cluster.settings.label}"):
        cluster.stream_info("NOT_HERE")
    assert not cluster.stream_exists("NOT_HERE")


def test_streams_are_found_by_subject(cluster: Cluster, unique: Names) -> None:
    name = unique("NAMED")
    made(cluster, name)
    assert cluster.stream_exists(name)
    assert cluster.stream_names(f"{name}.a") == [name]
    assert name in cluster.stream_names()
    assert cluster.stream_names(unique("unused")) == []


def test_single_messages_come_from_leader(cluster: Cluster, unique: Names) -> None:
    name = unique("SINGLE")
    made(cluster, name)
    cluster.publish_many([(f"{name}.{n % 2}", bytes([n, 255]), f"{name}-{n}") for n in range(6)])
    cluster.request_api(f"STREAM.MSG.DELETE.{name}", {"seq": 3})
    second = cluster.message(name, 2)
    assert second is not None
    assert (second.subject, second.payload) == (f"{name}.1", b"\x01\xff")
    assert second.headers == b"NATS/1.0\r\nNats-Msg-Id: %b-1\r\n\r\n" % name.encode()
    assert cluster.message(name, 3) is None
    after = [cluster.next_message(name, 3), cluster.next_message(name, 3, f"{name}.0"), cluster.next_message(name, 7)]
    assert [message and message.sequence for message in after] == [4, 5, None]
    last = [cluster.last_message(name), cluster.last_message(name, f"{name}.0"), cluster.last_message(name, "none")]
    assert [message and message.sequence for message in last] == [6, 5, None]


# ---------------------------------------------------------------------------------------------------------- publishing


def acknowledged(deliveries: Sequence[Delivery]) -> list[bool]:
    """Return which messages were acknowledged."""
    return [delivery.acknowledged for delivery in deliveries]


def test_more_advisories_than_a_window_arrive_in_order(cluster: Cluster, unique: Names) -> None:
    name = unique("MANY")
    made(cluster, name)
    items = [(f"{name}.x", b"%d" % n, f"{name}-{n}") for n in range(1000)]
    assert acknowledged(cluster.publish_many(items)) == [True] * 1000
    last = cluster.message(name, 1000)
    assert last is not None
    assert last.payload == b"999"
    assert acknowledged(cluster.publish_many(items[:3])) == [True] * 3, "a duplicate is stored already"
    assert cluster.stream_info(name).last_sequence == 1000
    assert cluster.publish_many([]) == []


def test_publish_without_stream_returns_reason(cluster: Cluster, unique: Names) -> None:
    items = [(unique("nowhere"), b"", f"n{n}") for n in range(1000)]
    deliveries = cluster.publish_many(items)
    assert not any(acknowledged(deliveries))
    assert deliveries[0].refusal == "no stream takes this subject"
    assert deliveries[-1].refusal is None, "sending stops after many consecutive refusals"


def test_each_refused_message_is_reported(cluster: Cluster, unique: Names) -> None:
    name = unique("FULL")
    made(cluster, name, max_msgs=2, discard="new")
    deliveries = cluster.publish_many([(f"{name}.x", b"", f"{name}-{n}") for n in range(5)])
    assert acknowledged(deliveries) == [True, True, False, False, False]
    assert {delivery.refusal for delivery in deliveries[2:]} == {"maximum messages exceeded (10077)"}


def test_refusal_holds_back_only_its_sender(cluster: Cluster, unique: Names) -> None:
    name = unique("HALF")
    made(cluster, name)
    nowhere = unique("nowhere")
    items = [(nowhere, b"", "a1"), (f"{name}.a", b"", "a2"), (f"{name}.b", b"", "b1"), (f"{name}.b", b"", "b2")]
    deliveries = cluster.publish_many(items, ["a", "a", "b", "b"])
    assert acknowledged(deliveries) == [False, False, True, True]
    assert [delivery.refusal for delivery in deliveries[:2]] == ["no stream takes this subject", None]
    assert cluster.stream_info(name).last_sequence == 2


def test_missing_acknowledgement_ends_at_timeout(cluster: Cluster, unique: Names) -> None:
    name = unique("MUTE")
    made(cluster, name, no_ack=True)
    assert acknowledged(cluster.publish_many([(f"{name}.x", b"", "id")], timeout_seconds=0.2)) == [False]
    assert cluster.last_refusal == "no acknowledgement within 0.2 s"


def test_next_message_of_sender_waits_for_acknowledgement(cluster: Cluster, unique: Names) -> None:
    name = unique("MUTE")
    made(cluster, name, no_ack=True)
    items = [(f"{name}.{number}", b"", str(number)) for number in range(4)]
    assert not any(acknowledged(cluster.publish_many(items, ["a", "a", "b", "b"], timeout_seconds=0.5)))
    stored = [cluster.message(name, sequence) for sequence in (1, 2)]
    assert [message and message.subject for message in stored] == [f"{name}.0", None], (
        "the second message is never sent"
    )


@pytest.mark.parametrize(("pause_seconds", "checks"), ((0.0, 1), (1.0, 3)))
def test_publishing_is_checked_again_after_a_pause(
    cluster: Cluster, unique: Names, monkeypatch: pytest.MonkeyPatch, pause_seconds: float, checks: int
) -> None:
    """A process may be suspended while the next message of a sender waits for an acknowledgement."""
    name, checked, clock = unique("PAUSED"), list[float](), itertools.count(0.0, pause_seconds)
    made(cluster, name)
    monkeypatch.setattr(times, "boot_seconds", lambda: next(clock))
    rules = PublishRules(guard=lambda: checked.append(0.0))
    with Cluster(cluster.settings, "test", rules) as guarded:
        deliveries = guarded.publish_many([(f"{name}.x", b"", f"{name}-{n}") for n in range(3)], ["a"] * 3)
    assert acknowledged(deliveries) == [True] * 3
    assert len(checked) == checks


@pytest.mark.process
def test_acknowledgements_before_lost_connection_count(tmp_path: Path) -> None:
    with NatsServer(tmp_path, "mortal") as mortal, rig.cluster(mortal) as cluster:
        made(cluster, "FEED")

        def kill() -> None:
            _await_messages(mortal, "FEED", 500)
            mortal.kill()

        items = [(f"FEED.{n}", b"x" * 1000, str(n)) for n in range(50_000)]
        with rig.in_background(kill):
            done = acknowledged(cluster.publish_many(items, timeout_seconds=120))
        assert cluster.last_refusal in ("connection lost", "unexpected EOF", "Connection reset by peer", "Broken pipe")
        mortal.start()
        stored = cluster.stream_info("FEED").messages
        # A message is stored before it is acknowledged, so the stream may hold more than were acknowledged.
        assert 0 < sum(done) <= stored < len(items)
        assert done == sorted(done, reverse=True)


@pytest.mark.process
def test_connection_reset_before_unsent_data_closes_client(tmp_path: Path) -> None:
    async def lose(server: NatsServer) -> None:
        closed = asyncio.Event()

        async def on_closed() -> None:
            closed.set()

        lost = SecuredClient(ClusterSettings((server.address,)))
        await lost.connect(f"nats://{server.address}", allow_reconnect=False, closed_cb=on_closed)
        os.kill(server.pid, signal.SIGSTOP)
        # The server reads nothing. When the kernel's buffers are full, the rest waits in the client.
        while not lost.pending_data_size:
            await lost.publish("anything", b"x" * 1_000_000)
            await asyncio.sleep(0.05)
        server.kill()
        await asyncio.wait_for(closed.wait(), rig.PATIENCE_SECONDS)

    with NatsServer(tmp_path, "mortal") as mortal:
        asyncio.run(lose(mortal))


@pytest.mark.process
def test_close_does_not_wait_for_a_stopped_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "REQUEST_SECONDS", 0.5)
    with NatsServer(tmp_path, "frozen") as server:
        opened = rig.cluster(server)
        made(opened, "FEED")
        rig.stop_process(server.pid)
        try:
            with pytest.raises(TransientError):
                opened.publish_many([("FEED.x", b"x" * 1_000_000, f"{n}") for n in range(16)], timeout_seconds=0.1)
            with rig.in_background(opened.close) as ending:
                ending.result(rig.PATIENCE_SECONDS)
        finally:
            os.kill(server.pid, signal.SIGCONT)


def test_client_reaches_the_server_after_silent_ones(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "REQUEST_SECONDS", 0.1)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in silent]
        settings = ClusterSettings((*addresses, nats_server.address), connect_timeout_seconds=1.0)
        with Cluster(settings) as opened:
            assert opened.max_payload


def _await_messages(server: NatsServer, stream: str, count: int) -> None:
    with rig.cluster(server) as other:
        while other.stream_info(stream).messages < count:
            pass


def test_core_messages_reach_subscribers(cluster: Cluster, nats_server: NatsServer, unique: Names) -> None:
    subject = unique("core")
    with socket.create_connection(("127.0.0.1", nats_server.port)) as listener, listener.makefile("rb") as lines:
        listener.sendall(b'CONNECT {"verbose":false}\r\nSUB %b 1\r\nPING\r\n' % subject.encode())
        while lines.readline() != b"PONG\r\n":
            pass
        cluster.publish_core([(subject, b"one"), (subject, b"two")])
        assert [lines.readline() for _ in range(4)][1::2] == [b"one\r\n", b"two\r\n"]


@pytest.mark.process
def test_core_message_without_permission_is_an_error(tmp_path: Path) -> None:
    users = '{ user: u, password: u, permissions: { publish: { deny: ["no.>"] } } }'
    with NatsServer(tmp_path, "guarded", config=f"authorization {{ users: [ {users} ] }}") as server:
        opened = Cluster(ClusterSettings((server.address,), "u", "u"))
        with closing(opened):
            opened.publish_core([("yes", b"")])
            with pytest.raises(PermissionDeniedError, match=r'publish to "no\.one"; give'):
                opened.publish_core([("yes", b""), ("no.one", b"")])


def test_publish_permission_is_proven_without_storing(cluster: Cluster, unique: Names) -> None:
    name = unique("PROOF")
    made(cluster, name)
    cluster.try_publishing(f"{name}.x")
    with pytest.raises(RunError, match="no stream takes this subject"):
        cluster.try_publishing(unique("nowhere"))
    assert cluster.stream_info(name).last_sequence == 0


# -------------------------------------------------------------------------------------------------------------- target


@pytest.mark.parametrize("max_age_ns", (0, MINUTE_NS))
def test_real_server_creates_stream_with_available_replicas(
    nats_pair: tuple[NatsServer, NatsServer], unique: Names, max_age_ns: int
) -> None:
    source, target = (ClusterSettings((server.address,)) for server in nats_pair)
    name = unique("MADE")
    with Cluster(source) as at_source, Cluster(target) as at_target:
        config = {**made(at_source, name, max_age=max_age_ns).config, "num_replicas": 3}
        made_there = at_target.create_stream(target_config(name, [f"far.{name}.>"], config))
        assert (made_there.subjects, made_there.replicas) == ((f"far.{name}.>",), 1)
        assert made_there.allow_direct


# ---------------------------------------------------------------------------------------------------------- connecting


def test_unreachable_server_is_one_immediate_line(nats_server: NatsServer) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        refusing = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(RunError, match=f"cannot connect to NATS: {refusing}: Connection refused") as caught:
            Cluster(ClusterSettings((refusing,))).__enter__()
        assert "\n" not in str(caught.value)
        with Cluster(ClusterSettings((refusing, nats_server.address))) as cluster:
            assert cluster.max_payload > 0
    assert not [thread for thread in threading.enumerate() if thread.name == "sr-assets"]


@pytest.mark.process
def test_refused_permission_is_named(tmp_path: Path) -> None:
    users = '{ user: "ada", password: "s3cret", permissions: { publish: { deny: ["$JS.API.STREAM.INFO.>", "no.>"] } } }'
    with (
        NatsServer(tmp_path, "guarded", config=f"authorization {{ users: [ {users} ] }}") as server,
        Cluster(ClusterSettings((server.address,), user="ada", password="s3cret")) as cluster,
    ):
        made(cluster, "GUARDED", subjects=["no.>"])
        assert acknowledged(cluster.publish_many([("no.x", b"", "id")])) == [False]
        assert "permissions violation for publish" in str(cluster.last_refusal).lower()
        with pytest.raises(RunError, match=r"(?i)permissions violation for publish to .*STREAM\.INFO"):
            cluster.stream_info("GUARDED")
        assert cluster.stream_names("no.x") == ["GUARDED"]


@pytest.mark.process
def test_refused_request_fails_no_other(tmp_path: Path) -> None:
    users = '{ user: "ada", password: "s3cret", permissions: { publish: { deny: ["$JS.API.STREAM.INFO.DENIED"] } } }'
    with (
        NatsServer(tmp_path, "guarded", config=f"authorization {{ users: [ {users} ] }}") as server,
        Cluster(ClusterSettings((server.address,), user="ada", password="s3cret")) as cluster,
        ThreadPoolExecutor(16) as pool,
    ):
        made(cluster, "OPEN")

        def ask(stream: str) -> str:
            try:
                return cluster.stream_info(stream).stream
            except PermissionDeniedError as error:
                return str(error)

        asked = ["OPEN", "DENIED"] * 500
        for stream, answer in zip(asked, pool.map(ask, asked), strict=True):
            assert (answer == stream) if stream == "OPEN" else ("stream.info.denied" in answer.lower()), answer


@pytest.mark.process
def test_server_without_jetstream_is_detected(tmp_path: Path) -> None:
    with NatsServer(tmp_path, "core", config='authorization { token: "t0ken" }', jetstream=False) as server:
        settings = ClusterSettings((server.address,), token="t0ken")
        with Cluster(settings) as cluster, pytest.raises(ApiError, match="is JetStream enabled"):
            cluster.stream_info("X")


@pytest.mark.process
def test_next_call_reconnects_after_outage(tmp_path: Path) -> None:
    with NatsServer(tmp_path, "phoenix") as server, Cluster(ClusterSettings((server.address,))) as cluster:
        made(cluster, "KEPT")
        server.kill()
        with pytest.raises(RunError) as caught:
            cluster.stream_info("KEPT")
        assert "\n" not in str(caught.value)
        server.start()
        assert cluster.stream_exists("KEPT")


def test_api_error_has_server_text_and_code(cluster: Cluster, unique: Names) -> None:
    name = unique("TWICE")
    made(cluster, name)
    with pytest.raises(ApiError, match="10058") as caught:
        made(cluster, name, storage="memory", max_msgs=3, subjects=[f"{name}.other"])
    assert caught.value.code == 10058
