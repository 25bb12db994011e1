"""The sweep of a stream: its portions, and a kill between two of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sr_assets.adapters import checkpoints
from sr_assets.adapters.checkpoints import Point
from sr_assets.adapters.published.index import Run
from sr_assets.adapters.published.publishing import PublishedStream, publish_site
from sr_assets.adapters.published.reading import open_fleet, read_rows
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.tracking.rows import node_row, node_table
from sr_assets.domain.tracking.rules import NodeState, Policy, Status
from sr_assets.settings import StreamSettings, load_settings
from sr_assets.stages.report import StreamReport
from sr_assets.stages.tracking.node_state import sweep_due

if TYPE_CHECKING:
    from pathlib import Path

SECOND = 1_000_000_000
POLICY = Policy(3_600 * SECOND, 1_800 * SECOND)
NOW_NS = 20_000 * SECOND
BLIND = BlindSpans(((15_000 * SECOND, 15_600 * SECOND),))
#: Seconds, on both sides of each limit, with and without the blind span.
SILENCES = (0, 1_799, 1_800, 1_801, 2_401, 3_599, 3_600, 3_601, 4_200, 4_201, 9_000)


@pytest.fixture
def stream(tmp_path: Path) -> StreamSettings:
    entry = {"stream": "REG", "source_url": "nats://a:1", "target_url": "nats://b:1", "target_stream": "COPY"}
    tracked = {"inspect_field": "sender", "inspect_duration": "1h", "advisory": {"subject": "adv.%s.%v"}}
    file = tmp_path / "replication.yaml"
    file.write_text(json.dumps({"name": "london", "streams": [{**entry, **tracked}]}))
    return load_settings(file, {"SR_ASSETS_HOME": str(tmp_path)}).streams[0]


def fill(state: SiteState) -> int:
    """Write a fleet into a state, with equal deadlines of some nodes; return the number of due nodes."""
    fleet = {
        f"web{number}": NodeState(0, NOW_NS - silence * SECOND, number, 5, 5, status, 0, None, 0, number + 1)
        for number, (silence, status) in enumerate(
            (silence, status) for status in (Status.UP, Status.TIMEOUT) for silence in (*SILENCES, 2_401, 9_000)
        )
    }
    # These deadlines ignore the blind span, so some nodes are swept too early and stay unchanged.
    table = node_table([node_row(POLICY, name, node, BlindSpans()) for name, node in fleet.items()])
    with state.transaction():
        state.save_stream(StreamState("REG", 7, 99, epoch_ns=5, watermark_ns=NOW_NS, planned_ns=NOW_NS))
        state.nodes("REG").merge(table)
        state.nodes("REG").save_blind_spans(BLIND.spans)
    due: int = state.nodes("REG").due(NOW_NS, 1_000).num_rows
    return due


def committed(state: SiteState) -> list[list[tuple[Any, ...]]]:
    """Return the transitions in the order of writing, and the nodes."""
    queries = ("SELECT * FROM transitions ORDER BY rowid", "SELECT * FROM nodes ORDER BY node")
    return [state.connection.execute(query).fetchall() for query in queries]


def sweep_all(state: SiteState, stream: StreamSettings, at_once: int) -> StreamReport:
    assert stream.policy is not None
    report = StreamReport(stream)
    sweep_due(state, stream, stream.policy, report, at_once)
    return report


def test_sweep_commits_the_same_rows_with_every_portion_size(tmp_path: Path, stream: StreamSettings) -> None:
    with SiteState(tmp_path / "whole") as state:
        due = fill(state)
        report = sweep_all(state, stream, due)
        whole = committed(state)
        assert report.swept == due == 15
        assert report.events.total() == len(whole[0]) > due / 2
    for at_once in range(1, due):
        with SiteState(tmp_path / str(at_once)) as state:
            fill(state)
            assert sweep_all(state, stream, at_once).events == report.events
            assert committed(state) == whole
            assert not sweep_all(state, stream, at_once).swept


@pytest.mark.parametrize("portions", (1, 3))
def test_killed_sweep_publishes_committed_portions_and_continues(
    portions: int, tmp_path: Path, stream: StreamSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(point: Point) -> None:
        passed.append(point)
        if passed == [Point.SWEPT] * portions:
            raise KeyboardInterrupt

    with SiteState(tmp_path / "whole") as state:
        due = fill(state)
        sweep_all(state, stream, due)
        whole = committed(state)
    passed: list[Point] = []
    monkeypatch.setattr(checkpoints, "hook", kill)
    with SiteState(tmp_path / "sites" / "london") as state:
        fill(state)
        with pytest.raises(KeyboardInterrupt):
            sweep_all(state, stream, 4)
    monkeypatch.setattr(checkpoints, "hook", None)
    with SiteState(tmp_path / "sites" / "london") as state:
        half = committed(state)[0]
        assert half == whole[0][: len(half)]
        assert 0 < len(half) < len(whole[0])
        assert state.outbox("REG").size() == len(half)
        published = [PublishedStream("REG", "COPY", tracked=True)]
        publish_site(tmp_path, "london", state, published, sites=["london"], run=Run(NOW_NS, "test"))
        with open_fleet(tmp_path) as fleet:
            advised, silent = (
                read_rows(fleet, query)
                for query in (
                    "SELECT node, max_by(event, transition) AS event FROM node_advisories GROUP BY node ORDER BY node",
                    """
                    SELECT node, if(status = 'retired', 'expire', status) AS event FROM node_availability
                    WHERE node IN (SELECT node FROM node_advisories) ORDER BY node
                    """,
                )
            )
        assert advised == silent
        assert sweep_all(state, stream, 4).swept == due - 4 * portions
        assert committed(state) == whole
