"""The URL of a cluster → ClusterSettings; a URL that cannot be used is refused without showing any of it."""

import ipaddress
import re
from urllib.parse import parse_qsl, unquote

from sr_assets.domain.positions import SECOND_NS
from sr_assets.settings.records import ClusterSettings
from sr_assets.settings.values import read_duration

_Login = tuple[str | None, str | None, str | None]


def parse_cluster(value: object) -> ClusterSettings:
    """Read comma-separated servers: `[nats://][user:password@|token@]host[:port][?connect_timeout=5s]`.

    User, password and token are percent-decoded. Raises ValueError, which never shows any part of the value: a
    misplaced character would make a password look like a host.
    """
    if not isinstance(value, str):
        raise ValueError("must be text such as nats://host:4222")  # noqa: TRY004  as in read_text
    parts = [_server(part.strip()) for part in value.split(",")]
    credentials = {login for _, login, _ in parts if login != (None, None, None)} or {(None, None, None)}
    timeouts = {timeout for _, _, timeout in parts if timeout is not None} or {5.0}
    if len(credentials) > 1:
        raise ValueError("all servers of one cluster must have the same user and password, or token")
    if len(timeouts) > 1:
        raise ValueError("connect_timeout differs between the servers")
    (user, password, token), timeout = credentials.pop(), timeouts.pop()
    return ClusterSettings(tuple(dict.fromkeys(server for server, _, _ in parts)), user, password, token, timeout)


def _server(text: str) -> tuple[str, _Login, float | None]:
    """Split one server's URL into `host:port`, (user, password, token) and the connect timeout in seconds."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "nats", text
    if scheme.lower() in ("tls", "ws", "wss"):
        raise ValueError(f"{scheme.lower()}:// is not supported in this version: use nats:// over a protected network")
    if scheme.lower() != "nats":
        raise ValueError("the URL must begin with nats:// or be host:port")
    # As in RFC 3986 the authority ends at the first of these, so a password must have them percent-encoded.
    authority, tail = re.fullmatch(r"([^/?#]*)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
    path, _, query = tail.partition("?")
    if path not in ("", "/"):
        raise ValueError(
            "nothing but ?connect_timeout=5s may follow host:port ('/', '?', '#' in a password: %2F %3F %23)"
        )
    login, _, address = authority.rpartition("@")
    return _address(address), _login(login, "@" in authority), _connect_timeout(query)


def _address(text: str) -> str:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)(?::([0-9]{1,5}))?", text)
    if found is None:
        raise ValueError("a server must be host, host:port or [IPv6]:port (a ',' in a password: %2C)")
    host, port = found[1].lower(), int(found[2] or 4222)
    if host.startswith("["):
        try:
            host = f"[{ipaddress.IPv6Address(host[1:-1])}]"
        except ValueError:
            raise ValueError("the address in brackets is not IPv6") from None
    if not 0 < port < 1 << 16:
        raise ValueError("the port must be between 1 and 65535")
    return f"{host}:{port}"


def _login(text: str, present: bool) -> _Login:
    user, separator, password = text.partition(":")
    if present and not user:
        raise ValueError("there is no user or token before the @")
    if separator:
        return unquote(user), unquote(password), None
    return None, None, unquote(user) or None


def _connect_timeout(query: str) -> float | None:
    timeout = None
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key.lower() in ("credentials", "jwt", "nkey"):
            raise ValueError(f"option {key} is not supported in this version: use user:password@ or token@")
        if key.lower() in ("tls_handshake_first", "insecure"):
            raise ValueError(f"option {key} is not supported in this version: TLS is not; take the option out")
        if key.lower() != "connect_timeout":
            raise ValueError("unknown option in the URL; allowed: connect_timeout")
        try:
            timeout = read_duration(value) / SECOND_NS
        except ValueError:
            raise ValueError("connect_timeout in the URL is not a duration such as 5s") from None
    return timeout
