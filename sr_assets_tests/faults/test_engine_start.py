"""A run killed while it starts the engine: the next run uses that engine and starts no other."""

import json
import subprocess
import sys
import time
from pathlib import Path

from sr_assets.adapters.spark.engine import engine_status, start_engine, stop_engine
from sr_assets.settings import SparkSettings

_START = """
import sys
from pathlib import Path
from sr_assets.adapters.spark.engine import start_engine
from sr_assets.settings import SparkSettings

start_engine(SparkSettings(), Path(sys.argv[1]))
"""


def test_engine_started_by_a_killed_run_is_reused(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", _START, str(tmp_path)])
    record, deadline = tmp_path / "spark" / "engine.json", time.monotonic() + 60.0
    try:
        while not record.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline, "no engine was started"
            time.sleep(0.005)
        first = json.loads(record.read_text())
        process.kill()
        assert process.wait() < 0
        assert engine_status(tmp_path) is None, "the engine was ready before the kill"
        engine = start_engine(SparkSettings(), tmp_path)
        assert engine.alive
        assert json.loads(record.read_text()) == first | {"port": engine.port}
    finally:
        stop_engine(tmp_path)
    assert not engine.running
