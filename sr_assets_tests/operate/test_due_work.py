"""The work of Dagster's daemon in `sr-assets run`: daily tables, retention, native streams and failed runs."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
import yaml

from sr_assets.adapters import control
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.published.fleet_reader import open_fleet, read_rows
from sr_assets.adapters.run_failures import forget_run_failure, read_run_failures
from sr_assets.adapters.state.lock import SiteLock
from sr_assets.adapters.wire import Connection, Outgoing, Publisher
from sr_assets.definitions import build
from sr_assets.domain.errors import RunError
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.operate.due_work import DueWork, is_due, note_checked
from sr_assets.operate.instance import prepare_instance, prepare_storage
from sr_assets.operate.processes import INTERRUPTED
from sr_assets.resources import LINGER, MODE_TAG
from sr_assets.settings import Settings, load_settings, parse_cluster
from sr_assets_tests.forks import Forked
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
    process = Forked(
        [sys.executable, "-m", "sr_assets", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
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
    control.change(tracked.home, "DELETE FROM due_work")
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


# `run --once` does the same work.
@pytest.mark.nightly
def test_run_follow_does_the_daily_tables(tracked: Settings) -> None:
    with following("run", "--follow") as process:
        wait_until(
            lambda: process.poll() is not None or all(any((tracked.home / table).glob("*.parquet")) for table in DAILY),
            "the daily tables",
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
        process = Forked([sys.executable, "-m", "sr_assets", "run", "--follow"], stderr=errors)
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


# In the gate, `up --no-ui` runs a site in `test_data_values.py`.
@pytest.mark.nightly
def test_up_without_ui_runs_the_sites(platform: Settings) -> None:
    with following("up", "--no-ui") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "Dagster: without the UI  (Ctrl-C stops it)\n"
        wait_until(lambda: has_rows(platform.home, "replication"), "a run of the sensor")


def test_run_once_records_a_run_that_failed_as_a_whole(platform: Settings) -> None:
    # The home and its lock exist, the state is unreadable.
    assert run("--once", "--stream", platform.streams[0].stream).returncode == 0
    (platform.home / "sites" / "london" / "state.duckdb").write_bytes(b"not a database")
    assert run("--once").returncode == 1
    (failure,) = read_run_failures(platform.home).values()
    assert (failure.job, failure.streams) == ("london_replication", (platform.streams[0].stream,))


@pytest.mark.parametrize("mode", ("--once", pytest.param("--follow", marks=pytest.mark.nightly)))
def test_native_streams_are_created_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_server: NatsServer, unique: Callable[[str], str], mode: str
) -> None:
    mirror = unique("MIRROR")
    configured = native_streams(tmp_path, monkeypatch, nats_server, mirror)
    shown = f"(SELECT * FROM topology_streams WHERE stream = '{mirror}')"
    if mode == "--once":
        ended = run("--once", due_work=True)
        assert ended.returncode == 0, ended.stderr
        assert has_rows(configured.home, shown)
        return
    with following("run", "--follow"):
        wait_until(lambda: has_rows(configured.home, shown), "the native stream")


def native_streams(folder: Path, monkeypatch: pytest.MonkeyPatch, server: NatsServer, *names: str) -> Settings:
    """Configure mirrors of a new stream, one of each name, without entries."""
    origin = f"{names[0]}_ORIGIN"
    with Cluster(parse_cluster(server.url)) as cluster:
        if cluster.find_stream(origin) is None:
            cluster.create_stream({"name": origin, "subjects": [f"{origin}.>"], "allow_direct": True})
    streams = [{"stream": name, "mirror": {"stream": origin}} for name in names]
    topology = {"clusters": {"here": {"url": server.url}}, "streams": streams, "manage": "create"}
    file = folder / "replication.yaml"
    file.write_text(yaml.safe_dump({"name": "HUB", "state_store": str(folder / "home"), "topology": topology}))
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
    for name in ("SR_ASSETS_HOME", "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)
    return load_settings()


#: The due work in which a function of a job touches a file, and does not return.
HANGING = """
import importlib, pathlib, sys, time
from sr_assets.operate import due_work
module, name, reached, _ = sys.argv[1:]
def hang(*_):
    pathlib.Path(reached).touch()
    time.sleep(1000)
