"""The Dagster instance: its settings, the permitted disks, and what we change in the instance of others."""

import os
from pathlib import Path

import dagster as dg
import pytest

from sr_assets.automation.jobs import JOB_TAG, SITE_TAG
from sr_assets.definitions import build
from sr_assets.domain.errors import ConfigurationError
from sr_assets.operate import instance
from sr_assets.settings import Settings

ROOT = Path(__file__).parent.parent.parent


def test_instance_is_in_the_home_with_the_packaged_settings(platform: Settings) -> None:
    folder = instance.prepare_instance(platform)
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
    assert instance.prepare_instance(platform) == own
    assert (own / "dagster.yaml").read_text() == "telemetry: {enabled: false}\n"
    assert not (platform.home / "dagster").exists()


def test_unusable_home_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written; choose another folder with SR_ASSETS_HOME"):
        instance.check_home(tmp_path / "file" / "home")
    instance.check_home(tmp_path / "not" / "there" / "yet")
    assert not (tmp_path / "not").exists()


def test_home_on_a_network_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance, "_REMOTE_DISKS", frozenset({instance._disk_kind(tmp_path)}))
    with pytest.raises(ConfigurationError, match="is on a network disk"):
        instance.check_home(tmp_path)


def nightly(settings: Settings) -> dg.ScheduleDefinition:
    """Return the schedule of the job."""
    schedule = build(settings).get_repository_def().get_schedule_def("nightly_retention")
    assert isinstance(schedule, dg.ScheduleDefinition)
    return schedule


def is_nightly(settings: Settings) -> bool:
    """Return whether the job runs by itself."""
    return nightly(settings).default_status is dg.DefaultScheduleStatus.RUNNING


def test_retention_is_off_in_an_instance_of_others(
    platform: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    monkeypatch.setenv("DAGSTER_HOME", str(theirs))
    with dg.DagsterInstance.get() as dagster_instance:
        dagster_instance.create_run_for_job(build(platform).get_repository_def().get_job("availability"))
    before = sorted(path.name for path in theirs.iterdir())
    assert instance.prepare_instance(platform) == theirs
    assert sorted(path.name for path in theirs.iterdir()) == before
    assert not is_nightly(platform)
    assert is_nightly(platform.changed(run_retention=True))


def test_retention_is_on_in_our_own_instance(
    platform: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    instance.prepare_instance(platform)
    assert is_nightly(platform)
    assert not is_nightly(platform.changed(run_retention=False))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "empty"))
    instance.prepare_instance(platform)
    assert is_nightly(platform)


def test_all_jobs_tag_their_runs(platform: Settings) -> None:
    repository = build(platform).get_repository_def()
    jobs = [repository.get_job(name) for name in repository.job_names if not name.startswith("__")]
    assert {tag for job in jobs for tag in job.run_tags} == {SITE_TAG, JOB_TAG}
    assert all(len(job.run_tags) == 1 for job in jobs)
