"""Connection parameters of a cluster: servers, login, TLS; and their public part.

They are in `domain`, not in `settings`, because Spark's tasks use them and must start quickly.
"""

import ipaddress
from dataclasses import dataclass, field
from typing import Final

#: The API prefix of a server's own domain and account.
OWN_API: Final = "$JS.API"


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """TLS options: paths of PEM files, `ca` (None: the system's), and the client `cert` with its `key`.

    `handshake_first` is for servers that expect TLS from the first byte; `insecure` verifies no certificate.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    handshake_first: bool = False
    insecure: bool = False


@dataclass(frozen=True, slots=True)
class ChoriaSettings:
    """Paths of a Choria token and its seed, and the collective, under which the broker has inboxes."""

    seed_file: str
    jwt_file: str
    collective: str


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Connection parameters of one cluster; `servers` are `host:port` (IPv6 in brackets) without credentials.

    `credentials` (a .creds file), `jwt` and `nkey` (a seed) are paths; no record contains key material. Without `tls`
    the connection is unencrypted, unless the server requires TLS; with `tls`, a server without TLS is refused.
    `api_prefix` addresses the JetStream of another domain, or of another account that ours imports. Responses arrive
    below `inbox_prefix`; with `choria`, which needs TLS, the token defines it.
    """

    servers: tuple[str, ...]
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    connect_timeout_seconds: float = 5.0
    credentials: str | None = None
    jwt: str | None = None
    nkey: str | None = None
    tls: TlsSettings | None = None
    api_prefix: str = OWN_API
    inbox_prefix: str = "_INBOX"
    choria: ChoriaSettings | None = None

    @property
    def sends_login_in_clear(self) -> bool:
        """Whether a password or token leaves this machine although the connection may be unencrypted.

        Keys sign a nonce instead. A server may require TLS, but a false one in its place does not.
        """
        secret = self.password is not None or self.token is not None
        return (
            secret and self.tls is None and not all(is_loopback(server.rpartition(":")[0]) for server in self.servers)
        )

    @property
    def label(self) -> str:
        """The servers as text for messages and logs."""
        return ",".join(self.servers)

    def api(self, operation: str) -> str:
        """Return the subject of a JetStream request such as `STREAM.NAMES`."""
        return f"{self.api_prefix}.{operation}"

    @property
    def api_owner(self) -> str:
        """The domain or API prefix as text for messages; empty for the server's own."""
        if self.api_prefix == OWN_API:
            return ""
        return f"API prefix {self.api_prefix}" if self.domain is None else f"domain {self.domain}"

    @property
    def domain(self) -> str | None:
        """The JetStream domain in the API prefix, or None."""
        domain = self.api_prefix.removeprefix("$JS.").removesuffix(".API")
        return domain if self.api_prefix == domain_api(domain) else None

    def same_as(self, other: "ClusterSettings") -> bool:
        """Return whether both have the same JetStream: common subjects and the same API prefix."""
        return self.api_prefix == other.api_prefix and self.shares_subjects(other)

    @property
    def addresses(self) -> frozenset[str]:
        """The servers, with one spelling for this machine's loopback names."""
        return frozenset(map(_canonical, self.servers))

    @property
    def logins(self) -> frozenset[tuple[str | None, ...]]:
        """Each server with the user's identity there."""
        return frozenset((server, *_identity(self)) for server in self.addresses)

    def shares_subjects(self, other: "ClusterSettings") -> bool:
        """Return whether both have a common server and the same user; another account counts as another cluster."""
        return not self.logins.isdisjoint(other.logins)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address; IPv6 may be in brackets."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def domain_api(domain: str) -> str:
    """Return the API prefix of a JetStream domain."""
    return f"$JS.{domain}.API"


def _identity(cluster: ClusterSettings) -> tuple[str | None, ...]:
    # A server may also identify users by their certificates.
    certificate = cluster.tls.cert if cluster.tls else None
    token = cluster.choria.jwt_file if cluster.choria else None
    return (
        cluster.user,
        cluster.password,
        cluster.token,
        cluster.credentials,
        cluster.jwt,
        cluster.nkey,
        token,
        certificate,
    )


def _canonical(server: str) -> str:
    """Return one spelling for this machine's loopback names, so that they compare equal."""
    host, _, port = server.rpartition(":")
    return f"localhost:{port}" if host in ("127.0.0.1", "[::1]") else server
