"""How to connect to a cluster, as a record: its servers, login and TLS; and the part of it that may be shown.

Here rather than in `settings` because Spark's tasks carry it too and start quickly. Add here what a connection needs to know.
Not here: how the configuration says it (`settings.clusters`), the files it names (`adapters.security`).
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """The options of TLS: paths of PEM files, `ca` (None: the system's), and our own `cert` with its `key`.

    `handshake_first` is for servers that expect TLS from the first byte on; `insecure` verifies no certificate.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    handshake_first: bool = False
    insecure: bool = False


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """How to connect to one cluster: `servers` are `host:port` (IPv6 in brackets) without credentials.

    `credentials` (a .creds file), `jwt` and `nkey` (a seed) are paths; key material is in no record. Without `tls` the
    connection is in the clear, unless the server requires TLS; with it a server without TLS is refused.
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

    @property
    def label(self) -> str:
        """The servers as text for messages and logs."""
        return ",".join(self.servers)

    def same_as(self, other: "ClusterSettings") -> bool:
        """Return whether both name a common server and log in as the same user; another account counts as another cluster."""
        ours, theirs = ({_canonical(server) for server in cluster.servers} for cluster in (self, other))
        return not ours.isdisjoint(theirs) and _identity(self) == _identity(other)


def _identity(cluster: ClusterSettings) -> tuple[str | None, ...]:
    # A server may know users by their certificates, too.
    certificate = cluster.tls.cert if cluster.tls else None
    return cluster.user, cluster.password, cluster.token, cluster.credentials, cluster.jwt, cluster.nkey, certificate


def _canonical(server: str) -> str:
    """Give this machine's loopback names one spelling, so that they compare equal."""
    host, _, port = server.rpartition(":")
    return f"localhost:{port}" if host in ("127.0.0.1", "[::1]") else server
