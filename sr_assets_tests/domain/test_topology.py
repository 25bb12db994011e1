"""Native streams by rule: what differs and what mends it, which limits a link has, whose copy a message is, the pictures."""

import shutil
import subprocess
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from sr_assets.domain.topology.dot import dot
from sr_assets.domain.topology.drift import Remedy, compare
from sr_assets.domain.topology.found import FoundStream, read_stream
from sr_assets.domain.topology.graph import around, graph_of
from sr_assets.domain.topology.links import Limits, Link, api_hash, brought_by, limits, read_mark
from sr_assets.domain.topology.plan import Action, in_order, plan_adoption, plan_stream
from sr_assets.domain.topology.svg import svg
from sr_assets.domain.topology.wanted import OWNER, Upstream, WantedStream

NEW, OLD = (2, 15, 0), (2, 11, 0)


def existing(config: dict[str, Any], **more: Any) -> FoundStream:
    return read_stream({"config": {"name": "S", **config}, "state": {"last_seq": 0, "messages": 0}, **more})


def ours(wanted: WantedStream, **edited: Any) -> FoundStream:
    """Return a stream as we made it, edited by hand since."""
    return existing({**wanted.whole("ME"), **edited})


SOURCED = WantedStream("hub", "S", sources=(Upstream("hub", "A", start_sequence=5),), config={"max_age": 60})
MIRROR = WantedStream("hub", "S", mirror=Upstream("hub", "A"))


def test_a_stream_that_is_as_we_made_it_has_no_drift_whatever_the_server_adds() -> None:
    echoed = {"metadata": {OWNER: "ME", "_nats.level": "4"}, "max_consumers": -1, "sealed": False, "max_msgs": -1}
    for wanted in (SOURCED, MIRROR):
        assert compare(wanted, ours(wanted, **echoed), "ME", NEW) == []


@pytest.mark.parametrize(
    ("wanted", "edited", "key", "remedy"),
    (
        (SOURCED, {"max_age": 90}, "max_age", Remedy.UPDATABLE),
        (SOURCED, {"max_msgs": 9}, "max_msgs", Remedy.UPDATABLE),
        (SOURCED, {"num_replicas": 3}, "replicas", Remedy.UPDATABLE),
        (SOURCED, {"subjects": ["by.hand"]}, "subjects", Remedy.UPDATABLE),
        (SOURCED, {"storage": "memory"}, "storage", Remedy.NEEDS_RECREATE),
        (SOURCED, {"retention": "interest"}, "retention", Remedy.UPDATABLE),
        (SOURCED, {"retention": "workqueue"}, "retention", Remedy.NEEDS_RECREATE),
        (SOURCED, {"sources": []}, "sources", Remedy.UPDATABLE),
        (SOURCED, {"sources": [{"name": "A", "opt_start_seq": 1}]}, "sources", Remedy.IGNORED),
        (MIRROR, {"mirror": {"name": "B"}}, "mirror", Remedy.NEEDS_RECREATE),
        (MIRROR, {"mirror": None}, "mirror", Remedy.NEEDS_RECREATE),
    ),
)
def test_an_edit_by_hand_is_drift_with_its_remedy(
    wanted: WantedStream, edited: dict[str, Any], key: str, remedy: Remedy
) -> None:
    assert [(drift.key, drift.remedy) for drift in compare(wanted, ours(wanted, **edited), "ME", NEW)] == [
        (key, remedy)
    ]


def test_a_mirror_can_be_made_a_stream_of_its_own_since_2_12() -> None:
    promoted = WantedStream("hub", "S", config={"subjects": ["a"]})
    there = existing({"mirror": {"name": "A"}})
    for version, remedy in ((NEW, Remedy.UPDATABLE), (OLD, Remedy.NEEDS_RECREATE)):
        (mirror,) = [drift for drift in compare(promoted, there, "ME", version) if drift.key == "mirror"]
        assert mirror.remedy is remedy


