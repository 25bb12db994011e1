"""Interpretation of an advisory stream's messages at the centre: an advisory, a heartbeat, or a rejected message.

A node is the key (replicator, name, stream, value); the Stream Replicator's advisories have no name and no stream,
which become "". The highest advisory of a node by `RANK` wins, so the result does not depend on order of arrival,
repetition or batch boundaries. Ours rank by epoch and `transition`. The Stream Replicator's have neither and rank below
ours, by `timestamp`; within one second the later one in the life cycle wins.
"""

import json
import math
import uuid
from enum import StrEnum
from typing import Any, Final, NamedTuple

from sr_assets.domain.advisories import NODE_PROTOCOL, OBSERVER_EVENT, PROTOCOL, SITE_PROTOCOL
from sr_assets.domain.positions import CLOCK_TOLERANCE_NS, SECOND_NS, parse_rfc3339_ns
from sr_assets.domain.senders import MAX_SENDER_BYTES, refuse_constant
from sr_assets.domain.tracking.announcements import NodeEvent
from sr_assets.domain.tracking.outages import SiteEvent
from sr_assets.domain.tracking.rules import Event, Status

#: Larger payloads are not parsed: an advisory has about 500 bytes.
MAX_PAYLOAD_BYTES: Final = 64 << 10
_END_OF_TIME_NS: Final = 1 << 63
_V1_SCHEMA: Final = "/age_advisory.json"

#: Events and the resulting status, by event code: the order of the life cycle.
LIFE_CYCLE: Final = (Event.NEW, Event.TIMEOUT, Event.RECOVER, Event.EXPIRE)
STATUS: Final = (Status.UP, Status.TIMEOUT, Status.UP, Status.RETIRED)
_EVENT_CODES: Final = {event.value: code for code, event in enumerate(LIFE_CYCLE)}
#: The fields that rank the advisories of a node, in order. The higher value wins, except for `received_ns` (stored time
#: in the centre's stream). A missing `seen_ns` ranks lowest.
RANK: Final = ("epoch_ns", "transition", "event_ns", "event_code", "seen_ns", "origin", "received_ns")
#: A site is blind when the centre's clock has passed the sum of these: the time of its last heartbeat, and the
#: announced time until the next. A site without both is never blind.
BLIND_AFTER: Final = ("observed_ns", "next_within_ns")
#: The values of `previous` that each event allows.
_BEFORE: Final[dict[str, tuple[str | None, ...]]] = {
    "new": (None, "retired"),
    "timeout": ("up",),
    "recover": ("timeout",),
    # `retire` also retires nodes that are up.
    "expire": ("timeout", "up"),
}


class AdvisoryFormat(StrEnum):
    """The format of an advisory: the old replicator's, the Stream Replicator's, or ours (with a `transition`)."""

    V1 = "v1"
    V2 = "v2"
    SR_ASSETS = "ours"


class Reject(StrEnum):
    """The reason of a rejection; a `clock_ahead` message with a `transition` is folded too."""

    TOO_LARGE = "too_large"
    NOT_JSON = "not_json"
    NO_ADVISORY = "no_advisory"
    UNKNOWN_EVENT = "unknown_event"
    BAD_FIELD = "bad_field"
    TOO_LONG = "too_long"
    BAD_TIME = "bad_time"
    IMPOSSIBLE = "impossible_transition"
    CLOCK_AHEAD = "clock_ahead"


# Tuples, because there are millions: one per message.
class Advisory(NamedTuple):
    """A valid advisory. `epoch_ns` 0, `transition` 0, `name` and `stream` "" stand for missing values.

    `event_code` is the event's index in `LIFE_CYCLE`, `origin` an `AdvisoryFormat`. `warning` is the reason to list it
    among the rejected messages although it is folded.
    """

    replicator: str
    name: str
    stream: str
    node: str
    epoch_ns: int
    transition: int
    event_ns: int
    event_code: int
    seen_ns: int | None
    origin: str
    event_id: str
    age_seconds: float | None
    previous: str | None
    late: bool
    returned: bool
    outage_seconds: float | None
    warning: Reject | None = None


