"""The cluster that results from a URL and the blocks `tls` and `choria`.

Errors show no part of the URL. The files that a cluster names are read when a connection is opened.
"""

import ipaddress
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import parse_qsl, unquote

from pydantic import InstanceOf, model_validator

from sr_assets.domain.clusters import ChoriaSettings, ClusterSettings, TlsSettings, domain_api
from sr_assets.domain.positions import SECOND_NS
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.names import Identity, Subject, read_plain_subject
from sr_assets.settings.values import Value, choice, read_duration, read_flag, read_path

Scheme = Literal["puppet", "manual", "file"]


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


class TlsBlock(Block):
    """`tls` of the file, of a stream or of one of its ends: PEM files by path, or in Puppet's directories."""

    is_local = True

    ca: FilePath | None = file_key("the CA of the server's certificate", None, default_text="the system's CAs")
    cert: FilePath | None = file_key("our certificate", None)
    key: FilePath | None = file_key("its key", None)
    scheme: Annotated[Scheme, choice(Scheme)] | None = file_key(
        "`puppet` finds the files in `ssl_dir`; `manual` and `file` need `ca`, or `cert` and `key`", None
    )
    identity: Identity | None = file_key("with `puppet`: the name of this host's certificate", None)
    ssl_dir: FilePath | None = file_key(
        "with `puppet`: the directory of `certs/ca.pem`, `certs/<identity>.pem` and `private_keys/<identity>.pem`", None
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key belong together; set both or none")
        puppet = self.scheme == "puppet"
        if puppet and (self.ca or self.cert):
            raise ValueError("scheme: puppet finds ca, cert and key in ssl_dir; remove them, or set scheme: manual")
        if puppet and not (self.ssl_dir and self.identity):
            raise ValueError("scheme: puppet needs ssl_dir and identity, which is the name of this host's certificate")
        if self.ssl_dir and not puppet:
            raise ValueError("ssl_dir: needs scheme: puppet; or set ca, cert and key")
        if self.scheme and not puppet and not (self.ca or self.cert):
            raise ValueError(f"scheme: {self.scheme} needs the files: ca, and cert with key")
        return self

    @property
    def files(self) -> tuple[str | None, str | None, str | None]:
        """The paths of the CA, the certificate and its key."""
        if self.scheme != "puppet" or not self.ssl_dir:
            return self.ca, self.cert, self.key
        folder, pem = Path(self.ssl_dir), f"{self.identity}.pem"
        return str(folder / "certs" / "ca.pem"), str(folder / "certs" / pem), str(folder / "private_keys" / pem)


class ChoriaBlock(Block):
    """`choria` of the file, of a stream or of one of its ends: a token with its seed."""

    is_local = True

    seed_file: FilePath | None = file_key("64 hexadecimal digits, which sign the broker's nonce", None)
    jwt_file: FilePath | None = file_key("the matching token of a client or server", None)
    collective: Subject | None = file_key("responses arrive at the token's inbox in this collective", None)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        missing = [key for key in ("seed_file", "jwt_file", "collective") if getattr(self, key) is None]
        if 0 < len(missing) < 3:
            raise ValueError(f"needs {' and '.join(missing)} too; an empty block disables choria")
        return self

    @property
    def settings(self) -> ChoriaSettings | None:
        """The settings of the block, or None if it is empty."""
        if not (self.seed_file and self.jwt_file and self.collective):
            return None
        return ChoriaSettings(self.seed_file, self.jwt_file, self.collective)


def with_api(cluster: ClusterSettings, domain: str | None, api_prefix: str | None, end: str = "") -> ClusterSettings:
    """Return the cluster with the JetStream of a domain or behind an API prefix; raises ValueError if both are set.

    `end` is the beginning of both keys.
    """
    if domain and api_prefix:
        raise ValueError(
            f"{end}domain, {end}api_prefix: exclude each other; use the JetStream domain or its API prefix"
        )
    prefix = domain_api(domain) if domain else api_prefix
    return replace(cluster, api_prefix=prefix) if prefix else cluster


def with_security(
    cluster: ClusterSettings,
    tls: Sequence[TlsBlock | None],
    choria: Sequence[ChoriaBlock | None] = (),
    *,
    plain: str | None = None,
) -> ClusterSettings:
    """Return the cluster with the first block of each kind that is set: blocks are inherited as a whole.

    With an empty `tls`, URL and server decide about TLS; `plain` is the key that disables `tls`. Raises ValueError if
    the blocks contradict each other or the URL.
    """
    login = next((block.settings for block in choria if block is not None), None)
    if plain and (cluster.tls or login):
        requirement = "choria, which would send its token unencrypted" if login else "the TLS that the URL requires"
        raise ValueError(f"{plain}: contradicts {requirement}")
    block = None if plain else next((block for block in tls if block is not None), None)
    ca, cert, key = block.files if block else (None, None, None)
    if ca or cert:
        cluster = replace(cluster, tls=replace(cluster.tls or TlsSettings(), ca=ca, cert=cert, key=key))
    if login is None:
        return cluster
    if cluster.user or cluster.token or cluster.credentials or cluster.nkey:
        raise ValueError(
            "choria: logs in with its token; remove the login from the URL, or disable choria with an empty block"
        )
    # Nothing is sent to a server without TLS, as in Choria.
    return replace(cluster, choria=login, tls=cluster.tls or TlsSettings())
