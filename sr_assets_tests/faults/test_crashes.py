"""The crash matrix: SIGKILL a real run at every checkpoint; the next run must recover.

The target and every table are compared with those of an undisturbed run. At most points the process that is killed does
what a site's child of `sr-assets run` does, without Dagster around it, which takes three quarters of the command's time.
"""

import json
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.spark.engine import engine_status
from sr_assets.adapters.state.operator_requests import leave_request
from sr_assets_tests.faults.conftest import Hold
from sr_assets_tests.faults.rig import (
    await_marker,
    configure,
    finish,
    kill_run,
    outcome,
    publish_rounds,
    start_held,
    start_run,
)
from sr_assets_tests.rig import ALL_ON_SPARK, SITE, Rig, Sent


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """The outcome of an undisturbed run, shared by the tests: the same history gives the same outcome."""
    return {}


@pytest.fixture
def disturbed(rig: Rig, undisturbed: dict[str, Any]) -> str:
    """The site of `undisturbed` with another target; returns its feed."""
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


def assert_recovered(rig: Rig, undisturbed: dict[str, Any], feed: str) -> None:
    """Assert that the outcome equals the undisturbed one, with each advisory stored once."""
    assert outcome(rig, rig.entries[0]["target_stream"]) == undisturbed["outcome"]
    assert len({message.headers for message in rig.stored(feed)}) == len(rig.stored(feed)) == 40


#: The points at which a real process is killed in each gate; simulated histories are killed at all of them.
_IN_THE_GATE = {Point.FOLDED, Point.PUBLISHING, Point.COMMITTING, Point.PUBLISHED_TABLES}
# No node falls silent or is retired by hand here, and no files are merged; other tests end runs at these points.
_ELSEWHERE = {Point.SWEPT, Point.ANSWERING, Point.REFILLING, Point.MERGED_HISTORY, Point.REPLACED_HISTORY}
_OF_THE_COMMAND = {Point.PUBLISHING}
#: What the command adds at these points is the same.
_AT_NIGHT = {Point.PLANNED, Point.COMMITTED, Point.PUBLISHED_TABLES}


@pytest.mark.parametrize(
    "point",
    [
        point if point in _IN_THE_GATE else pytest.param(point, marks=pytest.mark.nightly)
        for point in Point
        if point not in _ELSEWHERE
    ],
)
def test_next_run_recovers_from_a_kill_at_any_point(
    rig: Rig, undisturbed: dict[str, Any], disturbed: str, tmp_path: Path, point: Point
) -> None:
    marker = tmp_path / point
    process = start_held(rig, point, marker)
    await_marker(process, marker)
    kill_run(process)
    rig.drain()
    assert_recovered(rig, undisturbed, disturbed)


@pytest.mark.parametrize(
    "point",
    [
        point
        if point in _OF_THE_COMMAND
        else pytest.param(point, marks=pytest.mark.nightly if point in _AT_NIGHT else pytest.mark.long)
        for point in Point
        if point not in _ELSEWHERE
    ],
)
def test_next_command_recovers_from_a_kill_of_the_command(
    rig: Rig, undisturbed: dict[str, Any], disturbed: str, tmp_path: Path, point: Point
) -> None:
    """The whole `sr-assets run`: its Dagster run also ends in the middle."""
    process = start_run(rig, (point, tmp_path / point))
    await_marker(process, tmp_path / point)
    kill_run(process)
    finish(start_run(rig))
    assert_recovered(rig, undisturbed, disturbed)


@pytest.mark.parametrize(
    "point",
    (
        Point.PUBLISHING,
        # From here on, nothing depends on how the copies were published.
        *(pytest.param(point, marks=pytest.mark.nightly) for point in (Point.PUBLISHED, Point.COMMITTING)),
    ),
)
def test_next_run_recovers_from_a_kill_without_batch_publishing(
    rig: Rig, undisturbed: dict[str, Any], disturbed: str, tmp_path: Path, point: Point
) -> None:
    rig.entries[0]["allow_batched"] = "off"
    rig.settings()
    test_next_run_recovers_from_a_kill_at_any_point(rig, undisturbed, disturbed, tmp_path, point)


@pytest.mark.long
def test_next_run_recovers_from_a_kill_while_catching_up(
    rig: Rig, undisturbed: dict[str, Any], disturbed: str, tmp_path: Path
) -> None:
    """Read one large batch on all cores; the undisturbed run read small batches."""
    rig.spark = ALL_ON_SPARK
    rig.entries[0] |= {"batch_messages": 10, "catch_up_messages": 1_000}
    rig.settings()
    for point in (Point.READ, Point.FOLDING):
        process = start_run(rig, (point, tmp_path / point))
        await_marker(process, tmp_path / point)
        kill_run(process)
    finish(start_run(rig))
    assert_recovered(rig, undisturbed, disturbed)


