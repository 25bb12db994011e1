"""The work of Dagster's daemon in `sr-assets run`: daily tables, retention, native streams and failed runs."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import pytest
import yaml

from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.adapters.published.reading import open_fleet, read_rows
from sr_assets.adapters.run_failures import read_run_failures
from sr_assets.adapters.wire import Connection, Outgoing, Publisher
from sr_assets.domain.errors import RunError
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.operate.due_work import is_due, note_checked
from sr_assets.settings import Settings, parse_cluster
from sr_assets_tests.operate.rig import configure, run, runner_pid
from sr_assets_tests.rig import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.process

DAILY = ("availability", "inventory")


def ended_jobs(home: Path) -> Counter[str]:
    """Count the successful runs of each job."""
    with dg.DagsterInstance.from_config(str(home / "dagster")) as instance:
        succeeded = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.SUCCESS]))
    return Counter(run.job_name for run in succeeded)


def has_rows(home: Path, table: str) -> bool:
    try:
        with open_fleet(home) as connection:
            return bool(read_rows(connection, f"SELECT 1 FROM {table} LIMIT 1").values)
    except RunError:
        return False


@contextmanager
def following(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command until the end of the block, which must not leave an error."""
    process = subprocess.Popen(
        [sys.executable, "-m", "sr_assets", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=50)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


@pytest.fixture
def tracked(platform: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """One site, which tracks a node."""
    entry = yaml.safe_load((tmp_path / "replication.yaml").read_text())["streams"][0]
    with Connection(platform.streams[0].source, "test") as connection:
        body = json.dumps({"sender": "n1"}).encode()
        (ack,) = Publisher(connection).publish_all([Outgoing(1, f"{entry['stream']}.m", b"", body)])
    assert ack.error is None
    return configure(tmp_path, monkeypatch, [{**entry, "inspect_field": "sender", "inspect_duration": "1h"}])


def test_run_once_does_hourly_and_nightly_jobs_once(tracked: Settings) -> None:
    ended = run("--once", due_work=True)
    assert ended.returncode == 0, ended.stderr
    jobs = ended_jobs(tracked.home)
    assert {job: jobs[job] for job in (*DAILY, "retention")} == dict.fromkeys((*DAILY, "retention"), 1)
    # A second run within the hour does none of them, even if its check is due, and no site has work.
    (tracked.home / "due_work.json").unlink()
    assert run("--once", due_work=True).returncode == 0
    assert ended_jobs(tracked.home) == jobs


def test_plain_streams_have_no_daily_tables(platform: Settings) -> None:
    ended = run("--once", due_work=True)
    assert ended.returncode == 0, ended.stderr
    assert "error" not in ended.stderr
    assert set(ended_jobs(platform.home)) == {"london_replication", "paris_replication", "retention"}


def test_run_of_selected_streams_does_no_other_work(platform: Settings) -> None:
    assert run("--once", "--stream", platform.streams[0].stream, due_work=True).returncode == 0
    assert ended_jobs(platform.home) == {"london_replication": 1}


def test_run_follow_does_the_daily_tables(tracked: Settings) -> None:
    with following("run", "--follow") as process:
        wait_until(
            lambda: process.poll() is not None or has_rows(tracked.home, "availability_daily"),
            "a daily table",
            every=0.25,
        )
        assert process.poll() is None


def test_run_follow_ends_when_every_site_is_misconfigured(platform: Settings, tmp_path: Path) -> None:
    """A site with a wrong configuration is given up; the process of the due work must not outlive the last one."""
    log, file = tmp_path / "errors", tmp_path / "replication.yaml"
    lines = [
        f"error: the process of site {site} ended with exit code 2; correct the configuration and restart this command"
        for site in ("london", "paris")
    ]
    with log.open("w") as errors:
        process = subprocess.Popen([sys.executable, "-m", "sr_assets", "run", "--follow"], stderr=errors)
    try:
        wait_until(lambda: all(runner_pid(platform.home, site) for site in platform.sites), "a run of each site")
        file.write_text(f"{file.read_text()}\nunknown: key\n")
        os.kill(runner_pid(platform.home, "london"), signal.SIGKILL)
        wait_until(lambda: lines[0] in log.read_text(), "the end of the first site")
        assert process.poll() is None
        os.kill(runner_pid(platform.home, "paris"), signal.SIGKILL)
        assert process.wait(PATIENCE_SECONDS) == 2
    finally:
        process.kill()
    assert lines[1] in log.read_text()


def test_up_without_ui_runs_the_sites(platform: Settings) -> None:
    with following("up", "--no-ui") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "Dagster: without the UI  (Ctrl-C stops it)\n"
        wait_until(lambda: has_rows(platform.home, "replication"), "a run of the sensor", every=0.25)


def test_run_once_records_a_run_that_failed_as_a_whole(platform: Settings) -> None:
    # The home and its lock exist, the state is unreadable.
    assert run("--once", "--stream", platform.streams[0].stream).returncode == 0
    (platform.home / "sites" / "london" / "state.duckdb").write_bytes(b"not a database")
    assert run("--once").returncode == 1
    (failure,) = read_run_failures(platform.home).values()
    assert (failure.job, failure.streams) == ("london_replication", (platform.streams[0].stream,))


@pytest.mark.parametrize("mode", ("--once", "--follow"))
def test_native_streams_are_created_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_server: NatsServer, unique: Callable[[str], str], mode: str
) -> None:
    origin, mirror = unique("ORIGIN"), unique("MIRROR")
    with Cluster(parse_cluster(nats_server.url)) as cluster:
        cluster.create_stream({"name": origin, "subjects": [f"{origin}.>"], "allow_direct": True})
    configured = configure(
        tmp_path, monkeypatch, [{"stream": origin, "source_url": nats_server.url, "target_url": "nats://127.0.0.1:1"}]
    )
    file = tmp_path / "replication.yaml"
    streams = [{"stream": mirror, "mirror": {"stream": origin}}]
    topology = {"clusters": {"here": {"url": nats_server.url}}, "streams": streams, "manage": "create"}
    document = {**yaml.safe_load(file.read_text()), "topology": topology}
    del document["streams"]
    file.write_text(yaml.safe_dump(document))

    shown = f"(SELECT * FROM topology_streams WHERE stream = '{mirror}')"
    if mode == "--once":
        ended = run("--once", due_work=True)
        assert ended.returncode == 0, ended.stderr
        assert has_rows(configured.home, shown)
        return
    with following("run", "--follow"):
        wait_until(lambda: has_rows(configured.home, shown), "the native stream", every=0.25)


def test_damaged_stamp_counts_as_due(platform: Settings) -> None:
    assert is_due(platform)
    platform.home.mkdir(parents=True, exist_ok=True)
    note_checked(platform.home)
    assert not is_due(platform)
    for damaged in ("", "{}", "[]", json.dumps({"checked_at": "x"}), json.dumps({"checked_at": 1e12})):
        (platform.home / "due_work.json").write_text(damaged)
        assert is_due(platform)
