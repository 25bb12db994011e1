"""Health of a process and of its streams, over HTTP and to a service manager."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest
import yaml

from sr_assets.adapters.locking import lock
from sr_assets.adapters.state.lease import Lease
from sr_assets.adapters.state.operator_settings import set_paused
from sr_assets.adapters.state.status_file import SiteStatus, StreamStatus, record_alive, record_idle_poll, write_status
from sr_assets.automation.observing import find_work
from sr_assets.operate.health import Health, daemon_parts, site_parts, watchdog_beside
from sr_assets.operate.metrics import MetricsServer
from sr_assets.settings import Settings, load_settings
from sr_assets.stages.leadership import Leadership
from sr_assets_tests.forks import Forked
from sr_assets_tests.operate.rig import configure, run
from sr_assets_tests.rig import PATIENCE_SECONDS, edit_status, wait_until
from sr_assets_tests.servers import free_port
from sr_assets_tests.strangers import run_as_stranger

ENTRY = {"name": "london", "stream": "REG", "source_url": "nats://127.0.0.1:1", "target_url": "nats://127.0.0.1:2"}
HOUR_NS = 3600 * 10**9


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    return configure(tmp_path, monkeypatch, [ENTRY])


def write(settings: Settings, **stream: Any) -> Path:
    """Write the status of the stream and return the site's folder."""
    folder = settings.home / "sites" / "london"
    folder.mkdir(parents=True, exist_ok=True)
    write_status(folder, SiteStatus({"REG": StreamStatus(**stream)}))
    return folder