@pytest.mark.parametrize(
    "writer_resumes",
    (
        # A writer waits for an earlier one: `test_writer_waits_for_earlier_writer`.
        pytest.param(True, marks=pytest.mark.nightly),
        False,
    ),
)
def test_next_run_recovers_although_the_old_writer_survives(
    rig: Rig, hold: Hold, undisturbed: dict[str, Any], disturbed: str, writer_resumes: bool
) -> None:
    """The engine outlives the run: its writer stays stopped, or resumes after the next run has started."""
    hold.arm()
    process = start_run(rig)
    writer = psutil.Process(hold.await_writer(lambda: process.poll() is not None))
    kill_run(process)
    assert writer.is_running()
    if writer_resumes:
        release = threading.Timer(1.0, hold.release)
        release.start()
        rig.drain()
        release.join()
    else:
        # The next run copies in its own process and needs Spark only to stop the earlier writer.
        rig.spark = {}
        rig.drain()
        assert not writer.is_running()
    assert_recovered(rig, undisturbed, disturbed)


def test_run_finishes_its_batch_after_its_python_worker_dies(
    rig: Rig, hold: Hold, undisturbed: dict[str, Any], disturbed: str
) -> None:
    hold.arm()
    process = start_run(rig)
    writer = psutil.Process(hold.await_writer(lambda: process.poll() is not None))
    engine = engine_status(rig.home)
    assert engine is not None
    assert engine.pid in [parent.pid for parent in writer.parents()]
    writer.kill()
    finish(process)
    assert_recovered(rig, undisturbed, disturbed)


@pytest.mark.nightly
def test_run_starts_another_engine_after_its_engine_dies(
    rig: Rig, hold: Hold, undisturbed: dict[str, Any], disturbed: str, tmp_path: Path
) -> None:
    marker = tmp_path / Point.READ
    rig.settings()
    process = start_run(rig, (Point.READ, marker), environ=hold.environ)
    await_marker(process, marker)
    engine = engine_status(rig.home)
    assert engine is not None
    for engine_process in (*psutil.Process(engine.pid).children(recursive=True), psutil.Process(engine.pid)):
        engine_process.kill()
    marker.write_text("released")
    assert "Spark no longer responds" in finish(process)
    hold.note_engine(engine_status(rig.home))
    assert_recovered(rig, undisturbed, disturbed)


def test_killed_feed_run_folds_each_advisory_once(rig: Rig, tmp_path: Path) -> None:
    feed = rig.make("FEED", rig.target)
    advisories = [
        {"protocol": "io.choria.sr.v2.age_advisory", "event_id": f"{event}{n}", "replicator": "EAST", "value": f"n{n}"}
        | {"timestamp": 1_700_000_000 + seconds, "event": event}
        for seconds, event in enumerate(("new", "timeout"))
        for n in range(50)
    ]
    rig.publish(feed, [*(Sent(json.dumps(advisory).encode()) for advisory in advisories), Sent(b"nothing")], rig.target)
    rig.add_feed(feed, batch_messages=40)
    rig.settings()
    for point in (Point.READ, Point.COMMITTED):
        process = start_held(rig, point, tmp_path / point)
        await_marker(process, tmp_path / point)
        kill_run(process)
    rig.drain()
    assert rig.row("SELECT count(*) AS n, count(DISTINCT event_id) AS ids FROM global_advisories") == {
        "n": 100,
        "ids": 100,
    }
    assert rig.row("SELECT count(*) AS n FROM global_availability WHERE status = 'timeout'")["n"] == 50
    assert len(rig.rows("global_rejects")) == 1
    row = rig.row("replication")
    assert (row["seen_messages"], row["copied_messages"], row["parked_messages"]) == (101, 100, 1)


def test_killed_run_applies_a_request_of_an_operator_once(rig: Rig, tmp_path: Path) -> None:
    stream, feed, marker = rig.make(), rig.make("FEED"), tmp_path / "marker"
    publish_rounds(rig, stream, senders=2, rounds=1)
    configure(rig, stream, feed, rig.unique("COPY"))
    rig.drain()
    leave_request(rig.home / "sites" / SITE, "retire", stream, "n1")
    rig.publish(stream, [Sent(b'{"sender": "n0"}')])
    process = start_held(rig, Point.ANSWERING, marker)
    await_marker(process, marker)
    kill_run(process)
    # The node returns before the next run, which must not retire it again.
    rig.publish(stream, [Sent(b'{"sender": "n1"}')])
    rig.drain()
    rows = rig.rows("SELECT event, previous FROM node_advisories WHERE node = 'n1' ORDER BY transition")
    assert [tuple(row.values()) for row in rows] == [("new", None), ("expire", "up"), ("new", "retired")]
    assert len(rig.stored(feed)) == 4
