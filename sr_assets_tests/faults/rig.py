"""`sr-assets run` in its own process: hold it at a checkpoint, kill it there, and compare the outcome."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import psutil

from sr_assets.adapters.crash_points import Point
from sr_assets.domain.messages import last_origin
from sr_assets.embedded.nats_server import NatsServer
from sr_assets_tests.faults.holding import hold_at
from sr_assets_tests.forks import Forked
from sr_assets_tests.rig import PATIENCE_SECONDS, Rig, Sent, leave_out_due_work, wait_until

#: Columns that no fault may change. Times of detection and publication may differ.
TABLES = {
    "last_seen_nodes": "node, first_seen, last_seen, last_copied, last_sequence, copied_bytes, status, status_since",
    "retired_nodes": "node, first_seen, last_seen, retired_at, times_retired",
    "node_availability": "node, status, status_since, first_seen, last_seen",
    "node_advisories": "node, event, event_time, seen, age_seconds, previous, transition, returned, "
    "published_at IS NULL AS waits",
    "node_snapshots": "node, sequence, stored_at, payload_bytes, payload",
    "replication": "next_sequence, seen_messages, copied_messages, copied_bytes, skipped_messages, too_old_messages, "
    "gap_messages, parked_messages, no_sender_messages, lag_messages, last_error",
    "gaps": "first_sequence, last_sequence, messages, reason",
    "parked_messages": "sequence, reason",
    "site_summary": "nodes, up, timeout, retired",
}


def start_run(
    rig: Rig,
    hold: tuple[Point | str, Path] | None = None,
    *,
    mode: str = "--once",
    log: IO[bytes] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> subprocess.Popen[bytes]:
    """Start `sr-assets run`, optionally held at a checkpoint (with its marker file) and with its output in a log.

    It leaves out the hourly and nightly jobs, which would take longer than the run itself.
    """
    leave_out_due_work(rig.home)
    environ = {
        **environ,
        "SR_ASSETS_CONFIG": str(rig.home / "replication.yaml"),
        **(hold_at(*hold, environ) if hold else {}),
    }
    for name in ("DAGSTER_HOME", "SR_ASSETS_HOME"):
        environ.pop(name, None)
    return Forked(
        [sys.executable, "-W", "ignore", "-m", "sr_assets", "run", mode],
        env=environ,
        stdout=log or subprocess.DEVNULL,
        stderr=log or subprocess.PIPE,
    )


def start_held(rig: Rig, point: Point, marker: Path) -> subprocess.Popen[str]:
    """Start what a site's child of `sr-assets run` does, held at a checkpoint; four times cheaper than the command."""
    return rig.start({**os.environ, **hold_at(point, marker)})


def finish(process: subprocess.Popen[bytes], code: int = 0) -> str:
    """Wait for a run to end; return its stderr, which must contain no traceback."""
    _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == code, stderr.decode()
    assert b"Traceback" not in stderr, stderr.decode()
    return stderr.decode()


def await_marker(process: subprocess.Popen[Any], marker: Path) -> int:
    """Wait until a run reaches its checkpoint; return the process id of the held process."""
    wait_until(lambda: process.poll() is not None or (marker.exists() and bool(marker.read_text())), marker.name)
    assert process.poll() is None, process.communicate()[1]
    return int(marker.read_text())


def kill_run(process: subprocess.Popen[Any]) -> None:
    """Kill a run. Its sites die with it; the engine survives, even if a site started it."""
    children = psutil.Process(process.pid).children()
    # The parent of the sites is the original of `operate/forking.py`.
    children += [site for child in children for site in child.children()]
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_SECONDS)
    assert not alive
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()


def outcome(rig: Rig, target: str, server: NatsServer | None = None) -> dict[str, Any]:
    """Return the outcome of a run: copies in order, advisories per node, and all tables."""
    stored = rig.stored(target, server or rig.target)
    copies = [(getattr(last_origin(copy.headers), "sequence", None), copy.payload) for copy in stored]
    tables = {table: rig.rows(f"SELECT {columns} FROM {table} ORDER BY ALL") for table, columns in TABLES.items()}
    return {"copies": copies, **tables}


def publish_rounds(rig: Rig, stream: str, senders: int, rounds: int, server: NatsServer | None = None) -> None:
    """Publish rounds with one message per sender, then a message without a sender."""
    bodies = [{"sender": f"n{n % senders}", "n": n, "fill": "x" * 200} for n in range(senders * rounds)]
    rig.publish(stream, [*(Sent(json.dumps(body).encode()) for body in bodies), Sent(b"no sender")], server)


def configure(rig: Rig, stream: str, feed: str, target: str, **entry: Any) -> None:
    """Configure a single sampled stream with advisories."""
    rig.entries.clear()
    rig.add(
        stream,
        **{
            "target_stream": target,
            "target_subject_prefix": target,
            "inspect_field": "sender",
            "inspect_duration": "10h",
            "batch_messages": 50,
            "advisory": {"subject": f"{feed}.%s.%v", "reliable": True},
            **entry,
        },
    )
    rig.settings()
