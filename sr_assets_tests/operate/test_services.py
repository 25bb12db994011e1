"""The services of `sr-assets up`, in real processes."""

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil

from sr_assets.settings import Settings
from sr_assets_tests.operate.rig import imported_from
from sr_assets_tests.rig import wait_until


def test_up_serves_the_platform_and_leaves_no_process(platform: Settings, planted: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sr_assets", "up", "--port", str(port)]
    up = subprocess.Popen(command, cwd=planted, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert up.stdout is not None
        assert up.stdout.readline() == f"Dagster: http://127.0.0.1:{port}  (Ctrl-C stops it)\n"
        query = json.dumps(
            {
                "query": '{ sensorsOrError(repositorySelector: {repositoryName: "__repository__", '
                'repositoryLocationName: "sr_assets.definitions"}) { ... on Sensors { results { name } } } }'
            }
        )
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/graphql", query.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            sensors = json.load(answer)["data"]["sensorsOrError"]["results"]
        assert {sensor["name"] for sensor in sensors} == {"london_lag", "paris_lag"}
        second = subprocess.run([*command[:-1], str(port + 1)], capture_output=True, text=True, check=False)
        assert second.returncode == 1
        assert second.stderr.startswith("error: another `sr-assets up` works in ")
        children = psutil.Process(up.pid).children(recursive=True)
        assert len(children) >= 3
        up.send_signal(signal.SIGTERM)
        assert up.wait(100) == 0
        wait_until(lambda: not any(child.is_running() for child in children), "the end of all children", 60)
        assert not imported_from(planted)
    finally:
        up.kill()
        up.communicate()


def test_a_port_in_use_is_one_line(platform: Settings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = subprocess.run(
            [sys.executable, "-m", "sr_assets", "up", "--port", str(port)], capture_output=True, text=True, check=False
        )
    assert ended.returncode == 1
    assert (
        ended.stderr
        == f"error: port {port} on 127.0.0.1 cannot be used (Address already in use); choose another with --port\n"
    )
