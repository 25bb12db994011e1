"""Certificates, keys and JWTs of secured servers, and the server's configuration that names them."""

import base64
import datetime as dt
import json
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nkeys
import trustme

_UNLIMITED = -1


class Authority:
    """A certificate authority with its files in a separate folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._ca = trustme.CA()
        self.file = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def certify(self, *names: str, days: int = 1) -> dict[str, Any]:
        """Create a certificate for names, addresses or a mailbox; return the paths `cert` and `key`."""
        now = dt.datetime.now(dt.UTC)
        end = now + dt.timedelta(days=days)
        made = self._ca.issue_cert(*names, not_before=min(now, end) - dt.timedelta(days=1), not_after=end)
        stem = f"{names[0]}-{len(list(self._folder.iterdir()))}"
        paths = {"cert": self._folder / f"{stem}.pem", "key": self._folder / f"{stem}.key"}
        made.private_key_pem.write_to_path(paths["key"])
        for part in made.cert_chain_pems:
            part.write_to_path(paths["cert"], append=True)
        return {key: str(path) for key, path in paths.items()}

    def client_context(self) -> ssl.SSLContext:
        """Return the TLS context of a client that trusts this authority."""
        return ssl.create_default_context(cafile=str(self.file))

    def block(self, cert: str, key: str, **more: bool) -> str:
        """Return the `tls` block of a server's configuration; with `verify` the server requires client certificates of
        this CA.
        """
        options = {"cert_file": cert, "key_file": key, "ca_file": str(self.file), "timeout": 5, **more}
        return f"tls: {json.dumps(options)}\n"


@dataclass(frozen=True)
class Key:
    """An nkey: its secret seed and its public key."""

    seed: str
    public: str

    def sign(self, text: str) -> str:
        """Return a signature in the format of JWTs."""
        return encoded(nkeys.from_seed(bytearray(self.seed.encode())).sign(text.encode()))


def new_key(prefix: int = nkeys.PREFIX_BYTE_USER) -> Key:
    """Create a key of a user, or of another kind by its prefix."""
    seed = nkeys.encode_seed(os.urandom(32), prefix)
    return Key(seed.decode(), nkeys.from_seed(bytearray(seed)).public_key.decode())


class Operator:
    """An operator with one account that may use JetStream; it creates users, and the server's configuration."""

    def __init__(self) -> None:
        self._operator, self._account, system = (
            new_key(prefix)
            for prefix in (nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_ACCOUNT)
        )
        limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), _UNLIMITED)
        storage = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), _UNLIMITED)
        accounts = {
            system.public: _jwt(self._operator, system.public, "account", limits=limits),
            self._account.public: _jwt(self._operator, self._account.public, "account", limits=limits | storage),
        }
        self.config = "\n".join(
            [
                f"operator: {_jwt(self._operator, self._operator.public, 'operator', system_account=system.public)}",
                f"system_account: {system.public}",
                "resolver: MEMORY",
                f"resolver_preload: {json.dumps(accounts)}\n",
            ]
        )

    def user_jwt(self, key: Key, *, seconds: int = 3600) -> str:
        """Return the JWT of a user with this key and a limited validity."""
        limits = dict.fromkeys(("subs", "data", "payload"), _UNLIMITED)
        return _jwt(self._account, key.public, "user", seconds=seconds, pub={}, sub={}, **limits)


def creds(jwt: str, seed: str) -> str:
    """Return the text of a .creds file."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        "************************* IMPORTANT *************************\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


def _jwt(issuer: Key, subject: str, kind: str, *, seconds: int = 3600, **nats: object) -> str:
    return signed_jwt(issuer, subject, kind, {}, seconds=seconds, **nats)


def signed_jwt(
    issuer: Key, subject: str, kind: str, more: dict[str, Any], *, seconds: int = 3600, **nats: object
) -> str:
    """Return a JWT of NATS, signed by an nkey; `more` are claims in addition to the standard ones."""
    now = int(dt.datetime.now(dt.UTC).timestamp())
    claims = {"jti": "x", "iat": now - 3600, "exp": now + seconds, "iss": issuer.public, "name": kind, "sub": subject}
    claims |= more
    header = {"typ": "JWT", "alg": "ed25519-nkey"}
    parts = (header, {**claims, "nats": {**nats, "type": kind, "version": 2}})
    text = ".".join(encoded(json.dumps(part).encode()) for part in parts)
    return f"{text}.{issuer.sign(text)}"


def encoded(data: bytes) -> str:
    """Return base64 for URLs without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