setattr(importlib.import_module(module), name, hang)
sys.exit(due_work.due_work_process(once=sys.argv[4] == "once", since=0.0))
"""
TOPOLOGY_RUN = ("sr_assets.assets.topology", "_run")
RETENTION_RUN = ("sr_assets.automation.old_runs", "_orphaned_runs")


@contextmanager
def hanging(
    settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[str, str], mode: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the due work, and wait until a job of it hangs."""
    reached = folder / "reached"
    home = prepare_instance(settings)
    prepare_storage(home)
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    command = [sys.executable, "-W", "ignore", "-c", HANGING, *where, str(reached), mode]
    child: Forked[bytes] = Forked(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        wait_until(lambda: reached.exists() or child.poll() is not None, "the job")
        assert child.poll() is None
        yield child
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(
    ("where", "mode"),
    (
        pytest.param(TOPOLOGY_RUN, "once", id="topology-once"),
        pytest.param(RETENTION_RUN, "follow", id="retention-follow"),
        pytest.param(TOPOLOGY_RUN, "follow", id="topology-follow", marks=pytest.mark.nightly),
        pytest.param(RETENTION_RUN, "once", id="retention-once", marks=pytest.mark.nightly),
    ),
)
def test_signal_ends_due_work_and_cancels_its_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nats_server: NatsServer,
    unique: Callable[[str], str],
    where: tuple[str, str],
    mode: str,
) -> None:
    settings = native_streams(tmp_path, monkeypatch, nats_server, unique("MIRROR"))
    if where == RETENTION_RUN:
        settings = configure(
            tmp_path, monkeypatch, [{"stream": "S", "source_url": nats_server.url, "target_url": "nats://127.0.0.1:1"}]
        )
    with hanging(settings, tmp_path, monkeypatch, where, mode) as child:
        child.send_signal(signal.SIGTERM)
        # The job would take 1,000 s.
        assert child.wait(PATIENCE_SECONDS) == INTERRUPTED
    with dg.DagsterInstance.from_config(str(settings.home / "dagster")) as instance:
        job = "retention" if where == RETENTION_RUN else "topology"
        runs = instance.get_runs(dg.RunsFilter(job_name=job))
    assert [run.status for run in runs] == [dg.DagsterRunStatus.CANCELED]


def test_killed_topology_run_does_not_block_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_server: NatsServer, unique: Callable[[str], str]
) -> None:
    mirror = unique("MIRROR")
    settings = native_streams(tmp_path, monkeypatch, nats_server, mirror)
    with hanging(settings, tmp_path, monkeypatch, TOPOLOGY_RUN, "once") as child:
        child.kill()
        child.wait()
    monkeypatch.delenv("DAGSTER_HOME")
    ended = run("--once", due_work=True)
    assert ended.returncode == 0, ended.stderr
    with Cluster(parse_cluster(nats_server.url)) as cluster:
        assert cluster.find_stream(mirror) is not None
    with dg.DagsterInstance.from_config(str(settings.home / "dagster")) as instance:
        statuses = [run.status for run in instance.get_runs(dg.RunsFilter(job_name="topology"))]
    assert statuses == [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE]


# A test of the tick shows that it records changes.
@pytest.mark.nightly
def test_run_once_records_unchanged_native_streams_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nats_server: NatsServer, unique: Callable[[str], str]
) -> None:
    mirror = unique("MIRROR")
    settings = native_streams(tmp_path, monkeypatch, nats_server, mirror)

    def observations() -> int:
        with dg.DagsterInstance.from_config(str(settings.home / "dagster")) as instance:
            key = dg.AssetKey(["topology", "here", mirror])
            return len(instance.fetch_observations(key, limit=100).records)

    def run_once() -> int:
        ended = run("--once", due_work=True)
        assert ended.returncode == 0, ended.stderr
        return observations()

    # The first survey precedes the creation of the stream.
    run_once()
    assert run_once() == run_once()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        yield instance


def test_restarted_due_work_records_no_failure_again(platform: Settings, local: dg.DagsterInstance) -> None:
    platform.home.mkdir(parents=True, exist_ok=True)
    began = datetime.now(UTC) - timedelta(minutes=1)
    job = build(platform).resolve_job_def("retention")
    failed = local.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags=job.run_tags)
    local.report_run_failed(failed)
    DueWork(platform, local, began).note_failures()
    assert set(read_run_failures(platform.home)) == {"retention"}
    forget_run_failure(platform.home, "retention")
    DueWork(platform, local, began).note_failures()
    assert read_run_failures(platform.home) == {}
    again = local.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags=job.run_tags)
    local.report_run_failed(again)
    DueWork(platform, local, began).note_failures()
    assert set(read_run_failures(platform.home)) == {"retention"}


def test_site_run_without_process_is_ended_next_to_another(platform: Settings, local: dg.DagsterInstance) -> None:
    """Without Dagster's daemon, the due work ends it; a run of another code location is not ours."""
    job = build(platform).resolve_job_def("london_replication")
    lost, alive = (
        local.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags={MODE_TAG: LINGER}) for _ in range(2)
    )
    foreign = local.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)

    def statuses() -> list[dg.DagsterRunStatus]:
        runs = (local.get_run_by_id(run.run_id) for run in (lost, alive, foreign))
        return [run.status for run in runs if run is not None]

    started, failed = dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.FAILURE
    with SiteLock(platform.home / "sites" / "london", f"run {alive.run_id}", 0.0):
        DueWork(platform, local, datetime.now(UTC)).end_dead_site_runs()
        assert statuses() == [started, started, started]
        # Another process continues with the times of the first one.
        ((text,),) = control.query(platform.home, "SELECT value FROM due_work WHERE name = 'without_lock'")
        since = json.loads(text)
        assert list(since) == [lost.run_id]
        since[lost.run_id] -= 61
        control.change(platform.home, "UPDATE due_work SET value = ? WHERE name = 'without_lock'", json.dumps(since))
        DueWork(platform, local, datetime.now(UTC)).end_dead_site_runs()
    assert statuses() == [failed, started, started]


def test_damaged_stamp_counts_as_due(platform: Settings) -> None:
    assert is_due(platform)
    platform.home.mkdir(parents=True, exist_ok=True)
    note_checked(platform.home)
    assert not is_due(platform)
    for damaged in ("x", None, 1e12):
        control.change(platform.home, "UPDATE due_work SET value = ?", json.dumps(damaged))
        assert is_due(platform)
