"""How to connect to a cluster, as a record: its servers, login and TLS; and the part of it that may be shown.

Here rather than in `settings` because Spark's tasks carry it too and start quickly. Add here what a connection needs to know.
Not here: how the configuration says it (`settings.clusters`), the files it names (`adapters.security`).
"""

from dataclasses import dataclass, field
from typing import Final

#: Where a server answers JetStream's requests of its own domain and account.
OWN_API: Final = "$JS.API"


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
class ChoriaSettings:
    """The paths of a Choria token and its seed, and the collective, below which the broker has inboxes."""

    seed_file: str
    jwt_file: str
    collective: str


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """How to connect to one cluster: `servers` are `host:port` (IPv6 in brackets) without credentials.

    `credentials` (a .creds file), `jwt` and `nkey` (a seed) are paths; key material is in no record. Without `tls` the
    connection is in the clear, unless the server requires TLS; with it a server without TLS is refused. `api_prefix` is where
    JetStream is asked: another domain's, or another account's that ours imports. Answers come to subjects below
    `inbox_prefix`; with `choria`, which needs TLS, the token has its own.
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
    def label(self) -> str:
        """The servers as text for messages and logs."""
        return ",".join(self.servers)

    def api(self, operation: str) -> str:
        """Return the subject of a request to JetStream, such as `STREAM.NAMES`."""
        return f"{self.api_prefix}.{operation}"

    @property
    def api_owner(self) -> str:
        """Whose JetStream it is, as text for messages; empty where it is the server's own."""
        if self.api_prefix == OWN_API:
            return ""
        domain = self.api_prefix.removeprefix("$JS.").removesuffix(".API")
        return f"domain {domain}" if self.api_prefix == domain_api(domain) else f"API prefix {self.api_prefix}"

    def same_as(self, other: "ClusterSettings") -> bool:
        """Return whether both are the same JetStream: they share subjects, and are asked at the same API prefix."""
        return self.api_prefix == other.api_prefix and self.shares_subjects(other)

    def shares_subjects(self, other: "ClusterSettings") -> bool:
        """Return whether both name a common server and log in as the same user; another account counts as another cluster."""
        ours, theirs = ({_canonical(server) for server in cluster.servers} for cluster in (self, other))
        return not ours.isdisjoint(theirs) and _identity(self) == _identity(other)


def domain_api(domain: str) -> str:
    """Return the prefix by which a JetStream domain's API is asked from elsewhere."""
    return f"$JS.{domain}.API"


def _identity(cluster: ClusterSettings) -> tuple[str | None, ...]:
    # A server may know users by their certificates, too.
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
    """Give this machine's loopback names one spelling, so that they compare equal."""
    host, _, port = server.rpartition(":")
    return f"localhost:{port}" if host in ("127.0.0.1", "[::1]") else server
