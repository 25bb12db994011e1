"""The outbox: advisories stay until acknowledged, are stored once, and keep each node's order."""

import json
import socket
from typing import Any

import pytest

from sr_assets.adapters.state.transitions import Transitions
from sr_assets.domain.advisories import event_id
from sr_assets.domain.messages import encode_headers
from sr_assets.domain.positions import SECOND_NS, parse_rfc3339_ns
from sr_assets_tests.domain.advisory_schemas import V1, problems
from sr_assets_tests.event_schema import unknown_or_wrong
from sr_assets_tests.rig import PATIENCE_SECONDS, SITE, Rig, Sent, connection

SAMPLED = {"inspect_field": "sender", "inspect_duration": "10m"}


def from_sender(*names: str) -> list[Sent]:
    return [Sent(json.dumps({"sender": name}).encode()) for name in names]


def published_nodes(rig: Rig, stream: str, **where: Any) -> list[str]:
    return [json.loads(message.payload)["value"] for message in rig.stored(stream, **where)]


def test_transitions_are_not_published_without_an_advisory_block(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, from_sender("a"))
    rig.add(stream, **SAMPLED)
    (report,) = rig.drain().values()
    assert (report.published, report.waiting, report.undeliverable) == (0, 0, None)
    assert rig.row("node_advisories")["published_at"] is None


@pytest.mark.parametrize("reliable", (None, True))
def test_advisories_are_stored_once(rig: Rig, reliable: bool | None) -> None:
    stream, advisories = rig.make(), rig.make("ADV")
    rig.publish(stream, from_sender("a", "b", "a"))
    rig.add(stream, advisory={"subject": f"{advisories}.%s.%v", "reliable": reliable}, **SAMPLED)
    rig.drain()
    rig.drain()
    assert published_nodes(rig, advisories) == ["a", "b"]
    assert all(row["published_at"] for row in rig.rows("node_advisories"))


def test_v1_format_omits_new_nodes(rig: Rig) -> None:
    stream, advisories = rig.make(), rig.make("ADV")
    rig.publish(stream, from_sender("a", "b"))
    short = {"inspect_field": "sender", "inspect_duration": "2h", "warn_duration": "1h"}
    rig.add(stream, advisory={"subject": f"{advisories}.old", "reliable": True, "format": "v1"}, **short)
    rig.drain()
    assert published_nodes(rig, advisories) == []
    assert all(row["published_at"] for row in rig.rows("node_advisories")), "the outbox is not empty"
    rig.travel(hours=3)
    rig.drain()
    stored = [message.payload for message in rig.stored(advisories)]
    assert [problem for payload in stored for problem in (*problems(payload, V1), *unknown_or_wrong(payload))] == []
    events = sorted((json.loads(payload)["value"], json.loads(payload)["event"]) for payload in stored)
    assert events == [(node, event) for node in "ab" for event in ("expire", "timeout")]
    assert {json.loads(payload)["replicator"] for payload in stored} == {SITE}


def test_advisories_go_to_the_target_cluster_if_configured(rig: Rig) -> None:
    stream, advisories = rig.make(), rig.make("ADV", rig.target)
    rig.publish(stream, from_sender("a"))
    rig.add(stream, advisory={"subject": f"{advisories}.%s.%v", "cluster": "target"}, **SAMPLED)
    rig.drain()
    assert published_nodes(rig, advisories, server=rig.target) == ["a"]


@pytest.mark.parametrize("reliable", (None, False))
def test_unreliable_advisories_reach_subscribers(rig: Rig, reliable: bool | None) -> None:
    stream, subject = rig.make(), rig.unique("heard")
    rig.publish(stream, from_sender("a"))
    rig.add(stream, advisory={"subject": f"{subject}.%s.%v", "reliable": reliable}, **SAMPLED)
    with socket.create_connection(("127.0.0.1", rig.source.port), timeout=PATIENCE_SECONDS) as listener:
        listener.sendall(b'CONNECT {"verbose":false}\r\nSUB %b.> 1\r\nPING\r\n' % subject.encode())
        received = b""
        while b"PONG" not in received:
            received += listener.recv(65536)
        rig.drain()
        while b"io.choria.sr.v2.age_advisory" not in received:
            received += listener.recv(65536)
    assert f"MSG {subject}.new.a 1".encode() in received
    assert rig.row("node_advisories")["published_at"] is not None


def test_unmarked_advisories_are_resent_with_the_same_id(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, advisories = rig.make(), rig.make("ADV")
    rig.publish(stream, from_sender("a", "b"))
    rig.add(stream, advisory={"subject": f"{advisories}.%s.%v"}, **SAMPLED)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Transitions, "mark_published", crash)
        with pytest.raises(KeyboardInterrupt):
            rig.run()
    assert [row["published_at"] for row in rig.rows("node_advisories")] == [None, None]
    rig.drain()
    # The server's dedupe window recognises the ids.
    assert published_nodes(rig, advisories) == ["a", "b"]
    assert all(row["published_at"] for row in rig.rows("node_advisories"))


