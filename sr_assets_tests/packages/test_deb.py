"""The Debian package on a bare Debian: install, run as the unit, upgrade, remove, purge. The tests run in this order.

`make deb` builds the package before.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sr_assets_tests.packages.chroot import Chroot, Service, unit_service
from sr_assets_tests.packages.replicating import assert_replicates
from sr_assets_tests.rig import Rig

ROOT = Path(__file__).parent.parent.parent
CONFIG, STATE, LOGS = "/etc/sr-assets/replication.yaml", "/var/lib/sr-assets", "/var/log/sr-assets"

pytestmark = [pytest.mark.process, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def package() -> Path:
    """The package in dist/."""
    built = sorted((ROOT / "dist").glob("sr-assets_*.deb"))
    if not built:
        pytest.skip("dist/ has no package: run `make deb`")
    return built[-1]


@pytest.fixture(scope="module")
def installed(debian: Chroot, package: Path) -> Chroot:
    """The Debian with the package and its dependencies."""
    shutil.copy(package, debian.path("/srv/sr-assets.deb"))
    debian.succeed("apt-get", "update")
    debian.succeed("apt-get", "install", "--yes", "/srv/sr-assets.deb")
    debian.path("/srv/sr-assets.deb").unlink()
    return debian


def owner(chroot: Chroot, path: str) -> str:
    """Return user, group and mode of a path."""
    return chroot.succeed("stat", "--format=%U:%G %a", path).strip()


def test_deb_installs_user_configuration_and_units(installed: Chroot) -> None:
    assert owner(installed, CONFIG) == "root:sr-assets 640"
    assert owner(installed, "/etc/sr-assets") == "root:sr-assets 750"
    assert owner(installed, STATE) == owner(installed, LOGS) == "sr-assets:sr-assets 750"
    assert owner(installed, "/opt/sr-assets/bin/sr-assets") == "root:root 755"
    assert installed.path("/usr/lib/systemd/system/sr-assets@.service").is_file()
    assert "sr-assets, version" in installed.succeed("sr-assets", "--version")
    installed.succeed("logrotate", "--debug", "/etc/logrotate.d/sr-assets")


def test_deb_is_small_enough_to_download(package: Path) -> None:
    assert package.stat().st_size <= 450_000_000


def test_deb_contains_no_tests_no_server_and_no_build_path(installed: Chroot) -> None:
    names = installed.succeed("dpkg", "--listfiles", "sr-assets").splitlines()
    assert not [name for name in names if re.search(r"/sr_assets_(tests|bench)\b|/nats-server$", name)]
    matches = installed.run("grep", "-rlI", "/tmp/tmp\\.", "/opt/sr-assets/bin", "/opt/sr-assets/pyvenv.cfg")
    assert matches.stdout == ""


def test_bash_completes_a_subcommand(installed: Chroot) -> None:
    script = """
    source /usr/share/bash-completion/completions/sr-assets
    COMP_WORDS=(sr-assets ste) COMP_CWORD=1
    "$(complete -p sr-assets | sed 's/.*-F \\([^ ]*\\).*/\\1/')" sr-assets
    echo "${COMPREPLY[@]}"
    """
    assert installed.succeed("bash", "-c", script) == "step-down\n"
    assert installed.path("/usr/share/zsh/vendor-completions/_sr-assets").read_text().startswith("#compdef sr-assets")
    assert "complete" in installed.path("/usr/share/fish/vendor_completions.d/sr-assets.fish").read_text()


def test_unit_without_a_configuration_ends_in_one_line(installed: Chroot) -> None:
    service = unit_service(installed, "sr-assets.service")
    service.command[service.command.index(CONFIG)] = "/etc/sr-assets/none.yaml"
    ended = service.run()
    # The unit does not restart after this exit code.
    assert ended.returncode == 2
    assert_one_line(ended, "error: /etc/sr-assets/none.yaml: cannot be read")


def test_unit_with_a_read_only_state_ends_in_one_line(installed: Chroot) -> None:
    service = unit_service(installed, "sr-assets.service")
    service.writable.remove(STATE)
    ended = service.run()
    assert ended.returncode in {1, 2}
    assert_one_line(ended, "error: ", STATE)


def test_unit_with_a_state_of_root_ends_in_one_line(installed: Chroot) -> None:
    service = unit_service(installed, "sr-assets.service")
    installed.succeed("sh", "-c", f"chown root:root {STATE}; chmod 755 {STATE}")
    ended = service.run()
    installed.succeed("sh", "-c", f"chown sr-assets:sr-assets {STATE}; chmod 750 {STATE}")
    assert ended.returncode in {1, 2}
    assert_one_line(ended, "error: ", STATE)


def assert_one_line(ended: subprocess.CompletedProcess[str], *texts: str) -> None:
    """Assert that the output is a single line with these texts."""
    lines = [line for line in (ended.stdout + ended.stderr).splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1, lines
    assert all(text in lines[0] for text in texts), lines


def test_unit_replicates_reports_to_systemd_and_stops(installed: Chroot, rig: Rig, tmp_path: Path) -> None:
    installed.path("/etc/sr-assets/environment").write_text(f"SOURCE={rig.source.url}\n")
    service = unit_service(installed, "sr-assets.service")
    # As in the packaged configuration: commands without the unit's environment find the home, too.
    assert f"\nstate_store: {STATE}\n" in installed.path(CONFIG).read_text()
    assert_replicates(service, rig, tmp_path / "log", "${SOURCE}", state_store=STATE)


def test_operator_reads_the_tables_with_the_command(installed: Chroot) -> None:
    query = "SELECT copied_messages FROM replication"
    command = ["sr-assets", "--config", CONFIG, "query", query, "--format", "json"]
    source = unit_service(installed, "sr-assets.service").environ["SOURCE"]
    done = Service(installed, command, {"PATH": "/usr/bin", "SOURCE": source}, [STATE]).run()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{"copied_messages": 50}]


def test_upgrade_keeps_configuration_and_state(installed: Chroot, package: Path, tmp_path: Path) -> None:
    installed.path(CONFIG).write_text("name: MINE\nstreams: []\n")
    newer = repack(package, tmp_path)
    shutil.copy(newer, installed.path("/srv/newer.deb"))
    newer.unlink()
    installed.succeed("dpkg", "--force-confdef", "--force-confold", "--install", "/srv/newer.deb")
    installed.path("/srv/newer.deb").unlink()
    assert installed.path(CONFIG).read_text() == "name: MINE\nstreams: []\n"
    assert owner(installed, CONFIG) == "root:sr-assets 640"
    assert owner(installed, "/etc/sr-assets") == "root:sr-assets 750"
    assert installed.path(f"{STATE}/sites/BARE/state.duckdb").is_file()
    assert "99.0" in installed.succeed("dpkg-query", "--show", "sr-assets")


def repack(package: Path, folder: Path) -> Path:
    """Return a package of a later version with another default configuration."""
    tree, newer = folder / "tree", folder / "newer.deb"
    subprocess.run(["dpkg-deb", "--raw-extract", package, tree], check=True)
    control = tree / "DEBIAN" / "control"
    control.write_text(re.sub(r"(?m)^Version: .*", "Version: 99.0", control.read_text()))
    with (tree / CONFIG.removeprefix("/")).open("a") as config:
        config.write("# another default\n")
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, newer], check=True, capture_output=True
    )
    shutil.rmtree(tree)
    return newer


def test_remove_keeps_configuration_state_and_user(installed: Chroot) -> None:
    installed.succeed("dpkg", "--remove", "sr-assets")
    assert not installed.path("/opt/sr-assets").exists()
    assert not installed.path("/usr/lib/systemd/system/sr-assets.service").exists()
    assert installed.path(CONFIG).read_text() == "name: MINE\nstreams: []\n"
    assert installed.path(f"{STATE}/sites/BARE/state.duckdb").is_file()
    assert installed.run("id", "sr-assets").returncode == 0


def test_purge_deletes_everything(installed: Chroot) -> None:
    installed.succeed("dpkg", "--purge", "sr-assets")
    for path in ("/etc/sr-assets", "/etc/logrotate.d/sr-assets", STATE, LOGS, "/opt/sr-assets"):
        assert not installed.path(path).exists(), path
    assert installed.run("id", "sr-assets").returncode == 1
    assert installed.run("dpkg-query", "--show", "sr-assets").returncode == 1
