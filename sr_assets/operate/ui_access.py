"""UI access control: the webserver serves only its owner's browsers and programs, or users with a login.

Every web page in a browser and every user of the machine can connect to loopback, and every client of Dagster's UI may
launch and terminate runs.
"""

import asyncio
import base64
import binascii
import contextlib
import errno
import hashlib
import hmac
import logging
import os
import pwd
import re
import secrets
import socket
import stat
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import parse_qs

from sr_assets.adapters.connection_table import peer_user
from sr_assets.domain.clusters import is_loopback
from sr_assets.domain.errors import ConfigurationError, RunError

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_LOOPBACK: Final = "127.0.0.1"

Application = Callable[[Scope, Receive, Send], Awaitable[None]]

#: A page with another name that resolves to loopback (DNS rebinding) sends its own name.
_ACCEPTED_HOSTS: Final = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_HOST: Final = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.IGNORECASE)
_POLICY_VIOLATION: Final = 1008
_HASHED: Final = b":$scrypt$"
#: The beginnings of htpasswd's hashes after the user's name.
_FOREIGN_HASH: Final = re.compile(rb":(\$(2[abxy]|apr1|1|5|6)\$|\{SHA\})")
#: The fewest characters of a password or a token that cause no warning.
_SHORTEST: Final = 16
_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 5.0
#: Answers that wait at a time, and addresses whose wrong logins are counted.
_MOST_WAITING: Final = 32
#: Logins whose password is hashed or waits for it.
_MOST_HASHING: Final = 8
_MOST_ADDRESSES: Final = 1_000
_MOST_PROVEN: Final = 1_000
#: The line that the login of an unknown user is compared with; it has no digest, so no password fits.
_NOBODYS: Final = _HASHED + b"00" * 16 + b"$"
_ALLOW: Final = ((b"allow", b"POST"),)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The response to a refused request: HTTP status, one line of text, extra headers."""

    status: int
    line: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


_TOO_MANY: Final = Refusal(429, "too many wrong logins; try again later", ((b"retry-after", b"5"),))


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use the UI: users with one of the `logins`; without any, this user, root and the proxy's user.

    Requests name this machine's loopback or one of `public_hosts`. With `any_host`, they may name any host: the UI listens on
    another address than loopback, or behind a proxy, and each request has a login. A `proxy_user` needs a login too if there
    are logins, and then no other user is admitted.
    """

    logins: Callable[[], tuple[bytes, ...]] | None = None
    any_host: bool = False
    proxy_user: int | None = None
    public_hosts: frozenset[str] = frozenset()


def ui_sockets(host: str, port: int) -> list[socket.socket]:
    """Return sockets that are bound to an address; for 127.0.0.1 also to ::1, if this machine has it.

    Browsers try `::1` first for `localhost`: another user who listens there would receive the logins. Raises OSError.
    """
    with contextlib.ExitStack() as stack:
        sockets: list[socket.socket] = []
        for each in ("127.0.0.1", "::1") if host == "127.0.0.1" else (host,):
            family, *_, address = socket.getaddrinfo(each, port, type=socket.SOCK_STREAM)[0]
            try:
                bound = stack.enter_context(socket.socket(family))
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind(address)
            except OSError as error:
                if not sockets or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
            else:
                sockets.append(bound)
        stack.pop_all()
    return sockets


def refuse_open_ui(
    host: str, *, auth_file: Path | None, read_only: bool, proxy: str | None = None, public_hosts: Collection[str] = ()
) -> None:
    """Raise ConfigurationError if the options would admit everybody on the network or this machine.

    `proxy` is the user of a proxy, "" for a proxy whose requests all have a login of the file.
    """
    for public in public_hosts:
        if not _HOST.fullmatch(public):
            raise ConfigurationError(
                f"--public-host {public!r}: is not a host name; use the name in the browser's address"
            )
    if proxy:
        user_number(proxy)
    if auth_file or (is_loopback(host) and proxy is None):
        return
    if not read_only or proxy is None:
        options = f"--host {host}" if not is_loopback(host) else "--trust-proxy"
        raise ConfigurationError(
            f"{options}: everybody who reaches the port could start and stop runs; add --auth-file FILE, or --read-only"
            " --trust-proxy USER --public-host NAME behind a proxy of this machine that checks logins"
        )
    if not (proxy and public_hosts):
        raise ConfigurationError(
            "--read-only --trust-proxy: every user of this machine, and web pages by another host name, could read runs and"
            " logs past the proxy; name the proxy's user and host, as in --trust-proxy www-data --public-host"
            " fleet.example.net, or add --auth-file FILE"
        )


