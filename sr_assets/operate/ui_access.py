"""Which requests the webserver answers: those of its owner's own browser and programs, nobody else's.

It listens on loopback, where every page in a browser and every user of the machine reaches it, and whoever reaches it may
launch and end what it likes. Here: the decision, and an ASGI application in front of another. Not here: Dagster's UI
(`webserver`).
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import re
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

from sr_assets.domain.errors import ConfigurationError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

#: A page of another name that points at us (DNS rebinding) sends its own name.
_OUR_HOSTS: Final = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_CONNECTIONS: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED: Final = "01"
_POLICY_VIOLATION: Final = 1008
_ALLOW: Final = ((b"allow", b"POST"),)
#: No user: the other end of a connection has gone.
NOBODY: Final = -1


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not answered: HTTP's status, one line, and what the client may do about it."""

    status: int
    line: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


class AccessMiddleware:
    """An application that passes on to another what is not refused. `logins` None: our own user needs no login."""

    def __init__(self, application: Application, logins: tuple[bytes, ...] | None) -> None:
        """Take the application behind the gate, and the lines of which one has to be sent."""
        self._application = application
        self._logins = logins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, of HTTP or a web socket."""
        refusal = self._refuse(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self._application(scope, receive, send)
        elif scope["type"] == "websocket":
            # Before it is accepted: the client gets status 403.
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": refusal.line})
        else:
            headers = [(b"content-type", b"text/plain; charset=utf-8"), *refusal.headers]
            await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
            await send({"type": "http.response.body", "body": f"{refusal.line}\n".encode()})

    def _refuse(self, scope: Scope) -> Refusal | None:
        return refuse_foreign_page(scope) or (
            refuse_other_user(scope) if self._logins is None else refuse_unknown(scope, self._logins)
        )


def refuse_foreign_page(scope: Scope) -> Refusal | None:
    """Refuse what a page of another site makes a browser send; None when it may be answered."""
    host, origin, fetched = (_header(scope, name) for name in (b"host", b"origin", b"sec-fetch-site"))
    if host is None or not _OUR_HOSTS.fullmatch(host):
        return Refusal(403, "this name is not one of ours: open http://127.0.0.1 with our port")
    if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        return Refusal(403, "a page of another site may not ask us")
    if fetched in ("cross-site", "same-site") and not _is_followed_link(scope):
        return Refusal(403, "a page of another site may not ask us")
    if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
        asked = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if scope["path"].rstrip("/").endswith("/graphql") and "query" in asked:
            return Refusal(405, "ask GraphQL with POST: a GET is refused, because any page can cause one", _ALLOW)
    return None


def _is_followed_link(scope: Scope) -> bool:
    """Return whether somebody opened us by a link on another page: that shows the UI, and asks for nothing else."""
    return (
        scope["type"] == "http"
        and scope["method"] == "GET"
        and _header(scope, b"sec-fetch-mode") == "navigate"
        and _header(scope, b"sec-fetch-dest") == "document"
    )


def _header(scope: Scope, name: bytes) -> str | None:
    """Return the value of a header; one that is repeated has none that could be trusted, and gives all of them."""
    values = [value.decode("latin-1") for key, value in scope["headers"] if key == name]
    return ", ".join(values) if values else None


# ---------------------------------------------------------------------------------------------------------- who asks


def refuse_unknown(scope: Scope, logins: tuple[bytes, ...]) -> Refusal | None:
    """Refuse whoever sends none of the logins: by HTTP basic a line `user:password`, as bearer a token."""
    scheme, _, sent = (_header(scope, b"authorization") or "").partition(" ")
    secret = sent.strip().encode("latin-1")
    if scheme.lower() == "basic":
        try:
            secret = base64.b64decode(secret, validate=True)
        except binascii.Error:
            secret = b""
    elif scheme.lower() != "bearer":
        secret = b""
    # Each is compared, in constant time: how long it takes says nothing.
    same = [hmac.compare_digest(secret, login) for login in logins]
    if any(same):
        return None
    challenge = b"Basic" if any(b":" in login for login in logins) else b"Bearer"
    challenge += b' realm="sr-assets"'
    return Refusal(401, "a login of the file given with --auth-file is needed", ((b"www-authenticate", challenge),))


def read_logins(file: Path) -> tuple[bytes, ...]:
    """Return the logins of a file, one a line: `user:password`, or a token.

    Raises ConfigurationError when others may read or write the file, when it is another user's, or has no login.
    """
    try:
        with file.open("rb") as opened:
            status, content = os.fstat(opened.fileno()), opened.read()
    except OSError as error:
        raise ConfigurationError(f"--auth-file {file}: cannot be read: {error.strerror}") from None
    if status.st_uid not in (0, os.geteuid()) or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigurationError(f"--auth-file {file}: other users can use it: chmod 600, and make it your own")
    logins = tuple(line.strip() for line in content.splitlines() if line.strip())
    if not logins:
        raise ConfigurationError(f"--auth-file {file}: is empty; write user:password, or a token, one a line")
    return logins


def refuse_other_user(scope: Scope) -> Refusal | None:
    """Refuse the other users of this machine, where the system tells whose a connection on loopback is."""
    if peer_user(scope.get("client"), scope.get("server")) in (None, 0, os.geteuid()):
        return None
    return Refusal(403, "this UI belongs to another user, who can let others in with --auth-file")


def peer_user(client: tuple[str, int] | None, server: tuple[str, int] | None) -> int | None:
    """Return the user whose the client's end of a connection on this machine is.

    None where the system does not tell; NOBODY when that end was closed already: whoever sent a request and left could
    not be distinguished from root.
    """
    if client is None or server is None:
        return NOBODY
    tables = [table for table in _CONNECTIONS if table.exists()]
    # In the table of IPv6 the addresses of IPv4 have 24 digits more in front. They are the client's point of view.
    row = re.compile(rf"{_kernels_text(*client)} [0-9A-F]{{0,24}}{_kernels_text(*server)} (?P<rest>.*)")
    for table in tables:
        if match := row.search(table.read_text()):
            state, _, _, _, user, _, inode, *_ = match["rest"].split()
            return int(user) if state == _ESTABLISHED and inode != "0" else NOBODY
    return NOBODY if tables else None


def _kernels_text(host: str, port: int) -> str:
    """Return an address as the kernel's tables have it: each four bytes as one number of this machine."""
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    numbers = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{number:08X}' for number in numbers)}:{port:04X}"
