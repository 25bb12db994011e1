"""The Dagster instance's folder: its settings and the permitted disks."""

import os
from pathlib import Path

import pytest

from sr_assets import operate
from sr_assets.domain.errors import ConfigurationError
from sr_assets.settings import Settings

ROOT = Path(__file__).parent.parent.parent


def test_instance_is_in_the_home_with_the_packaged_settings(platform: Settings) -> None:
    folder = operate.prepare_instance(platform)
    assert folder == platform.home / "dagster"
    assert os.environ["DAGSTER_HOME"] == str(folder)
    assert (folder / "dagster.yaml").read_bytes() == (ROOT / "sr_assets" / "dagster.yaml").read_bytes()


def test_existing_dagster_home_keeps_its_settings(
    platform: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    monkeypatch.setenv("DAGSTER_HOME", str(own))
    assert operate.prepare_instance(platform) == own
    assert (own / "dagster.yaml").read_text() == "telemetry: {enabled: false}\n"
    assert not (platform.home / "dagster").exists()


def test_unusable_home_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written; choose another folder with SR_ASSETS_HOME"):
        operate.check_home(tmp_path / "file" / "home")
    operate.check_home(tmp_path / "not" / "there" / "yet")
    assert not (tmp_path / "not").exists()


def test_home_on_a_network_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operate.instance, "_REMOTE_DISKS", frozenset({operate.instance._disk_kind(tmp_path)}))
    with pytest.raises(ConfigurationError, match="is on a network disk"):
        operate.check_home(tmp_path)
