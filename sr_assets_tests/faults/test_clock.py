"""A local clock an hour off: every decision, advisory and table is the same as with a correct clock."""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import Any

import pytest

from sr_assets_tests.faults.rig import configure, outcome, publish_rounds
from sr_assets_tests.forks import Forked
from sr_assets_tests.rig import PATIENCE_SECONDS, SITE, Rig

#: A site's process as `sr-assets run` starts it, with all clocks except the monotonic one moved.
_SKEWED = """
import sys, time

offset_seconds, site, *labels = sys.argv[1:]
offset_seconds = int(offset_seconds)

def move(real, offset):
    # gRPC passes its deadlines to a C library, whose clock is not moved.
    return lambda: real() + offset * (not sys._getframe(1).f_globals.get("__name__", "").startswith("grpc"))

time.time, time.time_ns = move(time.time, offset_seconds), move(time.time_ns, offset_seconds * 10**9)
from sr_assets.operate.site_job import site_process
sys.exit(site_process(site, labels, once=True, bars=False))
"""


def run_skewed(rig: Rig, offset_seconds: int, code: int = 0) -> str:
    """Run the site in a process with a wrong clock; return its stderr."""
    instance = rig.home / "dagster"
    instance.mkdir(exist_ok=True)
    (instance / "dagster.yaml").write_bytes(files("sr_assets").joinpath("dagster.yaml").read_bytes())
    environ = {**os.environ, "SR_ASSETS_CONFIG": str(rig.home / "replication.yaml"), "DAGSTER_HOME": str(instance)}
    labels = [f"{SITE}/{entry['stream']}" for entry in rig.entries]
    command = [sys.executable, "-W", "ignore", "-c", _SKEWED, str(offset_seconds), SITE, *labels]
    process = Forked(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    # Its stdin stays open while it runs: the process ends with its parent.
    assert process.stderr is not None
    stderr = process.stderr.read()
    process.wait(PATIENCE_SECONDS)
    process.communicate()
    assert process.returncode == code, stderr
    return stderr


@pytest.mark.parametrize("offset_seconds", (3_600, pytest.param(-3_600, marks=pytest.mark.nightly)))
def test_local_clock_an_hour_off_changes_nothing(rig: Rig, offset_seconds: int) -> None:
    started = datetime.now(UTC)
    stream = rig.make()
    publish_rounds(rig, stream, senders=40, rounds=2)
    # Ages must be measured by the source's clock: an hour would change every result.
    entry = {"start_delta": "30m", "max_age": "30m", "inspect_duration": "40m", "warn_duration": "20m"}
    configure(rig, stream, rig.make("FEED"), rig.unique("RIGHT"), **entry)
    rig.drain()
    expected = outcome(rig, rig.entries[0]["target_stream"])
    assert len(expected["copies"]) == 41
    rig.__post_init__()
    configure(rig, stream, rig.make("FEED"), rig.unique("SKEWED"), **entry)
    run_skewed(rig, offset_seconds)
    assert outcome(rig, rig.entries[0]["target_stream"]) == expected
    # Nor if it cannot reach the source for its clock.
    rig.entries[0]["source_url"] = "nats://127.0.0.1:1"
    rig.settings()
    assert "127.0.0.1:1" in run_skewed(rig, offset_seconds, code=1)
    assert rig.row("replication")["last_error"] is not None
    assert_times_since(rig, started)


def assert_times_since(rig: Rig, started: datetime) -> None:
    """Assert that every time in every table is between the start of the test and now, except deadlines."""
    latest = datetime.now(UTC) + timedelta(seconds=5)
    times: list[tuple[str, Any]] = []
    for table in [row["name"] for row in rig.rows("SHOW TABLES")]:
        for row in rig.rows(table):
            times += [(f"{table}.{column}", value) for column, value in row.items() if isinstance(value, datetime)]
    assert {"replication.as_of", "snapshot_info.as_of", "node_advisories.detected_at"} <= {name for name, _ in times}
    ahead = timedelta(minutes=20)  # the next deadline; the end of a slot of latencies
    wrong = [
        (name, value)
        for name, value in times
        if not started - timedelta(seconds=5)
        <= value
        <= latest + (ahead if name.endswith(("deadline", "until")) else timedelta())
    ]
    assert not wrong
