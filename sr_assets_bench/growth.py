"""Growth curves: time and memory of a run, a publication and `nodes` for one number of known nodes.

Each step is a process of its own, whose peak of resident memory counts. As a program this module is such a process:
`python -m sr_assets_bench.growth STEP CONFIGURATION STATE NODES`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sr_assets_bench.rig import Bench

_STREAM: Final = "KNOWN"
#: So few messages that a run needs no Spark.
_MESSAGES: Final = 900
_CHANGES: Final = 10
#: Rows of a transaction that fills the state.
_FILLED: Final = 1_000_000
_POLL_SECONDS: Final = 0.01
_NODES: Final = """
INSERT INTO nodes BY NAME SELECT $stream AS stream, 'known' || i || '.example.net' AS node, $now - i AS first_seen_ns,
    $now AS seen_ns, 1 AS sequence, $now AS copied_ns, 1000 AS copied_bytes, 'up' AS status, $now AS status_since_ns,
    0 AS times_retired, 1 AS transition, $now + $hour AS deadline_ns FROM range($first, $after) AS t(i)
"""
_TRANSITIONS: Final = """
INSERT INTO transitions BY NAME SELECT uuid()::VARCHAR AS event_id, $stream AS stream,
    'known' || i || '.example.net' AS node, 'new' AS event, $now AS event_ns, $now - $old AS detected_ns, $now AS seen_ns,
    0 AS age_ns, 1 AS sequence, 1 AS transition, false AS late, false AS returned, false AS outbox
FROM range($first, $after) AS t(i)
"""
_CHANGED: Final = "UPDATE nodes SET seen_ns = $now, sequence = sequence + 1 WHERE node IN $nodes"


def measure_growth(bench: Bench, nodes: int) -> dict[str, Any]:
    """Measure each step with `nodes` known nodes, each with its state and its first transition; none is due."""
    bench.create(bench.source, _STREAM)
    bench.publish(_STREAM, _MESSAGES, _MESSAGES, 1_000)
    times = {"inspect_field": "sender", "inspect_duration": "12h", "warn_duration": "6h"}
    bench.run(bench.settings([{"stream": _STREAM, "target_subject_prefix": "known", **times}]), _STREAM)
    figures: dict[str, Any] = {"nodes": nodes}
    _measure(bench, nodes, "fill")
    return figures | measure_steps(bench, nodes)


def measure_steps(bench: Bench, nodes: int) -> dict[str, Any]:
    """Measure each step on a filled state."""
    figures: dict[str, Any] = {}
    for step in ("publish_all", "publish_few", "run_idle", "run_900"):
        if step == "run_900":
            bench.publish(_STREAM, _MESSAGES, _MESSAGES, 1_000)
        figures |= _measure(bench, nodes, step)
    return figures | _measured(bench, "nodes", ["-m", "sr_assets", "nodes", "--format", "json"])


def _measure(bench: Bench, nodes: int, step: str) -> dict[str, Any]:
    words = [step, str(bench.file), str(bench.home), str(nodes)]
    return _measured(bench, step, ["-m", "sr_assets_bench.growth", *words])


def _measured(bench: Bench, step: str, words: Sequence[str]) -> dict[str, Any]:
    """Run a Python program without its output; return its seconds, its CPU seconds and its peak memory.

    The kernel's `VmHWM` counts from the program's beginning, `ru_maxrss` would count this process too.
    """
    started, most = time.perf_counter(), 0
    with subprocess.Popen([sys.executable, *words], env=bench.environ, stdout=subprocess.DEVNULL) as child:
        while True:
            ended, status, used = os.wait4(child.pid, os.WNOHANG)
            if ended:
                break
            most = max(most, _peak_kib(child.pid))
            time.sleep(_POLL_SECONDS)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{step}: exit code {child.returncode}")
    return {
        f"{step}_seconds": round(time.perf_counter() - started, 2),
        f"{step}_cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        f"{step}_peak_mib": most >> 10,
    }


def _peak_kib(pid: int) -> int:
    line = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(line[1]) if line else 0


def _main() -> None:
    step, file, home, nodes = sys.argv[1:]
    if step.startswith("run"):
        _run(Path(file))
    else:
        _change(Path(home), step, int(nodes))


def _run(file: Path) -> None:
    """Drain the stream."""
    from sr_assets.settings import load_settings
    from sr_assets.stages.report import Stage
    from sr_assets.stages.run import run_site
    from sr_assets.stages.site import Site
    from sr_assets_bench.rig import SITE

    with Site(load_settings(file, {}), SITE, owner="bench", run_id="bench") as site:
        report = run_site(site, {_STREAM: frozenset(Stage)}, drain_only=True)[_STREAM]
    if report.failure:
        raise SystemExit(report.failure)


def _change(home: Path, step: str, nodes: int) -> None:
    """Change the state, or publish it."""
    from sr_assets.adapters.published.fleet_file import Run
    from sr_assets.adapters.published.site_publishing import publish_site
    from sr_assets.adapters.published.stream_status import PublishedStream
    from sr_assets.adapters.state.store import SiteState
    from sr_assets_bench.rig import SITE

    now_ns, hour_ns = time.time_ns(), 3_600_000_000_000
    with SiteState(home / "sites" / SITE) as state:
        if step == "fill":
            for first in range(0, nodes - _MESSAGES, _FILLED):
                row = {
                    "stream": _STREAM,
                    "now": now_ns,
                    "first": first,
                    "after": min(first + _FILLED, nodes - _MESSAGES),
                }
                with state.transaction():
                    state.connection.execute(_NODES, {**row, "hour": 6 * hour_ns})
                    state.connection.execute(_TRANSITIONS, {**row, "old": 2 * hour_ns})
        elif step == "publish_few":
            changed = [f"known{number}.example.net" for number in range(_CHANGES)]
            with state.transaction():
                state.connection.execute(_CHANGED, {"now": now_ns, "nodes": changed})
        if step.startswith("publish"):
            streams = [PublishedStream(_STREAM, _STREAM, tracked=True)]
            publish_site(home, SITE, state, streams, sites=[SITE], run=Run(now_ns, "bench"))


if __name__ == "__main__":
    _main()
