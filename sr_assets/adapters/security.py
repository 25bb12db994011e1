"""The security of connections to NATS servers, for `wire` and `nats`: logins (also Choria's), TLS contexts, error messages.

A NATS server verifies the signature of Choria's token; this module only reads the token's claims. Each connection reads the
files again, so the next one uses a renewed certificate or credential.
"""

import base64
import binascii
import datetime as dt
import hashlib
import json
import re
import ssl
import stat
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from sr_assets.adapters import times
from sr_assets.adapters.signing import UserKey
from sr_assets.domain.clusters import ChoriaSettings, ClusterSettings, TlsSettings
from sr_assets.domain.errors import RunError

_SEED_PREFIX: Final = 18 << 3
_USER_PREFIX: Final = 20 << 3
_PURPOSES: Final = {"choria_client_id": "callerid", "choria_server": "identity"}
_CHORIA_SEED: Final = re.compile(r"[0-9a-fA-F]{64}")
NO_TLS: Final = "the server has no TLS, which tls or tls:// requires; give it a certificate, or remove that setting"
# The third letter is part of the prefix that marks a user's seed.
_SEED: Final = re.compile(r"\bSU[A-D][A-Z2-7]{55}\b")
_JWT: Final = re.compile(r"\beyJ[\w-]+\.[\w-]+\.[\w-]+")
# OpenSSL's numbers (X509_V_ERR_…) and what they mean for the server's operator.
_CERTIFICATE: Final = {
    9: "is not valid yet; check its dates and the clocks",
    10: "has expired; renew it",
    62: "is not for this name; connect by a name in the certificate",
    64: "is not for this address; connect by a name in the certificate",
}
_UNKNOWN_CA: Final = frozenset({2, 18, 19, 20, 21})


@dataclass(frozen=True, slots=True, repr=False)
class Login:
    """A user with a password, a token, or an nkey pair that signs the server's nonce, alone or with a JWT.

    Responses arrive below `inbox_prefix`. `seed` is the nkey's seed, set only without a JWT.
    """

    inbox_prefix: str
    user: str | None = None
    password: str | None = None
    token: str | None = None
    jwt: str | None = None
    seed: str | None = None
    pair: UserKey | None = None

    def connect_options(self, nonce: str | None) -> dict[str, Any]:
        """Return the login as options of CONNECT, with a signature if the server sent a nonce."""
        options: dict[str, Any] = {"user": self.user, "pass": self.password, "auth_token": self.token}
        if self.pair and nonce:
            options["sig"] = _signature(self.pair, nonce).decode()
            options |= {"jwt": self.jwt} if self.jwt else {"nkey": self.pair.public_key.decode()}
        return {key: value for key, value in options.items() if value}

    def client_options(self) -> dict[str, Any]:
        """Return the login as options of nats-py."""
        options: dict[str, Any] = {"user": self.user, "password": self.password, "token": self.token}
        if self.jwt and self.pair:
            options |= {"user_jwt_cb": self.jwt.encode, "signature_cb": partial(_signature, self.pair)}
        return options | {"nkeys_seed_str": self.seed, "inbox_prefix": self.inbox_prefix, "no_echo": True}


def _signature(pair: UserKey, nonce: str) -> bytes:
    """Return the signature of a server's nonce: base64 for URLs without padding, as Go's client encodes it.

    Choria's broker refuses every other form.
    """
    return base64.urlsafe_b64encode(pair.sign(nonce.encode())).rstrip(b"=")


def read_text(key: str, file: str) -> str:
    """Return the text of the file that a key of the configuration names; raises RunError if it cannot be read."""
    try:
        return Path(file).read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise RunError(f"{key} {file}: cannot be read: {error.strerror}") from None


def user_seed(raw: bytes) -> bytes:
    """Return 32 bytes as the encoded seed of a user (`SU…`): prefix, seed and checksum in base32."""
    # The first five bits are the S of a seed, the next eight the U of a user.
    prefixed = bytes([_SEED_PREFIX | _USER_PREFIX >> 5, (_USER_PREFIX & 31) << 3]) + raw
    return base64.b32encode(prefixed + binascii.crc_hqx(prefixed, 0).to_bytes(2, "little")).rstrip(b"=")


