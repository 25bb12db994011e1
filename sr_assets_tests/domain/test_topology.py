"""Native streams: drift and remedies, plans, link limits, source marks, and graphs."""

import subprocess
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.domain.topology.found import FoundStream, read_stream
from sr_assets.domain.topology.graph import around, dot, graph_of
from sr_assets.domain.topology.links import Limits, Link, api_hash, brought_by, limits, read_mark
from sr_assets.domain.topology.plan import Action, Remedy, compare, in_order, plan_adoption, plan_stream
from sr_assets.domain.topology.wanted import OWNER, Upstream, WantedStream
from sr_assets_tests.programs import program

NEW, OLD = (2, 15, 0), (2, 11, 0)


def found_stream(config: dict[str, Any], **more: Any) -> FoundStream:
    return read_stream({"config": {"name": "S", **config}, "state": {"last_seq": 0, "messages": 0}, **more})


def own_stream(wanted: WantedStream, **edited: Any) -> FoundStream:
    """Return a stream as this replicator created it, then edited by hand."""
    return found_stream({**wanted.whole("ME"), **edited})


SOURCED = WantedStream("hub", "S", sources=(Upstream("hub", "A", start_sequence=5),), config={"max_age": 60})
MIRROR = WantedStream("hub", "S", mirror=Upstream("hub", "A"))


def test_server_additions_are_no_drift() -> None:
    server_additions = {
        "metadata": {OWNER: "ME", "_nats.level": "4"},
        "max_consumers": -1,
        "sealed": False,
        "max_msgs": -1,
    }
    for wanted in (SOURCED, MIRROR):
        assert compare(wanted, own_stream(wanted, **server_additions), "ME", NEW) == []


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
        (SOURCED, {"deny_delete": True}, "deny_delete", Remedy.NEEDS_RECREATE),
        (SOURCED, {"deny_purge": True}, "deny_purge", Remedy.NEEDS_RECREATE),
        (SOURCED, {"allow_rollup_hdrs": True}, "allow_rollup", Remedy.UPDATABLE),
        (SOURCED, {"max_consumers": 3}, "max_consumers", Remedy.NEEDS_RECREATE),
        (SOURCED, {"sealed": True}, "sealed", Remedy.NEEDS_RECREATE),
        (SOURCED, {"sources": []}, "sources", Remedy.UPDATABLE),
        (SOURCED, {"sources": [{"name": "A", "opt_start_seq": 1}]}, "sources", Remedy.IGNORED),
        (MIRROR, {"mirror": {"name": "B"}}, "mirror", Remedy.NEEDS_RECREATE),
        (MIRROR, {"mirror": None}, "mirror", Remedy.NEEDS_RECREATE),
    ),
)
def test_manual_edit_is_drift_with_its_remedy(
    wanted: WantedStream, edited: dict[str, Any], key: str, remedy: Remedy
) -> None:
    assert [(drift.key, drift.remedy) for drift in compare(wanted, own_stream(wanted, **edited), "ME", NEW)] == [
        (key, remedy)
    ]


def test_sealing_is_an_update_and_its_effects_are_no_drift() -> None:
    wanted = WantedStream("hub", "S", config={"subjects": ["a"], "max_age": 60, "sealed": True})
    (drift,) = compare(wanted, own_stream(wanted), "ME", NEW)
    assert (drift.key, drift.remedy) == ("sealed", Remedy.UPDATABLE)
    effects = {"max_age": 0, "discard": "new", "deny_delete": True, "deny_purge": True}
    assert compare(wanted, own_stream(wanted, sealed=True, **effects), "ME", NEW) == []


def test_mirror_can_be_promoted_since_server_2_12() -> None:
    promoted = WantedStream("hub", "S", config={"subjects": ["a"]})
    existing = found_stream({"mirror": {"name": "A"}})
    for version, remedy in ((NEW, Remedy.UPDATABLE), (OLD, Remedy.NEEDS_RECREATE)):
        (mirror,) = [drift for drift in compare(promoted, existing, "ME", version) if drift.key == "mirror"]
        assert mirror.remedy is remedy


