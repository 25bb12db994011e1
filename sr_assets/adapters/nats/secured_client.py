"""A nats-py client whose TLS the configuration decides, its options, and the texts of its errors."""

import asyncio
import os
import socket
import ssl
from typing import Any

import nats.errors
from nats.aio.client import Client

from sr_assets.adapters.security import NO_TLS, read_login, tls_context, tls_error_text
from sr_assets.domain.clusters import ClusterSettings


class SecuredClient(Client):
    """A nats-py client that never sends plain text to a server when TLS is configured.

    It overrides private methods: nats-py decides by the server's `tls_required` alone, has no public hook between the
    server's greeting and the login, and may lose a connection without a report. It reads a private attribute, because
    nats-py gives no access to its socket.
    """

    def __init__(self, settings: ClusterSettings) -> None:
        super().__init__()
        self._tls = settings.tls

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self._tls and not self._tls.handshake_first:
            if not (info.get("tls_required") or info.get("tls_available")):
                raise nats.errors.Error(NO_TLS)
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    async def _process_op_err(self, e: Exception) -> None:
        # nats-py would try to send the waiting data, fail again, and neither close the socket nor report the loss.
        self._pending, self._pending_data_size = [], 0
        await super()._process_op_err(e)

    def bound_delivery(self, vanished_ms: int | None) -> None:
        """Let the kernel close the connection if sent data stays unacknowledged for this long; None changes nothing."""
        writer = self._writer
        if vanished_ms is not None and writer is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, vanished_ms)

    async def close_soon(self, seconds: float) -> None:
        """Close the connection; after this time without its unsent data, because the server may never take it."""
        writer = self._writer
        try:
            await asyncio.wait_for(self.close(), seconds)
        except OSError:
            # TimeoutError is one.
            if writer is not None:
                writer.transport.abort()

    @property
    def _writer(self) -> asyncio.StreamWriter | None:
        writer = getattr(self._transport, "_io_writer", None)
        return writer if isinstance(writer, asyncio.StreamWriter) else None


def secure_options(settings: ClusterSettings) -> dict[str, Any]:
    """Return nats-py's options for TLS and the login; raises RunError that names an unusable file."""
    options = read_login(settings).client_options()
    if settings.tls:
        options |= {"tls": tls_context(settings.tls), "tls_handshake_first": settings.tls.handshake_first}
    return options


def error_text(error: Exception) -> str:
    """Return the text of an error without the library's prefix."""
    if isinstance(error, ssl.SSLError):
        return tls_error_text(error)
    if isinstance(error, TimeoutError):
        return "no response in time"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error).removeprefix("nats: ").strip("'") or type(error).__name__
