"""The repeated runs of one site in `run --follow`."""

import pytest
from dagster import JobDefinition

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.state.status_file import last_alive
from sr_assets.domain.errors import RunError
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.operate import site_job
from sr_assets.operate.instance import prepare_instance
from sr_assets.operate.job_execution import SiteJob
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
    monkeypatch.setattr(JobDefinition, "execute_in_process", execute)
    monkeypatch.setattr(site_job, "_await_poll", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        site_job.execute_site(platform, "london", [platform.streams[0].label], once=False)
    assert capsys.readouterr().err == "error: the storage does not respond\n"
    del runs[:]
    with pytest.raises(RunError, match="does not respond"):
        site_job.execute_site(platform, "london", [platform.streams[0].label], once=True)


def test_run_works_before_dagster_is_imported(
    platform: Settings,
    nats_pair: tuple[NatsServer, NatsServer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = platform.streams[0]
    with Cluster(stream.source, "test") as source:
        source.publish(f"{stream.stream}.node", b"{}", {})
    load = site_job._site_job

    def load_late(settings: Settings, site: str) -> SiteJob:
        with Cluster(stream.target, "test") as target:
            wait_until(lambda: target.find_stream(stream.target_stream) is not None, "the target stream")
            wait_until(lambda: target.stream_info(stream.target_stream).last_sequence == 1, "the copy")
        return load(settings, site)

    monkeypatch.setenv("DAGSTER_HOME", str(prepare_instance(platform)))
    monkeypatch.setattr(site_job, "_site_job", load_late)
    assert site_job.execute_site(platform, "london", [stream.label], once=True) == 0
    assert capsys.readouterr().out == f"{stream.label}: copied 1, skipped 0, lag 0\n"


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
