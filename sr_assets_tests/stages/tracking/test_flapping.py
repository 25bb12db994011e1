"""Flapping nodes and `recover_after`: what is announced, for every cut of a history."""

import itertools
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters.range_rows import Advisories
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.advisories import encode_node_event
from sr_assets.domain.errors import ConfigurationError
from sr_assets.domain.messages import Message as Stored
from sr_assets.domain.received import STATUS
from sr_assets.domain.tracking.rows import folded_table, transition_row
from sr_assets.domain.tracking.rules import Event, Status, Transition
from sr_assets.stages.report import StreamReport
from sr_assets.stages.tracking.announcing import decide_announcements
from sr_assets.stages.tracking.batch_rows import add_transitions
from sr_assets.stages.tracking.node_advisories import advisory_body
from sr_assets_tests.announcing import BEGIN_NS, SECOND, at, configured, fold, history, outbox, site_events
from sr_assets_tests.event_schema import unknown_or_wrong
from sr_assets_tests.examples import one_in
from sr_assets_tests.naive_rules import Report, announced_with_flapping
from sr_assets_tests.rig import SITE, Rig
from sr_assets_tests.rig import Sent as Message

NODES = ("web1", "db1")
END = 260


def node_events(state: SiteState) -> list[Report]:
    query = "SELECT node, event, (event_ns - ?) // ?, transitions FROM node_events ORDER BY event_ns, node"
    return state.connection.execute(query, [BEGIN_NS, SECOND]).fetchall()


@st.composite
def restless(draw: st.DrawFn) -> list[tuple[int, str]]:
    """Nodes that are silent for longer than the warning again and again."""
    sightings = []
    for node in NODES:
        second = draw(st.integers(0, 9))
        while second < 200:
            sightings.append((second, node))
            second += draw(st.sampled_from((2, 5, 11, 12, 13, 15, 22, 40)))
    return sorted(sightings)


@one_in(25)
@given(
    restless(),
    st.sampled_from((0, 3, 5)),
    st.sampled_from((25, 50)),
    st.sampled_from((0, 4, 30)),
    st.lists(st.integers(0, 250), max_size=5, unique=True),
)
def test_flapping_announces_the_same_for_every_cut(
    sightings: list[tuple[int, str]], most: int, within: int, recover_after: int, cuts: list[int]
) -> None:
    keys = {"flapping": {"transitions": most, "within": f"{within}s"}} if most else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stream = configured(folder, recover_after=f"{recover_after}s", **keys)
        for number, chosen in enumerate((cuts, ())):
            with SiteState(folder / str(number)) as state:
                fold(state, stream, sightings, chosen, END)
                announced, reports = announced_with_flapping(history(state), most, within, recover_after, END)
                assert node_events(state) == reports
                assert outbox(state) == announced


@one_in(25)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.sampled_from((None, "quiet"))), min_size=3, max_size=20),
    st.lists(st.integers(0, 250), max_size=5, unique=True),
)
def test_flapping_counts_transitions_of_a_class_without_announcements(
    steps: list[tuple[int, str | None]], cuts: list[int]
) -> None:
    quiet = {"name": "quiet", "field": "kind", "value": "quiet", "announce": False}
    seconds = list(itertools.accumulate(step for step, _ in steps))
    end, results = seconds[-1] + 40, []
    with tempfile.TemporaryDirectory() as name:
        stream = configured(Path(name), flapping={"transitions": 3, "within": "25s"}, classes=[quiet])
        for number, chosen in enumerate((cuts, ())):
            with SiteState(Path(name) / str(number)) as state:
                row, first = StreamState("REG", 1, 1, epoch_ns=1), 0
                for cut in (*sorted(cut for cut in chosen if cut < end), end):
                    row.watermark_ns = BEGIN_NS + cut * SECOND
                    own = [at for at, second in enumerate(seconds) if first <= second < cut]
                    rows = [transition_row("web1", back_and_forth(at, seconds[at]), steps[at][1]) for at in own]
                    with state.transaction():
                        state.save_stream(row)
                        add_transitions(state, stream, row, folded_table(rows), StreamReport(stream))
                    decide_announcements(state, stream, row)
                    first = cut
                told = {second for _, _, second in outbox(state)}
                results.append((told, node_events(state)))
    assert results[0] == results[1]
    assert told <= {second for second, (_, kind) in zip(seconds, steps, strict=True) if kind is None}
    for _, event, second, _ in results[0][1]:
        # No transition happened for `within`, whatever its class.
        assert event == "flapping" or not [each for each in seconds if second - 25 < each <= second]
        assert event == "flapping" or second - 25 in seconds


def back_and_forth(at: int, second: int) -> Transition:
    """Return a node's transition: its silences and returns alternate."""
    event_ns, silent = BEGIN_NS + second * SECOND, at % 2 == 0
    event, previous = (Event.TIMEOUT, Status.UP) if silent else (Event.RECOVER, Status.TIMEOUT)
    return Transition(event, event_ns, event_ns, 0, at, previous, at + 1, returned=False, outage_ns=None)


