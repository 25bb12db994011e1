"""A site on a Spark cluster without a shared file system: undisturbed, and with killed executors, workers and drivers.

The target is compared with the source: each message once, in order if one writer copies.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pytest

from sr_assets.adapters.copying.copy_plan import CopyPlan
from sr_assets.adapters.copying.fence import forget_claims, make_fence, take_away
from sr_assets.adapters.published.queries import ask
from sr_assets.adapters.spark.run_session import HomeEngine, SparkConnection
from sr_assets.adapters.spark.session import leave_session, open_session
from sr_assets.adapters.wire import Connection
from sr_assets.domain.days import day_of
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import last_origin
from sr_assets.settings import ClusterSettings, SparkSettings
from sr_assets.stages.daily_computation import AVAILABILITY_STAGE, INVENTORY_STAGE
from sr_assets.stages.lake_filling import fill
from sr_assets_tests.adapters.wire.rig import create_stream, outgoing
from sr_assets_tests.adapters.wire.rig import publish as publish_numbered
from sr_assets_tests.faults.copying import BATCH, copy_plan
from sr_assets_tests.faults.rig import finish, kill_run, start_run
from sr_assets_tests.forks import Forked
from sr_assets_tests.histories import FIRST, HOUR, Change, Message, configured, publish
from sr_assets_tests.rig import PATIENCE_SECONDS, Rig, Sent, address, connection, files_with, stop_process, wait_until
from sr_assets_tests.secured import Authority
from sr_assets_tests.servers import NatsServer, free_port
from sr_assets_tests.spark_cluster import SparkCluster

MANY = 100_000
_USER, _PASSWORD = "replicator", "S3cret-of-the-fleet"
#: A run that finally prints all that Spark's UI shows about it.
_RUN_AND_READ_UI = """
import json, sys, urllib.request
from pathlib import Path
from sr_assets.settings import load_settings
from sr_assets.stages.report import Stage
from sr_assets.stages.run import run_site
from sr_assets.stages.site import Site
from pyspark.sql import SparkSession

settings = load_settings(Path(sys.argv[1]), {})
with Site(settings, "LONDON", owner="child", run_id="child") as site:
    reports = run_site(site, {entry.stream: frozenset(Stage) for entry in site.entries}, drain_only=True)
    context = site.spark.session().sparkContext
    shown = []
    for part in ("environment", "sql?details=true&planDescription=true", "stages?details=true", "jobs", "allexecutors"):
        url = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}/{part}"
        shown.append(urllib.request.urlopen(url, timeout=30).read().decode())
print(json.dumps({"failures": [report.failure for report in reports.values() if report.failure], "shown": shown}))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkCluster]:
    with SparkCluster() as started:
        yield started


@pytest.fixture
def clustered(rig: Rig, cluster: SparkCluster) -> Rig:
    rig.spark = {"mode": cluster.mode, "config": cluster.config}
    return rig