def test_id_that_another_site_has_used_suppresses_no_advisory(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may publish into the same stream, on subjects of its own, and knows when a node will be silent for too long."""
    stream, advisories = rig.make(), rig.make("ADV")
    rig.publish(stream, from_sender("a", "b"))
    silent = {"inspect_field": "sender", "inspect_duration": "2h", "warn_duration": "1h"}
    rig.add(stream, advisory={"subject": f"{advisories}.paris.%s.%v", "reliable": True}, **silent)
    rig.drain()
    first = rig.stored(stream)[0]
    ids = [
        event_id(SITE, SITE, stream, "a", event, first.stored_ns + hours * 3_600 * SECOND_NS)
        for event, hours in (("timeout", 1), ("expire", 2))
    ]
    forged = [Sent(b"", "london", encode_headers({"Nats-Msg-Id": [event_id]})) for event_id in ids]
    rig.publish(advisories, forged)
    rig.travel(hours=3)
    with monkeypatch.context() as patched:
        # A run that ends before it notes the publication sends nothing twice.
        patched.setattr(Transitions, "mark_published", lambda *_: 1 / 0)
        rig.run()
    rig.drain()
    bodies = [json.loads(message.payload) for message in rig.stored(advisories) if message.payload]
    events = [body["event"] for body in bodies if body["value"] == "a"]
    assert events == ["new", "timeout", "expire"]
    assert len({body["event_id"] for body in bodies}) == len(bodies) == 6


def test_refused_advisories_stay_in_the_outbox_with_a_reason(rig: Rig) -> None:
    stream, advisories = rig.make(), rig.make("ADV", max_msgs=2, discard="new")
    rig.publish(stream, from_sender("a", "b", "c", "d"))
    rig.add(stream, advisory={"subject": f"{advisories}.%s.%v"}, **SAMPLED)
    (report,) = rig.drain().values()
    assert (report.published, report.waiting) == (2, 2)
    assert report.undeliverable is not None
    assert "10077" in report.undeliverable
    with connection(rig.source) as opened:
        body = {"name": advisories, "subjects": [f"{advisories}.>"], "max_msgs": -1, "discard": "new"}
        assert "error" not in opened.request(f"$JS.API.STREAM.UPDATE.{advisories}", body)
    (report,) = rig.drain().values()
    assert (report.waiting, report.undeliverable) == (0, None)
    assert published_nodes(rig, advisories) == ["a", "b", "c", "d"]


def test_full_advisory_stream_is_not_offered_the_whole_outbox(rig: Rig) -> None:
    count = 3_000
    stream, advisories = rig.make(), rig.make("ADV", max_msgs=1, discard="new")
    rig.publish(stream, from_sender(*(f"n{n:04}" for n in range(count))))
    rig.add(stream, advisory={"subject": f"{advisories}.%s.%v"}, **SAMPLED)
    with connection(rig.source) as listener:
        listener.send(f"SUB {advisories}.> 99\r\n".encode())
        # The server responds after it has processed the subscription.
        listener.request("$JS.API.STREAM.NAMES", {})
        (report,) = rig.drain().values()
        offered = 0
        while frames := listener.receive(1.0):
            offered += len(frames)
    assert (report.published, report.waiting) == (1, count - 1)
    assert 512 <= offered < 2_000
    body = {"name": advisories, "subjects": [f"{advisories}.>"], "max_msgs": -1, "discard": "new"}
    assert "error" not in rig.api(f"STREAM.UPDATE.{advisories}", body)
    (report,) = rig.drain().values()
    assert (report.waiting, report.undeliverable) == (0, None)
    assert published_nodes(rig, advisories) == [f"n{n:04}" for n in range(count)]


def test_undeliverable_outbox_does_not_stop_copying(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, from_sender("a"))
    rig.add(stream, advisory={"subject": "nobody.%s.%v", "reliable": True}, **SAMPLED)
    for n in range(2):
        (report,) = rig.drain().values()
        assert report.waiting == n + 1
        assert report.undeliverable is not None
        rig.publish(stream, from_sender(f"b{n}"))
    assert len(rig.copies(stream)) == 2


def test_heartbeat_claims_no_time_after_a_waiting_advisory(rig: Rig) -> None:
    """Otherwise a centre would take a day as complete whose advisories have not all arrived."""
    stream, feed, alive = rig.make(), rig.make("FEED", max_msgs=1, discard="new"), rig.make("ALIVE")
    advisory = {"subject": f"{feed}.%s.%v", "observer_subject": f"{alive}.alive", "reliable": True}
    rig.add(stream, inspect_field="sender", inspect_duration="1h", advisory=advisory)
    for node in ("a", "b", "c"):
        rig.publish(stream, [Sent(b'{"sender": "%s"}' % node.encode())])
    # The watermark is a second behind the clock.
    rig.travel(seconds=2)
    rig.drain()
    waiting = rig.row("SELECT min(event_ns) AS at_ns FROM node_advisories WHERE published_at IS NULL")["at_ns"]
    (heartbeat,) = rig.stored(alive)
    assert parse_rfc3339_ns(json.loads(heartbeat.payload)["watermark"]) == waiting - 1
    rig.api(f"STREAM.UPDATE.{feed}", {"name": feed, "subjects": [f"{feed}.>"], "allow_direct": True, "discard": "new"})
    with rig.open() as site, site.state.transaction():
        # A heartbeat is due again after a minute.
        state = site.state.load_stream(stream)
        assert state is not None
        state.alive_ns = None
        site.state.save_stream(state)
    rig.drain()
    *_, heartbeat = rig.stored(alive)
    assert parse_rfc3339_ns(json.loads(heartbeat.payload)["watermark"]) > waiting
