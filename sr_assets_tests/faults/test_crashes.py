"""The crash matrix: a real `sr-assets run` is killed with SIGKILL at every named point, and the next one mends it.

Compared is with a run nobody disturbed: what stands in the target, and every table.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from sr_assets.adapters.faults import HOLD_VARIABLE, Point
from sr_assets.adapters.spark_engine import engine_status, stop_engine
from sr_assets.domain.messages import last_origin
from sr_assets_tests.rig import Rig, Sent

_SECONDS = 120.0
#: What no crash may change; when something was noticed or published is another matter.
TABLES = {
    "last_seen_nodes": "node, first_seen, last_seen, last_copied, last_sequence, copied_bytes, status, status_since",
    "node_availability": "node, status, status_since, first_seen, last_seen",
    "node_advisories": "node, event, event_time, seen, age_seconds, previous, transition, returned, "
    "published_at IS NULL AS waits",
    "node_snapshots": "node, sequence, stored_at, payload_bytes, payload",
    "replication": "next_sequence, seen_messages, copied_messages, copied_bytes, skipped_messages, gap_messages, "
    "parked_messages, no_sender_messages",
}


def command(rig: Rig, hold: str = "") -> subprocess.Popen[bytes]:
    """Start `sr-assets run --once`."""
    environ = {**os.environ, "SR_ASSETS_CONFIG": str(rig.home / "replication.yaml"), HOLD_VARIABLE: hold}
    environ.pop("DAGSTER_HOME", None)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "sr_assets", "run", "--once"],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    _, said = process.communicate(timeout=_SECONDS)
    assert process.returncode == 0, said.decode()


def await_marker(process: subprocess.Popen[bytes], marker: Path) -> None:
    """Wait until a run stands at its point."""
    deadline = time.monotonic() + _SECONDS
    while not marker.exists():
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline, f"{marker.name} was never reached"
        time.sleep(0.02)


def kill_when_held(process: subprocess.Popen[bytes], marker: Path) -> None:
    """Kill the whole run once it stands at its point; the engine, in a session of its own, lives on."""
    await_marker(process, marker)
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()
    process.wait()
    if process.stderr:
        process.stderr.close()


def outcome(rig: Rig, target: str) -> dict[str, Any]:
    """Return what a run left: the copies in order, the advisories per node, and every table."""
    copies = [(getattr(last_origin(copy.headers), "sequence", None), copy.payload) for copy in rig.copies(target)]
    tables = {table: rig.rows(f"SELECT {columns} FROM {table} ORDER BY ALL") for table, columns in TABLES.items()}
    return {"copies": copies, **tables}


def prepare(rig: Rig) -> tuple[str, str]:
    """Make a source with two rounds of 40 senders and one message without; returns its name and the feed's."""
    stream, feed = rig.make(), rig.make("FEED")
    bodies = [{"sender": f"n{n % 40}", "n": n, "fill": "x" * 200} for n in range(80)]
    rig.publish(stream, [*(Sent(json.dumps(body).encode()) for body in bodies), Sent(b"nobody")])
    return stream, feed


def configure(rig: Rig, stream: str, feed: str, target: str) -> None:
    rig.entries.clear()
    rig.add(
        stream,
        target_stream=target,
        target_subject_prefix=target,
        inspect_field="sender",
        inspect_duration="10h",
        batch_messages=50,
        advisory={"subject": f"{feed}.%s.%v", "reliable": True},
    )
    rig.settings()


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """What a run leaves that nobody disturbed, kept between the points: the same history gives the same answer."""
    return {}


# The one that needs an engine of its own comes last.
@pytest.mark.parametrize("point", tuple(sorted(Point, key=lambda point: point is Point.PUBLISHING)))
def test_a_run_killed_at_a_point_is_mended_by_the_next(
    rig: Rig, undisturbed: dict[str, Any], tmp_path: Path, point: Point
) -> None:
    if not undisturbed:
        stream, feed = prepare(rig)
        configure(rig, stream, feed, rig.unique("WHOLE"))
        finish(command(rig))
        undisturbed.update(stream=stream, outcome=outcome(rig, rig.entries[0]["target_stream"]))
        assert len(undisturbed["outcome"]["copies"]) == 41
        rig.__post_init__()
    feed, target = rig.make("FEED"), rig.unique("CUT")
    configure(rig, undisturbed["stream"], feed, target)
    marker = tmp_path / point
    if point is Point.PUBLISHING:
        # A writer is held, not the run: the engine has to know the point as well.
        stop_engine(rig.home)
    kill_when_held(command(rig, f"{point}:{marker}"), marker)
    finish(command(rig))
    assert outcome(rig, target) == undisturbed["outcome"]
    with_ids = {message.headers for message in rig.stored(feed)}
    assert len(with_ids) == len(rig.stored(feed)) == 40, "every advisory once within the dedupe window"
    if point is Point.PUBLISHING:
        stop_engine(rig.home)


def test_a_run_whose_engine_is_killed_fails_in_one_line_and_the_next_one_starts_another(
    rig: Rig, tmp_path: Path
) -> None:
    stream, feed = prepare(rig)
    configure(rig, stream, feed, rig.unique("CUT"))
    marker = tmp_path / Point.READ
    process = command(rig, f"{Point.READ}:{marker}")
    await_marker(process, marker)
    engine = engine_status(rig.home)
    assert engine is not None
    for one in (*psutil.Process(engine.pid).children(recursive=True), psutil.Process(engine.pid)):
        one.kill()
    marker.unlink()
    _, said = process.communicate(timeout=_SECONDS)
    assert process.returncode == 1
    assert b"the Spark engine does not answer" in said
    assert b"Traceback" not in said
    finish(command(rig))
    assert len(rig.copies(rig.entries[0]["target_stream"])) == 41


def test_a_run_killed_in_mid_feed_folds_nothing_twice_and_leaves_nothing_out(rig: Rig, tmp_path: Path) -> None:
    feed = rig.make("FEED", rig.target)
    told = [
        {"protocol": "io.choria.sr.v2.age_advisory", "event_id": f"{event}{n}", "replicator": "EAST", "value": f"n{n}"}
        | {"timestamp": 1_700_000_000 + place, "event": event}
        for place, event in enumerate(("new", "timeout"))
        for n in range(50)
    ]
    rig.publish(feed, [*(Sent(json.dumps(one).encode()) for one in told), Sent(b"nothing")], rig.target)
    rig.add_feed(feed, batch_messages=40)
    rig.settings()
    for point in (Point.READ, Point.COMMITTED):
        kill_when_held(command(rig, f"{point}:{tmp_path / point}"), tmp_path / point)
    finish(command(rig))
    assert rig.row("SELECT count(*) AS n, count(DISTINCT event_id) AS ids FROM global_advisories") == {
        "n": 100,
        "ids": 100,
    }
    assert rig.row("SELECT count(*) AS n FROM global_availability WHERE status = 'timeout'")["n"] == 50
    assert len(rig.rows("global_rejects")) == 1
    row = rig.row("replication")
    assert (row["seen_messages"], row["copied_messages"], row["parked_messages"]) == (101, 100, 1)
