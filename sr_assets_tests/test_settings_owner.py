"""The owner of the configuration: what another user placed or may change runs no command."""

import os
from pathlib import Path

import pytest

from sr_assets.domain.errors import ConfigurationError
from sr_assets.settings import load_settings
from sr_assets.settings.document import foreign_writer, with_folders
from sr_assets_tests.strangers import STRANGER, need_root

CONFIGURATION = "name: london\nstreams: [{stream: REG, source_url: nats://a, target_url: nats://b}]\n"


@pytest.fixture
def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration in the working directory that only its owner can change."""
    monkeypatch.delenv("SR_ASSETS_CONFIG", raising=False)
    monkeypatch.delenv("SUDO_UID", raising=False)
    file = tmp_path / "conf" / "replication.yaml"
    file.parent.mkdir(mode=0o755)
    file.write_text(CONFIGURATION)
    file.chmod(0o644)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return file


@pytest.mark.parametrize("changed", ("conf/replication.yaml", "conf", "."))
def test_configuration_placed_by_another_user_is_refused(
    placed: Path, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_root()
    assert load_settings().streams[0].stream == "REG"
    os.chown(changed, STRANGER, -1)
    with pytest.raises(
        ConfigurationError, match="belongs to nobody, and could run commands as you; if you trust it, name"
    ):
        load_settings()
    # As after sudo in a checkout of one's own.
    monkeypatch.setenv("SUDO_UID", str(STRANGER))
    assert load_settings().streams[0].stream == "REG"


@pytest.mark.parametrize("changed", ("conf/replication.yaml", "conf", "."))
def test_configuration_that_others_can_write_is_refused(placed: Path, changed: str) -> None:
    mode = Path(changed).stat().st_mode
    Path(changed).chmod(mode | 0o002)
    with pytest.raises(ConfigurationError, match=r"every user can write .*, and could run commands as you"):
        load_settings()
    if changed == "conf/replication.yaml":
        with pytest.raises(
            ConfigurationError, match=r"every user can write .*; let only its owner write it \(chmod o-w\), or"
        ):
            load_settings(placed)
    if changed != "conf/replication.yaml":
        # As in /tmp: others cannot replace the file.
        Path(changed).chmod(mode | 0o1002)
        assert load_settings().streams[0].stream == "REG"


def test_configuration_that_a_group_can_write_is_refused(placed: Path) -> None:
    need_root()
    placed.chmod(0o664)
    # A group of this user only, as a umask of 002 leaves it.
    assert load_settings().streams[0].stream == "REG"
    os.chown(placed, -1, STRANGER)
    with pytest.raises(ConfigurationError, match=r"group \w+ can write .*/replication.yaml, and could run commands"):
        load_settings()
    # An operator who names it trusts the group; a warning names it.
    assert load_settings(placed).streams[0].stream == "REG"
    assert str(foreign_writer(placed)).startswith("group ")


def test_mounted_config_map_is_accepted(placed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ConfigMap: links through `..data`, everything with mode 0777, on a mount that nobody can write."""
    version = placed.parent / "..2026"
    version.mkdir()
    placed.rename(version / placed.name)
    (placed.parent / "..data").symlink_to(version.name)
    placed.symlink_to(Path("..data") / placed.name)
    for folder in (placed.parent, version):
        folder.chmod(0o777)
    # A volume that the containers of a pod share has that mode too.
    assert load_settings(placed).streams[0].stream == "REG"
    assert str(foreign_writer(*with_folders(placed))).startswith("every user can write")
    with pytest.raises(ConfigurationError, match="every user can write"):
        load_settings()
    fixed = os.statvfs(placed)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*fixed[:8], os.ST_RDONLY, *fixed[9:])))
    assert load_settings().streams[0].stream == "REG"
    assert foreign_writer(*with_folders(placed)) is None


def test_link_of_another_user_in_a_shared_folder_is_named(placed: Path, tmp_path: Path) -> None:
    need_root()
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    link = shared / "replication.yaml"
    link.symlink_to(placed)
    assert foreign_writer(*with_folders(link)) is None
    os.lchown(link, STRANGER, STRANGER)
    assert str(foreign_writer(*with_folders(link))).startswith(f"the link {link} belongs to ")


def test_link_into_a_folder_of_another_user_is_refused(placed: Path, tmp_path: Path) -> None:
    need_root()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    placed.rename(elsewhere / placed.name)
    placed.symlink_to(elsewhere / placed.name)
    assert load_settings().streams[0].stream == "REG"
    os.chown(elsewhere, STRANGER, -1)
    with pytest.raises(ConfigurationError, match="elsewhere belongs to nobody"):
        load_settings()


def test_installed_configuration_serves_folders_without_one(placed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = placed.with_name("installed.yaml")
    installed.write_text(CONFIGURATION.replace("REG", "INSTALLED"))
    monkeypatch.setattr("sr_assets.settings.loading._INSTALLED", installed)
    assert load_settings().streams[0].stream == "REG"
    placed.unlink()
    assert load_settings().streams[0].stream == "INSTALLED"
