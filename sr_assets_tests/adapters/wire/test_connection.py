"""Connecting to servers, and to something else: one clear line, no secret in it, no endless wait."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from sr_assets.adapters.wire import Ack, Connection, Outgoing, Publisher, WireError, read_confirmed, read_range
from sr_assets.adapters.wire import connection as wire_connection
from sr_assets.domain.positions import SequenceRange
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.settings import ClusterSettings
from sr_assets_tests.adapters.wire.rig import Names, flat, made, outgoing, publish
from sr_assets_tests.rig import address, stop_process


@pytest.mark.process
def test_a_server_that_dies_ends_a_publish_with_one_line_and_the_target_shows_what_was_stored(tmp_path: Path) -> None:
    with NatsServer(tmp_path, "mortal") as server:
        with Connection(address(server)) as connection:
            stream = made(connection, "MORTAL")

            def dying() -> Iterator[Outgoing]:
                yield from outgoing(stream, 2000)
                server.kill()
                yield from outgoing(stream, 20_000, first=2001)

            acks: list[Ack] = []
            with pytest.raises(WireError) as caught:
                acks.extend(Publisher(connection, max_messages=100).publish_all(dying()))
            assert "\n" not in str(caught.value)
        server.start()
        with Connection(address(server)) as connection:
            stored = flat(read_confirmed(connection, stream, SequenceRange(1, 30_000), direct=False))
            assert [m.sequence for m in stored] == list(range(1, len(stored) + 1))


def test_the_first_server_that_answers_is_taken(nats_server: NatsServer) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        with Connection(ClusterSettings((nobody, nats_server.address))) as connection:
            assert connection.server_version.startswith("2.")
        with pytest.raises(WireError, match=f"{nobody}: Connection refused"):
            Connection(ClusterSettings((nobody,))).open()


def test_a_peer_that_vanishes_is_noticed_by_the_kernel(connection: Connection) -> None:
    """Whatever is sent to it and not acknowledged for this long ends the connection, not a quarter of an hour later."""
    option = connection._open_link()._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert option == 30_000


@pytest.mark.process
def test_closing_does_not_wait_for_a_server_that_stands_still(tmp_path: Path) -> None:
    with NatsServer(tmp_path, "frozen") as server:
        connection = Connection(address(server), request_seconds=0.5)
        connection.open()
        stream = made(connection, "FROZEN")
        publish(connection, outgoing(stream, 50))
        reading = read_range(connection, stream, SequenceRange(1, 51), batch_messages=10, direct=False)
        next(reading)
        stop_process(server.pid)
        try:
            started = time.monotonic()
            reading.close()  # type: ignore[attr-defined]
            assert time.monotonic() - started < 2
            with pytest.raises(WireError, match="accepted no data"):
                connection.send(bytes(64 << 20))
            started = time.monotonic()
            connection.close()
            assert time.monotonic() - started < 2
        finally:
            os.kill(server.pid, signal.SIGCONT)


def test_a_server_without_an_answer_is_left_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(WireError, match=r"no INFO within 0\.1 s"):
            Connection(ClusterSettings((f"127.0.0.1:{port}",), connect_timeout_seconds=0.1)).open()


def test_a_question_that_nobody_answered_is_asked_again(
    nats_server: NatsServer, unique: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a stream without a leader: its next leader has not received the first."""
    monkeypatch.setattr(wire_connection, "RESEND_SECONDS", 0.1)
    subject = unique("api")
    with (
        socket.create_connection(("127.0.0.1", nats_server.port)) as responder,
        responder.makefile("rb") as lines,
        Connection(address(nats_server)) as connection,
    ):
        responder.sendall(b'CONNECT {"verbose":false}\r\nSUB %b 1\r\nPING\r\n' % subject.encode())
        assert any(line == b"PONG\r\n" for line in islice(lines, 3))

        def answer_the_third() -> None:
            replies = [line.split()[3] for line in islice(lines, 6) if line.startswith(b"MSG")]
            responder.sendall(b'PUB %b 8\r\n{"ok":1}\r\n' % replies[-1])

        thread = threading.Thread(target=answer_the_third)
        thread.start()
        assert connection.request(subject, {}) == {"ok": 1}
        thread.join()


def test_something_else_than_a_nats_server_is_recognised() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with server.accept()[0] as client:
                client.sendall(b"220 mail.example.net ESMTP\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(WireError, match="not the NATS protocol"):
            Connection(ClusterSettings((f"127.0.0.1:{server.getsockname()[1]}",))).open()
        thread.join()


@pytest.mark.process
def test_credentials_let_in_and_never_show(tmp_path: Path) -> None:
    config = (
        'authorization { users: [ { user: "ada", password: "s3cret", permissions: { publish: { deny: "no.>" } } } ] }'
    )
    with NatsServer(tmp_path, "guarded", config=config) as server:
        with Connection(ClusterSettings((server.address,), user="ada", password="s3cret")) as connection:
            made(connection, "GUARDED", subjects=["no.>"])
            with pytest.raises(WireError, match="Permissions Violation for Publish"):
                publish(connection, [Outgoing(1, "no.x", b"", b"")])
        for password in ("wr0ng", None):
            with pytest.raises(WireError, match="Authorization Violation") as caught:
                Connection(ClusterSettings((server.address,), user="ada", password=password)).open()
            assert "wr0ng" not in str(caught.value)


@pytest.mark.process
def test_pings_are_answered_while_waiting_and_while_publishing(tmp_path: Path) -> None:
    config = 'ping_interval: "200ms"\nping_max: 2'
    with NatsServer(tmp_path, "nervous", config=config) as server, Connection(address(server)) as connection:
        stream = made(connection, "PINGED")
        for first in range(1, 8001, 2000):
            assert connection.receive(0.5) == []
            assert publish(connection, outgoing(stream, 2000, first=first))[-1].error is None