def user_number(name: str) -> int:
    """Return the id of a user given by name or id; raises ConfigurationError for an unknown one."""
    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except KeyError:
        raise ConfigurationError(
            f"--trust-proxy {name}: is not a user of this machine; name the proxy's user, such as www-data"
        ) from None


class AccessMiddleware:
    """ASGI middleware that refuses requests without access, and answers wrong logins of an address ever later."""

    def __init__(self, application: Application, access: Access) -> None:
        self._application = application
        self._access = access
        #: The wrong logins in a row of each address.
        self._wrong: dict[str, int] = {}
        self._waiting = 0
        # One thread: a flood of wrong passwords takes one core, and the event loop answers the other requests.
        self._hasher = ThreadPoolExecutor(1, "login")
        self._hashing = 0
        #: Logins of hashed lines that were right, which need no second hash.
        self._proven: set[tuple[bytes, bytes]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse an HTTP request or web socket."""
        refusal = await self._refuse(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self._application(scope, receive, send)
        elif scope["type"] == "websocket":
            # Closing before accepting gives the client status 403.
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": refusal.line})
        else:
            headers = [(b"content-type", b"text/plain; charset=utf-8"), *refusal.headers]
            await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
            await send({"type": "http.response.body", "body": f"{refusal.line}\n".encode()})

    async def _refuse(self, scope: Scope) -> Refusal | None:
        access = self._access
        if refusal := refuse_foreign_page(scope, any_host=access.any_host, public_hosts=access.public_hosts):
            return refusal
        if (access.logins is None or access.proxy_user is not None) and (
            refusal := refuse_other_user(scope, access.proxy_user)
        ):
            return refusal
        return None if access.logins is None else await self._refuse_login(scope, access.logins())

    async def _refuse_login(self, scope: Scope, logins: tuple[bytes, ...]) -> Refusal | None:
        """Refuse a request without one of the logins, after a pause; a right login waits at most once, for its hash."""
        secret = sent_secret(scope)
        address = str((scope.get("client") or ("unknown",))[0])
        hashed = [login for login in logins if _HASHED in login]
        # Compare with every login, in constant time, so that timing reveals nothing.
        same = [hmac.compare_digest(secret, login) for login in logins if _HASHED not in login]
        is_right = any(same)
        if not is_right and hashed and b":" in secret:
            is_right = any((secret, login) in self._proven for login in hashed)
            if not is_right:
                if self._hashing >= _MOST_HASHING or (address in self._wrong and self._waiting >= _MOST_WAITING):
                    return _TOO_MANY
                self._hashing += 1
                try:
                    proven = await asyncio.get_running_loop().run_in_executor(self._hasher, _prove, secret, hashed)
                finally:
                    self._hashing -= 1
                if is_right := proven is not None:
                    if len(self._proven) >= _MOST_PROVEN:
                        self._proven.clear()
                    self._proven.add((secret, proven))
        if is_right:
            self._wrong.pop(address, None)
            return None
        if _header(scope, b"authorization") is not None:
            if len(self._wrong) >= _MOST_ADDRESSES:
                self._wrong.clear()
            count = self._wrong[address] = self._wrong.get(address, 0) + 1
            if count.bit_count() == 1:  # 1, 2, 4, 8, …
                logger.warning("UI: %d wrong logins in a row from %s", count, address)
            if self._waiting >= _MOST_WAITING:
                return _TOO_MANY
            self._waiting += 1
            try:
                await asyncio.sleep(min(_FIRST_PAUSE_SECONDS * 2 ** min(count, 10), _LONGEST_PAUSE_SECONDS))
            finally:
                self._waiting -= 1
        challenge = b"Basic" if any(b":" in login for login in logins) else b"Bearer"
        challenge += b' realm="sr-assets"'
        return Refusal(401, "a login from the --auth-file is required", ((b"www-authenticate", challenge),))


def refuse_foreign_page(scope: Scope, *, any_host: bool = False, public_hosts: Collection[str] = ()) -> Refusal | None:
    """Refuse requests that a page of another site makes a browser send; None: accepted."""
    host, origin, fetched = (_header(scope, name) for name in (b"host", b"origin", b"sec-fetch-site"))
    is_named = host is not None and re.sub(r":[0-9]{1,5}$", "", host).lower() in public_hosts
    if host is None or not (is_named or (_HOST if any_host else _ACCEPTED_HOSTS).fullmatch(host)):
        return Refusal(403, "this host name is refused; open http://127.0.0.1 with this port")
    if origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        return Refusal(403, "cross-site requests are refused")
    if fetched in ("cross-site", "same-site") and not _is_followed_link(scope):
        return Refusal(403, "cross-site requests are refused")
    if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
        parameters = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if scope["path"].rstrip("/").endswith("/graphql") and "query" in parameters:
            return Refusal(405, "GraphQL by GET is refused because any web page can send it; use POST", _ALLOW)
    return None


def _is_followed_link(scope: Scope) -> bool:
    """Return whether the user followed a link on another page: that only opens the UI."""
    return (
        scope["type"] == "http"
        and scope["method"] == "GET"
        and _header(scope, b"sec-fetch-mode") == "navigate"
        and _header(scope, b"sec-fetch-dest") == "document"
    )


def _header(scope: Scope, name: bytes) -> str | None:
    """Return a header's value; values of a repeated header are joined, and thus match no accepted value."""
    values = [value.decode("latin-1") for key, value in scope["headers"] if key == name]
    return ", ".join(values) if values else None


def sent_secret(scope: Scope) -> bytes:
    """Return what a request sends to log in: `user:password` as HTTP basic, or a bearer token; empty without one."""
    scheme, _, sent = (_header(scope, b"authorization") or "").partition(" ")
    secret = sent.strip().encode("latin-1")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(secret, validate=True)
        except binascii.Error:
            return b""
    return secret if scheme.lower() == "bearer" else b""


def _prove(secret: bytes, hashed: list[bytes]) -> bytes | None:
    """Return the line of `hashed_login` that a login belongs to, or None; an unknown user takes as long as a known one."""
    user, _, password = secret.partition(b":")
    lines = [line for line in hashed if hmac.compare_digest(line.partition(_HASHED)[0], user)]
    for line in lines or (_NOBODYS,):
        salt, _, digest = line.partition(_HASHED)[2].partition(b"$")
        with contextlib.suppress(ValueError):
            if hmac.compare_digest(_scrypt(password, bytes.fromhex(salt.decode())).encode(), digest):
                return line
    return None


def _scrypt(password: bytes, salt: bytes) -> str:
    # 16 MiB and some 30 ms, in which other threads run.
    return hashlib.scrypt(password, salt=salt, n=1 << 14, r=8, p=1).hex()


def hashed_login(user: str, password: str) -> str:
    """Return a line for a file of logins from which nobody can read the password."""
    salt = secrets.token_bytes(16)
    return f"{user}{_HASHED.decode()}{salt.hex()}${_scrypt(password.encode(), salt)}"


class Logins:
    """The logins of a file, which is read again when it changes; while it is unusable, the last ones remain."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._changed = self._change()
        self._logins = read_logins(file)

    def __call__(self) -> tuple[bytes, ...]:
        """Return the logins that the file has now."""
        if (changed := self._change()) != self._changed:
            self._changed = changed
            try:
                self._logins = read_logins(self._file)
            except ConfigurationError as error:
                logger.warning("UI: %s; using the logins from before", error)
        return self._logins

    def _change(self) -> tuple[int, ...]:
        try:
            status = self._file.stat()
        except OSError:
            return ()
        return status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode, status.st_uid


def read_logins(file: Path) -> tuple[bytes, ...]:
    """Return the logins in a file, one per line: `user:password`, a line of `hashed_login`, or a token.

    Lines that begin with `#` are comments. Raises ConfigurationError if other users can read or write the file or own it, or if
    it has no login.
    """
    try:
        with file.open("rb") as opened:
            status, content = os.fstat(opened.fileno()), opened.read()
    except OSError as error:
        raise ConfigurationError(f"--auth-file {file}: cannot be read: {error.strerror}") from None
    if status.st_uid not in (0, os.geteuid()) or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigurationError(f"--auth-file {file}: other users can access it; own it and set its mode to 600")
    lines = [line.strip() for line in content.splitlines()]
    logins = tuple(line for line in lines if line and not line.startswith(b"#") and not _FOREIGN_HASH.search(line))
    if not logins:
        raise ConfigurationError(f"--auth-file {file}: is empty; write one user:password or token per line")
    return logins


def weak_logins(file: Path) -> list[str]:
    """Return a warning for each line of a file of logins that nobody, or anybody, can use."""
    warnings = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        login = line.strip()
        secret = login.partition(b":")[2] or login
        if not login or login.startswith(b"#") or _HASHED in login:
            continue
        if _FOREIGN_HASH.search(login):
            warnings.append("has a hash of another program, with which nobody can log in; use `sr-assets login USER`")
        elif len(secret) < _SHORTEST:
            warnings.append(f"has fewer than {_SHORTEST} characters, which somebody may guess")
        else:
            continue
        warnings[-1] = f"--auth-file {file}: line {number} {warnings[-1]}"
    return warnings


def refuse_other_user(scope: Scope, proxy_user: int | None = None) -> Refusal | None:
    """Refuse users other than this one and the proxy's, if the system reveals the owner of a loopback connection."""
    if peer_user(scope.get("client"), scope.get("server")) in (None, 0, os.geteuid(), proxy_user or 0):
        return None
    return Refusal(403, "this UI belongs to another user, who can admit others with --auth-file")


@dataclass(frozen=True, slots=True)
class Ui:
    """Options of the UI: its address, whether it is read-only, the file with the accepted logins, and a proxy.

    `trust_proxy` is the proxy's user, or "" if all its requests have a login of the file; `public_hosts` are its names.

    Raises ConfigurationError if the options would let everybody on the network launch runs.
    """

    port: int = 3000
    read_only: bool = False
    auth_file: Path | None = None
    host: str = _LOOPBACK
    trust_proxy: str | None = None
    public_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse an open UI."""
        refuse_open_ui(
            self.host,
            auth_file=self.auth_file,
            read_only=self.read_only,
            proxy=self.trust_proxy,
            public_hosts=self.public_hosts,
        )

    @property
    def url(self) -> str:
        """The URL, as this machine opens it."""
        host = self._reachable
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def _reachable(self) -> str:
        return {"0.0.0.0": _LOOPBACK, "::": "::1"}.get(self.host, self.host)  # noqa: S104  all addresses, if configured

    def refuse_used_address(self) -> None:
        """Raise RunError if the UI cannot listen on its address."""
        try:
            for listening in ui_sockets(self.host, self.port):
                listening.close()
        except OSError as error:
            raise RunError(
                f"port {self.port} on {self.host}: cannot listen ({error.strerror}); choose another with"
                f" {'--port' if error.errno == errno.EADDRINUSE else '--host'}"
            ) from None

    def listens(self) -> bool:
        """Return whether the webserver accepts connections."""
        family, *_, address = socket.getaddrinfo(self._reachable, self.port, type=socket.SOCK_STREAM)[0]
        return listens(family, address)

    def absolute(self) -> Self:
        """Return these options for a process in another folder."""
        return self if self.auth_file is None else replace(self, auth_file=self.auth_file.absolute())


def listens(family: socket.AddressFamily, address: str | tuple[Any, ...]) -> bool:
    """Return whether somebody accepts connections at an address."""
    with socket.socket(family) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(address) == 0
