"""The engine's life, with a small process in the server's place where only the watching is at stake."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sr_assets.adapters.spark import watch as watcher
from sr_assets.adapters.spark.engine import keep_engine, use_engine
from sr_assets.adapters.spark.java import find_java

pytestmark = pytest.mark.process

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def watch(home: Path) -> subprocess.Popen[bytes]:
    """Watch over a process that does nothing, as the engine is watched: it is the one on record."""
    command = [sys.executable, "-m", watcher.__name__, str(home / "spark"), *SLEEPER]
    process = subprocess.Popen(command, start_new_session=True)
    if (home / "spark").exists():
        (home / "spark" / "engine.json").write_text(json.dumps({"pid": process.pid}))
    return process


def ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def test_an_engine_ends_by_itself_when_nobody_uses_it_any_more(tmp_path: Path) -> None:
    (tmp_path / "spark").mkdir()
    with use_engine(tmp_path, 0.0):
        process = watch(tmp_path)
        assert not ended(process, 6.0), "it was in use"
    assert ended(process, 15.0), "it is not wanted any more"


def test_an_engine_ends_when_its_home_is_gone(tmp_path: Path) -> None:
    process = watch(tmp_path / "never")
    assert ended(process, 15.0)


def test_an_engine_ends_when_another_is_on_record(tmp_path: Path) -> None:
    (tmp_path / "spark").mkdir()
    with use_engine(tmp_path, 0.0):
        lost, known = watch(tmp_path), watch(tmp_path)
        assert ended(lost, 15.0), "the run that started it was killed before it said so"
        assert not ended(known, 0.0), "it is in use"
    assert ended(known, 15.0)


def test_a_longer_idle_time_that_was_asked_for_still_counts(tmp_path: Path) -> None:
    (tmp_path / "spark").mkdir()
    keep_engine(tmp_path, 900.0)
    keep_engine(tmp_path, 60.0)
    assert float((tmp_path / "spark" / "keep").read_text()) > time.monotonic() + 800


def test_without_a_suitable_java_the_packaged_one_is_wrapped(tmp_path: Path) -> None:
    home = find_java(tmp_path, {"PATH": "/nowhere"})
    assert home == tmp_path / "spark" / "java"
    flags = ["--add-modules=jdk.incubator.vector", "-version"]
    done = subprocess.run([home / "bin" / "java", *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("listed", ("", "jdk.incubator.vector@11.0.2", "java.base@21"))
def test_a_java_that_spark_cannot_use_is_passed_over(tmp_path: Path, listed: str) -> None:
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho '{listed}'\n")
    java.chmod(0o755)
    assert find_java(tmp_path, {"JAVA_HOME": str(tmp_path / "jdk"), "PATH": "/nowhere"}) == tmp_path / "spark" / "java"


def test_a_suitable_java_home_is_used(tmp_path: Path) -> None:
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho 'jdk.incubator.vector@21.0.1'\n")
    java.chmod(0o755)
    assert find_java(tmp_path, {"JAVA_HOME": str(tmp_path / "jdk"), "PATH": "/nowhere"}) == tmp_path / "jdk"
