"""The kernel's TCP sockets: who listens, seen by this user while another one listens too."""

import os
import socket

import pytest

from sr_assets.adapters import connection_table
from sr_assets.adapters.connection_table import NOBODY, listener_user, peer_user
from sr_assets_tests.servers import free_port
from sr_assets_tests.strangers import STRANGER, stranger_listens


@pytest.fixture(params=("named", "listed"))
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel names the socket, or does not answer, as in a sandbox: then its tables list it."""
    if request.param == "listed":
        monkeypatch.setattr(connection_table, "_NETLINK_SOCK_DIAG", 1 << 20)


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("bound", ("127.0.0.1", "::ffff:127.0.0.1", "::1"))
def test_listener_user_is_the_owner_of_exactly_that_address(bound: str) -> None:
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    with socket.socket(family) as listening:
        listening.bind((bound, 0))
        port = listening.getsockname()[1]
        host = bound.removeprefix("::ffff:")
        assert listener_user(host, port) == NOBODY, "it is bound, but does not listen"
        listening.listen()
        assert listener_user(host, port) == os.geteuid()
        with socket.create_connection((host, port)) as client:
            assert listener_user(*client.getsockname()[:2]) == NOBODY, "a connection is no listener"
        for other in {"127.0.0.1", "::1", "127.0.0.2"} - {host}:
            assert listener_user(other, port) == NOBODY
    assert listener_user(host, port) == NOBODY


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("family", (socket.AF_INET, socket.AF_INET6))
def test_listener_on_all_addresses_is_not_one_on_a_single_address(family: socket.AddressFamily) -> None:
    with socket.socket(family) as listening:
        listening.bind(("", 0))
        listening.listen()
        host, port = listening.getsockname()[:2]
        assert listener_user(host, port) == os.geteuid()
        assert listener_user("127.0.0.1", port) == listener_user("::1", port) == NOBODY


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("bound", ("127.0.0.1", "::ffff:127.0.0.1", "::1"))
def test_peer_user_is_the_owner_of_the_clients_end(bound: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in bound else socket.AF_INET) as listening:
        listening.bind((bound, 0))
        listening.listen()
        server = (bound, listening.getsockname()[1])
        with socket.create_connection((bound.removeprefix("::ffff:"), server[1])) as client:
            accepted, _ = listening.accept()
            end = client.getsockname()[:2]
            assert peer_user(end, server) == os.geteuid()
            assert peer_user((end[0], end[1] ^ 1), server) == peer_user(server, server) == NOBODY
        with accepted:
            assert peer_user(end, server) == NOBODY, "it is closed"
    assert peer_user(end, server) == NOBODY, "the connection is closed"


@pytest.mark.process
@pytest.mark.usefixtures("source")
def test_listener_user_names_another_user() -> None:
    port = free_port()
    with stranger_listens(f"127.0.0.1:{port}", f"::1:{port}"):
        assert {listener_user("127.0.0.1", port), listener_user("::1", port)} == {STRANGER}
