"""Data sources and locks in the processes of `run` and `up`: values changed, sources stopped, holders killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from sr_assets.adapters.bucket import KeyBucket
from sr_assets.adapters.data import Source, open_source
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.domain.errors import RunError
from sr_assets.settings import SourceSettings
from sr_assets_tests.forks import Forked, run_forked
from sr_assets_tests.members import end_lease, expire
from sr_assets_tests.operate.rig import Up
from sr_assets_tests.rig import (
    PATIENCE_SECONDS,
    Rig,
    Sent,
    address,
    cluster,
    leave_out_due_work,
    stop_process,
    wait_until,
)
from sr_assets_tests.servers import NatsServer
from sr_assets_tests.sourced import kv


@pytest.fixture
def stream(rig: Rig) -> str:
    return rig.make()


@pytest.fixture(autouse=True)
def _no_home_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SR_ASSETS_HOME", "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)


def configure(rig: Rig, folder: Path, name: str, stream: str, **keys: Any) -> Path:
    """Write the configuration of a home of its own; return the file. `keys` are of the top level."""
    entry = {"stream": stream, "source_url": rig.source.url, "target_url": rig.target.url}
    entry |= {"target_stream": rig.unique("T"), "target_subject_prefix": rig.unique("copy"), **keys.pop("entry", {})}
    file = folder / f"{name}.yaml"
    document = {"name": name, "state_store": str(folder / name), "streams": [entry], "linger": "1s", **keys}
    file.write_text(yaml.safe_dump(document))
    # `run --once` leaves out the hourly and nightly jobs.
    leave_out_due_work(folder / name)
    return file


def start(file: Path, *arguments: str, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "sr_assets", "--config", str(file), *arguments]
    with output.open("wb") as log:
        return Forked(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def run(file: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "sr_assets", "--config", str(file), *arguments]
    ended = run_forked(command)
    return ended.returncode, ended.stdout + ended.stderr


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(PATIENCE_SECONDS)


def copied(home: Path) -> int:
    with open_fleet(home) as connection:
        return int(connection.execute("SELECT sum(copied_messages) FROM replication").fetchall()[0][0] or 0)


def is_paused(home: Path) -> bool | None:
    """Return whether the table shows the stream as paused, or None before the first publication."""
    try:
        with open_fleet(home) as connection:
            rows = connection.execute("SELECT paused FROM replication").fetchall()
    except RunError:
        return None
    return bool(rows[0][0]) if rows else None


@pytest.mark.parametrize(
    "command", (("run", "--follow"), pytest.param(("up", "--no-ui"), marks=pytest.mark.nightly)), ids=" ".join
)
def test_dynamic_pause_is_obeyed_and_shown_without_messages(
    rig: Rig, ops: Source, data_bucket: str, stream: str, tmp_path: Path, command: tuple[str, ...]
) -> None:
    paused = {"data": "ops/paused", "default": False, "dynamic": True}
    keys = {"data": {"ops": kv(rig, data_bucket)}, "sensor": {"interval": "1s"}, "entry": {"paused": paused}}
    file = configure(rig, tmp_path, "LONDON", stream, **keys)
    ops.put("paused", "true")
    rig.publish(stream, [Sent()])
    following = start(file, *command, output=tmp_path / "log")
    try:
        home = tmp_path / "LONDON"
        wait_until(lambda: is_paused(home) is True, "the first publication")
        assert copied(home) == 0
        ops.put("paused", "false")
        wait_until(lambda: copied(home) == 1, "the message to be copied")
        ops.put("paused", "true")
        wait_until(lambda: is_paused(home) is True, "the table to show the pause")
    finally:
        stop(following)
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    # The runs of `up` write their lines into Dagster's logs.
    assert log.count("data ops/paused: changed: 'true' -> 'false'") == (command[0] == "run")


# The tests of settings show the announcement.
@pytest.mark.nightly
def test_up_announces_a_changed_static_value(
    rig: Rig, ops: Source, data_bucket: str, stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"data": {"ops": kv(rig, data_bucket)}, "sensor": {"interval": {"data": "ops/cadence"}}}
    file = configure(rig, tmp_path, "LONDON", stream, **keys)
    ops.put("cadence", "1h")
    errors = tmp_path / "errors"
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
    with Up(errors=errors):
        ops.put("cadence", "2h")
        line = "warning: data ops/cadence: changed from '1h' to '2h' since the start; restart to use it"
        wait_until(lambda: line in errors.read_text(), "the announcement")


def test_source_that_stops_is_replaced_by_the_last_known_value(rig: Rig, stream: str, tmp_path: Path) -> None:
    with NatsServer(tmp_path / "ops", "ops") as server:
        with cluster(server) as opened:
            opened.create_stream({"name": "KV_OPS", "subjects": ["$KV.OPS.>"]})
        block = {"type": "kv", "url": server.url, "bucket": "OPS"}
        with open_source("ops", SourceSettings.model_validate(block)) as source:
            source.put("budget", "3m")
        keys = {"data": {"ops": block}, "run_budget": {"data": "ops/budget"}}
        file = configure(rig, tmp_path, "LONDON", stream, **keys)
        rig.publish(stream, [Sent()])
        assert run(file, "run", "--once")[0] == 0
        server.kill()
        code, output = run(file, "run", "--once")
        assert code == 0, output
        assert "warning: data ops/budget: bucket OPS on" in output
        assert "using the value '3m', read " in output
        (tmp_path / "LONDON" / "data.json").unlink()
        code, output = run(file, "run", "--once")
        assert (code, output.count("\n")) == (1, 1), output
        assert "data ops/budget: bucket OPS on" in output
        assert "no earlier value is known" in output
        server.start()
        assert run(file, "run", "--once")[0] == 0


def test_lock_of_a_suspended_holder_passes_on_without_a_double_commit(
    rig: Rig, data_bucket: str, stream: str, tmp_path: Path
) -> None:
    keys = {"data": {"ops": kv(rig, data_bucket)}, "locks": ["ops/job"], "lock_ttl": "1h", "lock_timeout": "1h"}
    first = configure(rig, tmp_path, "LONDON", stream, **{**keys, "linger": "1h", "run_budget": "1h"})
    second = configure(rig, tmp_path, "PARIS", stream, **keys)
    rig.publish(stream, [Sent()])
    holder = start(first, "run", "--follow", output=tmp_path / "log")
    try:
        wait_until((tmp_path / "LONDON" / "fleet.duckdb").exists, "the holder's first publication")
        site = next(child for child in psutil.Process(holder.pid).children(recursive=True) if child.name() == "LONDON")
        stop_process(site.pid)
        end_lease(tmp_path / "LONDON", "LONDON/locks")
        expire(rig, data_bucket)
        code, output = run(second, "run", "--once")
        assert code == 0, output
        assert copied(tmp_path / "PARIS") == 1
        rig.publish(stream, [Sent()])
        key = KeyBucket(address(rig.source), data_bucket, client="test")
        key.put({"lock.job": ("another job", None)})
        key.close()
        site.resume()
        # The reason depends on the moment of the suspension.
        lost = "the run lost its lock ("
        wait_until(lambda: lost in (tmp_path / "log").read_text(), "the suspended holder to end its run")
        assert copied(tmp_path / "LONDON") == 1
    finally:
        stop(holder)


def test_lock_timeout_names_the_holder(rig: Rig, data_bucket: str, stream: str, tmp_path: Path) -> None:
    keys = {"data": {"ops": kv(rig, data_bucket)}, "locks": ["ops/job"], "lock_ttl": "1h", "lock_timeout": "0s"}
    first = configure(rig, tmp_path, "LONDON", stream, **{**keys, "linger": "1h", "run_budget": "1h"})
    second = configure(rig, tmp_path, "PARIS", stream, **keys)
    holder = start(first, "run", "--follow", output=tmp_path / "log")
    try:
        wait_until((tmp_path / "LONDON" / "fleet.duckdb").exists, "the holder's first publication")
        code, output = run(second, "run", "--once")
        assert code == 1
        assert "PARIS: lock ops/job: LONDON/LONDON on " in output
        assert " holds ops/job since 20" in output
        assert "Traceback" not in output
        for process in [*psutil.Process(holder.pid).children(recursive=True), psutil.Process(holder.pid)]:
            process.kill()
        holder.wait()
        expire(rig, data_bucket)
        assert run(second, "run", "--once")[0] == 0
    finally:
        if holder.poll() is None:
            stop(holder)
