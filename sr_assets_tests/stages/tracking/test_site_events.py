"""Events of nodes and sites in their stream: each once, in order, and with few requests for many of them."""

from typing import Any

import pytest

from sr_assets.adapters import wire
from sr_assets.domain.messages import MESSAGE_ID_HEADER, header_values
from sr_assets.domain.tracking.announcements import NodeEvent, NodeReport
from sr_assets.stages.report import StreamReport
from sr_assets.stages.tracking import node_advisories
from sr_assets.stages.tracking.node_advisories import EventStage
from sr_assets_tests.rig import SITE, Rig

SECOND = 10**9


def test_many_events_are_published_once_with_few_requests(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, kept = rig.make(), rig.unique("EVENTS")
    rig.add(stream, inspect_field="sender", inspect_duration="1h", advisory={"subject": f"{stream}_adv.%s.%v"})
    rig.create(kept, subjects=[f"sr_assets.node.*.{SITE}.{SITE}.{stream}"], duplicate_window=100_000_000)
    now_ns, opened = rig.clock_ns(stream), list[str]()

    class Counted(wire.Connection):
        def __init__(self, *arguments: Any, **keys: Any) -> None:
            opened.append("connection")
            super().__init__(*arguments, **keys)

    monkeypatch.setattr(wire, "Connection", Counted)
    monkeypatch.setattr(node_advisories, "_CHUNK", 70)
    reports = [
        (f"{event}-{number}", f"n{number}", NodeReport(event, now_ns + at, 3, up=True))
        for number in range(100)
        for at, event in enumerate((NodeEvent.FLAPPING, NodeEvent.SETTLED))
    ]
    with rig.open() as site:
        (entry,) = site.settings.streams
        with site.state.transaction():
            site.state.undecided(stream).report(reports, 1, now_ns, publish=True)
        cluster = site.clusters.connect(entry.source)
        for _ in range(2):
            stage = EventStage(entry, site.state, site.clock, report := StreamReport(entry))
            assert stage.publish(cluster)
            assert not stage.publish(cluster)
            assert report.undeliverable_event is None
            # An older state, after the duplicate window.
            site.state.connection.execute("UPDATE node_events SET published_ns = NULL")
            rig.await_clock(stream, rig.clock_ns(stream) + SECOND // 2)
    stored = [header_values(message.headers, MESSAGE_ID_HEADER)[0].decode() for message in rig.stored(kept)]
    assert sorted(stored) == sorted(event_id for event_id, _, _ in reports)
    for number in range(100):
        assert stored.index(f"flapping-{number}") < stored.index(f"settled-{number}")
    assert len(opened) <= 4
