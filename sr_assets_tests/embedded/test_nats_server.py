"""The packaged server starts on a free port, stops on request, and starts again on the same port."""

import socket
from pathlib import Path

import pytest

from sr_assets.domain.errors import RunError
from sr_assets.embedded.nats_server import NatsServer, find_nats_server
from sr_assets_tests.rig import PATIENCE_SECONDS

pytestmark = pytest.mark.process


def greeting(server: NatsServer) -> bytes:
    """The first bytes a client gets."""
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as client:
        return client.recv(4)


def test_server_binary_is_packaged() -> None:
    assert find_nats_server().is_file()


def test_two_servers_choose_different_free_ports(tmp_path: Path) -> None:
    with NatsServer(tmp_path / "a", "a") as first, NatsServer(tmp_path / "b", "b") as second:
        assert first.port != second.port
        assert greeting(first) == greeting(second) == b"INFO"


def test_server_keeps_its_port_after_a_crash(tmp_path: Path) -> None:
    with NatsServer(tmp_path, "phoenix") as server:
        port, pid = server.port, server.pid
        server.kill()
        assert not server.running
        server.start()
        assert server.port == port
        assert server.pid != pid
        assert greeting(server) == b"INFO"


def test_stop_ends_the_process_and_is_repeatable(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, "calm", jetstream=False).start()
    server.stop()
    server.stop()
    assert not server.running
    with pytest.raises(ConnectionRefusedError):
        greeting(server)


def test_invalid_server_configuration_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no_such_key") as caught:
        NatsServer(tmp_path, "broken", config="no_such_key: 1").start()
    assert "\n" not in str(caught.value)
