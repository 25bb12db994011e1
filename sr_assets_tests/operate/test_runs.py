"""The runs of `sr-assets run`, in real processes."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest
import yaml

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.published.fleet_reader import open_fleet, read_rows
from sr_assets.adapters.state.lock import lock_owner
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.operate.forking import Copies
from sr_assets.operate.runs import _Children
from sr_assets.settings import Settings, parse_cluster
from sr_assets_tests.forks import Forked
from sr_assets_tests.operate.rig import SIGNALLED_AGAIN, configure, run, runner_pid
from sr_assets_tests.rig import PATIENCE_SECONDS, wait_until


def test_run_once_records_every_site_in_dagster(platform: Settings) -> None:
    ended = run("--once", due_work=True)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False)
    assert sorted(ended.stdout.splitlines()) == [
        f"{stream.label}: copied 0, skipped 0, lag 0" for stream in platform.streams
    ]
    with open_fleet(platform.home) as connection:
        assert sorted(read_rows(connection, "SELECT name FROM replication").values) == [("london",), ("paris",)]
    with dg.DagsterInstance.from_config(str(platform.home / "dagster")) as instance:
        runs = instance.get_runs()
    assert {(run.job_name, run.status) for run in runs} == {
        (job, dg.DagsterRunStatus.SUCCESS) for job in ("london_replication", "paris_replication", "retention")
    }


def test_run_processes_only_the_selected_streams(platform: Settings) -> None:
    ended = run("--once", "--stream", platform.streams[1].stream)
    assert (ended.returncode, ended.stdout) == (0, f"{platform.streams[1].label}: copied 0, skipped 0, lag 0\n")


@pytest.mark.process
def test_run_without_work_imports_little(platform: Settings) -> None:
    assert run("--once").returncode == 0
    heavy = "{'dagster', 'pyspark', 'duckdb', 'numpy', 'pyarrow', 'pandas', 'rich.console'}"
    program = "import sys; from sr_assets.cli import run_command; code = run_command(['run', '--once']); "
    program += f"print(code, *{heavy} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "0"


def test_failing_stream_exits_1_while_other_streams_run(
    platform: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = yaml.safe_load((tmp_path / "replication.yaml").read_text())["streams"][0]
    away = {**good, "stream": "AWAY", "source_url": "nats://user:secret@127.0.0.1:1"}
    configure(tmp_path, monkeypatch, [away, {**good, "stream": "MISSING"}, good])
    ended = run("--once")
    assert ended.returncode == 1
    assert ended.stdout == f"london/{good['stream']}: copied 0, skipped 0, lag 0\n"
    errors = [line for line in ended.stderr.splitlines() if " INFO " not in line]
    assert len(errors) == 2
    assert errors[0].startswith("error: london/AWAY: cannot connect to NATS: 127.0.0.1:1: ")
    assert errors[1].startswith("error: london/MISSING: stream MISSING does not exist on ")
    assert "secret" not in ended.stderr


def test_follow_runs_until_interrupted(platform: Settings) -> None:
    following = Forked(
        [sys.executable, "-m", "sr_assets", "run", "--follow", "--stream", "london/" + platform.streams[0].stream],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        site = platform.home / "sites" / "london"
        wait_until(lambda: lock_owner(site) is not None or following.poll() is not None, "the site to be locked")
        following.send_signal(signal.SIGINT)
        _, errors = following.communicate(timeout=PATIENCE_SECONDS)
    finally:
        following.kill()
    assert (following.returncode, errors) == (0, "")


def test_follow_starts_a_killed_site_again(platform: Settings, tmp_path: Path) -> None:
    log = tmp_path / "errors"
    with (
        log.open("w") as errors,
        Forked([sys.executable, "-m", "sr_assets", "run", "--follow"], stderr=errors) as following,
    ):
        try:
            wait_until(lambda: runner_pid(platform.home, "london") > 0, "the site's run")
            killed = runner_pid(platform.home, "london")
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: runner_pid(platform.home, "london") not in {0, killed}, "another run of the site")
            # The kernel may give both to a thread that does not handle them.
            for number in (signal.SIGINT, signal.SIGTERM):
                following.send_signal(number)
            assert following.wait(PATIENCE_SECONDS) == 0
        finally:
            following.kill()
    assert "error: the process of site london was ended by signal 9; restarting it" in log.read_text()


def test_second_signal_leaves_no_children_behind(platform: Settings) -> None:
    program = SIGNALLED_AGAIN + "from sr_assets.cli import run_command; sys.exit(run_command(['run', '--follow']))"
    with Forked([sys.executable, "-c", program]) as following:
        try:
            wait_until(lambda: runner_pid(platform.home, "london") > 0, "the site's run")
            following.send_signal(signal.SIGINT)
            assert following.wait(PATIENCE_SECONDS) == 0
        finally:
            following.kill()
    assert runner_pid(platform.home, "london") == 0


def test_child_that_ends_is_started_again_with_longer_pauses(
    platform: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    children, pauses, clock = _Children(platform, Copies(), lambda: None, alone=True), list[float](), [0.0]
    # Each run lasts this long and ends with this code; the last but one is healthy for a while.
    ends = [(1.0, 1), (1.0, -9), (1.0, 130), *[(1.0, 0)] * 5, (61.0, 1), (1.0, 2)]

    def run() -> int:
        seconds, code = ends.pop(0)
        clock[0] += seconds
        if code == 130:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return code

    monkeypatch.setattr("sr_assets.operate.runs.times.monotonic", lambda: clock[0])
    monkeypatch.setattr(children._stopped, "wait", pauses.append)
    assert children._keep("site london", run) == 2
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 1]
    printed = capsys.readouterr().err.splitlines()
    assert printed[:3] == [
        "error: the process of site london ended with exit code 1; restarting it in 1 s",
        "error: the process of site london was ended by signal 9; restarting it in 2 s",
        "error: the process of site london cannot be started: Resource temporarily unavailable; restarting it in 4 s",
    ]
    assert printed[-1].endswith("ended with exit code 2; correct the configuration and restart this command")


@pytest.mark.process
def test_ended_child_leaves_no_process_and_is_forgotten(platform: Settings, tmp_path: Path) -> None:
    children, pid = _Children(platform, Copies(), lambda: None, alone=True), tmp_path / "pid"
    program = """