# On local Spark, another test searches the same places for secrets.
@pytest.mark.nightly
def test_site_runs_on_a_cluster_without_leaking_secrets(
    cluster: SparkCluster, engine_home: Path, tmp_path: Path, unique: Callable[[str], str]
) -> None:
    """The servers require a client certificate and a password; executors get both only through their tasks."""
    authority = Authority(tmp_path / "authority")
    config = authority.block(**authority.certify("127.0.0.1"), verify=True)
    tls = {"ca": str(authority.file), **authority.certify("replicator@example.net")}
    with (
        NatsServer(tmp_path / "source", "source", config=config) as source,
        NatsServer(tmp_path / "target", "target", config=config) as target,
    ):
        rig = Rig(engine_home, source, target, unique, tls)
        log = tmp_path / "events"
        log.mkdir()
        shown = {"spark.ui.enabled": "true", "spark.ui.port": str(free_port()), "spark.eventLog.enabled": "true"}
        shown["spark.eventLog.compress"] = "false"
        rig.spark = {"mode": cluster.mode, "config": {**cluster.config, **shown, "spark.eventLog.dir": log.as_uri()}}
        plain, tracked = rig.make("PLAIN"), rig.make("NODES")
        urls = {
            f"{side}_url": f"tls://{_USER}:{_PASSWORD}@{server.address}"
            for side, server in (("source", source), ("target", target))
        }
        rig.publish(plain, [Sent(b"%d" % n) for n in range(3_000)])
        rig.publish(tracked, [Sent(json.dumps({"sender": f"n{n % 40}", "n": n}).encode()) for n in range(2_000)])
        rig.add(plain, workers=2, order="none", **urls)
        rig.add(tracked, inspect_field="sender", inspect_duration="1h", **urls)
        rig.settings()
        completed = subprocess.run(
            [sys.executable, "-c", _RUN_AND_READ_UI, str(rig.home / "replication.yaml")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert completed.returncode == 0, completed.stderr
        result = json.loads(completed.stdout.splitlines()[-1])
        assert result["failures"] == []
        assert sorted(int(copy.payload) for copy in rig.copies(plain)) == list(range(3_000))
        assert [json.loads(copy.payload)["n"] for copy in rig.copies(tracked)] == list(range(40))
        history = rig.rows("SELECT node, payload FROM node_snapshots")
        assert sorted(row["node"] for row in history) == sorted(f"n{n}" for n in range(40))
        assert sorted(json.loads(row["payload"])["n"] for row in history) == list(range(40))
    events = "".join(file.read_text(errors="replace") for file in log.rglob("*") if file.is_file())
    key = Path(tls["key"]).read_text().splitlines()[1]
    logs = "".join(file.read_text(errors="replace") for file in cluster.folder.rglob("*.log"))
    executors = "".join(file.read_text(errors="replace") for file in cluster.folder.rglob("std*"))
    searched = {
        "events": events,
        "ui": "".join(result["shown"]),
        "logs": logs,
        "executors": executors,
        "us": completed.stderr,
    }
    assert "mapinarrow" in searched["ui"].lower(), "the UI shows no query plans"
    assert "SparkListenerSQLExecutionStart" in events
    assert [name for name, text in searched.items() if _PASSWORD in text or key in text] == []
    assert cluster.user is None or worker_users(cluster) == {cluster.user}


def worker_users(cluster: SparkCluster) -> set[str]:
    """Return the users that own the workers' processes."""
    return {process.username() for process in cluster.workers()}


@contextlib.contextmanager
def paused(server: NatsServer) -> Iterator[None]:
    """Pause a server for the duration of the block."""
    stop_process(server.pid)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def message_count(rig: Rig, target: str) -> int:
    """Return the number of messages in a target."""
    return int(rig.api(f"STREAM.INFO.{target}", server=rig.target).get("state", {}).get("last_seq", 0))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_driver_executors_and_workers_lose_nothing(
    clustered: Rig, cluster: SparkCluster, tmp_path: Path
) -> None:
    rig = clustered
    target = publish_many(rig)
    first = start_run(rig)
    wait_until(lambda: message_count(rig, target) > 2_000, "copies")
    # Pause the target, or a slow machine might finish copying before the kill.
    with paused(rig.target):
        kill_run(first)
        wait_until(lambda: not cluster.executors() and not cluster.pythons(), "the end of the killed run's writers")
    assert message_count(rig, target) < MANY // 2, "killed too late"
    run_log = tmp_path / "run.log"
    with run_log.open("wb") as log:
        second = start_run(rig, log=log)
    await_copies(rig, cluster, target)
    kill_executors(rig, cluster, target)
    wait_until(
        lambda: run_log.read_text().count("cluster writers were lost") == 2,
        "the loss to be detected",
        2 * PATIENCE_SECONDS,
    )
    # Kill the replacement executors together with their workers.
    for worker in cluster.workers():
        cluster.kill(worker)
    for name in ("worker3", "worker4"):
        cluster.start_worker(name)
    wait_until(lambda: second.poll() is not None, "the run to end", 2 * PATIENCE_SECONDS)
    assert second.returncode == 0, run_log.read_text()
    assert_copied(rig, target, run_log.read_text())


def target_writers(rig: Rig, cluster: SparkCluster) -> list[psutil.Process]:
    """Return the executors' Python processes that are connected to the target."""
    return cluster.connected_to(int(rig.target.address.rpartition(":")[2]))


def await_copies(rig: Rig, cluster: SparkCluster, target: str) -> None:
    """Wait for copies by a new writer. The server may still store messages that a killed writer had sent."""
    wait_until(lambda: bool(target_writers(rig, cluster)), "a new writer", 2 * PATIENCE_SECONDS)
    before = message_count(rig, target)
    wait_until(lambda: message_count(rig, target) > before + 2_000, "copies of the new writer")


def publish_many(rig: Rig, **entry: Any) -> str:
    """Publish MANY messages to a new stream and configure one batch for them; return the target's name."""
    stream, target = rig.make(), rig.unique("COPY")
    rig.publish(stream, [Sent(b"%08d" % n + b"x" * 500) for n in range(MANY)])
    rig.add(stream, **{"target_stream": target, "target_subject_prefix": "to", "batch_messages": MANY, **entry})
    rig.settings()
    return target


def kill_executors(rig: Rig, cluster: SparkCluster, target: str) -> None:
    """Kill the executors during the copy; their workers survive and replace them."""
    with paused(rig.target):
        pythons = cluster.pythons()
        for executor in cluster.executors():
            executor.kill()
        _, alive = psutil.wait_procs(pythons, timeout=PATIENCE_SECONDS)
        assert not alive, "a Python worker outlived its executor"
    assert message_count(rig, target) < MANY, "killed too late"


def assert_copied(rig: Rig, target: str, run_log: str) -> None:
    """Assert that the target equals the source in order, that counters agree, and that no fence remains."""
    copies = rig.copies(target)
    assert [int(copy.payload[:8]) for copy in copies] == list(range(MANY)), run_log
    assert [origin.sequence for copy in copies if (origin := last_origin(copy.headers))] == list(range(1, MANY + 1))
    assert rig.row("replication")["copied_messages"] == MANY
    assert rig.api(f"CONSUMER.NAMES.{target}", server=rig.target)["consumers"] in (None, []), "a fence remains"
    assert "Traceback" not in run_log


def await_end(process: subprocess.Popen[bytes], code: int = 0) -> str:
    """Wait for the end of a run, which may wait for earlier writers and other machines; return its stderr."""
    wait_until(lambda: process.poll() is not None, "the run to end", 2 * PATIENCE_SECONDS)
    return finish(process, code)


_WRITER = """
import sys
from pathlib import Path
from sr_assets.adapters.copying.fence import WritePermit
from sr_assets.adapters.copying.copy_plan import CopyPlan
import json

plan = CopyPlan(**json.loads(sys.argv[1]))
with WritePermit(plan, 0, seconds=float(sys.argv[2])):
    print("writing", flush=True)
    sys.stdin.read()
"""


def writer(plan: CopyPlan, lease_seconds: float = 8.0) -> subprocess.Popen[str]:
    """Start a writer with a lease in its own process; it writes no message."""
    command = [sys.executable, "-c", _WRITER, json.dumps(asdict(plan)), f"{lease_seconds}"]
    return Forked(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("stopped", (True, False), ids=("stopped", "running"))
def test_writer_ends_when_its_fence_is_removed(rig: Rig, tmp_path: Path, stopped: bool) -> None:
    target = rig.make("COPY", rig.target)
    plan = copy_plan(tmp_path, address(rig.target), "NONE", target, fence="sr_assets_b1", subjects=(f"{target}.>",))
    with connection(rig.target) as opened:
        make_fence(opened, target, "sr_assets_b1", plan.subjects)
        with writer(plan, 2.0 if stopped else 8.0) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            if stopped:
                stop_process(process.pid)
            assert take_away(opened, target, "sr_assets_b1", 2), "no writer held a part"
            if not stopped:
                # The writer reads this from the file that its copier checks; a copier that does not check is ended too.
                wait_until(lambda: (tmp_path / "batch").read_text() != BATCH, "the writer to see it")
            assert (
                process.wait(PATIENCE_SECONDS) == -signal.SIGALRM if not stopped else resume(process) == -signal.SIGALRM
            )
        assert take_away(opened, target, "sr_assets_b1", 2), "the writer released its part"
        forget_claims(opened, target, "sr_assets_b1", 2)
        assert not take_away(opened, target, "sr_assets_b1", 2)


def resume(process: subprocess.Popen[str]) -> int:
    """Resume a process after its lease has expired; return its exit code."""
    started = time.monotonic()
    wait_until(lambda: time.monotonic() - started > 2.5, "the lease to pass")
    process.send_signal(signal.SIGCONT)
    return process.wait(PATIENCE_SECONDS)


def test_batch_part_has_one_writer_until_released(rig: Rig, tmp_path: Path) -> None:
    target = rig.make("COPY", rig.target)
    plan = copy_plan(tmp_path, address(rig.target), "NONE", target, fence="sr_assets_b1", subjects=(f"{target}.>",))
    with connection(rig.target) as opened:
        make_fence(opened, target, "sr_assets_b1", plan.subjects)
        with writer(plan) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            with writer(plan) as second:
                _, run_log = second.communicate(timeout=PATIENCE_SECONDS)
                assert "an earlier attempt to write into" in run_log
            process.communicate(timeout=PATIENCE_SECONDS)
            assert process.returncode == 0
        with writer(plan) as third:
            third.communicate(timeout=PATIENCE_SECONDS)
            assert third.returncode == 0
        assert not take_away(opened, target, "sr_assets_b1", 2)
        with writer(plan) as late:
            _, run_log = late.communicate(timeout=PATIENCE_SECONDS)
            assert "was abandoned before this writer started" in run_log


# Only a driver of its own takes a JVM to find out.
@pytest.mark.parametrize("scheme", (pytest.param("spark", marks=pytest.mark.nightly), "sc"))
def test_unreachable_cluster_is_an_error(rig: Rig, scheme: str) -> None:
    rig.spark = {"mode": f"{scheme}://127.0.0.1:{free_port()}"}
    rig.add(rig.make(server=rig.source))
    rig.publish(rig.entries[0]["stream"], [Sent(b"1")])
    assert "no response" in rig.failure()


_FIREWALL = """
import socket

class Walled(socket.socket):
    def connect(self, address):
        if address[1:2] == ({port},):
            raise OSError(113, "No route to host")
        super().connect(address)

socket.socket = Walled
"""


# The local engine's executor names an unreachable server in the same way.
@pytest.mark.nightly
def test_check_names_the_executor_and_the_unreachable_server(clustered: Rig, cluster: SparkCluster) -> None:
    rig = clustered
    port = int(rig.target.address.rpartition(":")[2])
    rig.spark["config"] = {"spark.pyspark.python": cluster.python_that("is-walled", _FIREWALL.format(port=port))}
    rig.add(rig.make())
    rig.settings()
    assert_each_executor_probed(check(rig), "No route to host")


def assert_each_executor_probed(run_log: str, reason: str) -> None:
    """Assert that each executor probed each server, and that the unreachable one is named."""
    lines = [line for line in run_log.splitlines() if "connect from executor" in line]
    assert any(reason in line and socket.gethostname() in line for line in lines), run_log
    assert len({line.partition("executor ")[2].partition(")")[0] for line in lines}) == 2, run_log
    assert len(lines) == 4, run_log


@pytest.mark.nightly
def test_workers_without_pyarrow_are_an_error_without_copies(clustered: Rig, cluster: SparkCluster) -> None:
    rig = clustered
    rig.spark["config"] = {
        "spark.pyspark.python": cluster.python_without("pyarrow"),
        # One attempt at the task is enough.
        "spark.task.maxFailures": "1",
    }
    stream = rig.make()
    rig.publish(stream, [Sent(b"1")])
    rig.add(stream)
    rig.settings()
    run_log = await_end(start_run(rig), 1)
    assert "lacks PyArrow: install it there" in run_log or "lacks pyarrow" in run_log, run_log
    assert rig.copies(stream) == []


@contextlib.contextmanager
def lake_on_cluster(
    cluster: SparkCluster, home: Path, folder: Path, stream: str, spark: dict[str, Any]
) -> Iterator[tuple[Rig, Path]]:
    """Yield a site whose source has a login, with a lake of 5,000 messages in a folder that all machines have."""
    users = f"authorization {{users: [{{user: {_USER}, password: {_PASSWORD}}}]}}"
    # The executors have another user.
    lake = cluster.folder / "work" / stream / "lake"
    for made in (lake.parent, lake):
        made.mkdir()
        made.chmod(0o777)
    with NatsServer(folder / "source", "source", config=users) as source:
        rig = Rig(home, source, source, str, spark=spark)
        with Connection(ClusterSettings((source.address,), user=_USER, password=_PASSWORD)) as opened:
            publish_numbered(opened, outgoing(create_stream(opened, stream), 5_000))
        login = f"nats://{_USER}:{_PASSWORD}@{source.address}"
        rig.add(stream, source_url=login, target_url="b:1", lake={"path": f"file:{lake}"})
        yield rig, lake


@pytest.mark.nightly
def test_lake_is_filled_on_a_cluster_without_leaking_secrets(
    cluster: SparkCluster, engine_home: Path, tmp_path: Path, unique: Callable[[str], str]
) -> None:
    config = {"mode": cluster.mode, "config": cluster.config}
    with lake_on_cluster(cluster, engine_home, tmp_path, unique("NODES"), config) as (rig, lake):
        settings = rig.settings()
        with closing(SparkConnection(HomeEngine(settings.spark, settings.home), None, "lake")) as spark:
            rows = [fill(settings, settings.streams[0], spark, "test").rows for _ in range(2)]
            # Its application would keep the cluster's cores.
            spark.session().stop()
    assert rows == [5_000, 0]
    with duckdb.connect() as opened:
        query = f"SELECT count(*), count(DISTINCT sequence) FROM read_parquet('{lake}/*/*.parquet')"
        assert opened.execute(query).fetchall() == [(5_000, 5_000)]
    (rig.home / "replication.yaml").unlink()
    assert files_with(_PASSWORD, lake, rig.home) == []
    assert _PASSWORD not in cluster.logs()


@pytest.fixture(scope="module")
def server(cluster: SparkCluster) -> Iterator[str]:
    """A Connect server on the whole cluster; tests that need the cluster itself must run before."""
    with cluster.connect() as mode:
        yield mode


@pytest.fixture
def served(rig: Rig, server: str) -> Rig:
    rig.spark = {"mode": server}
    return rig


@pytest.mark.long
@pytest.mark.timeout(600)
def test_connect_server_run_survives_lost_executors_and_drivers(
    served: Rig, cluster: SparkCluster, tmp_path: Path
) -> None:
    rig = served
    urls = {
        f"{side}_url": f"nats://{_USER}:{_PASSWORD}@{server.address}"
        for side, server in (("source", rig.source), ("target", rig.target))
    }
    target = publish_many(rig, **urls)
    log = tmp_path / "run.log"
    with log.open("wb") as output:
        first = start_run(rig, log=output)
    wait_until(lambda: message_count(rig, target) > 2_000, "copies")
    kill_executors(rig, cluster, target)
    await_copies(rig, cluster, target)
    # The server and its writer outlive the run; pause the writer, or it would finish before the next run.
    with paused(rig.target):
        (writer,) = target_writers(rig, cluster)
        stop_process(writer.pid)
        kill_run(first)
    assert message_count(rig, target) < MANY, "killed too late"
    run_log = await_end(start_run(rig))
    assert_copied(rig, target, log.read_text() + run_log)
    searched = {
        "events": cluster.events,
        "ui": cluster.shown(),
        "logs": cluster.logs(),
        "us": log.read_text() + run_log,
    }
    assert "SparkListenerConnectOperationStarted" in searched["events"]
    assert "mapinarrow" in searched["ui"].lower(), "the UI shows no query plans"
    assert [name for name, text in searched.items() if _PASSWORD in text] == []


@pytest.mark.nightly
def test_check_probes_every_server_from_each_connect_executor(served: Rig) -> None:
    rig = served
    rig.add(rig.make(), target_url=f"nats://127.0.0.1:{free_port()}")
    rig.settings()
    assert_each_executor_probed(check(rig), "Connection refused")


@pytest.mark.nightly
def test_connect_server_option_is_refused_in_spark_config(served: Rig) -> None:
    rig = served
    rig.spark["config"] = {"spark.cores.max": "1"}
    stream = rig.make()
    rig.publish(stream, [Sent(b"1")])
    rig.add(stream)
    assert "spark.config spark.cores.max: a Connect server fixes it at its start; set it there" in rig.failure()


@pytest.mark.nightly
def test_connect_session_is_reused_until_closed(server: str, tmp_path: Path) -> None:
    ids = []
    for closed in (False, True, False):
        session = open_session(SparkSettings(mode=server), tmp_path, "LONDON")
        ids.append(session.client._session_id)
        leave_session(session, forget=closed)
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.nightly
def test_daily_tables_are_computed_through_a_connect_server(server: str, tmp_path: Path) -> None:
    settings, day = configured(tmp_path), day_of(FIRST)
    changes = [Change(day.first_ns, "new", None), Change(day.first_ns + 6 * HOUR, "timeout", "up")]
    message = Message("a", day.first_ns, {"build_info": {"version": "0.31.0"}})
    publish(settings.home, {"a": changes}, day.next_ns, messages=[message])
    with closing(SparkConnection(HomeEngine(SparkSettings(mode=server), tmp_path), None, "daily")) as connection:
        for stage in (AVAILABILITY_STAGE, INVENTORY_STAGE):
            stage.compute_days(settings, [FIRST], connection)
    sql = "SELECT node, up_seconds, timeout_seconds, outages, final FROM availability_daily"
    assert ask(settings.home, sql).values == [("a", 6 * 3600.0, 18 * 3600.0, 1, True)]
    sql = "SELECT value, nodes FROM inventory_daily WHERE value = '0.31.0'"
    assert ask(settings.home, sql).values == [("0.31.0", 1)]


def check(rig: Rig) -> str:
    """Return the output of `check --connect`, which must exit with 1."""
    environ = {**os.environ, "SR_ASSETS_CONFIG": str(rig.home / "replication.yaml")}
    command = [sys.executable, "-m", "sr_assets", "check", "--connect", "--wide"]
    completed = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert completed.returncode == 1, completed.stderr
    assert "Traceback" not in completed.stderr
    return completed.stdout


@pytest.mark.nightly
def test_lake_needs_the_package_on_a_connect_server(
    server: str, cluster: SparkCluster, engine_home: Path, tmp_path: Path, unique: Callable[[str], str]
) -> None:
    """Spark ships nothing to the tasks of a streaming query there."""
    with lake_on_cluster(cluster, engine_home, tmp_path, unique("NODES"), {"mode": server}) as (rig, _):
        settings = rig.settings()
        engine = HomeEngine(settings.spark, settings.home)
        with (
            closing(SparkConnection(engine, None, "lake")) as spark,
            pytest.raises(RunError, match="the workers' Python lacks sr_assets; install it there"),
        ):
            fill(settings, settings.streams[0], spark, "test")
        shown = cluster.shown() + cluster.events
    assert _PASSWORD not in shown + cluster.logs()
