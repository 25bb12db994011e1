"""A full disk, simulated by a file size limit: one clear error, nothing half-written, and recovery once space is free."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from sr_assets.adapters.spark.engine import engine_status
from sr_assets_tests.faults.rig import configure, outcome, publish_rounds
from sr_assets_tests.forks import Forked, run_forked
from sr_assets_tests.members import make_bucket, member
from sr_assets_tests.rig import ALL_ON_SPARK, PATIENCE_SECONDS, SITE, Rig, Sent, cluster, leave_out_due_work, wait_until

_SENDERS = 2_000


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """The outcome with enough space."""
    return {}


@pytest.fixture
def prepared(rig: Rig, undisturbed: dict[str, Any]) -> dict[str, Any]:
    """A site with a short history and a next batch that exceeds the limits; returns the expected outcome."""
    first, rig.spark = _SENDERS // 2, ALL_ON_SPARK
    if not undisturbed:
        stream = rig.make()
        publish_rounds(rig, stream, senders=_SENDERS, rounds=1)
        configure(rig, stream, rig.make("FEED"), rig.unique("WHOLE"), batch_messages=first)
        rig.drain()
        undisturbed.update(stream=stream, outcome=outcome(rig, rig.entries[0]["target_stream"]))
        rig.__post_init__()
    configure(rig, undisturbed["stream"], rig.make("FEED"), rig.unique("CUT"), batch_messages=2 * _SENDERS)
    return undisturbed


@contextmanager
def limited_workers(rig: Rig, file_bytes: int) -> Iterator[None]:
    """Limit the file size for current and future Python workers of the engine."""
    engine = engine_status(rig.home)
    assert engine is not None
    processes = [
        process
        for process in psutil.Process(engine.pid).children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE
    ]
    daemons = [process.pid for process in processes if "pyspark.daemon" in process.cmdline()]
    assert daemons
    before = resource.prlimit(daemons[0], resource.RLIMIT_FSIZE)

    def limit(values: tuple[int, int]) -> None:
        for pid in daemons:
            if psutil.pid_exists(pid):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, values)

    limit((file_bytes, before[1]))
    try:
        yield
    finally:
        limit(before)


#: `sr-assets` with a limit on the size of its files.
_LIMITED = """
import resource, runpy, sys

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), resource.RLIM_INFINITY))
runpy.run_module("sr_assets", run_name="__main__")
"""


def run_limited(rig: Rig, file_bytes: int) -> subprocess.CompletedProcess[str]:
    """Run `sr-assets run --once` with a limit on file size, without the hourly and nightly jobs."""
    leave_out_due_work(rig.home)
    environ = {**os.environ, "SR_ASSETS_CONFIG": str(rig.home / "replication.yaml")}
    environ.pop("DAGSTER_HOME", None)
    return run_forked([sys.executable, "-W", "ignore", "-c", _LIMITED, str(file_bytes), "run", "--once"], env=environ)


@pytest.mark.nightly
def test_full_disk_while_staging_parquet_is_an_error_until_freed(rig: Rig, prepared: dict[str, Any]) -> None:
    with limited_workers(rig, 4_096):
        failure = rig.failure()
        assert re.search(r"/staging/\S+ cannot be written \(.*[Ff]ile too large\); free some space", failure), failure
        assert rig.row("replication")["last_error"] == failure
        assert not list(Path(rig.home, "snapshots").rglob("*.parquet"))
        # Only copying needs the space.
        assert len(rig.rows("node_availability")) == _SENDERS
    rig.drain()
    assert outcome(rig, rig.entries[0]["target_stream"]) == prepared["outcome"]


def test_full_disk_while_writing_state_is_an_error_until_freed(rig: Rig, prepared: dict[str, Any]) -> None:
    """Three limits: too small for the commit of a large batch, for any state, and for any file."""
    for file_bytes in (300_000, 20_000, 100):
        completed = run_limited(rig, file_bytes)
        assert completed.returncode == 1, completed
        assert "Traceback" not in completed.stderr
        lines = [line for line in completed.stderr.splitlines() if line.startswith("error: ")]
        # The site's, and the one of the process that records the failed run.
        assert 1 <= len(lines) <= 2, completed.stderr
        assert all(re.search(r"(?i)file too large|disk I/O error|is full", line) for line in lines), completed.stderr
        assert not (rig.home / "fleet.duckdb").exists() or not rig.rows("node_availability")
    rig.drain()
    assert outcome(rig, rig.entries[0]["target_stream"]) == prepared["outcome"]


@pytest.mark.nightly
def test_follow_continues_alone_after_a_full_disk(rig: Rig, tmp_path: Path) -> None:
    """Sites, election, heartbeats and due work of `run --follow` work again once space is free."""
    stream, target, beats = rig.make(), rig.make("TARGET", rig.target), rig.make("BEATS")
    rig.add(stream, target_stream=target, target_subject_prefix=target)
    heartbeats = {"url": rig.source.url, "interval": "200ms", "subjects": [{"subject": f"{beats}.a"}]}
    settings = member(
        rig, tmp_path, "a", make_bucket(rig, 2), heartbeats=heartbeats, linger="1s", sensor={"interval": "1s"}
    )
    environ = {**os.environ, "SR_ASSETS_CONFIG": str(settings.home / "replication.yaml")}
    environ.pop("DAGSTER_HOME", None)
    lease = settings.home / "sites" / SITE / "leader.json"

    def copied() -> int:
        with cluster(rig.target) as opened:
            return opened.stream_info(target).messages

    def limit(file_bytes: int) -> None:
        parent = psutil.Process(following.pid)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))

    # A pipe: the limit is not for the log.
    command = [sys.executable, "-W", "ignore", "-m", "sr_assets", "run", "--follow"]
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as log,
        Forked(command, env=environ, stdout=log.stdin, stderr=log.stdin) as following,
    ):
        try:
            rig.publish(stream, [Sent()])
            wait_until(lambda: copied() == 1, "the first copy")
            limit(0)
            rig.publish(stream, [Sent()])
            wait_until(lambda: not lease.exists(), "the end of the term")
            limit(resource.RLIM_INFINITY)
            wait_until(lambda: copied() == 2, "the second copy")
            with cluster(rig.source) as opened:
                before = opened.stream_info(beats).last_sequence
                wait_until(lambda: opened.stream_info(beats).last_sequence > before, "a heartbeat")
        finally:
            following.send_signal(signal.SIGTERM)
            following.wait(PATIENCE_SECONDS)
            assert log.stdin is not None
            log.stdin.close()
