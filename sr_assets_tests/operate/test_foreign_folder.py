"""A run in a folder that contains modules with the names of imported libraries."""

import subprocess
import sys
from pathlib import Path

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.spark.engine import stop_engine
from sr_assets.adapters.wire import Connection, Outgoing, Publisher
from sr_assets.settings import Settings
from sr_assets_tests.operate.rig import imported_from


def test_spark_run_imports_nothing_from_the_current_folder(platform: Settings, planted: Path) -> None:
    stream = platform.streams[0]
    with Connection(stream.source, "test") as opened:
        acks = list(Publisher(opened).publish_all([Outgoing(1, f"{stream.stream}.m", b"", b"x")]))
    assert not [ack for ack in acks if ack.error]
    command = [sys.executable, "-m", "sr_assets", "run", "--once"]
    try:
        ended = subprocess.run(command, cwd=planted, capture_output=True, text=True, check=False)
    finally:
        stop_engine(platform.home.resolve())
    assert (ended.returncode, imported_from(planted)) == (0, []), ended.stderr
    with Cluster(stream.target) as cluster:
        assert cluster.stream_info(stream.target_stream).last_sequence == 1
