"""A server whose clock is two days ahead for some time, imitated by a proxy that changes the times in its responses."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from typing import TYPE_CHECKING, Final, Self

from sr_assets.domain.positions import format_rfc3339_ns, parse_rfc3339_ns

if TYPE_CHECKING:
    from types import TracebackType

    from sr_assets.embedded.nats_server import NatsServer

_AHEAD_NS: Final = 48 * 3600 * 10**9
_OPEN_NS: Final = 1 << 62
#: A time in stream info or a header, and the stored time in a consumer's reply subject.
_TIME: Final = re.compile(rb"\b20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?Z|(\$JS\.ACK\.[^ ]+\.)(\d{19})(\.\d+)")
_CHUNK: Final = 1 << 16


class WrongClock:
    """A proxy in front of a server: real times within the wrong spans are reported two days ahead.

    So a message has the same stored time whenever it is read. Each changed time keeps its length.
    """

    def __init__(self, server: NatsServer) -> None:
        """Listen on a free port of the loopback interface."""
        self._server = server
        self._spans: list[list[int]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"nats://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    def set_ahead(self) -> None:
        """Set the clock ahead."""
        self._spans.append([time.time_ns(), _OPEN_NS])

    def correct(self) -> None:
        """Correct the clock."""
        self._spans[-1][1] = time.time_ns()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            host, port = self._server.url.removeprefix("nats://").rsplit(":", 1)
            with socket.create_connection((host, int(port))) as server:
                threading.Thread(target=_forward, args=(client, server), daemon=True).start()
                with contextlib.suppress(OSError):
                    self._forward_changed(server, client)
                for each in (client, server):
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)

    def _forward_changed(self, server: socket.socket, client: socket.socket) -> None:
        """Forward complete lines only, because a time never spans two of them."""
        pending = b""
        while chunk := server.recv(_CHUNK):
            complete, newline, pending = (pending + chunk).rpartition(b"\n")
            client.sendall(_TIME.sub(self._changed, complete + newline))

    def _changed(self, match: re.Match[bytes]) -> bytes:
        if match[2]:
            return match[1] + b"%d" % self._reported(int(match[2])) + match[3]
        text = match[0].decode()
        real_ns = parse_rfc3339_ns(text)
        reported_ns = self._reported(real_ns)
        if reported_ns == real_ns or "." not in text:
            return match[0]
        return f"{format_rfc3339_ns(reported_ns)[: len(text) - 1]}Z".encode()

    def _reported(self, real_ns: int) -> int:
        return real_ns + _AHEAD_NS * any(since <= real_ns < until for since, until in self._spans)


def _forward(client: socket.socket, server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := client.recv(_CHUNK):
            server.sendall(chunk)
    with contextlib.suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)
