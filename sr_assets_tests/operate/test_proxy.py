"""The documented nginx configuration in front of a real UI, with TLS."""

import base64
import re
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from sr_assets.settings import Settings
from sr_assets_tests.operate.rig import Up
from sr_assets_tests.programs import program
from sr_assets_tests.rig import PATIENCE_SECONDS, wait_until
from sr_assets_tests.servers import free_port

pytestmark = pytest.mark.process

DOCUMENT = Path(__file__).parents[2] / "docs" / "access.md"
LOGIN = {"Authorization": "Basic " + base64.b64encode(b"me:secret").decode()}


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    certificate, key = tmp_path / "fleet.pem", tmp_path / "fleet.key"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=fleet.example.net",
            ),
            *("-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def documented(port: int, ui_port: int, certificate: Path, key: Path) -> str:
    """Return the documented server block with this test's ports and files."""
    block: str
    (block,) = re.findall(r"```nginx\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    for before, after in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("http://127.0.0.1:3000", f"http://127.0.0.1:{ui_port}"),
        ("/etc/ssl/fleet.pem", str(certificate)),
        ("/etc/ssl/fleet.key", str(key)),
    ):
        assert before in block
        block = block.replace(before, after)
    return block


@pytest.fixture
def proxy(platform: Settings, tmp_path: Path, certificate: tuple[Path, Path]) -> Iterator[tuple[str, ssl.SSLContext]]:
    """Run the UI with logins behind nginx; yield the URL and a context that trusts the certificate."""
    logins = tmp_path / "logins"
    logins.write_text("me:secret\n")
    logins.chmod(0o600)
    port = free_port()
    folder = tmp_path / "nginx"
    folder.mkdir()
    with Up("--trust-proxy", "--auth-file", str(logins)) as up:
        paths = "".join(
            f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        configuration = folder / "nginx.conf"
        configuration.write_text(
            f"pid {folder}/pid; error_log {folder}/error.log; daemon off; events {{}}"
            f" http {{ access_log off; {paths} {documented(port, up.port, *certificate)} }}"
        )
        nginx = subprocess.Popen(
            [
                program("nginx", package="nginx"),
                "-p",
                str(folder),
                "-c",
                str(configuration),
            ],
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: _listens(port), "nginx")
            yield f"https://localhost:{port}", ssl.create_default_context(cafile=str(certificate[0]))
        finally:
            nginx.terminate()
            nginx.wait(PATIENCE_SECONDS)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def status(url: str, context: ssl.SSLContext, headers: dict[str, str], data: bytes | None = None) -> int:
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, context=context, timeout=PATIENCE_SECONDS) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


# The rules for a trusted proxy are tested without one.
@pytest.mark.nightly
def test_documented_proxy_serves_the_ui_to_logins_only(proxy: tuple[str, ssl.SSLContext]) -> None:
    url, context = proxy
    query = b'{"query": "{ version }"}'
    assert status(url, context, {}) == 401
    assert status(url, context, LOGIN) == 200
    assert status(f"{url}/graphql", context, {**LOGIN, "Origin": url}, query) == 200
    assert status(f"{url}/graphql", context, {**LOGIN, "Origin": "https://evil.example"}, query) == 403
