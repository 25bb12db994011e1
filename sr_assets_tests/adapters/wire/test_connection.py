"""Connections to servers: failover, resent requests, closing, credentials and pings."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from sr_assets.adapters.wire import (
    Ack,
    Connection,
    Outgoing,
    Publisher,
    WireError,
    read_confirmed,
    read_range,
)
from sr_assets.domain.positions import SequenceRange
from sr_assets.settings import ClusterSettings
from sr_assets_tests.adapters.wire.rig import Names, create_stream, flat, outgoing, publish
from sr_assets_tests.rig import address, in_background, stop_process, wait_until
from sr_assets_tests.servers import NatsServer


@pytest.mark.process
def test_publish_fails_with_one_line_when_server_is_killed(tmp_path: Path) -> None:
    with NatsServer(tmp_path, "mortal") as server:
        with Connection(address(server)) as connection:
            stream = create_stream(connection, "MORTAL")

            def publish_and_kill() -> Iterator[Outgoing]:
                yield from outgoing(stream, 2000)
                server.kill()
                yield from outgoing(stream, 20_000, first=2001)

            acks: list[Ack] = []
            with pytest.raises(WireError) as caught:
                acks.extend(Publisher(connection, max_messages=100).publish_all(publish_and_kill()))
            assert "\n" not in str(caught.value)
        server.start()
        with Connection(address(server)) as connection:
            stored = flat(read_confirmed(connection, stream, SequenceRange(1, 30_000), direct=False))
            assert [m.sequence for m in stored] == list(range(1, len(stored) + 1))


def test_open_uses_first_reachable_server(nats_server: NatsServer) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        refusing = f"127.0.0.1:{closed.getsockname()[1]}"
        with Connection(ClusterSettings((refusing, nats_server.address))) as connection:
            assert connection.server_version.startswith("2.")
        with pytest.raises(WireError, match=f"{refusing}: Connection refused"):
            Connection(ClusterSettings((refusing,))).open()


def test_socket_sets_tcp_user_timeout(connection: Connection) -> None:
    """The kernel ends a connection after 30 s without TCP acknowledgement, instead of after about 15 minutes."""
    option = connection._open_link()._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert option == 30_000


@pytest.mark.process
def test_close_does_not_wait_for_stopped_server(tmp_path: Path) -> None:
    with NatsServer(tmp_path, "frozen") as server:
        connection = Connection(address(server))
        connection.open()
        stream = create_stream(connection, "FROZEN")
        publish(connection, outgoing(stream, 50))
        reading = read_range(connection, stream, SequenceRange(1, 51), batch_messages=10, direct=False)
        next(reading)
        connection.request_seconds = connection.silence_seconds = 0.5
        stop_process(server.pid)
        try:
            reading.close()  # type: ignore[attr-defined]
            with pytest.raises(WireError, match="accepted no data"):
                connection.send(bytes(64 << 20))
            connection.close()
        finally:
            os.kill(server.pid, signal.SIGCONT)


def test_request_is_resent_until_answered(
    nats_server: NatsServer, unique: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream without a leader drops requests; its next leader has not received the earlier ones."""
    monkeypatch.setattr("sr_assets.adapters.wire.connection.RESEND_SECONDS", 0.1)
    subject = unique("api")
    with (
        socket.create_connection(("127.0.0.1", nats_server.port)) as responder,
        responder.makefile("rb") as lines,
        Connection(address(nats_server)) as connection,
    ):
        responder.sendall(b'CONNECT {"verbose":false}\r\nSUB %b 1\r\nPING\r\n' % subject.encode())
        assert any(line == b"PONG\r\n" for line in islice(lines, 3))

        def respond_to_third() -> None:
            replies = [line.split()[3] for line in islice(lines, 6) if line.startswith(b"MSG")]
            responder.sendall(b'PUB %b 8\r\n{"ok":1}\r\n' % replies[-1])

        with in_background(respond_to_third):
            assert connection.request(subject, {}) == {"ok": 1}


class AnswerCounter:
    """A proxy for one client that counts its answers to the server's pings."""

    def __init__(self, server: NatsServer) -> None:
        self.answers = 0
        self._listener, self._server = socket.create_server(("127.0.0.1", 0)), server
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with self._listener:
            client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._server.port))
        threading.Thread(target=self._pass, args=(server, client), daemon=True).start()
        self._pass(client, server, counted=True)

    def _pass(self, sender: socket.socket, receiver: socket.socket, *, counted: bool = False) -> None:
        with sender, receiver, contextlib.suppress(OSError):
            while data := sender.recv(1 << 16):
                self.answers += counted and data.count(b"PONG\r\n")
                receiver.sendall(data)


@pytest.mark.process
def test_connection_answers_pings_while_it_waits(tmp_path: Path) -> None:
    # The server asks every half second, and closes a connection that leaves ten pings without an answer.
    config = 'ping_interval: "500ms"\nping_max: 10'
    with NatsServer(tmp_path, "nervous", config=config) as server:
        counter = AnswerCounter(server)
        with Connection(ClusterSettings((counter.address,))) as connection:
            stream = create_stream(connection, "PINGED")

            def await_answers(work: Callable[[], object]) -> None:
                wanted = counter.answers + 3
                wait_until(lambda: bool(work()) or counter.answers >= wanted, "answered pings")

            # The server asks only a connection that is silent.
            await_answers(lambda: connection.receive(0.1))
            assert publish(connection, outgoing(stream, 2000))[-1].error is None
            await_answers(lambda: connection.receive(0.1))
            assert publish(connection, outgoing(stream, 2000))[-1].error is None
