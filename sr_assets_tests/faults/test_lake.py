"""A lake whose run or engine is killed in the middle of its query: each message is in it once after the next run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from sr_assets.adapters.spark.engine import engine_status
from sr_assets.adapters.spark.run_session import HomeEngine
from sr_assets_tests.forks import Forked
from sr_assets_tests.rig import Rig, Sent, wait_until

_FILL = """
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from sr_assets.adapters.spark.run_session import HomeEngine, SparkConnection
from sr_assets.domain.errors import RunError
from sr_assets.settings import load_settings
from sr_assets.stages.lake_filling import fill

settings = load_settings(Path(sys.argv[1]), {})
with closing(SparkConnection(HomeEngine(settings.spark, settings.home), None, "lake")) as spark:
    try:
        print(fill(settings, settings.streams[0], spark, "child").rows)
    except RunError as error:
        print(error)
"""
MANY = 20_000


def counts(lake: Path) -> tuple[int, int]:
    """Return the number of rows and of sequences that any reader finds in a lake's files."""
    with duckdb.connect() as connection:
        query = f"SELECT count(*), count(DISTINCT sequence) FROM read_parquet('{lake}/*/*.parquet')"
        ((rows, sequences),) = connection.execute(query).fetchall()
    return rows, sequences


def batch_count(lake: Path) -> int:
    """Return the number of the lake's complete batches."""
    return len(list((lake / "_checkpoint" / "commits").glob("[0-9]*")))


def filling(rig: Rig) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _FILL, str(rig.home / "replication.yaml")]
    return Forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.nightly
@pytest.mark.parametrize("killed", ("run", "engine", "both"))
def test_killed_query_leaves_each_message_once_after_the_next_run(rig: Rig, killed: str) -> None:
    stream, lake = rig.make(), rig.home / "lake"
    rig.add(stream, batch_messages=500, catch_up_messages=500, lake={"path": str(lake)})
    rig.publish(stream, [Sent(b"%d" % n) for n in range(MANY)])
    settings = rig.settings()
    for done in (2, 6):
        process = filling(rig)
        wait_until(
            lambda done=done, process=process: process.poll() is not None or batch_count(lake) >= done,  # type: ignore[misc]
            f"{done} batches",
            every=0.005,
        )
        assert process.poll() is None, process.communicate()
        engine = engine_status(rig.home)
        assert engine is not None
        if killed != "engine":
            process.kill()
        if killed != "run":
            os.killpg(engine.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        assert killed != "engine" or "the Spark engine ended during the query; the next run continues" in printed
        assert (lake / "_checkpoint" / "begun").exists()
    # What a kill between the writing of a file and its commit leaves; only this moment is too short to meet.
    part = next(lake.glob("*/*.parquet"))
    part.with_name(f"part-00000-{'0' * 8}-{'0' * 4}-{'0' * 4}-{'0' * 4}-{'0' * 12}.c000.snappy.parquet").write_bytes(
        part.read_bytes()
    )
    # A reader's own file has another name.
    own = part.with_name("own.parquet")
    own.write_bytes(b"")
    printed, errors = filling(rig).communicate()
    assert int(printed) > 0, errors
    own.unlink()
    assert counts(lake) == (MANY, MANY)
    assert not (lake / "_checkpoint" / "begun").exists()
    with HomeEngine(settings.spark, settings.home).opened() as session:
        row = (
            session.read.parquet(str(lake))
            .selectExpr("count(*) AS rows", "count(DISTINCT sequence) AS sequences")
            .collect()
        )
    assert row[0].asDict() == {"rows": MANY, "sequences": MANY}
