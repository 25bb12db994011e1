"""The messages that a site publishes: advisories (Choria's version 2 with extensions, or version 1), site events and
heartbeats.
"""

import hashlib
import json
import uuid
from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any, Final

from sr_assets.domain.positions import SECOND_NS, format_rfc3339_ns
from sr_assets.domain.tracking.announcements import NodeEvent
from sr_assets.domain.tracking.rules import Event, Status, Transition

PROTOCOL: Final = "io.choria.sr.v2.age_advisory"
V1_SCHEMA: Final = "https://choria.io/schemas/sr/v1/age_advisory.json"
#: The event of a heartbeat, which concerns a site instead of a node.
OBSERVER_EVENT: Final = "observer_alive"
SITE_PROTOCOL: Final = "io.choria.sr_assets.v1.site_event"
NODE_PROTOCOL: Final = "io.choria.sr_assets.v1.node_event"
OBSERVER_PROTOCOL: Final = "io.choria.sr_assets.v1.observer_alive"
#: Before the end of a message id with which an event is published again.
_AGAIN: Final = "/r"
#: The digit with a UUID's variant, by the digit of the hash that it replaces.
_VARIANT: Final = {f"{digit:x}": f"{digit & 3 | 8:x}" for digit in range(16)}
_compact: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class EventIds:
    """The ids of a stream's transitions, the same in every run and every replay.

    An id is the UUID of version 5 (RFC 9562, 5.5) whose name is the JSON array of the stream's identity, the sender, the
    event and its time in ns. A fleet may have 100,000 transitions together, so each takes a sixth of the time of `uuid.uuid5`.
    """

    def __init__(self, replicator: str, name: str, stream: str) -> None:
        """Hash the part of the names that all ids share."""
        begin = f"[{','.join(map(encode_basestring, (replicator, name, stream)))},"
        self._begun = hashlib.sha1(uuid.NAMESPACE_URL.bytes + begin.encode(), usedforsecurity=False)

    def __call__(self, sender: str, event: str, event_ns: int) -> str:
        """Return the id of a transition."""
        hashed = self._begun.copy()
        hashed.update(f"{encode_basestring(sender)},{encode_basestring(event)},{event_ns}]".encode())
        digits = hashed.hexdigest()
        return f"{digits[:8]}-{digits[8:12]}-5{digits[13:16]}-{_VARIANT[digits[16]]}{digits[17:20]}-{digits[20:32]}"


def event_id(replicator: str, name: str, stream: str, sender: str, event: str, event_ns: int) -> str:
    """Return the id of one transition, as `EventIds` does."""
    return EventIds(replicator, name, stream)(sender, event, event_ns)


def published_again(message_id: str, nonce: str) -> str:
    """Return another message id of an event, whose own somebody else has used."""
    return f"{message_id}{_AGAIN}{nonce}"


def published_id(message_id: bytes) -> str:
    """Return the event's id in the message id of a stored advisory or event."""
    return message_id.decode(errors="replace").partition(_AGAIN)[0]


def seconds(duration_ns: int) -> float:
    """Return a duration in seconds, with millisecond precision."""
    return round(duration_ns / SECOND_NS, 3)


def is_late(planned_ns: int | None, event_ns: int, interval_ns: int) -> bool:
    """Return whether a transition happened more than an interval before `planned_ns`, so that it comes from a backlog.

    `planned_ns` is the `ts` of the stream info that planned the batch; without it, no transition is late.
    """
    return planned_ns is not None and planned_ns - event_ns > interval_ns


def encode(
    transition: Transition,
    *,
    replicator: str,
    name: str,
    stream: str,
    sender: str,
    inspect_field: str,
    epoch_ns: int,
    late: bool,
) -> bytes:
    """Return the body of an advisory: compact JSON in UTF-8 without ASCII escapes, Choria's fields first.

    Whole seconds are rounded down. `epoch_ns` is the source's time at the start of the stream's state, or 0 if unknown.
    Of two advisories of a node, the later epoch wins, then the higher `transition`.
    """
    age_ns, outage_ns = transition.age_ns, transition.outage_ns
    body = {
        "protocol": PROTOCOL,
        "event_id": event_id(replicator, name, stream, sender, transition.event, transition.event_ns),
        "inspect_field": inspect_field,
        "age": age_ns // SECOND_NS,
        "seen": transition.seen_ns // SECOND_NS,
        "replicator": replicator,
        "timestamp": transition.event_ns // SECOND_NS,
        "event": transition.event.value,
        "value": sender,
        "stream": stream,
        "name": name,
        "event_time": format_rfc3339_ns(transition.event_ns),
        "sequence": transition.sequence,
        "transition": transition.transition,
        "epoch": epoch_ns,
        "previous": None if transition.previous is None else transition.previous.value,
        "late": late,
        "returned": transition.returned,
        "age_seconds": seconds(age_ns),
        "outage_seconds": None if outage_ns is None else seconds(outage_ns),
    }
    return _compact(body).encode()


