"""Killed runs of a partitioned stream; the next run has another number of partitions."""

from pathlib import Path

import psutil
import pytest

from sr_assets.adapters.checkpoints import Point
from sr_assets_tests.faults.conftest import Hold
from sr_assets_tests.faults.rig import await_marker, finish, kill_run, start_run
from sr_assets_tests.partitioned import assert_exact, rounds, sequences
from sr_assets_tests.rig import ALL_ON_SPARK, Rig


@pytest.fixture
def stream(rig: Rig) -> str:
    """A stream with 360 messages in two partitions, which is configured and not copied yet."""
    rig.spark = ALL_ON_SPARK
    name = rig.make()
    rig.publish(name, rounds(30, 2))
    partitions = {"count": 2, "filter": f"{name}.{{p}}.>"}
    rig.add(name, partitions=partitions, target_stream=f"{name}_T", batch_messages=200)
    rig.settings()
    return name


def finish_with_three_lanes(rig: Rig, stream: str) -> None:
    """Move senders to three partitions in the source and in the configuration, then copy the rest."""
    rig.publish(stream, rounds(5, 3, first=30))
    rig.entries[0]["partitions"]["count"] = 3
    rig.drain()
    assert_exact(rig, stream, f"{stream}_T")
    row = rig.row("replication")
    assert (row["copied_messages"], row["gap_messages"], row["lag_messages"]) == (420, 0, 0)
    assert rig.row("SELECT count(*) AS n, max(lag_messages) AS lag FROM replication_partitions") == {"n": 3, "lag": 0}


def test_new_lanes_finish_the_batch_of_a_killed_run(rig: Rig, stream: str, tmp_path: Path) -> None:
    for point in (Point.PLANNED, Point.PUBLISHED, Point.COMMITTING):
        process = start_run(rig, (point, tmp_path / point))
        await_marker(process, tmp_path / point)
        kill_run(process)
    assert len(rig.copies(f"{stream}_T")) == 200
    finish_with_three_lanes(rig, stream)


def test_new_lanes_finish_the_batch_of_a_killed_writer(rig: Rig, hold: Hold, stream: str) -> None:
    hold.arm()
    process = start_run(rig)
    writer = psutil.Process(hold.await_writer())
    kill_run(process)
    copied = sequences(rig.copies(f"{stream}_T"))
    assert 0 < len(copied) <= 200
    writer.kill()
    hold.release()
    finish_with_three_lanes(rig, stream)


def test_next_run_finds_copies_of_lanes_whose_originals_are_lost(rig: Rig, stream: str, tmp_path: Path) -> None:
    process = start_run(rig, (Point.PUBLISHED, tmp_path / "marker"))
    await_marker(process, tmp_path / "marker")
    kill_run(process)
    for sequence in (3, 4, 150):
        rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    finish(start_run(rig))
    assert sorted(sequences(rig.copies(f"{stream}_T"))) == list(range(1, 361))
    row = rig.row("replication")
    assert (row["copied_messages"], row["gap_messages"]) == (360, 0)
