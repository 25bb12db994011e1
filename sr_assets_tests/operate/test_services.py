"""The services of `sr-assets up`, in real processes."""

import base64
import json
import socket
import sys
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

from sr_assets.settings import Settings
from sr_assets_tests.forks import run_forked
from sr_assets_tests.operate.rig import REPOSITORY, Up, imported_from, log_in_json
from sr_assets_tests.rig import wait_until
from sr_assets_tests.strangers import connected_stranger

SENSORS = {"london_lag", "paris_lag", "run_failures"}
LOCATION = '"sr_assets.definitions"'
SHUTDOWN = f"mutation {{ shutdownRepositoryLocation(repositoryLocationName: {LOCATION}) {{ __typename }} }}"
SENSOR = f'{{sensorName: "london_lag", {REPOSITORY[1:-1]}}}'
#: `sr-assets` with a usual shell's limit of open files.
LIMITED = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
runpy.run_module("sr_assets", run_name="__main__")
"""
SET_CURSOR = f'mutation {{ setSensorCursor(sensorSelector: {SENSOR}, cursor: "x") {{ __typename }} }}'


def test_up_serves_only_its_own_pages_and_leaves_no_process(platform: Settings, planted: Path, tmp_path: Path) -> None:
    """It also refuses a second `up`, and starts the code server again."""
    log_in_json()
    errors = tmp_path / "errors"
    with Up(folder=planted, errors=errors) as up:
        assert up.sensors() == SENSORS
        listening = {
            connection.laddr
            for connections in up.each(lambda process: process.net_connections("inet"))
            for connection in connections
            if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
        }
        assert listening == {("127.0.0.1", up.port), ("::1", up.port)}
        second = run_forked([*up.command, "--port", str(up.port + 1)])
        assert second.returncode == 1
        refused = json.loads(second.stderr)
        assert (refused["level"], refused["message"].partition("` ")[0]) == ("error", "another `sr-assets up")
        assert up.send("GET", f"/graphql?query={quote(SHUTDOWN)}")[0] == 405
        foreign: tuple[dict[str, str], ...] = (
            {"host": "evil.example"},
            {"origin": "http://evil.example"},
            {"origin": "null"},
        )
        for headers in foreign:
            assert up.send("POST", f"/graphql?query={quote(SHUTDOWN)}", b"", **headers)[0] == 403
        assert "restarting it" not in errors.read_text()
        # A request that the UI itself may send; it ends the code server, like a crash.
        up.ask(SHUTDOWN)
        wait_until(lambda: "restarting it" in errors.read_text(), "the end of the code server")
        wait_until(lambda: up.sensors() == SENSORS, "the sensors of the code server that was started again")
        children = up.processes()[1:]
        assert len(children) >= 3
    wait_until(lambda: not any(child.is_running() for child in children), "the end of all children")
    assert not imported_from(planted)
    # Dagster's lines have the same format as this package's.
    events = [json.loads(line) for line in errors.read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= event.keys() for event in events)
    assert any(event["logger"].startswith("dagster.") for event in events)


def test_read_only_ui_with_login_refuses_changes(platform: Settings, tmp_path: Path) -> None:
    file = tmp_path / "logins"
    file.write_text("me:secret\n0123456789abcdef\n")
    file.chmod(0o600)
    with Up("--read-only", "--auth-file", str(file)) as up:
        for path in ("/", "/graphql", "/server_info"):
            assert up.send("GET", path)[0] == 401
        assert up.send("GET", "/", authorization="Bearer wrong")[0] == 401
        token = "Bearer 0123456789abcdef"
        assert up.sensors(authorization=token) == SENSORS
        assert up.sensors(authorization="Basic " + base64.b64encode(b"me:secret").decode()) == SENSORS
        refused = up.ask(SHUTDOWN, authorization=token)["shutdownRepositoryLocation"]
        assert refused["__typename"] == "UnauthorizedError"
        refused = up.ask(SET_CURSOR, authorization=token)["setSensorCursor"]
        assert refused["__typename"] == "UnauthorizedError"
        command_lines = " ".join(map(" ".join, up.each(psutil.Process.cmdline)))
        assert "secret" not in command_lines


def test_auth_file_readable_by_others_is_refused_in_one_line(platform: Settings, tmp_path: Path) -> None:
    file = tmp_path / "logins"
    file.write_text("me:secret")
    file.chmod(0o644)
    command = [sys.executable, "-m", "sr_assets", "up", "--auth-file", str(file)]
    ended = run_forked(command)
    assert ended.returncode == 2
    assert ended.stderr == f"error: --auth-file {file}: other users can access it; own it and set its mode to 600\n"


def test_busy_port_is_reported_in_one_line(platform: Settings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_forked([sys.executable, "-m", "sr_assets", "up", "--port", str(port)])
    assert ended.returncode == 1
    assert (
        ended.stderr
        == f"error: port {port} on 127.0.0.1: cannot listen (Address already in use); choose another with --port\n"
    )


@pytest.mark.process
@pytest.mark.parametrize("options", (("--host", "0.0.0.0"), ("--trust-proxy",), ("--host", "::", "--read-only")))
def test_ui_open_to_everybody_is_refused_in_one_line(platform: Settings, options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "sr_assets", "up", *options]
    ended = run_forked(command)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "everybody who reaches the port could start and stop runs" in ended.stderr


@pytest.mark.nightly
@pytest.mark.process
def test_up_outlives_half_open_connections_and_its_webserver(platform: Settings, tmp_path: Path) -> None:
    file, errors = tmp_path / "logins", tmp_path / "errors"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    up = Up("--auth-file", str(file), errors=errors)
    up.command = [sys.executable, "-c", LIMITED, *up.command[3:]]
    with up, connected_stranger(up.port, 1_500, b"GET / HT"):
        token = "Bearer 0123456789abcdef"
        assert up.sensors(authorization=token) == SENSORS
        webserver = next(each for each in up.processes() if each.name() == "webserver")
        assert len(webserver.net_connections("inet")) <= 256 + 2
        webserver.kill()
        line = "the Dagster webserver was ended by signal 9; restarting it in 1 s"
        wait_until(lambda: line in errors.read_text(), "the end of the webserver")
        wait_until(lambda: is_served(up, token), "the webserver that was started again")
        assert "Too many open files" not in errors.read_text()


def is_served(up: Up, token: str) -> bool:
    try:
        return up.send("GET", "/server_info", authorization=token)[0] == 200
    except OSError:
        return False


# One test shows what a login opens, another which addresses need it.
@pytest.mark.nightly
def test_ui_with_login_listens_on_every_address(platform: Settings, tmp_path: Path) -> None:
    file = tmp_path / "logins"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    with Up("--host", "0.0.0.0", "--auth-file", str(file)) as up:
        assert up.send("GET", "/", host="fleet.example.net")[0] == 401
        assert up.send("GET", "/", host="fleet.example.net", authorization="Bearer 0123456789abcdef")[0] == 200
