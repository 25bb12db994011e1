"""Enrolment of a host at a Puppet CA, in Puppet's folders: key, the CA's certificate, request, certificate.

Each step writes its file, so an interrupted enrolment resumes.
"""

import hashlib
import http.client
import os
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from sr_assets.adapters import times
from sr_assets.domain.errors import ConfigurationError, RunError

POLL_SECONDS: Final = 10.0
_REQUEST_SECONDS: Final = 30.0
_KEY_BITS: Final = 2048
#: Puppet's folders and their modes.
_FOLDERS: Final = {"certs": 0o755, "certificate_requests": 0o755, "public_keys": 0o755, "private_keys": 0o750}


class _RefusedError(RunError):
    """The CA refused a request."""


@dataclass(frozen=True, slots=True)
class Enrolment:
    """The identity to enrol, its folder, the CA (`host:port`), and the CA's SHA-256 fingerprint if known."""

    identity: str
    folder: Path
    ca: str
    fingerprint: str | None = None
    trust_first: bool = False

    @property
    def key_file(self) -> Path:
        return self.folder / "private_keys" / f"{self.identity}.pem"

    @property
    def ca_file(self) -> Path:
        """The CA's certificate, or its chain."""
        return self.folder / "certs" / "ca.pem"

    @property
    def certificate_file(self) -> Path:
        """The host's certificate."""
        return self.folder / "certs" / f"{self.identity}.pem"

    @property
    def request_file(self) -> Path:
        """The certificate request sent to the CA."""
        return self.folder / "certificate_requests" / f"{self.identity}.pem"

    def enrol(self, timeout_seconds: float, say: Callable[[str], None], *, every_seconds: float = POLL_SECONDS) -> None:
        """Obtain the missing files; `say` gets a line for each step and each download attempt.

        Raises ConfigurationError if all files exist, RunError with one line if a step fails or the CA does not sign in
        time.
        """
        deadline = times.monotonic() + timeout_seconds
        if all(file.exists() for file in (self.key_file, self.ca_file, self.certificate_file)):
            raise ConfigurationError(f"{self.folder}: already has key, certificate and CA of {self.identity}")
        self._make_folders()
        authorities = self._authorities(say)
        key = self._key(say)
        self._request(key, say)
        certificate = self._await_certificate(deadline, every_seconds, say)
        self._check(certificate, key, authorities)
        _write_new(self.certificate_file, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        say(f"certificate: {self.certificate_file}, until {certificate.not_valid_after_utc:%Y-%m-%d %H:%M:%S} UTC")

    def _make_folders(self) -> None:
        try:
            for folder, mode in (
                (self.folder, 0o771),
                *((self.folder / name, mode) for name, mode in _FOLDERS.items()),
            ):
                if not folder.is_dir():
                    folder.mkdir(parents=True)
                    folder.chmod(mode)
        except OSError as error:
            raise RunError(f"{self.folder}: cannot be created: {error.strerror}") from None

    def _key(self, say: Callable[[str], None]) -> rsa.RSAPrivateKey:
        """Return the existing key, which is never replaced, or a new one."""
        file = self.key_file
        if file.exists():
            try:
                key = serialization.load_pem_private_key(file.read_bytes(), password=None)
            except OSError as error:
                raise RunError(f"{file}: cannot be read: {error.strerror}") from None
            except TypeError:
                raise RunError(f"{file}: has a password; replace it by a key without one, or delete it") from None
            except (ValueError, UnsupportedAlgorithm):
                raise RunError(f"{file}: is not a complete PEM key: remove it for a new one") from None
            if not isinstance(key, rsa.RSAPrivateKey):
                raise RunError(f"{file}: is not an RSA key, which a Puppet CA requires: remove it for a new one")
            say(f"key: {file} (existing)")
            return key
        key = rsa.generate_private_key(65537, _KEY_BITS)
        form = serialization.PrivateFormat.TraditionalOpenSSL
        text = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        _write_new(file, text, 0o640)
        say(f"key: {file}")
        return key

    def _authorities(self, say: Callable[[str], None]) -> list[x509.Certificate]:
        """Return the CA's chain, fetched without verification if the file is missing, and compared with the fingerprint.

        Without a fingerprint, an unknown CA is trusted only with `trust_first`: it decides about every later connection.
        """
        file, unverified = self.ca_file, ssl._create_unverified_context()  # noqa: S323, SLF001  its fingerprint is shown
        known = file.exists()
        text = file.read_bytes() if known else self._ask("GET", "certificate/ca", unverified)
        try:
            chain = x509.load_pem_x509_certificates(text)
        except ValueError:
            raise RunError(f"{file if known else self.ca}: the CA's certificate is not a PEM certificate") from None
        for authority in chain:
            say(f"CA {authority.subject.rfc4514_string()}, SHA-256 {_fingerprint(authority, ':')}")
        if self.fingerprint is not None:
            self._compare(chain, self.fingerprint)
        elif not (known or self.trust_first):
            raise RunError(
                f"{self.ca}: this CA is not known yet; compare the fingerprint above with the one that the CA shows, and run"
                " the same command with --ca-fingerprint, or with --trust-first on a network that you trust; no file was"
                " written"
            )
        if not known:
            _write_new(file, text, 0o644)
        return chain

    def _compare(self, chain: list[x509.Certificate], fingerprint: str) -> None:
        """Raise RunError if no certificate has the fingerprint, or one is not linked to that certificate."""
        trusted = [authority for authority in chain if _fingerprint(authority) == fingerprint]
        if not trusted:
            raise RunError(
                f"{self.ca}: no certificate of the CA has the SHA-256 fingerprint of --ca-fingerprint; no file was written"
            )
        left = [authority for authority in chain if authority not in trusted]
        while linked := [
            authority
            for authority in left
            if any(_issued(authority, other) or _issued(other, authority) for other in trusted)
        ]:
            trusted += linked
            left = [authority for authority in left if authority not in linked]
        if left:
            raise RunError(
                f"{self.ca}: its chain has a certificate that does not belong to --ca-fingerprint; no file was written"
            )

    def _request(self, key: rsa.RSAPrivateKey, say: Callable[[str], None]) -> None:
        """Send the request; ignore a refusal if an earlier request was sent."""
        file = self.request_file
        before = file.exists()
        if not before:
            name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.identity)])
            request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
            _write_new(file, request.public_bytes(serialization.Encoding.PEM), 0o640)
        try:
            self._ask("PUT", f"certificate_request/{self.identity}", self._verified(), file.read_bytes())
            say(f"request: {file}, sent to {self.ca}")
        except _RefusedError as answer:
            if not before:
                file.unlink()
                raise
            say(f"request: {file}, sent before ({answer})")

    def _await_certificate(self, deadline: float, every_seconds: float, say: Callable[[str], None]) -> x509.Certificate:
        attempt = 0
        while True:
            attempt += 1
            say(f"Attempting to download certificate for {self.identity}, try {attempt}.")
            try:
                return x509.load_pem_x509_certificate(
                    self._ask("GET", f"certificate/{self.identity}", self._verified())
                )
            except ValueError:
                raise RunError(f"{self.ca}: the response is not a PEM certificate") from None
            except RunError as error:
                if times.monotonic() + every_seconds > deadline:
                    remedy = f"sign the request of {self.identity} there and run the same command again"
                    raise RunError(f"timed out waiting for a certificate: {error}; {remedy}") from None
            times.sleep(every_seconds)

    def _check(
        self, certificate: x509.Certificate, key: rsa.RSAPrivateKey, authorities: list[x509.Certificate]
    ) -> None:
        names = [str(attribute.value) for attribute in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        if certificate.public_key() != key.public_key() or names != [self.identity]:
            raise RunError(
                f"{self.ca}: the certificate is for another key or name: have the CA clean {self.identity}, remove "
                f"{self.request_file}, and run the same command again"
            )
        if not any(_issued(certificate, authority) for authority in authorities):
            raise RunError(f"{self.ca}: the certificate is not signed by the CA in {self.ca_file}")

    def _verified(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca_file))

    def _ask(self, method: str, path: str, context: ssl.SSLContext, body: bytes | None = None) -> bytes:
        host, _, port = self.ca.rpartition(":")
        connection = http.client.HTTPSConnection(host.strip("[]"), int(port), timeout=_REQUEST_SECONDS, context=context)
        try:
            headers = {"Content-Type": "text/plain", "Accept": "text/plain"}
            connection.request(method, f"/puppet-ca/v1/{path}?environment=production", body, headers)
            answer = connection.getresponse()
            text = answer.read(1 << 20)
        except ssl.SSLCertVerificationError as error:
            raise RunError(f"{self.ca}: its certificate is refused: {error.verify_message}") from None
        except (OSError, http.client.HTTPException) as error:
            raise RunError(f"{self.ca}: {getattr(error, 'strerror', None) or error or type(error).__name__}") from None
        finally:
            connection.close()
        if answer.status != http.client.OK:
            first = re.sub(r"[^ -~]+", " ", text[:200].decode(errors="replace")).strip()
            raise _RefusedError(f"{self.ca}: {method} {path}: {answer.status} {answer.reason}: {first}".rstrip(": "))
        return text


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _fingerprint(certificate: x509.Certificate, separator: str = "") -> str:
    digest = hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest().upper()
    return separator.join(digest[at : at + 2] for at in range(0, len(digest), 2))


def _write_new(file: Path, content: bytes, mode: int) -> None:
    """Write a new file atomically, with this mode whatever the umask; never replace an existing one."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(content)
        draft.chmod(mode)
        try:
            os.link(draft, file)
        finally:
            draft.unlink()
    except OSError as error:
        raise RunError(f"{file}: cannot be written: {error.strerror}") from None
