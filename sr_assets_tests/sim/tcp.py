"""A simulated server on a real socket, so that the tests of real servers run against it too."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

from sr_assets_tests.sim.server import Server, Session


class TcpServer:
    """A simulated server with this machine's clock, on a free port of the loopback; a context manager."""

    def __init__(self, name: str = "simulated") -> None:
        self._timers: list[tuple[int, Callable[[], None]]] = []
        self.server = Server(time.time_ns, lambda at_ns, call: self._timers.append((at_ns, call)), name)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._ends = False
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = f"nats://{self.address}"

    def __enter__(self) -> Self:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: None)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        self._waker.send(b"x")
        self._thread.join()
        for key in [*self._selector.get_map().values()]:
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._waker.close()
        self._selector.close()

    def _serve(self) -> None:
        while not self._ends:
            due = [call for at_ns, call in self._timers if at_ns <= time.time_ns()]
            self._timers = [timer for timer in self._timers if timer[1] not in due]
            for call in due:
                call()
            wait_ns = min((at_ns for at_ns, _ in self._timers), default=time.time_ns() + 10**9) - time.time_ns()
            for key, _ in self._selector.select(max(0.0, wait_ns / 1e9)):
                key.data()

    def _accept(self) -> None:
        peer, _ = self._listener.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def close() -> None:
            session.close()
            if peer.fileno() >= 0:
                self._selector.unregister(peer)
                peer.close()

        def read() -> None:
            try:
                data = peer.recv(1 << 20)
                if data:
                    session.feed(data)
            except OSError:
                data = b""
            if not data:
                close()

        def emit(data: bytes) -> None:
            peer.sendall(data)

        session = Session(self.server, emit, close)
        self._selector.register(peer, selectors.EVENT_READ, read)
