"""Our own clock, an hour off: every decision, advisory and table is as with a right one."""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import Any

import pytest

from sr_assets_tests.faults.rig import configure, outcome, publish_rounds
from sr_assets_tests.rig import PATIENCE_SECONDS, SITE, Rig

#: What `sr-assets run` lets a site's process do, with every clock of its own but the monotonic one moved.
_SKEWED = """
import runpy, sys, time

offset_seconds = int(sys.argv.pop(1))

def move(real, offset):
    # gRPC hands its deadlines to a library of C, whose clock is not moved.
    return lambda: real() + offset * (not sys._getframe(1).f_globals.get("__name__", "").startswith("grpc"))

time.time, time.time_ns = move(time.time, offset_seconds), move(time.time_ns, offset_seconds * 10**9)
sys.argv[0] = "operate"
runpy.run_module("sr_assets.operate", run_name="__main__")
"""


def run_skewed(rig: Rig, offset_seconds: int, code: int = 0) -> str:
    """Work the site in a process whose clock is off; returns what it said on stderr."""
    instance = rig.home / "dagster"
    instance.mkdir(exist_ok=True)
    (instance / "dagster.yaml").write_bytes(files("sr_assets").joinpath("dagster.yaml").read_bytes())
    environ = {**os.environ, "SR_ASSETS_CONFIG": str(rig.home / "replication.yaml"), "DAGSTER_HOME": str(instance)}
    labels = [part for entry in rig.entries for part in ("--stream", f"{SITE}/{entry['stream']}")]
    command = [sys.executable, "-W", "ignore", "-c", _SKEWED, str(offset_seconds), SITE, *labels]
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    # Its stdin stays open for as long as it works: it ends with its parent.
    assert process.stderr is not None
    said = process.stderr.read()
    process.wait(PATIENCE_SECONDS)
    process.communicate()
    assert process.returncode == code, said
    return said


@pytest.mark.parametrize("offset_seconds", (3_600, -3_600))
def test_a_clock_that_is_an_hour_off_changes_nothing(rig: Rig, offset_seconds: int) -> None:
    began = datetime.now(UTC)
    stream = rig.make()
    publish_rounds(rig, stream, senders=40, rounds=2)
    # Whatever asks "how long ago" must ask the source: an hour would make the difference of everything.
    timed = {"start_delta": "30m", "max_age": "30m", "inspect_duration": "40m", "warn_duration": "20m"}
    configure(rig, stream, rig.make("FEED"), rig.unique("RIGHT"), **timed)
    rig.drain()
    right = outcome(rig, rig.entries[0]["target_stream"])
    assert len(right["copies"]) == 41
    rig.__post_init__()
    configure(rig, stream, rig.make("FEED"), rig.unique("SKEWED"), **timed)
    run_skewed(rig, offset_seconds)
    assert outcome(rig, rig.entries[0]["target_stream"]) == right
    # Nor does one that finds nobody to ask the time.
    rig.entries[0]["source_url"] = "nats://127.0.0.1:1"
    rig.settings()
    assert "127.0.0.1:1" in run_skewed(rig, offset_seconds, code=1)
    assert rig.row("replication")["last_error"] is not None
    assert_times_within(rig, began)


def assert_times_within(rig: Rig, began: datetime) -> None:
    """See that every time in every table lies between the beginning of the test and now, or where deadlines lie."""
    latest = datetime.now(UTC) + timedelta(seconds=5)
    times: list[tuple[str, Any]] = []
    for table in [row["name"] for row in rig.rows("SHOW TABLES")]:
        for row in rig.rows(table):
            times += [(f"{table}.{column}", value) for column, value in row.items() if isinstance(value, datetime)]
    assert {"replication.as_of", "snapshot_info.as_of", "node_advisories.detected_at"} <= {name for name, _ in times}
    ahead = timedelta(minutes=20)  # the next deadline
    wrong = [
        (name, value)
        for name, value in times
        if not began - timedelta(seconds=5) <= value <= latest + (ahead if name.endswith("deadline") else timedelta())
    ]
    assert not wrong
