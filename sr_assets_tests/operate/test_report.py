"""The printed result of a failing run."""

import os
import re
from pathlib import Path

import dagster as dg
import pytest

from sr_assets.adapters.copying import copier
from sr_assets.adapters.state.lock import SiteLock
from sr_assets.assets.specs import site_job_name
from sr_assets.automation.failures import failures
from sr_assets.definitions import build
from sr_assets.operate.run_output import report_run
from sr_assets.stages.site import Site
from sr_assets_tests.rig import SITE, Rig, Sent


def test_report_includes_a_busy_site_and_a_failure(tmp_path: Path) -> None:
    @dg.op
    def busy() -> None:
        with SiteLock(tmp_path, "run 1", 0), SiteLock(tmp_path, "run 2", 0):
            pass

    @dg.op
    def failing() -> None:
        raise dg.Failure("london/A: gone\nlondon/B: gone too")

    @dg.job(executor_def=dg.in_process_executor)
    def both() -> None:
        busy()
        failing()

    with dg.DagsterInstance.ephemeral() as instance:
        lines = failures(both.execute_in_process(instance=instance, raise_on_error=False).all_events)
    assert {"london/A: gone", "london/B: gone too"} < set(lines)
    assert any(
        re.fullmatch(rf"site {tmp_path.name} is under way: run 1 \(pid {os.getpid()}\) since \S+", line)
        for line in lines
    )


def test_lag_of_an_unreachable_source_is_unknown(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    stream = rig.make()
    rig.add(stream, target_subject_prefix="t")
    rig.publish(stream, [Sent(b"{}")])
    rig.run()
    rig.entries[-1]["source_url"] = "nats://127.0.0.1:1"
    settings = rig.settings()
    job = build(settings).resolve_job_def(site_job_name(settings, SITE))
    with dg.DagsterInstance.ephemeral() as instance:
        code = report_run(settings.streams, job.execute_in_process(instance=instance, raise_on_error=False))
    assert code == 1
    assert f"{SITE}/{stream}: copied 0, skipped 0, lag unknown" in capsys.readouterr().out.splitlines()


def test_failing_run_prints_its_own_work(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Work that an earlier run committed but did not publish is not counted for this one."""
    good, bad = rig.make(), rig.make()
    rig.create(bad, rig.target, subjects=[f"t.{bad}.>"], max_msgs=3, discard="new")
    rig.add(good, target_subject_prefix="t")
    rig.add(bad, target_subject_prefix="t", inspect_field="sender", inspect_duration="1h")
    for stream in (good, bad):
        rig.publish(stream, [Sent(b'{"sender": "a"}'), Sent(b'{"sender": "b"}')])
    with monkeypatch.context() as patched:
        patched.setattr(Site, "publish", lambda *_, **__: None)
        rig.run()
    rig.publish(good, [Sent(b"{}")])
    rig.publish(bad, [Sent(b'{"sender": "c"}'), Sent(b'{"sender": "d"}'), Sent(b'{"sender": "a"}')])
    monkeypatch.setattr(copier, "_REFUSAL_SECONDS", 0.5)
    settings = rig.settings()
    job = build(settings).resolve_job_def(site_job_name(settings, SITE))
    with dg.DagsterInstance.ephemeral() as instance:
        code = report_run(settings.streams, job.execute_in_process(instance=instance, raise_on_error=False))
    printed = capsys.readouterr()
    assert code == 1
    assert f"{SITE}/{good}: copied 1, skipped 0, lag 0" in printed.out.splitlines()
    assert f"{SITE}/{bad}: copied 0, skipped 1, lag 0" in printed.out.splitlines()
    assert "maximum messages" in printed.err