import pathlib, subprocess
left = subprocess.Popen(["sleep", "1000"])
pathlib.Path(file).write_text(str(left.pid))
raise SystemExit(0)
"""
    work: Callable[[], Any] = partial(exec, program, {"file": str(pid)})
    assert children._run("test", work) == 0
    left = int(pid.read_text())
    wait_until(lambda: not psutil.pid_exists(left) or psutil.Process(left).status() == "zombie", "the group to end")
    assert children._children == []
    children.stop()


@pytest.mark.process
def test_child_without_original_ends_silently_with_open_tables(tmp_path: Path) -> None:
    # As under `sr-assets demo`, whose threads forbid copies: DuckDB listed each object that a thread kept from being released.
    program = """
import duckdb, threading
connection = duckdb.connect()
connection.execute("SELECT 1")
threading.Thread(target=lambda: threading.Event().wait(), daemon=True).start()
raise SystemExit("the last line")
"""
    with (tmp_path / "errors").open("w+b") as errors:
        work: Callable[[], Any] = partial(exec, program, {})
        child = Copies().start("test", work, errors=errors.fileno())
        with child:
            assert child.wait() == 1
        errors.seek(0)
        assert errors.read() == b"the last line\n"


def test_run_once_without_work_starts_no_dagster_run(
    platform: Settings, nats_pair: tuple[NatsServer, NatsServer]
) -> None:
    stream = platform.streams[0]
    with Cluster(parse_cluster(nats_pair[0].url)) as source:
        source.publish(f"{stream.stream}.node", b"{}", {})
        assert run("--once").returncode == 0
        before = _site_runs(platform)
        again = run("--once")
        assert (again.returncode, again.stderr) == (0, "")
        assert sorted(again.stdout.splitlines()) == [
            f"{each.label}: copied 0, skipped 0, lag 0" for each in platform.streams
        ]
        assert _site_runs(platform) == before
        source.publish(f"{stream.stream}.node", b"{}", {})
    assert f"{stream.label}: copied 1, skipped 0, lag 0" in run("--once").stdout


@pytest.mark.nightly
def test_run_once_compares_a_recreated_target_without_new_messages(
    platform: Settings, nats_pair: tuple[NatsServer, NatsServer]
) -> None:
    stream = platform.streams[0]
    with Cluster(parse_cluster(nats_pair[0].url)) as source:
        source.publish(f"{stream.stream}.node", b"{}", {})
    assert run("--once").returncode == 0
    with Cluster(parse_cluster(nats_pair[1].url)) as target:
        target.request_api(f"STREAM.DELETE.{stream.target_stream}")
    assert f"target stream {stream.target_stream} was deleted" in run("--once").stderr


def _site_runs(platform: Settings) -> list[str]:
    with dg.DagsterInstance.from_config(str(platform.home / "dagster")) as instance:
        return [run.run_id for run in instance.get_runs() if run.job_name.endswith("_replication")]
