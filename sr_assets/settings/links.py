"""The security of a link: the blocks `tls` and `choria`, and the cluster that results from a URL and these blocks.

The named files are read when a connection is opened.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import model_validator

from sr_assets.domain.clusters import ChoriaSettings, ClusterSettings, TlsSettings, domain_api
from sr_assets.settings.clusters import FilePath
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.names import Identity, Subject
from sr_assets.settings.values import choice

Scheme = Literal["puppet", "manual", "file"]


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
