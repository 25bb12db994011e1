"""The RPM package, installed with `rpm --root` into a bare Debian: no distribution with RPM packages is available.

The dependencies are compared, not resolved, and its scripts run without systemd. `make rpm` builds the package before.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from sr_assets_tests.packages.chroot import Chroot
from sr_assets_tests.packages.replicating import CONFIG

ROOT = Path(__file__).parent.parent.parent
STATE = "/var/lib/sr-assets"

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("rpm") is None, reason="needs rpm"),
]


@pytest.fixture(scope="module")
def package() -> Path:
    """The package in dist/."""
    built = sorted((ROOT / "dist").glob("sr-assets-*.rpm"))
    if not built:
        pytest.skip("dist/ has no package: run `make rpm`")
    return built[-1]


def rpm(*arguments: str | Path) -> str:
    """Run rpm and return its output; a failure fails the test."""
    done = subprocess.run(["rpm", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rpm_depends_on_the_distributions_python(package: Path) -> None:
    required = rpm("--query", "--package", "--requires", package).split()
    assert [name for name in required if name.startswith("/usr/bin/python3.")]
    assert {CONFIG, "/etc/logrotate.d/sr-assets"} == set(rpm("-q", "--configfiles", "--package", package).split())


def test_rpm_installs_files_and_keeps_data_when_erased(package: Path, debian: Chroot) -> None:
    rpm("--root", debian.root, "--nodeps", "--install", package)
    owners = debian.succeed("stat", "--format=%U:%G %a", "/etc/sr-assets", CONFIG, STATE, "/var/log/sr-assets")
    assert owners.splitlines() == ["root:sr-assets 750", "root:sr-assets 640", *["sr-assets:sr-assets 750"] * 2]
    assert debian.path("/usr/lib/systemd/system/sr-assets@.service").is_file()
    assert "python3." in str(debian.path("/opt/sr-assets/bin/python").readlink())
    for file in ("bash-completion/completions/sr-assets", "zsh/site-functions/_sr-assets"):
        assert "sr-assets" in debian.path(f"/usr/share/{file}").read_text(), file
    assert not list(debian.path("/opt/sr-assets").rglob("nats-server*"))

    debian.path(CONFIG).write_text("name: MINE\nstreams: []\n")
    debian.path(f"{STATE}/kept").touch()
    rpm("--root", debian.root, "--nodeps", "--replacepkgs", "--install", package)
    assert debian.path(CONFIG).read_text() == "name: MINE\nstreams: []\n"

    rpm("--root", debian.root, "--erase", "sr-assets")
    assert not debian.path("/opt/sr-assets").exists()
    assert debian.path(f"{CONFIG}.rpmsave").read_text() == "name: MINE\nstreams: []\n"
    assert debian.path(f"{STATE}/kept").is_file()
    assert debian.run("id", "sr-assets").returncode == 0
