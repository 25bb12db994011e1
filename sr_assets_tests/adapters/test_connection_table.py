"""The kernel's tables of TCP sockets: who listens, seen by this user while another one listens too."""

import os
import socket

import pytest

from sr_assets.adapters.connection_table import NOBODY, listener_user
from sr_assets_tests.servers import free_port
from sr_assets_tests.strangers import STRANGER, stranger_listens


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


@pytest.mark.process
def test_listener_user_names_another_user() -> None:
    port = free_port()
    with stranger_listens(f"127.0.0.1:{port}", f"::1:{port}"):
        assert {listener_user("127.0.0.1", port), listener_user("::1", port)} == {STRANGER}
