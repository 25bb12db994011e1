"""The security of a link: the blocks `tls` and `choria`, and the cluster that results from a URL and these blocks.

The named files are read when a connection is opened.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, Protocol, Self

from pydantic import BeforeValidator, model_validator

from sr_assets.domain.clusters import ChoriaSettings, ClusterSettings, TlsSettings, domain_api
from sr_assets.settings.clusters import read_file_path
from sr_assets.settings.mapping import Raw
from sr_assets.settings.names import read_plain_subject
from sr_assets.settings.values import one_of, read_text, shown

FilePath = Annotated[str, BeforeValidator(read_file_path)]


def read_identity(value: object) -> str:
    """Read the name of a host's certificate, which is also used in file names."""
    text = read_text(value)
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}", text):
        raise ValueError(f"{shown(text)} is not a certificate name; use letters, digits, '.', '_' and '-'")
    return text


class RawTls(Raw):
    """`tls` of the file, of a stream or of one of its ends: PEM files by path, or in Puppet's directories."""

    ca: FilePath | None = None
    cert: FilePath | None = None
    key: FilePath | None = None
    scheme: (
        Annotated[Literal["puppet", "manual", "file"], BeforeValidator(one_of("puppet", "manual", "file"))] | None
    ) = None
    identity: Annotated[str, BeforeValidator(read_identity)] | None = None
    ssl_dir: FilePath | None = None

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


class RawChoria(Raw):
    """`choria` of the file, of a stream or of one of its ends: a token with its seed."""

    seed_file: FilePath | None = None
    jwt_file: FilePath | None = None
    collective: Annotated[str, BeforeValidator(read_plain_subject)] | None = None

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


class Inherited(Protocol):
    """An object with the blocks of the top level."""

    @property
    def tls(self) -> RawTls | None:
        """The block `tls`."""

    @property
    def choria(self) -> RawChoria | None:
        """The block `choria`."""


def with_api(cluster: ClusterSettings, domain: str | None, api_prefix: str | None) -> ClusterSettings:
    """Return the cluster with the JetStream of a domain or behind an API prefix."""
    prefix = domain_api(domain) if domain else api_prefix
    return replace(cluster, api_prefix=prefix) if prefix else cluster


def with_security(
    cluster: ClusterSettings,
    tls: Sequence[RawTls | None],
    choria: Sequence[RawChoria | None] = (),
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
