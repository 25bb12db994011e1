"""Sites and centres of different versions: messages of earlier and later versions at a centre, and ours at an earlier one.

The wire data is fixed: it must not follow the code. A version that adds a field adds no message here.
"""

import json
from typing import Any

import pytest

from sr_assets.domain.advisories import encode, observer_alive
from sr_assets.domain.tracking.rules import Event, Status, Transition
from sr_assets_tests.rig import Rig, Sent

#: The published formats: the replicator for NATS Streaming, and the Stream Replicator.
V1 = (
    b'{"$schema":"https://choria.io/schemas/sr/v1/age_advisory.json","inspect":"sender","value":"v1","age":660,'
    b'"seen":1647351430,"replicator":"OLD","timestamp":1647352090,"event":"timeout"}'
)
V2 = (
    b'{"protocol":"io.choria.sr.v2.age_advisory","event_id":"26RNdHLlS8mXIUZFKcNFRJ9WwOy","inspect_field":"sender",'
    b'"age":660,"seen":1647351430,"replicator":"GO","timestamp":1647352090,"event":"timeout","value":"v2"}'
)
#: The first format of this package, without `epoch`.
FIRST = (
    b'{"protocol":"io.choria.sr.v2.age_advisory","event_id":"5e7c8d21-1bb0-5a4e-9f0c-0d4bb5b6a1f1","inspect_field":'
    b'"sender","age":660,"seen":1647351430,"replicator":"EAST","timestamp":1647352090,"event":"timeout","value":"first",'
    b'"stream":"NODES","name":"london","event_time":"2022-03-15T13:48:10.000000000Z","sequence":10631,"transition":2,'
    b'"previous":"up","late":false,"returned":false,"age_seconds":660.0,"outage_seconds":null}'
)
FIRST_HEARTBEAT = (
    b'{"protocol":"io.choria.sr_assets.v1.observer_alive","event":"observer_alive","replicator":"EAST","name":"london",'
    b'"stream":"NODES","timestamp":1647352090,"event_time":"2022-03-15T13:48:10.000000000Z",'
    b'"watermark":"2022-03-15T13:48:09.000000000Z","position":10632,"lag_messages":0,"lag_seconds":0.0,"nodes":5,'
    b'"next_within_seconds":null}'
)
#: Fields of a later version: at the top, nested, and of each JSON type.
LATER_FIELDS: dict[str, Any] = {"held_by": None, "class": "db", "weight": 1.5, "flags": [1, "a"], "site": {"rack": 7}}
#: The fields that the first centre reads, with their JSON types.
ADVISORY_FIELDS = {
    "protocol": str,
    "event_id": str,
    "inspect_field": str,
    "age": int,
    "seen": int,
    "replicator": str,
    "timestamp": int,
    "event": str,
    "value": str,
    "stream": str,
    "name": str,
    "event_time": str,
    "sequence": int,
    "transition": int,
    "late": bool,
    "returned": bool,
    "age_seconds": float,
}
HEARTBEAT_FIELDS = {
    "protocol": str,
    "event": str,
    "replicator": str,
    "name": str,
    "stream": str,
    "timestamp": int,
    "event_time": str,
    "watermark": str,
    "position": int,
    "lag_messages": int,
    "lag_seconds": float,
    "nodes": int,
    "next_within_seconds": float,
}


def later(payload: bytes, **changes: Any) -> bytes:
    """Return a message as a later version might write it."""
    return json.dumps(json.loads(payload) | LATER_FIELDS | changes).encode()


@pytest.fixture
def feed(rig: Rig) -> str:
    """A stream at the centre, read by the site's only feed."""
    stream = rig.make("FEED", rig.target)
    rig.add_feed(stream, retired_retention="50Y")
    return stream


def fold(rig: Rig, feed: str, *payloads: bytes) -> dict[str, tuple[str, str]]:
    """Publish messages, run the centre, and return status and format of each node."""
    rig.publish(feed, [Sent(payload) for payload in payloads], rig.target)
    rig.drain()
    return {row["node"]: (row["status"], row["source"]) for row in rig.rows("global_availability")}


def test_centre_folds_the_messages_of_every_earlier_version(rig: Rig, feed: str) -> None:
    nodes = fold(rig, feed, V1, V2, FIRST, FIRST_HEARTBEAT)
    assert nodes == {"v1": ("timeout", "v1"), "v2": ("timeout", "v2"), "first": ("timeout", "ours")}
    assert rig.rows("global_rejects") == []
    site = rig.row("SELECT * FROM global_summary WHERE name = 'london'")
    assert (site["observer"], site["timeout"]) == ("ok", 1)
    # The site is upgraded: its advisories have an epoch now, and its counters continue.
    upgraded = {"transition": 3, "event": "recover", "previous": "timeout", "epoch": 1_647_352_000_000_000_000}
    assert fold(rig, feed, later(FIRST, event_id="upgraded", **upgraded))["first"] == ("up", "ours")


def test_centre_ignores_the_fields_of_a_later_version(rig: Rig, feed: str) -> None:
    assert fold(rig, feed, *(later(payload) for payload in (V1, V2, FIRST, FIRST_HEARTBEAT))) == {
        "v1": ("timeout", "v1"),
        "v2": ("timeout", "v2"),
        "first": ("timeout", "ours"),
    }
    assert rig.rows("global_rejects") == []
    assert rig.row("SELECT observer FROM global_summary WHERE name = 'london'")["observer"] == "ok"


def test_centre_rejects_an_event_of_a_later_version_and_continues(rig: Rig, feed: str) -> None:
    unknown = later(FIRST, event="flapping", transition=3, event_id="unknown", value="other")
    assert fold(rig, feed, FIRST, unknown, V2) == {"first": ("timeout", "ours"), "v2": ("timeout", "v2")}
    assert [row["reason"] for row in rig.rows("global_rejects")] == ["unknown_event"]


def types(payload: bytes, fields: dict[str, type]) -> dict[str, type]:
    document = json.loads(payload)
    return {field: type(document[field]) for field in fields}


def test_advisory_has_the_fields_that_the_first_centre_reads() -> None:
    transition = Transition(Event.TIMEOUT, 660, 0, 660, 1, Status.UP, 2, returned=False, outage_ns=None)
    names = {"replicator": "EAST", "name": "london", "stream": "NODES", "sender": "web1", "inspect_field": "sender"}
    payload = encode(transition, **names, epoch_ns=1, late=False)
    assert types(payload, ADVISORY_FIELDS) == ADVISORY_FIELDS


def test_heartbeat_has_the_fields_that_the_first_centre_reads() -> None:
    payload = observer_alive(
        replicator="EAST",
        name="london",
        stream="NODES",
        position=1,
        nodes=1,
        ts_ns=1,
        watermark_ns=1,
        lag_ns=0,
        next_within_ns=1,
        lag_messages=0,
    )
    assert types(payload, HEARTBEAT_FIELDS) == HEARTBEAT_FIELDS