def test_of_a_stream_that_others_made_only_what_the_configuration_names_counts() -> None:
    there = existing({"max_age": 60, "max_msgs": 5, "sources": [{"name": "A", "opt_start_seq": 5}]})
    assert compare(SOURCED, there, "ME", NEW) == []


def plan(wanted: WantedStream, there: FoundStream | None, manage: Any = "reconcile", *, recreate: bool = False) -> Any:
    return plan_stream(wanted, there, owner="ME", manage=manage, version=NEW, recreate=recreate)


def test_what_is_missing_is_made_unless_we_only_observe() -> None:
    assert plan(SOURCED, None, "observe").action is Action.NONE
    assert plan(SOURCED, None, "create").action is Action.CREATE
    assert plan(SOURCED, None, "create").config["metadata"] == {OWNER: "ME"}


def test_an_edit_is_taken_back_when_we_reconcile_a_stream_of_ours_and_in_no_other_case() -> None:
    edited = ours(SOURCED, max_age=90, max_msgs=7)
    update = plan(SOURCED, edited)
    assert update.action is Action.UPDATE
    assert (update.config["max_age"], update.config["max_msgs"]) == (60, -1)
    for manage in ("observe", "create"):
        assert plan(SOURCED, edited, manage).action is Action.NONE
    for metadata, reason in (({}, "has no owner"), ({OWNER: "YOU"}, "belongs to replicator YOU")):
        left = plan(SOURCED, ours(SOURCED, max_age=90, metadata=metadata))
        assert left.action is Action.NONE
        assert reason in left.reason


def test_only_a_named_stream_is_made_again_and_only_for_what_no_update_can_change() -> None:
    other = ours(MIRROR, mirror={"name": "B"})
    assert plan(MIRROR, other).action is Action.NONE
    assert "--recreate hub/S" in plan(MIRROR, other).reason
    assert plan(MIRROR, other, recreate=True).action is Action.RECREATE
    assert plan(SOURCED, ours(SOURCED, max_age=90), recreate=True).action is Action.UPDATE
    foreign = ours(MIRROR, mirror={"name": "B"}, metadata={})
    assert plan(MIRROR, foreign, recreate=True).action is Action.NONE


def test_an_update_sends_no_start_that_would_be_taken_and_have_no_effect() -> None:
    there = ours(SOURCED, max_age=90, sources=[{"name": "A", "opt_start_seq": 1}])
    step = plan(SOURCED, there)
    assert step.action is Action.UPDATE
    assert step.config["sources"] == [{"name": "A", "opt_start_seq": 1}]
    assert "accept the new start and ignore it" in step.reason


def test_adoption_changes_the_owner_alone() -> None:
    there = existing({"max_age": 1, "metadata": {"team": "x", "_nats.level": "4"}})
    step = plan_adoption(SOURCED, there, "ME", named=False)
    assert step.action is Action.ADOPT
    assert step.config == {**there.config, "metadata": {"team": "x", OWNER: "ME"}}
    theirs = existing({"metadata": {OWNER: "YOU"}})
    assert plan_adoption(SOURCED, theirs, "ME", named=False).action is Action.NONE
    assert plan_adoption(SOURCED, theirs, "ME", named=True).action is Action.ADOPT


def test_a_stream_is_made_after_those_that_it_copies_from() -> None:
    streams = [
        WantedStream("hub", "REPORT", mirror=Upstream("hub", "ARCHIVE")),
        WantedStream("hub", "ARCHIVE", sources=(Upstream("city", "ORDERS"),)),
        WantedStream("city", "ORDERS", config={"subjects": ["o"]}),
    ]
    ordered = in_order(plan(stream, None) for stream in streams)
    assert [step.wanted.stream for step in ordered] == ["ORDERS", "ARCHIVE", "REPORT"]


