"""Enrolment at a simulated Puppet CA over TLS that signs immediately, late, never, or another certificate."""

import datetime as dt
import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from sr_assets.adapters.puppet_ca import Enrolment
from sr_assets.adapters.security import tls_context
from sr_assets.domain.errors import RunError
from sr_assets.settings import TlsSettings
from sr_assets_tests.rig import Command

ME = "sr.example.net"


class StandIn:
    """A Puppet CA on loopback: it answers the first `delay` requests for a certificate with 404, then with `answer`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.key, self.certificate = self._signed("Puppet CA", None)
        self.delay, self.polls = 0, 0
        self.requests: dict[str, x509.CertificateSigningRequest] = {}
        self.answer: bytes | None = None
        key, certificate = self._signed("localhost", None, server=True)
        file = folder / "server.pem"
        form = (
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
        file.write_bytes(key.private_bytes(*form) + _pem(certificate))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        """`host:port` of the CA."""
        return f"localhost:{self.server.server_port}"

    @property
    def fingerprint(self) -> str:
        """The fingerprint of its certificate."""
        return self.certificate.fingerprint(hashes.SHA256()).hex().upper()

    def _signed(self, name: str, public: Any, *, server: bool = False) -> tuple[rsa.RSAPrivateKey, x509.Certificate]:
        """Return a key and its certificate, signed by the CA, or self-signed for the CA itself."""
        key = rsa.generate_private_key(65537, 2048)
        now, subject = dt.datetime.now(dt.UTC), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer: x509.Certificate | None = getattr(self, "certificate", None)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer.subject if issuer else subject)
            .public_key(public or key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        )
        if server:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        return key, builder.sign(self.key if issuer else key, hashes.SHA256())

    def certify(self, name: str, public: Any = None) -> bytes:
        """Return a PEM certificate of a public key, by default of a discarded key."""
        return _pem(self._signed(name, public)[1])

    def _handler(stand_in) -> type[http.server.BaseHTTPRequestHandler]:  # noqa: N805  the handler has its own self
        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                name = self.path.partition("?")[0].rpartition("/")[2]
                if name == "ca":
                    self._send(200, _pem(stand_in.certificate))
                    return
                stand_in.polls += 1
                request = stand_in.requests.get(name)
                if request is None or stand_in.polls <= stand_in.delay:
                    self._send(404, b"Not Found: Could not find certificate")
                else:
                    self._send(200, stand_in.answer or stand_in.certify(name, request.public_key()))

            def do_PUT(self) -> None:
                name = self.path.partition("?")[0].rpartition("/")[2]
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if name in stand_in.requests:
                    self._send(400, f"{name} already has a requested certificate; ignoring".encode())
                    return
                stand_in.requests[name] = x509.load_pem_x509_csr(body)
                self._send(200, b"")

            def _send(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        return Handler


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def ca(tmp_path: Path) -> Iterator[StandIn]:
    """A CA that signs immediately."""
    made = StandIn(tmp_path / "ca")
    yield made
    made.server.shutdown()
    made.server.server_close()


def enrolled(ca: StandIn, folder: Path, *, timeout: float = 30.0, fingerprint: str | None = None) -> list[str]:
    """Enrol with a poll interval of 10 ms and return the printed lines."""
    lines: list[str] = []
    Enrolment(ME, folder, ca.address, fingerprint, trust_first=True).enrol(timeout, lines.append, every_seconds=0.01)
    return lines


def test_enrolment_writes_puppet_layout(ca: StandIn, tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "ssl"
    colons = ":".join(ca.fingerprint[at : at + 2] for at in range(0, 64, 2)).lower()
    arguments = ("enroll", ME, "--dir", str(folder), "--ca", ca.address)
    code, output, errors = command(*arguments, "--ca-fingerprint", colons)
    assert (code, errors) == (0, "")
    assert f"SHA-256 {colons.upper()}" in output
    assert f"Attempting to download certificate for {ME}, try 1." in output
    key, certificate = folder / "private_keys" / f"{ME}.pem", folder / "certs" / f"{ME}.pem"
    assert key.read_text().startswith("-----BEGIN RSA PRIVATE KEY-----")
    assert [file.stat().st_mode & 0o777 for file in (key, key.parent, certificate)] == [0o640, 0o750, 0o644]
    request = ca.requests[ME]
    assert request.subject.rfc4514_string() == f"CN={ME}"
    assert isinstance(request.signature_hash_algorithm, hashes.SHA256)
    assert tls_context(TlsSettings(str(folder / "certs" / "ca.pem"), str(certificate), str(key))).get_ca_certs()
    code, _, errors = command(*arguments)
    assert (code, errors) == (2, f"error: {folder}: already has key, certificate and CA of {ME}\n")


def test_interrupted_enrolment_resumes_with_its_key(ca: StandIn, tmp_path: Path) -> None:
    folder, ca.delay = tmp_path / "ssl", 10**9
    with pytest.raises(RunError, match=f"timed out waiting for a certificate: .*sign the request of {ME} there and"):
        enrolled(ca, folder, timeout=0.1)
    key = (folder / "private_keys" / f"{ME}.pem").read_bytes()
    ca.delay = ca.polls + 2
    lines = enrolled(ca, folder)
    assert (folder / "private_keys" / f"{ME}.pem").read_bytes() == key
    assert [line for line in lines if "try" in line][-1].endswith("try 3.")
    assert any("sent before" in line and "already has a requested certificate" in line for line in lines)


def test_unknown_ca_is_not_trusted_unasked(ca: StandIn, tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "ssl"
    arguments = ("enroll", ME, "--dir", str(folder), "--ca", ca.address)
    code, output, errors = command(*arguments)
    assert code == 1
    assert ca.fingerprint in output.replace(":", "")
    assert "this CA is not known yet; compare the fingerprint" in errors
    assert not [file for file in folder.rglob("*") if file.is_file()]
    assert command(*arguments, "--trust-first")[0] == 0


def test_wrong_fingerprint_or_certificate_is_refused(ca: StandIn, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has the SHA-256 fingerprint of --ca-fingerprint; no file was written"):
        enrolled(ca, tmp_path / "pinned", fingerprint="00" * 32)
    assert not (tmp_path / "pinned" / "certs" / "ca.pem").exists()
    ca.answer = ca.certify(ME)
    with pytest.raises(RunError, match="the certificate is for another key or name"):
        enrolled(ca, tmp_path / "other")
    ca.requests.clear()
    ca.answer = b"<html>"
    with pytest.raises(RunError, match="the response is not a PEM certificate"):
        enrolled(ca, tmp_path / "page")
    ca.requests.clear()
    stranger = StandIn(tmp_path / "stranger")
    stranger.delay = 1
    folder = tmp_path / "strange"
    with pytest.raises(RunError, match="timed out"):
        enrolled(stranger, folder, timeout=0.0, fingerprint=stranger.fingerprint)
    with pytest.raises(RunError, match="its certificate is refused"):
        enrolled(ca, folder)
    stranger.server.shutdown()
    stranger.server.server_close()


@pytest.mark.parametrize(
    ("key", "expected"),
    (
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE", "is not a complete PEM key: remove it for a new one"),
        ("", "is not a complete PEM key"),
        ("locked", "has a password; replace it by a key without one"),
    ),
)
def test_existing_key_is_never_replaced(ca: StandIn, tmp_path: Path, key: str, expected: str) -> None:
    file = tmp_path / "ssl" / "private_keys" / f"{ME}.pem"
    file.parent.mkdir(parents=True)
    content = key.encode()
    if key == "locked":
        hidden = serialization.BestAvailableEncryption(b"hunter2")
        form = serialization.PrivateFormat.TraditionalOpenSSL
        content = ca.key.private_bytes(serialization.Encoding.PEM, form, hidden)
    file.write_bytes(content)
    with pytest.raises(RunError, match=expected):
        enrolled(ca, tmp_path / "ssl")
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("arguments", "expected"),
    (
        (("../x",), "is not a certificate name"),
        (("a/b",), "is not a certificate name"),
        ((ME, "--ca", "puppet"), "is not host:port"),
        ((ME, "--ca-fingerprint", "00"), "is not a SHA-256 fingerprint"),
        ((ME, "--ca", "localhost:1", "--timeout", "1s"), "localhost:1: "),
    ),
)
def test_failed_enrolment_is_one_line(
    tmp_path: Path, command: Command, arguments: tuple[str, ...], expected: str
) -> None:
    code, _, errors = command("enroll", *arguments, "--dir", str(tmp_path / "ssl"))
    assert code == (1 if "--timeout" in arguments else 2)
    assert expected in errors
    assert errors.count("\n") == 1