def read_choria(choria: ChoriaSettings) -> Login:
    """Read and check both files; raises RunError, one line without their content, if the broker would refuse them.

    The broker permits subscriptions to this inbox prefix only.
    """
    where = f"choria: jwt_file {choria.jwt_file}"
    token = read_text("choria: jwt_file", choria.jwt_file).strip()
    claims = _claims(where, token)
    purpose = claims.get("purpose")
    if purpose not in _PURPOSES:
        known = " or ".join(_PURPOSES)
        raise RunError(
            f"{where}: the token's purpose is {str(purpose)[:40]!r}; use a client's or a server's token ({known})"
        )
    name, key = claims.get(_PURPOSES[purpose]), claims.get("public_key")
    for claim, value in ((_PURPOSES[purpose], name), ("public_key", key)):
        if not isinstance(value, str) or not value:
            raise RunError(f"{where}: the token has no {claim}; request another one from the issuer")
    _refuse_untimely(where, claims)
    pair = _pair(choria.seed_file)
    if base64.b32decode(bytes(pair.public_key) + b"=" * (-len(pair.public_key) % 8))[1:33].hex() != str(key).lower():
        raise RunError(f"choria: seed_file {choria.seed_file}: does not match the token in jwt_file {choria.jwt_file}")
    holder = hashlib.md5(str(name).encode(), usedforsecurity=False).hexdigest()
    return Login(f"{choria.collective}.reply.{holder}", token=token, jwt=token, pair=pair)


def _claims(where: str, token: str) -> dict[str, Any]:
    try:
        header, claims, signature = (_decoded(part) for part in token.split("."))
        algorithm, read = json.loads(header)["alg"], json.loads(claims)
    except (ValueError, KeyError, TypeError):
        raise RunError(f"{where}: contains no token; it needs a JWT of three parts") from None
    if algorithm != "EdDSA" or not signature or not isinstance(read, dict):
        raise RunError(f"{where}: is not a token of Choria; its tokens are signed with EdDSA")
    return read


def _refuse_untimely(where: str, claims: dict[str, Any]) -> None:
    """Raise RunError if the token or its issuer has expired, or the token is not valid yet."""
    now = times.time()
    ends = [
        claims[claim] for claim in ("exp", "issexp") if isinstance(claims.get(claim), (int, float)) and claims[claim]
    ]
    if ends and min(ends) <= now:
        raise RunError(f"{where}: the token expired at {_at(min(ends))}; replace it")
    begins = claims.get("nbf")
    if isinstance(begins, (int, float)) and begins > now:
        raise RunError(f"{where}: the token is valid from {_at(begins)} on: wait, or check the clocks")


def _pair(file: str) -> UserKey:
    # A file may end with a line break, although Choria writes none.
    seed = read_text("choria: seed_file", file).strip()
    if not _CHORIA_SEED.fullmatch(seed):
        raise RunError(f"choria: seed_file {file}: contains no seed; it needs 64 hexadecimal digits")
    return UserKey(user_seed(bytes.fromhex(seed)))


def _decoded(part: str) -> bytes:
    try:
        return base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
    except binascii.Error:
        raise ValueError(part) from None


def _at(seconds: float) -> str:
    try:
        return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return str(seconds)


def tls_context(tls: TlsSettings) -> ssl.SSLContext:
    """Return the context of a TLS connection to a server; raises RunError that names an unusable file."""
    for key, path in (("ca", tls.ca), ("cert", tls.cert), ("key", tls.key)):
        if path:
            # OpenSSL's own error does not name the missing file.
            read_text(f"tls: {key}", path)
    try:
        context = ssl.create_default_context(cafile=tls.ca)
    except ssl.SSLError:
        raise RunError(f"tls: ca {tls.ca}: contains no PEM certificate") from None
    if tls.cert:
        try:
            # Without this empty password OpenSSL would prompt for one on the terminal.
            context.load_cert_chain(tls.cert, tls.key, password="")
        except ssl.SSLError as error:
            files = f"tls: cert {tls.cert}, key {tls.key}"
            if error.reason == "KEY_VALUES_MISMATCH":
                raise RunError(f"{files}: the key does not match the certificate") from None
            raise RunError(f"{files}: need a PEM certificate and its PEM key without a password") from None
    if tls.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def tls_error_text(error: ssl.SSLError) -> str:
    """Return one line with the cause of a TLS failure and the remedy."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _UNKNOWN_CA:
            return "the server's certificate is from an untrusted CA; set the CA's file in tls: ca"
        return f"the server's certificate {_CERTIFICATE.get(error.verify_code, f'is refused: {error.verify_message}')}"
    reason = error.reason or str(error)
    if "CERTIFICATE_REQUIRED" in reason:
        return "the server requires a client certificate; set cert and key in tls"
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return (
            f"the server refuses our certificate ({_plain(reason)}); check tls: cert, and the CA that the server trusts"
        )
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"):
        return "the server does not start with TLS; remove tls_handshake_first from the URL"
    return f"TLS failed ({_plain(reason)})"


def silence_hint(cluster: ClusterSettings) -> str:
    """Return a possible cause of a server's silence, to be appended to the error."""
    if cluster.tls and cluster.tls.handshake_first:
        return " (if the server does not start with TLS, remove tls_handshake_first from the URL)"
    return " (a server that begins with TLS needs ?tls_handshake_first=true)"