def encode_v1(transition: Transition, *, name: str, sender: str, inspect_field: str) -> bytes:
    """Return the body of an advisory in the old replicator's format, whose replicator is an entry's `name`.

    The format has no event `new`.
    """
    body = {
        "$schema": V1_SCHEMA,
        "inspect": inspect_field,
        "value": sender,
        "age": transition.age_ns // SECOND_NS,
        "seen": transition.seen_ns // SECOND_NS,
        "replicator": name,
        "timestamp": transition.event_ns // SECOND_NS,
        "event": transition.event.value,
    }
    return _compact(body).encode()


def encode_site_event(event: Mapping[str, Any], *, replicator: str, name: str) -> bytes:
    """Return the body of a site event, from its row in `site_events`."""
    counts = {"nodes": event["nodes"], "silent": event["silent"], "since": format_rfc3339_ns(event["since_ns"])}
    return _event_body(SITE_PROTOCOL, event, replicator, name, counts)


def encode_node_event(event: Mapping[str, Any], *, replicator: str, name: str, ranked: bool = True) -> bytes:
    """Return the body of a node's event, from its row in `node_events` with the node's last transition until then.

    With `ranked`, it has the node's state where no advisory tells it: after an undone retirement, and of a settled node
    that is up. A centre ranks the state among the advisories, which must have a number too.
    """
    node: dict[str, object] = {"value": event["node"], "transitions": event["transitions"], "up": event["up"]}
    if ranked and event["last_transition"] is not None:
        last = {"event": event["last_event"], "event_ns": event["last_ns"], "previous": event["last_previous"]}
        if event["event"] == NodeEvent.UNRETIRED:
            now = NodeEvent.UNRETIRED.value if event["up"] else Event.TIMEOUT.value
            last = {"event": now, "event_ns": event["event_ns"], "previous": Status.RETIRED.value}
        if event["event"] == NodeEvent.UNRETIRED or (event["event"] == NodeEvent.SETTLED and event["up"]):
            node["state"] = {
                "event": last["event"],
                "event_time": format_rfc3339_ns(last["event_ns"]),
                "previous": last["previous"],
                "seen": event["last_seen_ns"] // SECOND_NS,
                "transition": event["last_transition"],
            }
    return _event_body(NODE_PROTOCOL, event, replicator, name, node)


def _event_body(protocol: str, event: Mapping[str, Any], replicator: str, name: str, own: dict[str, object]) -> bytes:
    body = {
        "protocol": protocol,
        "event_id": event["event_id"],
        "event": event["event"],
        "replicator": replicator,
        "name": name,
        "stream": event["stream"],
        "timestamp": event["event_ns"] // SECOND_NS,
        "event_time": format_rfc3339_ns(event["event_ns"]),
        **own,
        "epoch": event["epoch"],
    }
    return _compact(body).encode()


def observer_alive(
    *,
    replicator: str,
    name: str,
    stream: str,
    ts_ns: int,
    watermark_ns: int | None,
    position: int,
    lag_messages: int,
    lag_ns: int,
    nodes: int,
    next_within_ns: int | None,
    epoch_ns: int = 0,
) -> bytes:
    """Return the body of a site's heartbeat: position, lag and number of nodes that are not retired.

    `next_within_ns` is the maximum time until the next heartbeat, or None if there is none; `epoch_ns` is the same as
    in an advisory.
    """
    body = {
        "protocol": OBSERVER_PROTOCOL,
        "event": OBSERVER_EVENT,
        "replicator": replicator,
        "name": name,
        "stream": stream,
        "timestamp": ts_ns // SECOND_NS,
        "event_time": format_rfc3339_ns(ts_ns),
        "watermark": None if watermark_ns is None else format_rfc3339_ns(watermark_ns),
        "position": position,
        "lag_messages": lag_messages,
        "lag_seconds": seconds(lag_ns),
        "nodes": nodes,
        "epoch": epoch_ns,
        "next_within_seconds": None if next_within_ns is None else seconds(next_within_ns),
    }
    return _compact(body).encode()
