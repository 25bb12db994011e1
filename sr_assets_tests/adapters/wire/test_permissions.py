"""A user's permissions by the server's account of them, and by probes that deliver no message."""

import socket
from collections.abc import Iterator

import pytest

from sr_assets.adapters.wire import find_denied
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.permissions import Action
from sr_assets_tests.servers import NatsServer

pytestmark = pytest.mark.process

WANTED = [
    (Action.PUBLISH, "allowed.>"),
    (Action.PUBLISH, "refused.*.end"),
    (Action.SUBSCRIBE, "_INBOX.>"),
    (Action.SUBSCRIBE, "other.>"),
]
MISSING = {(Action.PUBLISH, "refused.*.end"), (Action.SUBSCRIBE, "other.>")}
USERS = """authorization { users: [
  { user: told, password: p, permissions: {
      publish: ["allowed.>", "$SYS.REQ.USER.INFO"], subscribe: ["_INBOX.>"] } },
  { user: untold, password: p, permissions: { publish: ["allowed.>"], subscribe: ["_INBOX.>"] } },
  { user: deaf, password: p, permissions: { publish: ["allowed.>", "$SYS.REQ.USER.INFO"], subscribe: ["x"] } },
  { user: free, password: p }
] }"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("permissions"), "guarded", config=USERS) as server:
        yield server


@pytest.mark.parametrize(
    ("user", "missing"),
    (
        ("told", MISSING),
        ("untold", MISSING),
        ("deaf", MISSING | {(Action.SUBSCRIBE, "_INBOX.>")}),
        ("free", set()),
    ),
)
def test_find_denied_names_every_missing_permission(
    server: NatsServer, user: str, missing: set[tuple[Action, str]]
) -> None:
    assert find_denied(ClusterSettings((server.address,), user, "p"), WANTED) == missing


def test_find_denied_delivers_no_message(server: NatsServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as listener, listener.makefile("rb") as lines:
        lines.readline()
        listener.sendall(b'CONNECT {"verbose":false,"user":"free","pass":"p"}\r\nSUB allowed.> 1\r\nPING\r\n')
        assert lines.readline() == b"PONG\r\n"
        find_denied(ClusterSettings((server.address,), "untold", "p"), WANTED)
        listener.sendall(b"PUB allowed.mine 0\r\n\r\n")
        assert lines.readline() == b"MSG allowed.mine 1 0\r\n"
