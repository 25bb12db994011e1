"""Access control of the webserver."""

import asyncio
import base64
import itertools
import os
import socket
import threading
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters.connection_table import NOBODY, peer_user
from sr_assets.domain.clusters import is_loopback
from sr_assets.domain.errors import ConfigurationError
from sr_assets.operate.ui_access import (
    Access,
    AccessMiddleware,
    Logins,
    hashed_login,
    read_logins,
    refuse_foreign_page,
    refuse_open_ui,
    ui_sockets,
    weak_logins,
)
from sr_assets_tests.rig import PATIENCE_SECONDS

OWN_HEADERS = {"host": "127.0.0.1:3000"}


def scope(
    method: str = "POST", path: str = "/graphql", query: str = "", kind: str = "http", **headers: str
) -> dict[str, Any]:
    """Return a request as an ASGI scope."""
    named = {name.replace("_", "-"): value for name, value in {**OWN_HEADERS, **headers}.items()}
    listed = [(name.encode(), value.encode()) for name, value in named.items()]
    return {"type": kind, "method": method, "path": path, "query_string": query.encode(), "headers": listed}


def status(request: dict[str, Any]) -> int:
    refusal = refuse_foreign_page(request)
    return refusal.status if refusal else 200


@pytest.mark.parametrize("host", ("127.0.0.1:3000", "localhost:3000", "LOCALHOST", "[::1]:3000"))
def test_own_page_is_served_under_every_loopback_name(host: str) -> None:
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
def test_cross_site_request_is_refused(headers: dict[str, str], kind: str) -> None:
    for method in ("GET", "POST"):
        assert status(scope(method, "/server_info", kind=kind, **headers)) == 403


def test_request_without_exactly_one_host_is_refused() -> None:
    request = scope()
    assert status({**request, "headers": []}) == 403
    assert status({**request, "headers": [*request["headers"], (b"host", b"evil.example")]}) == 403


def test_link_on_another_page_opens_the_ui() -> None:
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert status(scope("GET", "/runs", **link)) == 200
    assert status(scope("POST", "/graphql", **link)) == 403