def request(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_stream_is_ready_after_a_success(settings: Settings) -> None:
    health = Health(settings)
    assert health.answer("/readyz") == (503, "london/REG: no run has succeeded yet\n")
    write(settings, last_success_ns=time.time_ns())
    assert health.answer("/readyz") == (200, "ok\n")


def test_stream_is_not_ready_while_it_fails_or_is_late(settings: Settings) -> None:
    health = Health(settings)
    write(settings, last_success_ns=time.time_ns(), last_error="no space")
    assert health.answer("/readyz") == (503, "london/REG: no space\n")
    folder = write(settings, last_success_ns=time.time_ns() - HOUR_NS)
    assert health.answer("/readyz") == (503, "london/REG: last success 1h ago\n")
    record_idle_poll(folder)
    assert health.answer("/readyz") == (200, "ok\n")


def test_follower_is_ready_and_names_the_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = configure(tmp_path, monkeypatch, [{**ENTRY, "leader_election_name": "london"}])
    lease = Lease(leader="b", leader_host="host", since_ns=0)
    lease.write(write(settings))
    with (settings.home / "sites" / "london" / "election.lock").open("w") as campaigning:
        assert lock(campaigning)
        assert Health(settings).answer("/readyz") == (200, f"ok\nlondon: standby, {lease.line}\n")
    assert Health(settings).answer("/readyz")[0] == 503


def test_member_that_cannot_campaign_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = configure(tmp_path, monkeypatch, [{**ENTRY, "leader_election_name": "london"}])
    folder = write(settings)
    # No server listens at the address of the election.
    with Leadership(settings, "london", patient=True) as leadership:
        failed = leadership.lease
        assert failed.failing_since is not None
        assert Health(settings).answer("/readyz") == (200, f"ok\nlondon: standby, {failed.problem}\n")
    with (folder / "election.lock").open("w") as campaigning:
        assert lock(campaigning)
        replace(failed, failing_since=time.time() - 121).write(folder)
        assert Health(settings).answer("/readyz") == (503, f"london: cannot campaign for 2m1s: {failed.problem}\n")


@pytest.mark.process
def test_stream_stays_ready_while_it_is_paused(platform: Settings) -> None:
    assert run("--once").returncode == 0
    entry = platform.streams[0]
    folder = platform.home / "sites" / entry.name
    edit_status(folder, entry.stream, last_success_ns=1)
    (late,) = Health(platform).failing()
    assert late.startswith(f"{entry.label}: last success")
    set_paused(platform, entry, paused=True)
    assert find_work(platform, entry.name).reason == f"{entry.label}: copying was paused"
    # As after the run that publishes the pause.
    edit_status(folder, entry.stream, paused=True)
    assert find_work(platform, entry.name).skip == f"{entry.label}: paused"
    assert Health(platform).failing() == []


def test_lost_storage_of_dagster_is_named_and_opened_again(settings: Settings) -> None:
    attempts: list[None] = []
    is_back = threading.Event()

    @contextmanager
    def open_instance() -> Iterator[dg.DagsterInstance]:
        attempts.append(None)
        if not is_back.is_set():
            raise OSError("no storage")
        with dg.DagsterInstance.ephemeral() as instance:
            yield instance

    with daemon_parts(open_instance, time.time, poll_seconds=0.01) as parts:
        health = Health(settings, parts)
        health._started -= 200
        wait_until(lambda: len(attempts) > 1, "two attempts")
        (line,) = health.hung()
        assert line.startswith("Dagster's storage: no progress for 3m")
        is_back.set()
        wait_until(lambda: health.hung() == [], "a reading")


def test_process_without_progress_is_not_healthy(settings: Settings) -> None:
    folder = write(settings)
    health = Health(settings, site_parts(settings, ["london"]))
    assert health.answer("/healthz") == (200, "ok\n")
    health._started -= 200
    code, text = health.answer("/healthz")
    assert (code, text.startswith("site london: no progress for 3m")) == (503, True)
    record_alive(folder)
    assert health.answer("/healthz") == (200, "ok\n")


def test_server_of_health_alone_serves_no_metrics(settings: Settings) -> None:
    with MetricsServer(None, "127.0.0.1", 0, health=Health(settings)) as url:
        base = url.removesuffix("/metrics")
        assert request(f"{base}/healthz") == (200, "ok\n")
        assert request(f"{base}/readyz")[0] == 503
        assert request(url) == (404, "health is at /healthz and /readyz\n")


@pytest.mark.process
def test_stranger_gets_names_and_kinds_of_problems_alone(settings: Settings) -> None:
    write(settings, last_success_ns=time.time_ns(), last_error="n1.example: cannot reach nats://10.0.0.1")
    with MetricsServer(None, "127.0.0.1", 0, health=Health(settings)) as url:
        port = url.split(":")[2].partition("/")[0]
        assert (
            request(url.replace("/metrics", "/readyz"))[1] == "london/REG: n1.example: cannot reach nats://10.0.0.1\n"
        )
        assert asked_by_stranger(port) == "london/REG: failing\n"
    with MetricsServer(None, "127.0.0.1", 0, health=Health(settings.changed(published_mode=0o644))) as url:
        assert "cannot reach" in asked_by_stranger(url.split(":")[2].partition("/")[0])


def asked_by_stranger(port: str) -> str:
    """Return the body of `/readyz` for another user."""
    ask = (
        "client = socket.socket()\n"
        "client.connect(('127.0.0.1', int(sys.argv[1])))\n"
        "client.sendall(b'GET /readyz HTTP/1.0\\r\\n\\r\\n')\n"
        "sys.stdout.write(client.makefile().read())\n"
    )
    return run_as_stranger(ask, [port]).partition("\n\n")[2]


@pytest.mark.parametrize("abstract", (False, True), ids=("file", "abstract"))
def test_service_manager_gets_start_progress_and_end(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool
) -> None:
    monkeypatch.setattr("sr_assets.operate.health._POLL_SECONDS", 1.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(10)
        name = f"sr-assets-{os.getpid()}" if abstract else str(tmp_path / "n")
        manager.bind(f"\0{name}" if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}" if abstract else name)
        with watchdog_beside(Health(settings)):
            received = [manager.recv(100), manager.recv(100)]
        while received[-1] == b"WATCHDOG=1":
            received.append(manager.recv(100))
    assert received[:2] == [b"READY=1", b"WATCHDOG=1"]
    assert received[-1] == b"STOPPING=1"
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}


def test_hung_process_sends_no_watchdog(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sr_assets.operate.health._POLL_SECONDS", 0.02)
    polled: list[float] = []

    def parts() -> dict[str, float]:
        polled.append(0.0)
        return {"part": 0.0}

    health = Health(settings, parts)
    health._started = 0.0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(10)
        manager.bind(str(tmp_path / "n"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
        with watchdog_beside(health):
            wait_until(lambda: len(polled) > 3, "several polls")
        assert [manager.recv(100), manager.recv(100)] == [b"READY=1", b"STOPPING=1"]


@contextmanager
def served(*arguments: str) -> Iterator[str]:
    """Run a command with a health port; yield the base URL."""
    file = Path(os.environ["SR_ASSETS_CONFIG"])
    port = free_port()
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "health": {"port": port}}))
    load_settings()
    command = [sys.executable, "-m", "sr_assets", *arguments]
    process = Forked(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert (process.returncode, "Traceback" in errors) == (0, False), errors
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()


def answers(url: str, wanted: tuple[int, str]) -> bool:
    try:
        return request(url) == wanted
    except OSError:
        return False


@pytest.mark.process
@pytest.mark.parametrize(
    "command", (("run", "--follow"), pytest.param(("up", "--no-ui"), marks=pytest.mark.nightly)), ids=" ".join
)
def test_command_becomes_healthy_and_ready(platform: Settings, command: tuple[str, ...]) -> None:
    with served(*command) as base:
        wait_until(lambda: answers(f"{base}/readyz", (200, "ok\n")), "readiness")
        assert request(f"{base}/healthz") == (200, "ok\n")
