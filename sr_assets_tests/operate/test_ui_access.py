"""Whom the webserver answers."""

import asyncio
import base64
import os
import socket
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest

from sr_assets.domain.errors import ConfigurationError
from sr_assets.operate.ui_access import (
    NOBODY,
    AccessMiddleware,
    peer_user,
    read_logins,
    refuse_foreign_page,
    refuse_unknown,
)

STREAM_METRICS = {"host": "127.0.0.1:3000"}


def scope(
    method: str = "POST", path: str = "/graphql", query: str = "", kind: str = "http", **headers: str
) -> dict[str, Any]:
    """Return a request as a server hands it to an application."""
    named = {name.replace("_", "-"): value for name, value in {**STREAM_METRICS, **headers}.items()}
    listed = [(name.encode(), value.encode()) for name, value in named.items()]
    return {"type": kind, "method": method, "path": path, "query_string": query.encode(), "headers": listed}


def status(asked: dict[str, Any]) -> int:
    refusal = refuse_foreign_page(asked)
    return refusal.status if refusal else 200


@pytest.mark.parametrize("host", ("127.0.0.1:3000", "localhost:3000", "LOCALHOST", "[::1]:3000"))
def test_our_own_page_is_answered_by_any_of_our_names(host: str) -> None:
    assert status(scope(host=host)) == 200
    for scheme in ("http", "https"):
        assert status(scope(host=host, origin=f"{scheme}://{host}", sec_fetch_site="same-origin")) == 200
        assert status(scope(host=host, origin=f"{scheme}://{host}", kind="websocket")) == 200


@pytest.mark.parametrize(
    "headers",
    (
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example:3000"},
        {"host": "10.0.0.1:3000"},
        {"host": ""},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:3001"},
        {"origin": "http://localhost:3000"},
        {"origin": "file://"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors", "sec_fetch_dest": "image"},
        {"sec_fetch_site": "same-site", "sec_fetch_mode": "cors", "sec_fetch_dest": "empty"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"},
    ),
)
@pytest.mark.parametrize("kind", ("http", "websocket"))
def test_a_page_of_another_site_is_refused(headers: dict[str, str], kind: str) -> None:
    for method in ("GET", "POST"):
        assert status(scope(method, "/server_info", kind=kind, **headers)) == 403


def test_a_request_without_a_name_or_with_two_is_refused() -> None:
    asked = scope()
    assert status({**asked, "headers": []}) == 403
    assert status({**asked, "headers": [*asked["headers"], (b"host", b"evil.example")]}) == 403


def test_a_link_on_another_page_opens_the_ui_and_sends_nothing() -> None:
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert status(scope("GET", "/runs", **link)) == 200
    assert status(scope("POST", "/graphql", **link)) == 403


@pytest.mark.parametrize("path", ("/graphql", "/graphql/", "/x/graphql"))
@pytest.mark.parametrize("method", ("GET", "HEAD"))
def test_graphql_is_not_asked_with_get(method: str, path: str) -> None:
    assert status(scope(method, path, "query=mutation%7Bx%7D")) == 405
    assert status(scope(method, path, "a=b&query=")) == 405
    assert status(scope(method, path)) == 200
    assert status(scope(method, "/runs", "query=tag")) == 200


@pytest.fixture
def logins(tmp_path: Path) -> tuple[bytes, ...]:
    file = tmp_path / "logins"
    file.write_text("me:söcret:1\n\n0123456789abcdef\n", encoding="utf-8")
    file.chmod(0o600)
    return read_logins(file)


@pytest.mark.parametrize(
    ("sent", "status"),
    (
        ("Basic " + base64.b64encode("me:söcret:1".encode()).decode(), None),
        ("basic " + base64.b64encode("me:söcret:1".encode()).decode(), None),
        ("Bearer 0123456789abcdef", None),
        ("Basic " + base64.b64encode(b"me:").decode(), 401),
        ("Basic me:secret", 401),
        ("Bearer 0123456789abcde", 401),
        ("Bearer ", 401),
        ("0123456789abcdef", 401),
        ("", 401),
    ),
)
def test_a_login_of_the_file_is_needed(logins: tuple[bytes, ...], sent: str, status: int | None) -> None:
    refusal = refuse_unknown(scope(authorization=sent), logins)
    assert (refusal.status if refusal else None) == status
    assert refusal is None or refusal.headers == ((b"www-authenticate", b'Basic realm="sr-assets"'),)


def test_a_file_of_logins_that_others_can_use_or_that_has_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "logins"
    with pytest.raises(ConfigurationError, match=f"--auth-file {file}: cannot be read: No such file"):
        read_logins(file)
    file.write_text("me:secret")
    file.chmod(0o640)
    with pytest.raises(ConfigurationError, match="other users can use it: chmod 600"):
        read_logins(file)
    file.chmod(0o600)
    file.write_text(" \n")
    with pytest.raises(ConfigurationError, match="is empty; write user:password, or a token"):
        read_logins(file)


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection on loopback: client, server."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with socket.create_connection(listening.getsockname()) as client, listening.accept()[0] as server:
            yield client, server


def test_the_owner_of_a_connection_is_known_until_it_is_closed(connected: tuple[socket.socket, socket.socket]) -> None:
    client, server = connected
    ends = (client.getsockname(), server.getsockname())
    assert peer_user(*ends) == os.geteuid()
    client.close()
    assert peer_user(*ends) == NOBODY
    assert peer_user(None, ends[1]) == NOBODY


def test_another_user_of_the_machine_is_refused_unless_there_are_logins(
    connected: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, server = connected
    asked = {**scope(), "client": client.getsockname(), "server": server.getsockname()}
    assert answer(asked, None) == [200]
    # Of root nobody is protected: a user who is not root has to be somebody else.
    monkeypatch.setattr("sr_assets.operate.ui_access.peer_user", lambda *_: os.geteuid() + 1)
    assert answer(asked, None) == [403]
    assert answer(asked, (b"0123456789abcdef",)) == [401]
    assert answer({**asked, "type": "websocket"}, None) == [1008]


def answer(asked: dict[str, Any], logins: tuple[bytes, ...] | None) -> list[int]:
    """Ask an application behind the gate; returns the status or the code with which it is answered."""
    said: list[int] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        said.extend(value for key, value in message.items() if key in ("status", "code"))

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("nothing is read of a refused request")

    async def application(_scope: object, _receive: object, _send: object) -> None:
        await send({"type": "http.response.start", "status": 200})

    asyncio.run(AccessMiddleware(application, logins)(asked, receive, send))
    return said
