"""The engine's lifetime and Java; a sleeping process replaces the server where only the watcher matters."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from sr_assets.adapters.private import own_folder
from sr_assets.adapters.spark import engine as engines
from sr_assets.adapters.spark import watch as watcher
from sr_assets.adapters.spark.config import find_java
from sr_assets.adapters.spark.engine import (
    Engine,
    abandon_start,
    keep_engine,
    start_engine,
    stop_engine,
    use_engine,
)
from sr_assets.domain.errors import RunError
from sr_assets.settings import SparkSettings
from sr_assets_tests.rig import wait_until
from sr_assets_tests.strangers import BECOME_STRANGER, need_root

pytestmark = pytest.mark.process

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def watched(folder: Path, *_: object) -> list[str]:
    """Return the command that starts a sleeping process behind a watcher."""
    return [sys.executable, "-m", watcher.__name__, str(folder), *SLEEPER]


def start_watcher(home: Path) -> subprocess.Popen[bytes]:
    """Start a watcher of a sleeping process and record it as the engine."""
    process = subprocess.Popen(watched(home / "spark"), start_new_session=True)
    if (home / "spark").exists():
        (home / "spark" / "engine.json").write_text(json.dumps({"pid": process.pid}))
    return process


def ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def test_engine_stops_after_its_last_user_leaves(tmp_path: Path) -> None:
    (tmp_path / "spark").mkdir()
    with use_engine(tmp_path, 0.0):
        process = start_watcher(tmp_path)
        assert not ended_within(process, 6.0), "it stopped while in use"
    assert ended_within(process, 15.0), "it still runs without users"


def test_engine_stops_when_home_is_missing(tmp_path: Path) -> None:
    process = start_watcher(tmp_path / "never")
    assert ended_within(process, 15.0)


def test_engine_stops_when_another_one_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "spark").mkdir()
    with use_engine(tmp_path, 0.0):
        unrecorded, recorded = start_watcher(tmp_path), start_watcher(tmp_path)
        assert ended_within(unrecorded, 15.0), "it still runs unrecorded, as if its run was killed before recording it"
        assert not ended_within(recorded, 0.0), "it stopped while in use"
    assert ended_within(recorded, 15.0)


def test_engine_of_ended_process_is_not_running_on_a_host_without_ps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not Engine(1, ended.pid, "", "", 0.0).running


def test_abandoned_start_fails_at_once_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_command", watched)
    monkeypatch.setattr(engines, "_START_SECONDS", 3_600.0)
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(start_engine, SparkSettings(), tmp_path)
        record = tmp_path / "spark" / "engine.json"
        wait_until(lambda: record.exists() or start.done(), "the engine")
        engine = Engine(**json.loads(record.read_text()))
        try:
            wait_until(lambda: engine.running, "the watcher")
            abandon_start(tmp_path)
            wait_until(start.done, "the end of the start")
        finally:
            # A start that was not abandoned would wait for an hour.
            engines._stop(tmp_path / "spark")
    with pytest.raises(RunError, match="did not start"):
        start.result()
    assert not engine.running
    assert not record.exists()


def test_keep_engine_does_not_shorten_idle_time(tmp_path: Path) -> None:
    (tmp_path / "spark").mkdir()
    keep_engine(tmp_path, 900.0)
    until = (tmp_path / "spark" / "keep").read_text()
    keep_engine(tmp_path, 60.0)
    assert (tmp_path / "spark" / "keep").read_text() == until


def test_find_java_wraps_packaged_java_without_suitable_one(tmp_path: Path) -> None:
    home = find_java(tmp_path, {"PATH": "/nowhere"})
    assert home == tmp_path / "spark" / "java"
    flags = ["--add-modules=jdk.incubator.vector", "-version"]
    done = subprocess.run([home / "bin" / "java", *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("modules", "suitable"),
    (
        ("", False),
        ("jdk.incubator.vector@11.0.2", False),
        ("java.base@21", False),
        ("jdk.incubator.vector@21.0.1", True),
    ),
)
def test_find_java_uses_java_home_only_if_suitable(tmp_path: Path, modules: str, suitable: bool) -> None:
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho '{modules}'\n")
    java.chmod(0o755)
    chosen = find_java(tmp_path, {"JAVA_HOME": str(tmp_path / "jdk"), "PATH": "/nowhere"})
    assert chosen == tmp_path / ("jdk" if suitable else "spark/java")


def test_process_of_another_user_is_no_engine_and_gets_no_signal(tmp_path: Path) -> None:
    need_root()
    # It has the number of an engine that has ended, and its command.
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", f"{BECOME_STRANGER}print(flush=True); sys.stdin.read()", watcher.__name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
        start_new_session=True,
    ) as foreign:
        assert foreign.stdout is not None
        assert foreign.stdout.readline()
        recorded = Engine(0, foreign.pid, "token", "", 0.0)
        own_folder(tmp_path / "spark")
        (tmp_path / "spark" / "engine.json").write_text(json.dumps(asdict(recorded)))
        assert not recorded.running
        abandon_start(tmp_path)
        assert not stop_engine(tmp_path)
        assert foreign.poll() is None
        foreign.communicate()