def test_foreign_stream_is_compared_by_configured_keys_only() -> None:
    existing = found_stream({"max_age": 60, "max_msgs": 5, "sources": [{"name": "A", "opt_start_seq": 5}]})
    assert compare(SOURCED, existing, "ME", NEW) == []


def plan(
    wanted: WantedStream, existing: FoundStream | None, manage: Any = "reconcile", *, recreate: bool = False
) -> Any:
    return plan_stream(wanted, existing, owner="ME", manage=manage, version=NEW, recreate=recreate)


def test_missing_stream_is_created_unless_manage_is_observe() -> None:
    assert plan(SOURCED, None, "observe").action is Action.NONE
    assert plan(SOURCED, None, "create").action is Action.CREATE
    assert plan(SOURCED, None, "create").config["metadata"] == {OWNER: "ME"}


def test_only_reconcile_of_an_owned_stream_reverts_an_edit() -> None:
    edited = own_stream(SOURCED, max_age=90, max_msgs=7)
    update = plan(SOURCED, edited)
    assert update.action is Action.UPDATE
    assert (update.config["max_age"], update.config["max_msgs"]) == (60, -1)
    for manage in ("observe", "create"):
        assert plan(SOURCED, edited, manage).action is Action.NONE
    for metadata, reason in (({}, "has no owner"), ({OWNER: "YOU"}, "belongs to replicator YOU")):
        step = plan(SOURCED, own_stream(SOURCED, max_age=90, metadata=metadata))
        assert step.action is Action.NONE
        assert reason in step.reason


def test_only_a_named_owned_stream_is_recreated() -> None:
    other = own_stream(MIRROR, mirror={"name": "B"})
    assert plan(MIRROR, other).action is Action.NONE
    assert "--recreate hub/S" in plan(MIRROR, other).reason
    assert plan(MIRROR, other, recreate=True).action is Action.RECREATE
    assert plan(SOURCED, own_stream(SOURCED, max_age=90), recreate=True).action is Action.UPDATE
    foreign = own_stream(MIRROR, mirror={"name": "B"}, metadata={})
    assert plan(MIRROR, foreign, recreate=True).action is Action.NONE


def test_update_keeps_a_source_start_that_servers_ignore() -> None:
    existing = own_stream(SOURCED, max_age=90, sources=[{"name": "A", "opt_start_seq": 1}])
    step = plan(SOURCED, existing)
    assert step.action is Action.UPDATE
    assert step.config["sources"] == [{"name": "A", "opt_start_seq": 1}]
    assert "accept the new start and ignore it" in step.reason


def test_adoption_changes_only_the_owner() -> None:
    existing = found_stream({"max_age": 1, "metadata": {"team": "x", "_nats.level": "4"}})
    step = plan_adoption(SOURCED, existing, "ME", named=False)
    assert step.action is Action.ADOPT
    assert step.config == {**existing.config, "metadata": {"team": "x", OWNER: "ME"}}
    foreign = found_stream({"metadata": {OWNER: "YOU"}})
    assert plan_adoption(SOURCED, foreign, "ME", named=False).action is Action.NONE
    assert plan_adoption(SOURCED, foreign, "ME", named=True).action is Action.ADOPT


def test_streams_are_created_after_their_origins() -> None:
    streams = [
        WantedStream("hub", "REPORT", mirror=Upstream("hub", "ARCHIVE")),
        WantedStream("hub", "ARCHIVE", sources=(Upstream("city", "ORDERS"),)),
        WantedStream("city", "ORDERS", config={"subjects": ["o"]}),
    ]
    ordered = in_order(plan(stream, None) for stream in streams)
    assert [step.wanted.stream for step in ordered] == ["ORDERS", "ARCHIVE", "REPORT"]


