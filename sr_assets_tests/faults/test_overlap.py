"""Competing runs of one site: one at a time, none waits forever, and nothing is lost or duplicated."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest

from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.state.lock import SiteBusyError, lock_owner
from sr_assets.assets.specs import site_job_name
from sr_assets.operate.services import Services
from sr_assets.stages.site import Site
from sr_assets_tests.faults.conftest import Hold
from sr_assets_tests.faults.holding import hold_at
from sr_assets_tests.faults.rig import (
    await_marker,
    configure,
    finish,
    outcome,
    publish_rounds,
    start_run,
)
from sr_assets_tests.forks import Forked
from sr_assets_tests.rig import PATIENCE_SECONDS, SITE, Rig, stop_process, wait_until


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """The outcome of a single run."""
    return {}


@pytest.fixture
def single_run(rig: Rig, undisturbed: dict[str, Any]) -> dict[str, Any]:
    """The expected outcome of the site, which the tests run again with another target."""
    if not undisturbed:
        stream = rig.make()
        publish_rounds(rig, stream, senders=40, rounds=2)
        configure(rig, stream, rig.make("FEED"), rig.unique("WHOLE"))
        rig.drain()
        undisturbed.update(stream=stream, outcome=outcome(rig, rig.entries[0]["target_stream"]))
        rig.__post_init__()
    configure(rig, undisturbed["stream"], rig.make("FEED"), rig.unique("SHARED"))
    return undisturbed


def assert_same_outcome(rig: Rig, single_run: dict[str, Any]) -> None:
    target, feed = rig.entries[0]["target_stream"], rig.entries[0]["advisory"]["subject"].partition(".")[0]
    assert outcome(rig, target) == single_run["outcome"]
    assert len({message.headers for message in rig.stored(feed)}) == len(rig.stored(feed)) == 40


def site_owner(rig: Rig) -> str | None:
    return lock_owner(rig.home / "sites" / SITE)


def test_concurrent_runs_take_turns(rig: Rig, single_run: dict[str, Any]) -> None:
    runs = [start_run(rig), start_run(rig)]
    for run in runs:
        finish(run)
    assert_same_outcome(rig, single_run)


def test_stopped_owner_keeps_its_site_and_finishes_after_resuming(
    rig: Rig, single_run: dict[str, Any], tmp_path: Path
) -> None:
    marker = tmp_path / "read"
    with pytest.MonkeyPatch.context() as environment:
        for name, text in hold_at(Point.READ, marker).items():
            environment.setenv(name, text)
        owner = rig.start()
    held_pid = await_marker(owner, marker)
    stop_process(held_pid)
    try:
        marker.write_text("released")
        with (
            pytest.raises(SiteBusyError, match=rf"{SITE} is under way: child \(pid {held_pid}\) since \d{{4}}-"),
            Site(rig.settings(), SITE, owner="second", run_id="2", wait_seconds=1.0),
        ):
            pass
    finally:
        os.kill(held_pid, signal.SIGCONT)
    stdout, _ = owner.communicate()
    assert (owner.returncode, stdout) == (0, "[]\n")
    assert_same_outcome(rig, single_run)


def test_killed_run_leaves_no_site_running(rig: Rig) -> None:
    stream = rig.make()
    for name in (SITE, "PARIS"):
        rig.add(stream, name=name, target_stream=rig.unique(name), target_subject_prefix=name)
    rig.settings()
    environ = {**os.environ, "SR_ASSETS_CONFIG": str(rig.home / "replication.yaml")}
    environ.pop("DAGSTER_HOME", None)
    following = Forked([sys.executable, "-m", "sr_assets", "run", "--follow"], env=environ)
    folders = [rig.home / "sites" / name for name in (SITE, "PARIS")]
    try:
        wait_until(lambda: all(lock_owner(folder) for folder in folders), "both sites to be running")
        children = psutil.Process(following.pid).children(recursive=True)
    finally:
        following.kill()
        following.wait()
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_SECONDS)
    assert not alive
    assert not any(lock_owner(folder) for folder in folders)


@pytest.mark.long
def test_run_waits_for_dagster_and_recovers_its_cancelled_run(
    rig: Rig, hold: Hold, single_run: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The sensor requests the runs and the daemon launches them, so the held and cancelled runs are Dagster's own."""
    settings = rig.settings(sensor={"interval": "1s"}, linger="1s")
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(rig.home / "replication.yaml"))
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "dagster"))
    hold.arm()
    with Services(settings, None), dg.DagsterInstance.get() as instance:
        worker = psutil.Process(hold.await_writer())
        (cancelled,) = instance.get_runs(dg.RunsFilter(job_name=site_job_name(settings, SITE)), limit=1)
        assert cancelled.run_id in (site_owner(rig) or "")
        second = start_run(rig)
        try:
            wait_until(lambda: waits_for_site(second, rig), "the second run to wait for the site")
            assert instance.run_launcher.terminate(cancelled.run_id)
            wait_until(lambda: reload(instance, cancelled).is_finished, "the end of the cancelled run")
            assert reload(instance, cancelled).status is dg.DagsterRunStatus.CANCELED
            # Its writer stopped with it, before the next run.
            wait_until(lambda: not worker.is_running(), "the end of the writer")
            finish(second)
        finally:
            second.kill()
        wait_until(lambda: caught_up(rig), "the sensor's or the second run to recover the site")
        wait_until(lambda: site_owner(rig) is None, "the end of all runs")
    assert_same_outcome(rig, single_run)


def waits_for_site(run: subprocess.Popen[bytes], rig: Rig) -> bool:
    file = str(rig.home / "sites" / SITE / "lock")
    with contextlib.suppress(psutil.Error):
        processes = psutil.Process(run.pid).children(recursive=True)
        return any(opened.path == file for process in processes for opened in process.open_files())
    return False


def reload(instance: dg.DagsterInstance, run: dg.DagsterRun) -> dg.DagsterRun:
    recorded = instance.get_run_by_id(run.run_id)
    assert recorded is not None
    return recorded


def caught_up(rig: Rig) -> bool:
    file = rig.home / "fleet.duckdb"
    return file.exists() and rig.row(
        "SELECT sum(lag_messages) AS lag, count(last_error) AS wrong FROM replication"
    ) == {
        "lag": 0,
        "wrong": 0,
    }
