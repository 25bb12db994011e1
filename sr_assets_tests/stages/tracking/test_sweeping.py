"""Time passes for many nodes at once: as for one after the other, whatever the portions, and after a kill between them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters import checkpoints
from sr_assets.adapters.checkpoints import Point
from sr_assets.adapters.published.index import Run
from sr_assets.adapters.published.publishing import PublishedStream, publish_site
from sr_assets.adapters.published.reading import open_fleet, read_rows
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.tracking import NodeState, Policy, Status, sweep
from sr_assets.settings import StreamSettings, load_settings
from sr_assets.stages.report import StreamReport
from sr_assets.stages.tracking.fold import folded_table, transition_row
from sr_assets.stages.tracking.node_rows import node_row, node_table
from sr_assets.stages.tracking.sweeping import sweep_due, sweep_nodes

if TYPE_CHECKING:
    from pathlib import Path

SECOND = 1_000_000_000
POLICY = Policy(3_600 * SECOND, 1_800 * SECOND)
NOW_NS = 20_000 * SECOND
BLIND = BlindSpans(((15_000 * SECOND, 15_600 * SECOND),))
#: Silences in seconds, on both sides of each limit, with the blind span and without.
SILENCES = (0, 1_799, 1_800, 1_801, 2_401, 3_599, 3_600, 3_601, 4_200, 4_201, 9_000)

states = st.builds(
    lambda silence, status, since, copied: NodeState(
        SECOND,
        NOW_NS - silence * SECOND,
        7,
        copied,
        copied,
        status,
        NOW_NS - min(since, silence) * SECOND,
        NOW_NS if status is Status.RETIRED else None,
        int(status is Status.RETIRED),
        3,
    ),
    st.sampled_from(SILENCES),
    st.sampled_from(Status),
    st.sampled_from(SILENCES),
    st.sampled_from([None, 50]),
)


@given(st.lists(states, min_size=1, max_size=20), st.just(BlindSpans()) | st.just(BLIND))
def test_many_nodes_are_swept_as_the_rule_sweeps_each(nodes: list[NodeState], blind: BlindSpans) -> None:
    named = {f"web{number}": state for number, state in enumerate(nodes)}
    swept, happened = {}, []
    for name, state in named.items():
        swept[name], transitions = sweep(POLICY, state, NOW_NS, blind)
        happened += [transition_row(name, transition) for transition in transitions]
    before, after = (
        node_table([node_row(POLICY, name, state, blind) for name, state in each.items()]) for each in (named, swept)
    )
    assert sweep_nodes(POLICY, before.drop(["deadline_ns"]), NOW_NS, blind) == (after, folded_table(happened))


@pytest.fixture
def stream(tmp_path: Path) -> StreamSettings:
    entry = {"stream": "REG", "source_url": "nats://a:1", "target_url": "nats://b:1", "target_stream": "COPY"}
    tracked = {"inspect_field": "sender", "inspect_duration": "1h", "advisory": {"subject": "adv.%s.%v"}}
    file = tmp_path / "replication.yaml"
    file.write_text(json.dumps({"name": "london", "streams": [{**entry, **tracked}]}))
    return load_settings(file, {"SR_ASSETS_HOME": str(tmp_path)}).streams[0]


def fill(state: SiteState) -> int:
    """Write a fleet into a state, some nodes with one deadline; returns how many of them are due."""
    fleet = {
        f"web{number}": NodeState(0, NOW_NS - silence * SECOND, number, 5, 5, status, 0, None, 0, number + 1)
        for number, (silence, status) in enumerate(
            (silence, status) for status in (Status.UP, Status.TIMEOUT) for silence in (*SILENCES, 2_401, 9_000)
        )
    }
    # As they were written before the span was known: some are swept too early, and nothing happens to them.
    table = node_table([node_row(POLICY, name, node, BlindSpans()) for name, node in fleet.items()])
    with state.transaction():
        state.save_stream(StreamState("REG", 7, 99, epoch_ns=5, watermark_ns=NOW_NS, planned_ns=NOW_NS))
        state.nodes("REG").merge(table)
        state.nodes("REG").save_blind_spans(BLIND.spans)
    due: int = state.nodes("REG").due(NOW_NS, 1_000).num_rows
    return due


def committed(state: SiteState) -> list[list[tuple[Any, ...]]]:
    """Return the transitions in the order in which they were written, and the nodes."""
    queries = ("SELECT * FROM transitions ORDER BY rowid", "SELECT * FROM nodes ORDER BY node")
    return [state.connection.execute(query).fetchall() for query in queries]


def sweep_all(state: SiteState, stream: StreamSettings, at_once: int) -> StreamReport:
    assert stream.policy is not None
    report = StreamReport(stream)
    sweep_due(state, stream, stream.policy, report, at_once)
    return report


def test_portions_of_any_size_commit_the_same_in_the_same_order(tmp_path: Path, stream: StreamSettings) -> None:
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
def test_a_sweep_that_was_killed_between_portions_goes_on_and_the_tables_have_what_was_committed(
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