class Observation(NamedTuple):
    """A site's heartbeat (`observer_alive`): position, lag, and the maximum time until the next one."""

    replicator: str
    name: str
    stream: str
    watermark_ns: int | None
    position: int | None
    lag_messages: int | None
    nodes: int | None
    next_within_ns: int | None


class SiteNotice(NamedTuple):
    """An event of a site's outage, or of a node's flapping, which the centre ignores."""

    replicator: str
    name: str
    stream: str
    event: str
    event_ns: int


class Rejected(NamedTuple):
    """An invalid message and its reason; `field` names the wrong field, or is ""."""

    reason: Reject
    field: str = ""


_DECODER: Final = json.JSONDecoder(parse_constant=refuse_constant)


class _UnfitError(Exception):
    """Raised for an invalid message; `args` are the fields of `Rejected`."""


def read_message(payload: bytes, received_ns: int) -> Advisory | Observation | SiteNotice | Rejected:
    """Interpret one message of an advisory stream, stored in it at `received_ns`, without raising."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        return Rejected(Reject.TOO_LARGE)
    try:
        document = _DECODER.decode(payload.decode())
    except (ValueError, RecursionError):  # not UTF-8, not JSON, a number of thousands of digits; nested endlessly
        return Rejected(Reject.NOT_JSON)
    if not isinstance(document, dict):
        return Rejected(Reject.NO_ADVISORY)
    try:
        if document.get("event") == OBSERVER_EVENT:
            return _observation(document)
        if document.get("protocol") in (SITE_PROTOCOL, NODE_PROTOCOL):
            return _site_notice(document)
        return _advisory(document, received_ns)
    except _UnfitError as unfit:
        return Rejected(*unfit.args)


def _advisory(document: dict[str, Any], received_ns: int) -> Advisory:
    written_as = _format(document)
    event = document.get("event")
    event_code = _EVENT_CODES.get(event) if isinstance(event, str) else None
    if event_code is None:
        raise _UnfitError(Reject.UNKNOWN_EVENT, "event")
    transition, epoch_ns = _counter(document, "transition", 1), _counter(document, "epoch", 0)
    replicator, node = _text(document, "replicator"), _text(document, "value")
    name, stream = _text(document, "name", ""), _text(document, "stream", "")
    event_ns = _event_ns(document)
    if "previous" in document and document["previous"] not in _BEFORE[LIFE_CYCLE[event_code]]:
        raise _UnfitError(Reject.IMPOSSIBLE, "previous")
    if transition == 1 and event_code:
        raise _UnfitError(Reject.IMPOSSIBLE, "transition")
    warning = Reject.CLOCK_AHEAD if event_ns - received_ns > CLOCK_TOLERANCE_NS else None
    if warning and not transition:
        # Without a transition only the time ranks it, so it would outrank every correct advisory for hours.
        raise _UnfitError(warning, "timestamp")
    age = _seconds(document.get("age_seconds", document.get("age")))
    return Advisory(
        replicator,
        name,
        stream,
        node,
        epoch_ns if transition else 0,
        transition,
        event_ns,
        event_code,
        _seen_ns(document.get("seen")),
        AdvisoryFormat.SR_ASSETS.value if transition else written_as.value,
        _identity(document, (replicator, name, stream, node, event_code, event_ns)),
        age,
        document.get("previous"),
        document.get("late") is True,
        document.get("returned") is True,
        _seconds(document.get("outage_seconds")),
        warning,
    )


def _format(document: dict[str, Any]) -> AdvisoryFormat:
    if document.get("protocol") == PROTOCOL:
        return AdvisoryFormat.V2
    schema = document.get("$schema")
    if "protocol" not in document and isinstance(schema, str) and schema.endswith(_V1_SCHEMA):
        return AdvisoryFormat.V1
    raise _UnfitError(Reject.NO_ADVISORY, "protocol")


def _text(document: dict[str, Any], field: str, default: str | None = None) -> str:
    value = document.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or not (value or default == ""):
        raise _UnfitError(Reject.BAD_FIELD, field)
    try:
        length = len(value.encode())
    except UnicodeEncodeError:
        raise _UnfitError(Reject.BAD_FIELD, field) from None
    if length > MAX_SENDER_BYTES:
        raise _UnfitError(Reject.TOO_LONG, field)
    return value


def _counter(document: dict[str, Any], field: str, least: int) -> int:
    """Return a counter that only our advisories have, or 0."""
    value = document.get(field)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _END_OF_TIME_NS:
        raise _UnfitError(Reject.BAD_FIELD, field)
    return value


def _event_ns(document: dict[str, Any]) -> int:
    """Return the event's time in unix ns: `event_time`, else `timestamp` in seconds."""
    text = document.get("event_time")
    field = "timestamp" if text is None else "event_time"
    try:
        ns = _whole_seconds(document.get("timestamp")) * SECOND_NS if text is None else parse_rfc3339_ns(text)
    except (TypeError, ValueError):
        raise _UnfitError(Reject.BAD_TIME, field) from None
    if not 0 <= ns < _END_OF_TIME_NS:
        raise _UnfitError(Reject.BAD_TIME, field)
    return ns