@pytest.mark.parametrize("path", ("/graphql", "/graphql/", "/x/graphql"))
@pytest.mark.parametrize("method", ("GET", "HEAD"))
def test_graphql_by_get_is_refused(method: str, path: str) -> None:
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
        ("Basic " + base64.b64encode("me:söcret:1".encode()).decode(), 200),
        ("basic " + base64.b64encode("me:söcret:1".encode()).decode(), 200),
        ("Bearer 0123456789abcdef", 200),
        ("Basic " + base64.b64encode(b"me:").decode(), 401),
        ("Basic me:secret", 401),
        ("Bearer 0123456789abcde", 401),
        ("Bearer ", 401),
        ("0123456789abcdef", 401),
        ("", 401),
    ),
)
def test_request_needs_a_login_from_the_file(
    logins: tuple[bytes, ...], sent: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sr_assets.operate.ui_access._FIRST_PAUSE_SECONDS", 0.0)
    assert answer(scope(authorization=sent), logins) == [status]


def test_unsafe_or_empty_auth_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "logins"
    with pytest.raises(ConfigurationError, match=f"--auth-file {file}: cannot be read: No such file"):
        read_logins(file)
    file.write_text("me:secret")
    file.chmod(0o640)
    with pytest.raises(ConfigurationError, match="other users can access it; own it and set its mode to 600"):
        read_logins(file)
    file.chmod(0o600)
    file.write_text(" \n")
    with pytest.raises(ConfigurationError, match="is empty; write one user:password or token per line"):
        read_logins(file)
    file.write_text("# operators\nme:$2y$05$abcdefghijklmnopqrstuv\nme:{SHA}abc\n")
    with pytest.raises(ConfigurationError, match="is empty"):
        read_logins(file)
    assert [line.partition(": line ")[2][:12] for line in weak_logins(file)] == ["2 has a hash", "3 has a hash"]


def basic(login: str) -> str:
    """Return the header of a login."""
    return "Basic " + base64.b64encode(login.encode()).decode()


def test_hashed_login_admits_its_password_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sr_assets.operate.ui_access._FIRST_PAUSE_SECONDS", 0.0)
    line = hashed_login("me", "correct horse battery").encode()
    assert b"horse" not in line
    middleware = AccessMiddleware(served, Access(lambda: (line,)))
    for _ in range(2):
        assert asked(middleware, scope(authorization=basic("me:correct horse battery"))) == [200]
        for wrong in ("me:correct horse", "you:correct horse battery", line.decode(), "me:", ":", ""):
            assert asked(middleware, scope(authorization=basic(wrong))) == [401]
        assert asked(middleware, scope(authorization=f"Bearer {line.decode()}")) == [401]
    other = hashed_login("me", "another password").encode()
    monkeypatch.setattr(middleware, "_access", Access(lambda: (other,)))
    assert asked(middleware, scope(authorization=basic("me:correct horse battery"))) == [401]


def test_every_wrong_login_costs_one_hash_for_unknown_users_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sr_assets.operate.ui_access._FIRST_PAUSE_SECONDS", 0.0)
    lines = (hashed_login("me", "correct horse battery").encode(), b"you:plain", hashed_login("she", "x").encode())
    hashed: list[bytes] = []

    def scrypt(password: bytes, _salt: bytes) -> str:
        hashed.append(password)
        return "0"

    monkeypatch.setattr("sr_assets.operate.ui_access._scrypt", scrypt)
    middleware = AccessMiddleware(served, Access(lambda: lines))
    for user in ("me", "you", "she", "nobody", ""):
        assert asked(middleware, scope(authorization=basic(f"{user}:wrong"))) == [401]
    assert hashed == [b"wrong"] * 5
    assert asked(middleware, scope(authorization=basic("you:plain"))) == [200]
    assert asked(middleware, scope(authorization="Bearer wrong")) == [401]
    assert len(hashed) == 5


def test_wrong_logins_hold_up_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    release, hashing, most = threading.Event(), [0], [0]

    def scrypt(_password: bytes, _salt: bytes) -> str:
        hashing[0] += 1
        most[0] = max(most[0], hashing[0])
        is_released = release.wait(PATIENCE_SECONDS)
        release.set()
        assert is_released
        hashing[0] -= 1
        return "0"

    line = hashed_login("me", "correct horse battery").encode()
    middleware = AccessMiddleware(served, Access(lambda: (line, b"0123456789abcdef")))
    right = scope(authorization=basic("me:correct horse battery"))
    assert asked(middleware, right) == [200]
    monkeypatch.setattr("sr_assets.operate.ui_access._scrypt", scrypt)
    monkeypatch.setattr("sr_assets.operate.ui_access._FIRST_PAUSE_SECONDS", 0.0)

    async def flood() -> list[list[int]]:
        wrong = [
            asyncio.ensure_future(statuses(middleware, scope(authorization=basic(f"me:wrong {each}"))))
            for each in range(20)
        ]
        try:
            # Twelve of them are refused although no password has been hashed yet.
            for each in itertools.islice(asyncio.as_completed(wrong, timeout=PATIENCE_SECONDS), 12):
                assert await each == [429]
            for other in (right, scope(authorization="Bearer 0123456789abcdef")):
                assert await statuses(middleware, other) == [200]
            assert await statuses(middleware, scope()) == [401]
        finally:
            release.set()
        return await asyncio.gather(*wrong)

    assert sorted(asyncio.run(flood())) == [[401]] * 8 + [[429]] * 12
    assert most == [1]


def test_logins_follow_their_file_and_outlive_a_bad_one(tmp_path: Path) -> None:
    file = tmp_path / "logins"
    file.write_text("me:secret-of-sixteen\n")
    file.chmod(0o600)
    logins = Logins(file)
    assert logins() == (b"me:secret-of-sixteen",)
    file.write_text("you:another-secret-of-mine\n")
    assert logins() == (b"you:another-secret-of-mine",)
    file.chmod(0o644)
    assert logins() == (b"you:another-secret-of-mine",)
    file.unlink()
    assert logins() == (b"you:another-secret-of-mine",)


def test_wrong_logins_wait_longer_and_a_right_one_never(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("sr_assets.operate.ui_access.asyncio.sleep", sleep)
    middleware = AccessMiddleware(served, Access(lambda: (b"0123456789abcdef",)))
    wrong, right = (scope(authorization=f"Bearer {token}") for token in ("wrong", "0123456789abcdef"))
    for _ in range(8):
        assert asked(middleware, wrong) == [401]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 5.0
    assert sum("wrong logins in a row" in record.message for record in caplog.records) == 4
    assert (asked(middleware, right), len(pauses)) == ([200], 8)
    assert asked(middleware, scope()) == [401]
    assert len(pauses) == 8


def test_ui_listens_on_both_loopback_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listening = ui_sockets("127.0.0.1", port)
    assert {each.getsockname()[0] for each in listening} == {"127.0.0.1", "::1"}
    listening[0].close()
    with listening[1] as stranger:
        stranger.listen()
        with pytest.raises(OSError, match="in use"):
            ui_sockets("127.0.0.1", port)


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a loopback connection: client, server."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with socket.create_connection(listening.getsockname()) as client, listening.accept()[0] as server:
            yield client, server


def test_peer_user_is_nobody_after_the_connection_is_closed(connected: tuple[socket.socket, socket.socket]) -> None:
    client, server = connected
    ends = (client.getsockname(), server.getsockname())
    assert peer_user(*ends) == os.geteuid()
    client.close()
    assert peer_user(*ends) == NOBODY
    assert peer_user(None, ends[1]) == NOBODY


def test_other_user_is_refused_without_logins(
    connected: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, server = connected
    request = {**scope(), "client": client.getsockname(), "server": server.getsockname()}
    assert answer(request, None) == [200]
    # Root is always accepted, so the other user must not be root.
    monkeypatch.setattr("sr_assets.operate.ui_access.peer_user", lambda *_: os.geteuid() + 1)
    assert answer(request, None) == [403]
    assert answer(request, (b"0123456789abcdef",)) == [401]
    assert answer({**request, "type": "websocket"}, None) == [1008]


def answer(request: dict[str, Any], logins: tuple[bytes, ...] | None, access: Access | None = None) -> list[int]:
    """Send a request through the middleware; returns the statuses or close codes of the response."""
    return asked(AccessMiddleware(served, access or Access(None if logins is None else lambda: logins)), request)


async def served(_scope: object, _receive: object, send: Any) -> None:
    """Answer each request that passes the middleware."""
    await send({"type": "http.response.start", "status": 200})


def asked(middleware: AccessMiddleware, request: dict[str, Any]) -> list[int]:
    """Send a request; returns the statuses or close codes of the response."""
    return asyncio.run(statuses(middleware, request))


async def statuses(middleware: AccessMiddleware, request: dict[str, Any]) -> list[int]:
    """Send a request; returns the statuses or close codes of the response."""
    said: list[int] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        said.extend(value for key, value in message.items() if key in ("status", "code"))

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("nothing is read of a refused request")

    await middleware(request, receive, send)
    return said


def test_loopback_is_recognised() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "fleet.example.net", "")))


