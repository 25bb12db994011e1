"""What starts Dagster: the instance's folder, the runs of `sr-assets run`, the services of `sr-assets up`; real processes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import psutil
import pytest
import yaml

from sr_assets import operate
from sr_assets.adapters.fleet import open_fleet, read_rows
from sr_assets.adapters.jetstream import Cluster
from sr_assets.adapters.state import SiteLock, lock_owner
from sr_assets.domain.errors import ConfigurationError
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.settings import Settings, load_settings, parse_cluster

ROOT = Path(__file__).parent.parent


@pytest.fixture
def platform(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nats_pair: tuple[NatsServer, NatsServer],
    unique: Callable[[str], str],
) -> Settings:
    """Two sites with one empty source stream each, so that no run needs Spark."""
    source, target = nats_pair
    streams = [unique("EMPTY"), unique("EMPTY")]
    with Cluster(parse_cluster(source.url)) as cluster:
        for stream in streams:
            cluster.create_stream({"name": stream, "subjects": [f"{stream}.>"], "allow_direct": True})
    entries = [
        {"name": site, "stream": stream, "source_url": source.url, "target_url": target.url}
        for site, stream in zip(("london", "paris"), streams, strict=True)
    ]
    return configure(tmp_path, monkeypatch, entries)


def configure(folder: Path, monkeypatch: pytest.MonkeyPatch, entries: list[dict[str, str]]) -> Settings:
    file = folder / "replication.yaml"
    file.write_text(yaml.safe_dump({"name": "US-EAST", "state_store": str(folder / "home"), "streams": entries}))
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
    for name in ("SR_ASSETS_HOME", "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)
    return load_settings()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sr_assets", "run", *arguments], capture_output=True, text=True, check=False
    )


# -------------------------------------------------------------------------------------------------------- the instance


def test_the_instance_lives_in_the_home_with_the_packages_settings(platform: Settings) -> None:
    folder = operate.prepare_instance(platform)
    assert folder == platform.home / "dagster"
    assert os.environ["DAGSTER_HOME"] == str(folder)
    assert (folder / "dagster.yaml").read_bytes() == (ROOT / "sr_assets" / "dagster.yaml").read_bytes()


def test_a_dagster_home_of_ones_own_and_its_settings_are_kept(
    platform: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    monkeypatch.setenv("DAGSTER_HOME", str(own))
    assert operate.prepare_instance(platform) == own
    assert (own / "dagster.yaml").read_text() == "telemetry: {enabled: false}\n"
    assert not (platform.home / "dagster").exists()


def test_a_home_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written; name another folder with SR_ASSETS_HOME"):
        operate.check_home(tmp_path / "file" / "home")
    operate.check_home(tmp_path / "not" / "there" / "yet")
    assert not (tmp_path / "not").exists()


def test_a_home_on_a_network_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operate, "_REMOTE_DISKS", frozenset({operate._disk_kind(tmp_path)}))
    with pytest.raises(ConfigurationError, match="lies on a network disk"):
        operate.check_home(tmp_path)


# ------------------------------------------------------------------------------------------------------------ the runs


def test_run_once_works_every_site_and_records_it_in_dagster(platform: Settings) -> None:
    ended = run("--once")
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False)
    assert sorted(ended.stdout.splitlines()) == [
        f"{stream.label}: copied 0, skipped 0, lag 0" for stream in platform.streams
    ]
    with open_fleet(platform.home) as connection:
        assert sorted(read_rows(connection, "SELECT name FROM replication").values) == [("london",), ("paris",)]
    with dg.DagsterInstance.from_config(str(platform.home / "dagster")) as instance:
        runs = instance.get_runs()
    assert {(run.job_name, run.status) for run in runs} == {
        (f"{site}_replication", dg.DagsterRunStatus.SUCCESS) for site in ("london", "paris")
    }


def test_run_works_only_the_streams_it_is_given(platform: Settings) -> None:
    ended = run("--once", "--stream", platform.streams[1].stream)
    assert (ended.returncode, ended.stdout) == (0, f"{platform.streams[1].label}: copied 0, skipped 0, lag 0\n")


def test_a_stream_that_fails_is_one_line_and_exit_code_1_and_the_others_run(
    platform: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = yaml.safe_load((tmp_path / "replication.yaml").read_text())["streams"][0]
    away = {**good, "stream": "AWAY", "source_url": "nats://user:secret@127.0.0.1:1"}
    configure(tmp_path, monkeypatch, [away, {**good, "stream": "MISSING"}, good])
    ended = run("--once")
    assert ended.returncode == 1
    assert ended.stdout == f"london/{good['stream']}: copied 0, skipped 0, lag 0\n"
    errors = ended.stderr.splitlines()
    assert len(errors) == 2
    assert errors[0].startswith("error: london/AWAY: cannot connect to NATS: 127.0.0.1:1: ")
    assert errors[1].startswith("error: london/MISSING: stream MISSING does not exist on ")
    assert "secret" not in ended.stderr


def test_the_words_of_a_busy_site_and_of_a_failure_reach_the_user(tmp_path: Path) -> None:
    @dg.op
    def busy() -> None:
        with SiteLock(tmp_path, "run 1", 0), SiteLock(tmp_path, "run 2", 0):
            pass

    @dg.op
    def failing() -> None:
        raise dg.Failure("london/A: gone\nlondon/B: gone too")

    @dg.job(executor_def=dg.in_process_executor)
    def both() -> None:
        busy()
        failing()

    with dg.DagsterInstance.ephemeral() as instance:
        lines = operate.failures(both.execute_in_process(instance=instance, raise_on_error=False).all_events)
    assert {"london/A: gone", "london/B: gone too"} < set(lines)
    assert any(
        re.fullmatch(rf"site {tmp_path.name} is under way: run 1 \(pid {os.getpid()}\) since \S+", line)
        for line in lines
    )


def test_follow_goes_on_until_it_is_told_to_stop(platform: Settings) -> None:
    following = subprocess.Popen(
        [sys.executable, "-m", "sr_assets", "run", "--follow", "--stream", "london/" + platform.streams[0].stream],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(
            lambda: lock_owner(platform.home / "sites" / "london") is not None or following.poll() is not None, 120
        )
        following.send_signal(signal.SIGINT)
        _, errors = following.communicate(timeout=100)
    finally:
        following.kill()
    assert (following.returncode, errors) == (0, "")


# -------------------------------------------------------------------------------------------------------- the services


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_up_serves_the_platform_and_leaves_nothing_behind(platform: Settings) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sr_assets", "up", "--port", str(port)]
    up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert up.stdout is not None
        assert up.stdout.readline() == f"Dagster: http://127.0.0.1:{port}  (Ctrl-C stops it)\n"
        asked = json.dumps(
            {
                "query": '{ sensorsOrError(repositorySelector: {repositoryName: "__repository__", '
                'repositoryLocationName: "sr_assets.definitions"}) { ... on Sensors { results { name } } } }'
            }
        )
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/graphql", asked.encode(), {"Content-Type": "application/json"}
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
        wait_for(lambda: not any(child.is_running() for child in children), 10)
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