def test_a_link_is_dead_when_it_was_never_heard_or_is_silent_for_longer_than_its_stream_allows() -> None:
    def link(active: float | None, **keys: str) -> Link:
        return Link("hub", "S", "mirror", "A", active_seconds=active, limits=limits(keys))

    assert [link(active).dead for active in (None, 0.4, 10.1)] == [True, False, True]
    assert not link(200.0, **{"io.nats.monitor.seen-critical": "5m"}).dead
    assert link(11.0, **{"io.nats.monitor.seen-critical": "soon"}).dead
    assert limits({"io.nats.monitor.seen-critical": "1m30s", "io.nats.monitor.lag-critical": "200"}) == Limits(
        90.0, 200
    )


def test_a_message_belongs_to_the_source_whose_origin_and_filter_it_names() -> None:
    # Marks as a server wrote them: 2.15.1, from a domain, with a filter, and with two transforms.
    config = [
        {"name": "O", "external": {"api": "$JS.leaf.API"}},
        {"name": "P", "filter_subject": "p.a"},
        {"name": "P", "subject_transforms": [{"src": "p.b", "dest": "x.b"}, {"src": "p.c", "dest": ""}]},
    ]
    links = existing({"sources": config}).links
    marks = ["O:mSx7q4yJ 5 > > o.4 LUyGXFmd", "P 9 p.a > p.a", "P 4 p.b\fp.c x.b\f p.b"]
    assert api_hash("$JS.leaf.API") == "mSx7q4yJ"
    brought = [[brought_by(mark, link, links) for link in links] for mark in map(read_mark, marks) if mark]
    assert brought == [[True, False, False], [False, True, False], [False, False, True]]
    assert read_mark("$JS.ACK.O.x.1.5.5.0.0") is None


HOSTILE = 'a"b\\N"; x -> y; //&lt;\n<b>]}'
STREAMS = [("hub", "hub", "S"), ("city", None, "S"), ("hub", "hub", HOSTILE)]
LINKS = [
    Link("hub", "S", "mirror", "S", "hub", "city", active_seconds=0.1, lag_messages=0),
    Link("hub", "S", "source", HOSTILE, "hub", "hub", "hub", HOSTILE, active_seconds=12.0),
    Link("hub", "T", "replica", "S", "hub", "city", sampling="by sender every 3600s", lag_messages=3),
]


def test_a_graph_keeps_streams_of_one_name_apart_and_says_what_is_dead() -> None:
    graph = graph_of(STREAMS, LINKS)
    assert [(node.place, node.stream) for node in graph.nodes][:2] == [("hub", "S"), ("city", "S")]
    assert [(edge.colour, edge.dashed) for edge in graph.edges] == [("blue", False), ("red", False), ("black", True)]
    labels = [edge.label for edge in graph.edges]
    assert "lag unknown\nsilent for 12s" in labels[1]
    assert labels[2] == "Replica\nby sender every 3600s\nlag 3"
    alone = graph_of([*STREAMS, ("hub", "hub", "ALONE")], LINKS)
    assert len(around(alone, graph.nodes[0]).nodes) == len(alone.nodes) - 1


def test_the_pictures_are_well_formed_whatever_the_names_are() -> None:
    graph = graph_of(STREAMS, LINKS)
    drawn = ET.fromstring(svg(graph))
    assert any(
        HOSTILE.replace("\n", " ") in (text.text or "") for text in drawn.iter("{http://www.w3.org/2000/svg}title")
    )
    text = dot(graph)
    assert 'label="city\\nS"' in text
    assert r"a\"b\\N\"; x -> y; //&amp;lt;" in text
    assert dot(graph_of([], [])).startswith("digraph {")


@pytest.mark.process
@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
def test_graphviz_takes_the_graph_and_shows_hostile_names_as_they_are() -> None:
    drawn = subprocess.run(
        ["dot", "-Tsvg"], input=dot(graph_of(STREAMS, LINKS)), capture_output=True, text=True, timeout=60, check=True
    )
    texts = [text.text for text in ET.fromstring(drawn.stdout).iter("{http://www.w3.org/2000/svg}text")]
    assert 'a"b\\N"; x -> y; //&lt;' in texts
    assert texts.count("<b>]}") >= 1
