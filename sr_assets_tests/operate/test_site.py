"""The repeated runs of one site in `run --follow`."""

import pytest

from sr_assets.adapters.state.status_file import last_alive
from sr_assets.domain.errors import RunError
from sr_assets.operate import site_job
from sr_assets.operate.instance import prepare_instance
from sr_assets.settings import Settings
from sr_assets.stages.leadership import Leadership
from sr_assets_tests.rig import in_background, wait_until


def test_failure_of_dagsters_storage_ends_no_site(
    platform: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []

    def execute(*_: object, **__: object) -> None:
        runs.append("run")
        if len(runs) == 2:
            raise KeyboardInterrupt
        raise RunError("the storage does not respond")

    monkeypatch.setenv("DAGSTER_HOME", str(prepare_instance(platform)))
    monkeypatch.setattr(site_job, "_execute", execute)
    monkeypatch.setattr(site_job, "_await_poll", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        site_job.execute_site(platform, "london", [platform.streams[0].label], once=False)
    assert capsys.readouterr().err == "error: the storage does not respond\n"
    del runs[:]
    with pytest.raises(RunError, match="does not respond"):
        site_job.execute_site(platform, "london", [platform.streams[0].label], once=True)


def test_site_with_a_long_interval_stays_alive(platform: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_job, "_INTERVAL_SECONDS", 0.1)
    hourly = platform.changed(sensor=platform.sensor.model_copy(update={"interval_ns": 3600 * 10**9}))
    folder = platform.home / "sites" / "london"
    folder.mkdir(parents=True)
    leadership = Leadership(hourly, "london")
    with in_background(lambda: site_job._await_poll(hourly, leadership, folder)):
        try:
            wait_until(lambda: last_alive(folder) > 0.0, "a sign of life")
            first = last_alive(folder)
            wait_until(lambda: last_alive(folder) > first, "a sign of life after the first")
        finally:
            monkeypatch.setattr(Leadership, "leads", False)
