"""TLS contexts, logins and their error messages, for the connections of `wire` and `nats`.

Each connection reads the files again, so the next one uses a renewed certificate or credential.
"""

import re
import ssl
import stat
from pathlib import Path
from typing import Final

from sr_assets.adapters.choria import read_choria
from sr_assets.adapters.login import Login, read_text
from sr_assets.adapters.signing import UserKey
from sr_assets.domain.clusters import ClusterSettings, TlsSettings
from sr_assets.domain.errors import RunError

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
