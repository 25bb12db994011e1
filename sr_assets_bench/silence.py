"""A fleet that falls silent: the time to commit and publish its timeouts and advisories, and the memory of the runs."""

from __future__ import annotations

import resource
import time
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.state.store import SiteState
from sr_assets.settings import load_settings
from sr_assets.stages.report import Stage
from sr_assets.stages.run import run_site
from sr_assets.stages.site import Site
from sr_assets_bench.rig import SITE

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from sr_assets_bench.rig import Bench

_STREAM: Final = "SILENT"
_ADVISED: Final = "SILENCE"
_MINUTE_NS: Final = 60_000_000_000
#: The number of nodes that continue to report.
_REPORTING: Final = 1_000


def measure_silence(bench: Bench, known: int) -> dict[str, Any]:
    """Measure a run in which all known nodes time out, a run that publishes their advisories, and a run without work.

    Each is a separate process, whose peak of resident memory counts.
    """
    bench.create(bench.source, _STREAM)
    bench.create(bench.source, _ADVISED)
    bench.publish(_STREAM, _REPORTING, _REPORTING, 512)
    tracked = {"inspect_field": "sender", "inspect_duration": "1h", "warn_duration": "30m"}
    advisory = {"subject": f"{_ADVISED}.%s.%v", "reliable": True}
    entry = {"stream": _STREAM, "target_subject_prefix": "silent", **tracked, "advisory": advisory}
    bench.run(bench.settings([entry]), _STREAM)
    _make_known(bench, known)
    quiet = _run_alone(bench, *Stage)
    _fall_silent(bench)
    swept, announced = _run_alone(bench, Stage.NODE_STATE), _run_alone(bench, *Stage)
    return {
        "nodes": known,
        "timeouts": swept["timeouts"],
        "advisories": announced["published"],
        "quiet_seconds": round(quiet["seconds"], 1),
        "swept_seconds": round(swept["seconds"], 1),
        "announced_seconds": round(announced["seconds"], 1),
        "quiet_peak_mib": quiet["most_kib"] >> 10,
        "more_mib": max(0, max(swept["most_kib"], announced["most_kib"]) - quiet["most_kib"]) >> 10,
    }


def _make_known(bench: Bench, count: int) -> None:
    """Write known nodes into the state like earlier runs; none is due within the half hour."""
    with SiteState(bench.home / "sites" / SITE) as state, state.transaction():
        state.connection.execute(
            """
            INSERT INTO nodes BY NAME SELECT $stream AS stream, 'known' || i || '.example.net' AS node,
                $now AS first_seen_ns, $now AS seen_ns, 1 AS sequence, $now AS copied_ns, 512 AS copied_bytes,
                'up' AS status, $now AS status_since_ns, 0 AS times_retired, 1 AS transition,
                $now + $warning AS deadline_ns FROM range($count) AS t(i)
            """,
            {"stream": _STREAM, "count": count, "now": time.time_ns(), "warning": 30 * _MINUTE_NS},
        )


def _fall_silent(bench: Bench) -> None:
    """Move the last sighting of every node of `_make_known` 45 to 46 minutes into the past."""
    with SiteState(bench.home / "sites" / SITE) as state, state.transaction():
        state.connection.execute(
            """
            UPDATE nodes SET seen_ns = seen_ns - earlier, deadline_ns = deadline_ns - earlier
            FROM (SELECT node AS silent, $least + hash(node) % $span AS earlier FROM nodes) WHERE node = silent
                AND node LIKE 'known%'
            """,
            {"least": 45 * _MINUTE_NS, "span": _MINUTE_NS},
        )


def _run_alone(bench: Bench, *stages: Stage) -> dict[str, Any]:
    """Drain the stream in a separate process."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(bench.file, frozenset(stages), there))
    process.start()
    there.close()
    try:
        figures: dict[str, Any] = here.recv()
    finally:
        process.join()
    return figures


def _run(file: Path, stages: frozenset[Stage], answer: Connection) -> None:
    started = time.perf_counter()
    with Site(load_settings(file, {}), SITE, owner="bench", run_id="bench") as site:
        report = run_site(site, {_STREAM: stages}, drain_only=True)[_STREAM]
    if report.failure:
        raise SystemExit(report.failure)
    answer.send(
        {
            "seconds": time.perf_counter() - started,
            "most_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "timeouts": report.events["timeout"],
            "published": report.published,
        }
    )