def _whole_seconds(value: object) -> int:
    """Return seconds rounded down. Raises ValueError unless it is a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e12 < value < 1e12:
        raise ValueError("is not a number of seconds")
    return math.floor(value)


def _seen_ns(value: object) -> int | None:
    """Return the node's last sighting in unix ns, or None for the Stream Replicator's value for unknown."""
    try:
        ns = _whole_seconds(value) * SECOND_NS
    except ValueError:
        return None
    return ns if 0 < ns < _END_OF_TIME_NS else None


def _seconds(value: object) -> float | None:
    """Return a duration in seconds, or None if it is not a number or negative, as the Stream Replicator writes an
    unknown one.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
        return None
    return float(value)


def _identity(document: dict[str, Any], fields: tuple[object, ...]) -> str:
    """Return the advisory's own id, or an id computed from `fields`, so that repetitions have the same id."""
    value = document.get("event_id")
    if isinstance(value, str) and 0 < len(value) <= MAX_SENDER_BYTES and value.isascii():
        return value
    return str(uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(fields, separators=(",", ":"), ensure_ascii=False)))


def _observation(document: dict[str, Any]) -> Observation:
    names = _text(document, "replicator"), _text(document, "name", ""), _text(document, "stream", "")
    text = document.get("watermark")
    try:
        watermark_ns = None if text is None else parse_rfc3339_ns(text)
    except (TypeError, ValueError):
        raise _UnfitError(Reject.BAD_TIME, "watermark") from None
    within = _seconds(document.get("next_within_seconds"))
    return Observation(
        *names,
        watermark_ns if watermark_ns is not None and 0 <= watermark_ns < _END_OF_TIME_NS else None,
        _count(document.get("position")),
        _count(document.get("lag_messages")),
        _count(document.get("nodes")),
        None if within is None else min(round(within * SECOND_NS), _END_OF_TIME_NS // 2),
    )


def _site_notice(document: dict[str, Any]) -> SiteNotice:
    if document.get("event") not in (*SiteEvent, *NodeEvent):
        raise _UnfitError(Reject.UNKNOWN_EVENT, "event")
    names = _text(document, "replicator"), _text(document, "name", ""), _text(document, "stream", "")
    return SiteNotice(*names, document["event"], _event_ns(document))


def _count(value: object) -> int | None:
    known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _END_OF_TIME_NS
    return value if known and isinstance(value, int) else None
