"""A run killed while it starts the engine: the next run uses that engine and starts no other."""

import json
import subprocess
import sys
from pathlib import Path

from sr_assets.adapters.spark.engine import engine_status, start_engine, stop_engine
from sr_assets.settings import SparkSettings
from sr_assets_tests.rig import wait_until

_START = """
import sys
from pathlib import Path
from sr_assets.adapters.spark.engine import start_engine
from sr_assets.settings import SparkSettings

start_engine(SparkSettings(), Path(sys.argv[1]))
"""


def test_engine_started_by_a_killed_run_is_reused(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", _START, str(tmp_path)])
    record = tmp_path / "spark" / "engine.json"
    try:
        wait_until(lambda: record.exists() or process.poll() is not None, "the engine", every=0.005)
        assert process.poll() is None
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