def test_link_is_dead_if_never_active_or_silent_past_its_limit() -> None:
    def link(active: float | None, **keys: str) -> Link:
        return Link("hub", "S", "mirror", "A", active_seconds=active, limits=limits(keys))

    assert [link(active).dead for active in (None, 0.4, 10.1)] == [True, False, True]
    assert not link(200.0, **{"io.nats.monitor.seen-critical": "5m"}).dead
    assert link(11.0, **{"io.nats.monitor.seen-critical": "soon"}).dead
    assert limits({"io.nats.monitor.seen-critical": "1m30s", "io.nats.monitor.lag-critical": "200"}) == Limits(
        90.0, 200
    )


def test_mark_identifies_the_source_by_origin_and_filter() -> None:
    # Marks written by server 2.15.1: from a domain, with a filter, and with two transforms.
    config = [
        {"name": "O", "external": {"api": "$JS.leaf.API"}},
        {"name": "P", "filter_subject": "p.a"},
        {"name": "P", "subject_transforms": [{"src": "p.b", "dest": "x.b"}, {"src": "p.c", "dest": ""}]},
    ]
    links = found_stream({"sources": config}).links
    marks = ["O:mSx7q4yJ 5 > > o.4 LUyGXFmd", "P 9 p.a > p.a", "P 4 p.b\fp.c x.b\f p.b"]
    assert api_hash("$JS.leaf.API") == "mSx7q4yJ"
    matches = [[brought_by(mark, link, links) for link in links] for mark in map(read_mark, marks) if mark]
    assert matches == [[True, False, False], [False, True, False], [False, False, True]]
    assert read_mark("$JS.ACK.O.x.1.5.5.0.0") is None


HOSTILE = 'a"b\\N"; x -> y; //&lt;\n<b>]}'
STREAMS = [("hub", "hub", "S"), ("city", None, "S"), ("hub", "hub", HOSTILE)]
LINKS = [
    Link("hub", "S", "mirror", "S", "hub", "city", active_seconds=0.1, lag_messages=0),
    Link("hub", "S", "source", HOSTILE, "hub", "hub", "hub", HOSTILE, active_seconds=12.0),
    Link("hub", "T", "replica", "S", "hub", "city", sampling="by sender every 3600s", lag_messages=3),
]


def test_graph_separates_equal_names_and_marks_dead_links() -> None:
    graph = graph_of(STREAMS, LINKS)
    assert [(node.place, node.stream) for node in graph.nodes][:2] == [("hub", "S"), ("city", "S")]
    assert [(edge.colour, edge.dashed) for edge in graph.edges] == [("blue", False), ("red", False), ("black", True)]
    labels = [edge.label for edge in graph.edges]
    assert "lag unknown\nsilent for 12s" in labels[1]
    assert labels[2] == "Replica\nby sender every 3600s\nlag 3"
    alone = graph_of([*STREAMS, ("hub", "hub", "ALONE")], LINKS)
    assert len(around(alone, graph.nodes[0]).nodes) == len(alone.nodes) - 1


def test_dot_is_well_formed_for_hostile_names() -> None:
    text = dot(graph_of(STREAMS, LINKS))
    assert 'label="city\\nS"' in text
    assert r"a\"b\\N\"; x -> y; //&amp;lt;" in text
    assert dot(graph_of([], [])).startswith("digraph {")


@pytest.mark.process
def test_graphviz_renders_hostile_names_literally() -> None:
    drawn = subprocess.run(
        [program("dot", package="graphviz"), "-Tsvg"],
        input=dot(graph_of(STREAMS, LINKS)),
        capture_output=True,
        text=True,
        check=True,
    )
    texts = [text.text for text in ET.fromstring(drawn.stdout).iter("{http://www.w3.org/2000/svg}text")]
    assert 'a"b\\N"; x -> y; //&lt;' in texts
    assert texts.count("<b>]}") >= 1


@given(st.text() | st.from_regex(r"[ :C=0-9a-zA-Z\x00-\x1f]*"))
def test_any_mark_of_a_stream_is_read_or_ignored(value: str) -> None:
    mark = read_mark(value)
    assert mark is None or (0 <= mark.sequence < 10**20 and len(mark.stream) <= len(value))