def no_responder_hint(cluster: ClusterSettings) -> str:
    """Return a possible cause of a JetStream API subject without responders."""
    if cluster.api_owner:
        return f"no server here has {cluster.api_owner}; correct it, or check the leafnode or import behind it"
    return "is JetStream enabled?"


def denied_text(complaint: str) -> str:
    """Return a server's error about a permission, with the remedy."""
    remedy = "give the user that permission (`sr-assets permissions` prints all that it needs)"
    if "subscription" in complaint.lower():
        remedy += ", or set inbox_prefix in the URL to a permitted prefix"
    return f"{complaint}; {remedy}"


def read_login(cluster: ClusterSettings) -> Login:
    """Read the files of the login; raises RunError that names a bad one, before any connection.

    A JWT or seed may be bare, or decorated as `nsc` writes it.
    """
    if cluster.choria:
        return read_choria(cluster.choria)
    jwt_file = cluster.credentials or cluster.jwt
    seed_file = cluster.credentials or cluster.nkey
    jwt = _extract(_JWT, "user's JWT", "credentials" if cluster.credentials else "jwt", jwt_file)
    seed = _extract(_SEED, "user's seed (SU…)", "credentials" if cluster.credentials else "nkey", seed_file)
    try:
        pair = UserKey(seed.encode()) if seed else None
    except ValueError:
        raise RunError(f"{seed_file}: the user's seed (SU…) is damaged; copy the file again") from None
    only_seed = None if jwt else seed
    return Login(cluster.inbox_prefix, cluster.user, cluster.password, cluster.token, jwt, only_seed, pair)


def exposed_secrets(cluster: ClusterSettings) -> list[str]:
    """Return the configured key files that every user of this machine may read."""
    return [file for file in _secret_files(cluster) if _mode(file) & stat.S_IROTH]


def forgeable_files(cluster: ClusterSettings) -> dict[str, str]:
    """Return who else may change the configured keys and certificates, by file: a CA decides whom we trust."""
    from sr_assets.settings.document import foreign_writer  # needs pydantic, which the executors of a cluster lack

    tls = cluster.tls
    files = [*_secret_files(cluster), *filter(None, (tls.ca, tls.cert) if tls else ())]
    writers = {file: foreign_writer(Path(file), Path(file).resolve()) for file in files}
    return {file: writer for file, writer in writers.items() if writer}


def _secret_files(cluster: ClusterSettings) -> list[str]:
    choria, tls = cluster.choria, cluster.tls
    logins = [cluster.credentials, cluster.nkey, cluster.jwt]
    return [
        file for file in (*logins, choria and choria.seed_file, choria and choria.jwt_file, tls and tls.key) if file
    ]


def _mode(file: str) -> int:
    try:
        return Path(file).stat().st_mode
    except OSError:
        return 0


def _extract(pattern: re.Pattern[str], content: str, key: str, file: str | None) -> str | None:
    if file is None:
        return None
    match = pattern.search(read_text(key, file))
    if match is None:
        raise RunError(f"{key} {file}: there is no {content} in it")
    return match[0]


def _plain(reason: str) -> str:
    """Return OpenSSL's reason, such as TLSV1_ALERT_UNKNOWN_CA, in lower-case text."""
    return re.sub(r"^(TLSV\d+|SSLV\d+)_", "", reason).replace("_", " ").lower()