@pytest.mark.parametrize("host", ("127.0.0.1", "0.0.0.0"))
@pytest.mark.parametrize("auth_file", (None, Path("logins")))
@pytest.mark.parametrize("read_only", (False, True))
@pytest.mark.parametrize("proxy", (None, "", "0"))
@pytest.mark.parametrize("public_hosts", ((), ("fleet.example.net",)))
def test_ui_without_any_login_is_refused(
    host: str, auth_file: Path | None, read_only: bool, proxy: str | None, public_hosts: tuple[str, ...]
) -> None:
    checked_by_proxy = read_only and proxy and public_hosts
    if auth_file is not None or (host == "127.0.0.1" and proxy is None) or checked_by_proxy:
        refuse_open_ui(host, auth_file=auth_file, read_only=read_only, proxy=proxy, public_hosts=public_hosts)
        return
    past_proxy = "could read runs and logs past the proxy; name the proxy's user and host"
    problem = past_proxy if read_only and proxy is not None else "could start and stop runs; add --auth-file FILE"
    with pytest.raises(ConfigurationError, match=problem):
        refuse_open_ui(host, auth_file=auth_file, read_only=read_only, proxy=proxy, public_hosts=public_hosts)


def test_unknown_proxy_user_and_public_host_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--trust-proxy nobody-here: is not a user of this machine; name"):
        refuse_open_ui("127.0.0.1", auth_file=None, read_only=True, proxy="nobody-here", public_hosts=("a.example",))
    with pytest.raises(
        ConfigurationError, match=r"--public-host 'https://a\.example': is not a host name; use the name"
    ):
        refuse_open_ui("127.0.0.1", auth_file=None, read_only=True, proxy="0", public_hosts=("https://a.example",))


@pytest.mark.parametrize(("user", "status"), ((0, 200), (33, 200), (65534, 403), (NOBODY, 403), (None, 200)))
def test_only_the_proxys_user_reads_past_a_proxy(
    monkeypatch: pytest.MonkeyPatch, user: int | None, status: int
) -> None:
    monkeypatch.setattr("sr_assets.operate.ui_access.peer_user", lambda *_: user)
    access = Access(None, proxy_user=33, public_hosts=frozenset({"fleet.example.net"}))
    assert answer(scope(host="fleet.example.net"), None, access) == [status]
    assert answer(scope(host="Fleet.example.net:443"), None, access) == [status]
    assert answer(scope(host="evil.example"), None, access) == [403]


def test_proxy_user_needs_a_login_if_there_are_logins(monkeypatch: pytest.MonkeyPatch) -> None:
    access = Access(lambda: (b"0123456789abcdef",), any_host=True, proxy_user=33)
    login = scope(authorization="Bearer 0123456789abcdef")
    monkeypatch.setattr("sr_assets.operate.ui_access.peer_user", lambda *_: 33)
    assert (answer(login, None, access), answer(scope(), None, access)) == ([200], [401])
    monkeypatch.setattr("sr_assets.operate.ui_access.peer_user", lambda *_: 65534)
    assert answer(login, None, access) == [403]


@pytest.mark.parametrize("host", ("fleet.example.net", "10.0.0.1:3000", "[2001:db8::1]:443"))
def test_other_hosts_are_accepted_only_if_configured(host: str) -> None:
    own = scope(host=host, origin=f"https://{host}", sec_fetch_site="same-origin")
    assert refuse_foreign_page(own) is not None
    assert refuse_foreign_page(own, any_host=True) is None
    # A page of another site is refused in any case.
    for headers in ({"origin": "https://evil.example"}, {"sec_fetch_site": "cross-site"}):
        assert refuse_foreign_page(scope(host=host, **headers), any_host=True) is not None
    for malformed in ("", "a b", "a/b", "fleet.example.net, evil.example"):
        assert refuse_foreign_page(scope(host=malformed), any_host=True) is not None
