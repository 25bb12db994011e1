"""The webserver's limits for connections without a request."""

import asyncio
import contextlib
import http.client
import resource
import socket
import threading
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import uvicorn

from sr_assets.operate.webserver import bounded_protocol, most_connections
from sr_assets_tests.rig import PATIENCE_SECONDS, in_background, wait_until


@contextlib.contextmanager
def served(most: int, release: threading.Event | None = None) -> Iterator[int]:
    """Serve an application that answers, below /held not before `release`; yield its port."""

    async def application(scope: MutableMapping[str, Any], _receive: Any, send: Any) -> None:
        if release and scope["path"] == "/held":
            await asyncio.to_thread(release.wait, 60)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(application, http=bounded_protocol(most), log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        with in_background(lambda: server.run(sockets=[listening])):
            try:
                wait_until(lambda: server.started, "the server")
                yield listening.getsockname()[1]
            finally:
                server.should_exit = True


def request(port: int, path: str = "/") -> http.client.HTTPConnection:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    client.request("GET", path)
    return client


def is_closed(client: socket.socket) -> bool:
    client.settimeout(0.1)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def sends(client: socket.socket) -> bool:
    try:
        client.sendall(b"G")
    except ConnectionError:
        return False
    return True


def half_open(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
    with contextlib.suppress(ConnectionError):
        client.sendall(b"GET / HT")
    return client


def test_oldest_connection_without_a_request_gives_way() -> None:
    release = threading.Event()
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(served(4, release))
        stack.callback(release.set)
        held = stack.enter_context(contextlib.closing(request(port, "/held")))
        slow = [stack.enter_context(half_open(port)) for _ in range(200)]
        with contextlib.closing(request(port)) as client:
            assert client.getresponse().read() == b"ok"
        wait_until(lambda: is_closed(slow[0]), "the end of the first half-open connection")
        assert sum(not is_closed(client) for client in slow) < 4
        release.set()
        assert held.getresponse().read() == b"ok"


def test_connection_is_closed_while_all_others_have_a_request() -> None:
    release = threading.Event()
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(served(2, release))
        stack.callback(release.set)
        held = [stack.enter_context(contextlib.closing(request(port, "/held"))) for _ in range(2)]
        with half_open(port) as third:
            wait_until(lambda: is_closed(third), "the refusal of a third connection")
        release.set()
        assert [client.getresponse().read() for client in held] == [b"ok", b"ok"]


@pytest.mark.parametrize("first", ("", "GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
def test_incomplete_head_ends_the_connection(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sr_assets.operate.webserver._CHECK_SECONDS", 0.05)
    monkeypatch.setattr("sr_assets.operate.webserver._HEAD_SECONDS", 0.2)
    with served(4) as port, socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as client:
        client.sendall(first.encode())
        if first:
            assert client.recv(8) == b"HTTP/1.1"
        # A client that drips is never silent.
        wait_until(lambda: not sends(client) or is_closed(client), "the end of the connection")


def test_connections_are_fewer_with_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, most in ((resource.RLIM_INFINITY, 256), (65_536, 256), (256, 64), (1, 1)):
        monkeypatch.setattr("resource.getrlimit", lambda _, soft=soft: (soft, soft))
        assert most_connections() == most
