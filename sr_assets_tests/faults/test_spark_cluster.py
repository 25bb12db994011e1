"""A site on a Spark cluster that shares nothing with us, undisturbed and with executors, workers and drivers killed.

What is copied is compared with the source: every message once, in order where one writer copies.
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
from pathlib import Path

import pytest

from sr_assets.adapters.copying.fence import forget_claims, make_fence, take_away
from sr_assets.adapters.copying.plan import CopyPlan
from sr_assets.domain.messages import last_origin
from sr_assets.embedded.nats_server import NatsServer
from sr_assets_tests.faults.copying import BATCH, copy_plan
from sr_assets_tests.faults.rig import finish, kill_run, start_run
from sr_assets_tests.rig import Rig, Sent, address, connection, stop_process, wait_until
from sr_assets_tests.secured import Authority
from sr_assets_tests.spark_cluster import SparkCluster, free_port

_USER, _PASSWORD = "replicator", "S3cret-of-the-fleet"
#: A run that tells at its end what Spark's UI shows of it.
_SHOWN = """
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


def test_a_site_runs_where_nothing_of_ours_is_and_no_secret_is_shown(
    cluster: SparkCluster, engine_home: Path, tmp_path: Path, unique: Callable[[str], str]
) -> None:
    """The servers want a client certificate, and get a password too: the executors have both from their tasks alone."""
    authority = Authority(tmp_path / "authority")
    config = authority.block(**authority.certify("127.0.0.1"), verify=True)
    ours = {"ca": str(authority.file), **authority.certify("replicator@example.net")}
    with (
        NatsServer(tmp_path / "source", "source", config=config) as source,
        NatsServer(tmp_path / "target", "target", config=config) as target,
    ):
        rig = Rig(engine_home, source, target, unique, ours)
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
        done = subprocess.run(
            [sys.executable, "-c", _SHOWN, str(rig.home / "replication.yaml")],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        assert result["failures"] == []
        assert sorted(int(copy.payload) for copy in rig.copies(plain)) == list(range(3_000))
        assert [json.loads(copy.payload)["n"] for copy in rig.copies(tracked)] == list(range(40))
        history = rig.rows("SELECT node, payload FROM node_snapshots")
        assert sorted(row["node"] for row in history) == sorted(f"n{n}" for n in range(40))
        assert sorted(json.loads(row["payload"])["n"] for row in history) == list(range(40))
    events = "".join(file.read_text(errors="replace") for file in log.rglob("*") if file.is_file())
    key = Path(ours["key"]).read_text().splitlines()[1]
    logs = "".join(file.read_text(errors="replace") for file in cluster.folder.rglob("*.log"))
    executors = "".join(file.read_text(errors="replace") for file in cluster.folder.rglob("std*"))
    searched = {
        "events": events,
        "ui": "".join(result["shown"]),
        "logs": logs,
        "executors": executors,
        "us": done.stderr,
    }
    assert "mapInArrow" in searched["ui"].replace("MapInArrow", "mapInArrow"), "the plans are there to be looked at"
    assert "SparkListenerSQLExecutionStart" in events
    assert [name for name, text in searched.items() if _PASSWORD in text or key in text] == []
    assert cluster.user is None or executed_by(cluster) == {cluster.user}


def executed_by(cluster: SparkCluster) -> set[str]:
    """Return whose processes the workers are."""
    return {process.username() for process in cluster.workers()}


@contextlib.contextmanager
def standing_still(server: NatsServer) -> Iterator[None]:
    """Stop a server where it is, until the end of the block."""
    stop_process(server.pid)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def held(rig: Rig, target: str) -> int:
    """Return how many messages a target has got."""
    return int(rig.api(f"STREAM.INFO.{target}", server=rig.target).get("state", {}).get("last_seq", 0))


@pytest.mark.timeout(600)
def test_a_driver_and_all_workers_killed_in_the_middle_cost_nothing_but_time(
    clustered: Rig, cluster: SparkCluster
) -> None:
    rig, total = clustered, 100_000
    stream, target = rig.make(), rig.unique("COPY")
    rig.publish(stream, [Sent(b"%08d" % n + b"x" * 500) for n in range(total)])
    rig.add(stream, target_stream=target, target_subject_prefix="to", batch_messages=total)
    rig.settings()
    first = start_run(rig)
    wait_until(lambda: held(rig, target) > 2_000, "copies")
    # The target stands still meanwhile: else a busy machine could be done with the copying before it comes to the killing.
    with standing_still(rig.target):
        kill_run(first)
        wait_until(lambda: not cluster.executors() and not cluster.pythons(), "the end of the killed run's writers")
    before = held(rig, target)
    assert before < total // 2, "killed too late"
    second = start_run(rig)
    wait_until(lambda: held(rig, target) > before + 2_000, "copies of the second run")
    with standing_still(rig.target):
        for process in [*cluster.workers(), *cluster.executors()]:
            cluster.kill(process)
    assert held(rig, target) < total, "killed too late"
    for name in ("worker3", "worker4"):
        cluster.start_worker(name)
    said = ended(second)
    copies = rig.copies(target)
    assert [int(copy.payload[:8]) for copy in copies] == list(range(total)), said
    assert [origin.sequence for copy in copies if (origin := last_origin(copy.headers))] == list(range(1, total + 1))
    assert rig.row("replication")["copied_messages"] == total
    assert rig.api(f"CONSUMER.NAMES.{target}", server=rig.target)["consumers"] in (None, []), "no fence stays behind"


def ended(process: subprocess.Popen[bytes], code: int = 0) -> str:
    """Wait for the end of a run, which waits for earlier writers and for other machines; returns what it said."""
    wait_until(lambda: process.poll() is not None, "the run to end", 300.0)
    return finish(process, code)


_WRITER = """
import sys
from pathlib import Path
from sr_assets.adapters.copying.fence import Lease
from sr_assets.adapters.copying.plan import CopyPlan
import json

plan = CopyPlan.decode(json.loads(sys.argv[1]))
with Lease(plan, 0, seconds=2.0):
    print("writing", flush=True)
    sys.stdin.read()
"""


def writer(plan: CopyPlan) -> subprocess.Popen[str]:
    """Start a writer with a lease of 2 s, in a process of its own that writes nothing."""
    command = [sys.executable, "-c", _WRITER, json.dumps(plan.encode())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("stands_still", (True, False), ids=("stands still", "asks"))
def test_a_writer_whose_fence_was_taken_away_ends_before_its_next_instruction(
    rig: Rig, tmp_path: Path, stands_still: bool
) -> None:
    target = rig.make("COPY", rig.target)
    plan = copy_plan(tmp_path, address(rig.target), "NONE", target, fence="sr_assets_b1", subjects=(f"{target}.>",))
    with connection(rig.target) as asking:
        make_fence(asking, target, "sr_assets_b1", plan.subjects)
        with writer(plan) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            if stands_still:
                stop_process(process.pid)
            assert take_away(asking, target, "sr_assets_b1", 2), "a writer is at work"
            if not stands_still:
                # It reads of it in the file that its copier looks at; a copier that does not look is ended too.
                wait_until(lambda: (tmp_path / "batch").read_text() != BATCH, "the writer to see it")
            assert process.wait(30) == -signal.SIGALRM if not stands_still else resumed(process) == -signal.SIGALRM
        assert take_away(asking, target, "sr_assets_b1", 2), "it did not give its part back"
        forget_claims(asking, target, "sr_assets_b1", 2)
        assert not take_away(asking, target, "sr_assets_b1", 2)


def resumed(process: subprocess.Popen[str]) -> int:
    """Let a process go on that has stood still longer than its lease; returns how it ended."""
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 2.5, "the lease to pass")
    process.send_signal(signal.SIGCONT)
    return process.wait(30)


def test_a_part_of_a_batch_has_one_writer_until_it_is_given_back(rig: Rig, tmp_path: Path) -> None:
    target = rig.make("COPY", rig.target)
    plan = copy_plan(tmp_path, address(rig.target), "NONE", target, fence="sr_assets_b1", subjects=(f"{target}.>",))
    with connection(rig.target) as asking:
        make_fence(asking, target, "sr_assets_b1", plan.subjects)
        with writer(plan) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "writing\n"
            with writer(plan) as second:
                _, said = second.communicate(timeout=30)
                assert "an earlier attempt to write into" in said
            process.communicate(timeout=30)
            assert process.returncode == 0
        with writer(plan) as third:
            third.communicate(timeout=30)
            assert third.returncode == 0
        assert not take_away(asking, target, "sr_assets_b1", 2)
        with writer(plan) as late:
            _, said = late.communicate(timeout=30)
            assert "was given up before this writer began" in said


@pytest.mark.parametrize("scheme", ("spark", "sc"))
def test_a_cluster_that_is_not_there_is_one_line(rig: Rig, scheme: str) -> None:
    rig.spark = {"mode": f"{scheme}://127.0.0.1:{free_port()}"}
    rig.add(rig.make(server=rig.source))
    rig.publish(rig.entries[0]["stream"], [Sent(b"1")])
    assert "nobody answers there" in rig.failure()


def test_check_names_the_executor_and_the_server_that_it_does_not_reach(clustered: Rig, cluster: SparkCluster) -> None:
    rig = clustered
    rig.add(rig.make(), target_url=f"nats://127.0.0.1:{free_port()}")
    rig.settings()
    said = check(rig)
    lines = [line for line in said.splitlines() if "executor" in line]
    assert any("Connection refused" in line and socket.gethostname() in line for line in lines), said
    assert len({line.partition("executor ")[2].partition(")")[0] for line in lines}) == 2, said


def test_workers_without_pyarrow_are_one_line_and_nothing_is_half_done(clustered: Rig, cluster: SparkCluster) -> None:
    rig = clustered
    rig.spark["config"] = {"spark.pyspark.python": cluster.python_without("pyarrow")}
    stream = rig.make()
    rig.publish(stream, [Sent(b"1")])
    rig.add(stream)
    rig.settings()
    said = ended(start_run(rig), 1)
    assert "lacks PyArrow: install it there" in said or "lacks pyarrow" in said, said


def check(rig: Rig) -> str:
    """Return what `check --connect` prints, which ends with 1."""
    environ = {**os.environ, "SR_ASSETS_CONFIG": str(rig.home / "replication.yaml")}
    command = [sys.executable, "-m", "sr_assets", "check", "--connect", "--wide"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout
