"""The URL of a cluster, parsed into ClusterSettings.

Errors show no part of the URL. The files that it names are read when a connection is opened.
"""

import ipaddress
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import parse_qsl, unquote

from pydantic import InstanceOf

from sr_assets.domain.clusters import ClusterSettings, TlsSettings
from sr_assets.domain.positions import SECOND_NS
from sr_assets.settings.names import read_plain_subject
from sr_assets.settings.values import Value, read_duration, read_flag, read_path


def parse_cluster(value: object) -> ClusterSettings:
    """Parse comma-separated servers: `[nats://|tls://][user:password@|token@]host[:port][?option=…&option=…]`.

    Options: `connect_timeout=5s`, `credentials=FILE`, `jwt=FILE&nkey=FILE`, `nkey=FILE`, `tls_handshake_first=true`,
    `insecure=true`, `inbox_prefix=_INBOX_sr`. An option of one server applies to all. User, password and token are
    percent-decoded.

    Raises ValueError without any part of the value: a misplaced character would make a password look like a host.
    """
    if not isinstance(value, str):
        raise ValueError("must be text such as nats://host:4222")  # noqa: TRY004  as in read_text
    servers: list[str] = []
    options: dict[str, Any] = {}
    for part in value.split(","):
        server, of_server = _server(part.strip())
        servers.append(server)
        for key, item in of_server.items():
            if options.setdefault(key, item) != item:
                raise ValueError(f"{key} differs between the servers of one cluster")
    user, password, token = options.pop("login", (None, None, None))
    files: dict[str, Any] = {key: options.get(key) for key in ("credentials", "jwt", "nkey")}
    _refuse_two_logins(user, **files)
    first, insecure = options.get("tls_handshake_first", False), options.get("insecure", False)
    return ClusterSettings(
        tuple(dict.fromkeys(servers)),
        user,
        password,
        token,
        options.get("connect_timeout", 5.0),
        **files,
        tls=TlsSettings(handshake_first=first, insecure=insecure) if options.get("tls") or first or insecure else None,
        inbox_prefix=options.get("inbox_prefix", "_INBOX"),
    )


def read_file_path(value: object) -> str:
    """Read the path of a file that is opened later; a relative one starts at the working directory."""
    return str(Path.cwd() / read_path(value))


def _server(text: str) -> tuple[str, dict[str, Any]]:
    """Split one server's URL into `host:port` and its login, TLS and options."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "nats", text
    if scheme.lower() in ("ws", "wss"):
        raise ValueError(f"{scheme.lower()}:// is not supported; use nats:// or tls://")
    if scheme.lower() not in ("nats", "tls"):
        raise ValueError("the URL must begin with nats:// or tls://, or be host:port")
    # RFC 3986: the authority ends at the first of these characters, so a password must percent-encode them.
    authority, after = re.fullmatch(r"([^/?#]*)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
    path, _, query = after.partition("?")
    if path not in ("", "/"):
        raise ValueError(
            "only options such as ?connect_timeout=5s may follow host:port ('/', '?', '#' in a password: %2F %3F %23)"
        )
    login, _, address = authority.rpartition("@")
    options = _login(login, "@" in authority) | _options(query)
    return _address(address), options | {"tls": True} if scheme.lower() == "tls" else options


def _address(text: str) -> str:
    parts = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)(?::([0-9]{1,5}))?", text)
    if parts is None:
        raise ValueError("a server must be host, host:port or [IPv6]:port (a ',' in a password: %2C)")
    host, port = parts[1].lower(), int(parts[2] or 4222)
    if host.startswith("["):
        try:
            host = f"[{ipaddress.IPv6Address(host[1:-1])}]"
        except ValueError:
            raise ValueError("the address in brackets is not IPv6") from None
    if not 0 < port < 1 << 16:
        raise ValueError("the port must be between 1 and 65535")
    return f"{host}:{port}"


def _login(text: str, present: bool) -> dict[str, Any]:
    """Parse `user:password` or a token as (user, password, token)."""
    user, separator, password = text.partition(":")
    if not present:
        return {}
    if not user:
        raise ValueError("the user or token before the @ is missing")
    return {"login": (unquote(user), unquote(password), None) if separator else (None, None, unquote(user))}


def _timeout_seconds(text: str) -> float:
    return read_duration(text) / SECOND_NS


_OPTIONS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "connect_timeout": (_timeout_seconds, "a duration such as 5s"),
    "credentials": (read_file_path, "the path of a file"),
    "jwt": (read_file_path, "the path of a file"),
    "nkey": (read_file_path, "the path of a file"),
    "tls_handshake_first": (read_flag, "true or false"),
    "insecure": (read_flag, "true or false"),
    "inbox_prefix": (read_plain_subject, "the beginning of a subject, such as _INBOX_sr"),
}


def _options(query: str) -> dict[str, Any]:
    options = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        name = key.lower()
        if name not in _OPTIONS:
            raise ValueError(f"unknown option in the URL; allowed: {', '.join(_OPTIONS)}")
        read, allowed = _OPTIONS[name]
        refusal = ValueError(f"{name} in the URL is not {allowed}")
        if not value:
            raise refusal
        try:
            options[name] = read(value)
        except ValueError:
            raise refusal from None
    return options


def _refuse_two_logins(user: str | None, credentials: str | None, jwt: str | None, nkey: str | None) -> None:
    if credentials and (jwt or nkey):
        raise ValueError("credentials already contains jwt and nkey; use either credentials or the other two")
    if jwt and not nkey:
        raise ValueError("jwt needs nkey, the file with the seed of the same user")
    if user is not None and (credentials or nkey):
        raise ValueError("user:password@ and a credentials file exclude each other; remove one")


Url = Annotated[InstanceOf[ClusterSettings], Value(parse_cluster, type="URL")]
FilePath = Annotated[str, Value(read_file_path, type="path")]
