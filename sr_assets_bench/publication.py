"""Publication of a site's tables next to other sites, and of a centre's tables after some advisories."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.published.fleet_file import Run
from sr_assets.adapters.published.publication import publication_folder
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.published.stream_status import PublishedStream
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets_bench.rig import SITE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sr_assets_bench.rig import Bench

_STREAM: Final = "NODES"
_ROUNDS: Final = 9
_NOW_NS: Final = 1_769_860_800_000_000_000
#: Numbers of other sites next to the measured site.
_OTHERS: Final = {"alone": 0, "beside_10": 10, "beside_100": 100}
_CHANGES: Final = 10
_NODES: Final = """
INSERT INTO nodes BY NAME SELECT $stream AS stream, 'node' || i || '.example.net' AS node, $now AS first_seen_ns,
    $now - i * 1000 AS seen_ns, i AS sequence, $now - i * 1000 AS copied_ns, 900 AS copied_bytes, 'up' AS status,
    $now AS status_since_ns, 0 AS times_retired, 1 AS transition, $now + i * 1000 AS deadline_ns FROM range($count) AS t (i)
"""
_TRANSITIONS: Final = """
INSERT INTO transitions BY NAME SELECT uuid()::VARCHAR AS event_id, $stream AS stream, 'node' || i || '.example.net' AS node,
    'new' AS event, $now - i * 1000 AS event_ns, $now AS detected_ns, 1 AS transition, false AS outbox
    FROM range($count) AS t (i)
"""
#: A month of advisories: of all nodes with `first` 0, else a second advisory of some nodes.
_HEARD: Final = """
INSERT INTO {table} BY NAME SELECT $stream AS feed, 'EAST' AS replicator, 'site' || i % 100 AS name, 'S' AS stream,
    'node' || i AS node, 1 AS epoch_ns, 1 + $first AS transition, received_ns AS event_ns, 0 AS event_code, 'ours' AS origin,
    received_ns {event_id} FROM (SELECT i, $now + CASE WHEN $first > 0 THEN $first ELSE -i * 2592000000 END AS received_ns
        FROM range($count) AS t (i))
"""


def measure_publication(bench: Bench, nodes: int) -> dict[str, Any]:
    """Measure the publication of a site next to 0, 10 and 100 others of its size, and of a centre with 100 times as
    many nodes.
    """
    homes = {beside: bench.home / beside for beside in _OTHERS}
    figures: dict[str, list[float]] = {beside: [] for beside in _OTHERS}
    with SiteState(bench.home / "measured") as state:
        with state.transaction():
            state.save_stream(StreamState(_STREAM, 1, nodes, watermark_ns=_NOW_NS, as_of_ns=_NOW_NS))
            for statement in (_NODES, _TRANSITIONS):
                state.connection.execute(statement, {"stream": _STREAM, "now": _NOW_NS, "count": nodes})
        others = {beside: [f"other{number}" for number in range(count)] for beside, count in _OTHERS.items()}
        for beside, home in homes.items():
            for number, other in enumerate(others[beside]):
                # The publication of the last one shows all of them.
                last = number + 1 == len(others[beside])
                _publish(home, other, state, others[beside] if last else [other])
        for _ in range(_ROUNDS):
            for beside, home in homes.items():
                figures[beside].append(_publish(home, SITE, state, [SITE, *others[beside]]))
    alone, beside_10, beside_100 = (statistics.median(figures[beside]) for beside in _OTHERS)
    return {
        "nodes": nodes,
        "alone_seconds": round(alone, 3),
        "beside_10_times": round(beside_10 / alone, 2),
        "beside_100_times": round(beside_100 / alone, 2),
        **_measure_centre(bench.home / "centre", 100 * nodes),
    }


def _measure_centre(home: Path, nodes: int) -> dict[str, Any]:
    """Measure a centre's publication after advisories of ten of its nodes."""
    seconds, written = [], []
    with SiteState(home / "sites" / SITE) as state:
        with state.transaction():
            state.save_stream(StreamState(_STREAM, 1, nodes, watermark_ns=_NOW_NS, as_of_ns=_NOW_NS))
        _hear(state, nodes, 0)
        whole_seconds = _publish(home, SITE, state, [SITE])
        before = _files(home)
        for number in range(1, _ROUNDS + 1):
            _hear(state, _CHANGES, number)
            seconds.append(_publish(home, SITE, state, [SITE]))
            after = _files(home)
            written.append(sum(size for name, size in after.items() if name not in before))
            before = after
    return {
        "centre_nodes": nodes,
        "centre_whole_seconds": round(whole_seconds, 2),
        "centre_changes": _CHANGES,
        "centre_seconds": round(statistics.median(seconds), 3),
        "centre_written_kib": round(statistics.median(written) / 1024),
    }


def _hear(state: SiteState, count: int, first: int) -> None:
    """Fold one advisory of each of `nodes` nodes into the global view; with `first` above 0 they are known."""
    values = {"stream": _STREAM, "now": _NOW_NS, "count": count, "first": first}
    with state.transaction():
        if first:
            state.connection.execute(
                "DELETE FROM global_nodes WHERE node IN (SELECT 'node' || i FROM range(?) AS t (i))", [count]
            )
        state.connection.execute(_HEARD.format(table="global_nodes", event_id=""), values)
        state.connection.execute(
            _HEARD.format(table="global_history", event_id=", uuid()::VARCHAR AS event_id"), values
        )


def _files(home: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in publication_folder(home, SITE).iterdir()}


def _publish(home: Path, name: str, state: SiteState, sites: Sequence[str]) -> float:
    """Publish a state as a site's; return the seconds."""
    started = time.perf_counter()
    publish_site(
        home, name, state, [PublishedStream(_STREAM, "T", tracked=True)], sites=sites, run=Run(_NOW_NS, "bench")
    )
    return time.perf_counter() - started