@one_in(25)
@given(
    restless(),
    st.tuples(st.integers(0, 150), st.integers(1, 60)),
    st.sampled_from(("*", "web*")),
    st.sampled_from((2, 4)),
    st.sampled_from((0, 5)),
    st.lists(st.integers(0, 250), min_size=1, max_size=5, unique=True),
)
def test_rules_together_announce_the_same_for_every_cut(
    sightings: list[tuple[int, str]],
    window: tuple[int, int],
    match: str,
    most: int,
    recover_after: int,
    cuts: list[int],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, (begin, length) = Path(name), window
        stream = configured(
            folder,
            {"match": match, "from": at(begin), "to": at(begin + length)},
            outage_guard={"partial": "60%", "min_nodes": 2, "quiet": "4s", "hold": "40s"},
            flapping={"transitions": most, "within": "30s"},
            recover_after=f"{recover_after}s",
        )
        results = []
        for number, chosen in enumerate((cuts, ())):
            with SiteState(folder / str(number)) as state:
                fold(state, stream, sightings, chosen, END)
                query = "SELECT event_id, suppressed_by, held_by, withheld FROM transitions ORDER BY ALL"
                decisions = state.connection.execute(query).fetchall()
                results.append((outbox(state), site_events(state), node_events(state), decisions))
        assert results[0] == results[1]


@one_in(25)
@given(restless(), st.lists(st.integers(0, 250), max_size=3, unique=True), st.integers(60, 250), st.randoms())
def test_centre_shows_the_status_of_nodes_that_have_settled(
    sightings: list[tuple[int, str]], cuts: list[int], end: int, chance: random.Random
) -> None:
    with tempfile.TemporaryDirectory() as name, SiteState(Path(name) / "state") as state:
        stream = configured(Path(name), flapping={"transitions": 3, "within": "25s"})
        fold(state, stream, [each for each in sightings if each[0] < end], [cut for cut in cuts if cut < end], end)
        bodies = [advisory_body(stream, row) for row in state.outbox("REG").unpublished(999)]
        bodies += [
            encode_node_event(event, replicator="london", name="london")
            for event in state.undecided("REG").unpublished()
        ]
        chance.shuffle(bodies)
        stored = [Stored(1 + at, BEGIN_NS + at, "adv", b"", body) for at, body in enumerate(bodies)]
        state.global_tables.fold("ADV", pa.Table.from_batches([Advisories().converter()(stored)]))
        # The rules of this second and the flapping nodes are not decided yet.
        query = """
            SELECT node, status FROM nodes WHERE node NOT IN (SELECT node FROM flapping_nodes)
                AND node NOT IN (SELECT node FROM transitions WHERE due_ns IS NOT NULL) ORDER BY node
            """
        settled = dict(state.connection.execute(query).fetchall())
        shown = f"SELECT node, {[status.value for status in STATUS]}[event_code + 1] FROM global_nodes"
        assert {
            node: status for node, status in state.connection.execute(shown).fetchall() if node in settled
        } == settled


@pytest.mark.parametrize("cuts", ((), range(5, 90, 5)), ids=("one jump", "five seconds"))
def test_return_of_a_held_node_that_had_settled_is_not_announced(tmp_path: Path, cuts: Sequence[int]) -> None:
    guard = {"partial": "60%", "min_nodes": 2, "quiet": "4s"}
    stream = configured(tmp_path, outage_guard=guard, flapping={"transitions": 2, "within": "15s"})
    seconds = {"web1": (0, *range(12, 61, 3), *range(75, 90, 3)), "db1": (*range(0, 61, 3), *range(75, 90, 3))}
    with SiteState(tmp_path) as state:
        fold(state, stream, sorted((at, node) for node, times in seconds.items() for at in times), cuts, 90)
        assert [event[:2] for event in site_events(state)] == [("dark", 70), ("restored", 75)]
        assert node_events(state) == [("web1", "flapping", 12, 2), ("web1", "settled", 27, 2)]
        # `settled` told that the node is up.
        assert [row for row in outbox(state) if row[1] != "new"] == [("web1", "timeout", 10)]


@pytest.mark.parametrize(
    ("keys", "problem"),
    (
        ({"flapping": {"transitions": 1}}, "flapping.transitions: 1 is not a whole number, 2 or more"),
        ({"flapping": {"within": "0s"}}, "flapping.within: "),
        ({"recover_after": "soon"}, "recover_after: 'soon' is not a duration"),
    ),
)
def test_flapping_refuses_a_setting_in_one_line(tmp_path: Path, keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        configured(tmp_path, **keys)
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


def test_flapping_node_sends_two_events_and_its_last_silence(rig: Rig) -> None:
    stream, advisories = rig.make(), rig.unique("ADV")
    rig.create(advisories, subjects=[f"{advisories}.>", f"sr_assets.node.*.{SITE}.{SITE}.{stream}"])
    short = {"inspect_field": "sender", "inspect_duration": "9h", "warn_duration": "1h"}
    rules = {"flapping": {"transitions": 2, "within": "4h"}}
    rig.add(stream, advisory={"subject": f"{advisories}.%s.%v"}, **short, **rules)
    for _ in range(2):
        rig.publish(stream, [Message(b'{"sender": "web1"}')])
        rig.travel(hours=2)
    rig.travel(hours=6)
    rig.drain()
    assert [problem for message in rig.stored(advisories) for problem in unknown_or_wrong(message.payload)] == []
    bodies = [json.loads(message.payload) for message in rig.stored(advisories)]
    sent = sorted((body for body in bodies if body["event"] != "observer_alive"), key=lambda body: body["event_time"])
    assert [(body["event"], body.get("transitions")) for body in sent] == [
        ("new", None),
        ("timeout", None),
        ("flapping", 2),
        ("timeout", None),
        ("settled", 3),
    ]
    subjects = [message.subject for message in rig.stored(advisories) if message.subject.startswith("sr_assets.")]
    assert subjects == [f"sr_assets.node.{event}.{SITE}.{SITE}.{stream}" for event in ("flapping", "settled")]
    assert [row["event"] for row in rig.rows("SELECT event FROM node_events ORDER BY event_time")] == [
        "flapping",
        "settled",
    ]
