"""The crash matrix: a real `sr-assets run` is killed with SIGKILL at every named point, and the next one mends it.

Compared is with a run nobody disturbed: what stands in the target, and every table.
"""

import json
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from sr_assets.adapters.checkpoints import Point
from sr_assets.adapters.spark.engine import engine_status
from sr_assets_tests.faults.conftest import Hold
from sr_assets_tests.faults.rig import (
    await_marker,
    configure,
    finish,
    kill_run,
    outcome,
    publish_rounds,
    start_run,
)
from sr_assets_tests.rig import ALL_ON_SPARK, Rig, Sent


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """What a run leaves that nobody disturbed, kept between the tests: the same history gives the same answer."""
    return {}


@pytest.fixture
def disturbed(rig: Rig, undisturbed: dict[str, Any]) -> str:
    """The site of `undisturbed` once more, with another target; returns its feed."""
    if not undisturbed:
        stream = rig.make()
        publish_rounds(rig, stream, senders=40, rounds=2)
        target = rig.unique("WHOLE")
        configure(rig, stream, rig.make("FEED"), target)
        rig.drain()
        undisturbed.update(stream=stream, outcome=outcome(rig, target))
        assert len(undisturbed["outcome"]["copies"]) == 41
        rig.__post_init__()
    feed = rig.make("FEED")
    configure(rig, undisturbed["stream"], feed, rig.unique("CUT"))
    return feed


def assert_mended(rig: Rig, undisturbed: dict[str, Any], feed: str) -> None:
    """See that nothing differs from the undisturbed, and that every advisory is there once."""
    assert outcome(rig, rig.entries[0]["target_stream"]) == undisturbed["outcome"]
    assert len({message.headers for message in rig.stored(feed)}) == len(rig.stored(feed)) == 40


# Nobody falls silent here; a kill between two portions of a sweep has a test of its own (`test_sweeping`).
@pytest.mark.parametrize("point", [point for point in Point if point is not Point.SWEPT])
def test_a_run_killed_at_a_point_is_mended_by_the_next(
    rig: Rig, undisturbed: dict[str, Any], disturbed: str, tmp_path: Path, point: Point
) -> None:
    marker = tmp_path / point
    process = start_run(rig, (point, marker))
    await_marker(process, marker)
    kill_run(process)
    finish(start_run(rig))
    assert_mended(rig, undisturbed, disturbed)


def test_a_run_killed_amid_catching_up_is_mended_by_the_next(
    rig: Rig, undisturbed: dict[str, Any], disturbed: str, tmp_path: Path
) -> None:
    """One large batch, read by all cores, where the undisturbed run took small ones."""
    rig.spark = ALL_ON_SPARK
    rig.entries[0] |= {"batch_messages": 10, "catch_up_messages": 1_000}
    rig.settings()
    for point in (Point.READ, Point.FOLDING):
        process = start_run(rig, (point, tmp_path / point))
        await_marker(process, tmp_path / point)
        kill_run(process)
    finish(start_run(rig))
    assert_mended(rig, undisturbed, disturbed)


@pytest.mark.parametrize("goes_on", (True, False))
def test_a_run_killed_amid_publishing_is_mended_although_its_writer_lives_on(
    rig: Rig, hold: Hold, undisturbed: dict[str, Any], disturbed: str, goes_on: bool
) -> None:
    """The engine outlives the run: its writer stands still for good, or goes on when the next run has begun."""
    hold.arm()
    process = start_run(rig)
    writer = psutil.Process(hold.await_writer())
    kill_run(process)
    assert writer.is_running()
    if goes_on:
        release = threading.Timer(1.0, hold.release)
        release.start()
        rig.drain()
        release.join()
    else:
        # The next run makes the copies itself, and needs Spark only to stop the earlier writer.
        rig.spark = {}
        rig.drain()
        assert not writer.is_running()
    assert_mended(rig, undisturbed, disturbed)


def test_a_batch_whose_python_worker_is_killed_is_finished_by_the_same_run(
    rig: Rig, hold: Hold, undisturbed: dict[str, Any], disturbed: str
) -> None:
    hold.arm()
    process = start_run(rig)
    writer = psutil.Process(hold.await_writer())
    engine = engine_status(rig.home)
    assert engine is not None
    assert engine.pid in [parent.pid for parent in writer.parents()]
    writer.kill()
    finish(process)
    assert_mended(rig, undisturbed, disturbed)


def test_a_run_whose_engine_is_killed_starts_another_and_goes_on(
    rig: Rig, undisturbed: dict[str, Any], disturbed: str, tmp_path: Path
) -> None:
    rig.spark, marker = ALL_ON_SPARK, tmp_path / Point.READ
    rig.settings()
    process = start_run(rig, (Point.READ, marker))
    await_marker(process, marker)
    engine = engine_status(rig.home)
    assert engine is not None
    for engine_process in (*psutil.Process(engine.pid).children(recursive=True), psutil.Process(engine.pid)):
        engine_process.kill()
    marker.write_text("released")
    assert "Spark no longer responds" in finish(process)
    assert_mended(rig, undisturbed, disturbed)


def test_a_run_killed_in_mid_feed_folds_nothing_twice_and_leaves_nothing_out(rig: Rig, tmp_path: Path) -> None:
    feed = rig.make("FEED", rig.target)
    advisories = [
        {"protocol": "io.choria.sr.v2.age_advisory", "event_id": f"{event}{n}", "replicator": "EAST", "value": f"n{n}"}
        | {"timestamp": 1_700_000_000 + place, "event": event}
        for place, event in enumerate(("new", "timeout"))
        for n in range(50)
    ]
    rig.publish(feed, [*(Sent(json.dumps(advisory).encode()) for advisory in advisories), Sent(b"nothing")], rig.target)
    rig.add_feed(feed, batch_messages=40)
    rig.settings()
    for point in (Point.READ, Point.COMMITTED):
        process = start_run(rig, (point, tmp_path / point))
        await_marker(process, tmp_path / point)
        kill_run(process)
    finish(start_run(rig))
    assert rig.row("SELECT count(*) AS n, count(DISTINCT event_id) AS ids FROM global_advisories") == {
        "n": 100,
        "ids": 100,
    }
    assert rig.row("SELECT count(*) AS n FROM global_availability WHERE status = 'timeout'")["n"] == 50
    assert len(rig.rows("global_rejects")) == 1
    row = rig.row("replication")
    assert (row["seen_messages"], row["copied_messages"], row["parked_messages"]) == (101, 100, 1)
