"""A network between one member and one server that can be cut, imitated by a proxy."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from types import TracebackType

    from sr_assets.embedded.nats_server import NatsServer

_CHUNK: Final = 1 << 16


class Network:
    """A proxy in front of a server. While it is cut, it forwards nothing and closes nothing.

    Afterwards it delivers data that waited up to `limit_seconds`; a connection whose data waited longer is closed
    without it, as the kernel does after TCP_USER_TIMEOUT.
    """

    def __init__(self, server: NatsServer, limit_seconds: float) -> None:
        """Listen on a free port of the loopback interface."""
        self._server, self._limit_seconds = server, limit_seconds
        self._whole = threading.Event()
        self._whole.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"nats://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self._whole.set()

    def cut(self) -> None:
        """Forward nothing from now on."""
        self._whole.clear()

    def heal(self) -> None:
        """Forward again."""
        self._whole.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            if not self._passes():
                return
            host, port = self._server.address.rsplit(":", 1)
            with socket.create_connection((host, int(port))) as server:
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
                self._forward(server, client)

    def _passes(self) -> bool:
        """Wait for the network; return False if it was cut for too long."""
        since = time.monotonic()
        self._whole.wait()
        return time.monotonic() - since <= self._limit_seconds

    def _forward(self, sender: socket.socket, receiver: socket.socket) -> None:
        with contextlib.suppress(OSError):
            # The first waiting chunk is the oldest one: those behind it wait in the kernel.
            while (chunk := sender.recv(_CHUNK)) and self._passes():
                receiver.sendall(chunk)
        for each in (sender, receiver):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
