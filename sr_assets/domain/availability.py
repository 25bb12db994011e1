"""The centre's rules: what a message of an advisory stream says, and the fold of all of them into one view.

Here: reading an advisory whoever wrote it, what cannot be one, which advisory of a node wins. Not here: the history and
its retention, the tables, when a site counts as blind (`adapters.state.global_view`), our own advisories (`advisories`).

A node is the key (replicator, name, stream, value); the Stream Replicator's advisories tell no name and no stream, which then
are "". Its advisory with the highest `transition` wins, so that neither the order of arrival nor a repetition nor a cut
of the history changes anything. An advisory without a `transition`, the Stream Replicator's, loses against any with one; among
those without the later `timestamp` wins, of two in one second the later one in the order of the life cycle.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple, NoReturn

from sr_assets.domain.advisories import OBSERVER_EVENT, PROTOCOL
from sr_assets.domain.positions import SECOND_NS, parse_rfc3339_ns
from sr_assets.domain.senders import MAX_SENDER_BYTES
from sr_assets.domain.tracking import Event, Status

#: An advisory is about 500 bytes; what is larger than this is not even parsed.
MAX_PAYLOAD_BYTES: Final = 64 << 10
#: A server's clock may run ahead of another's by less than this.
CLOCK_TOLERANCE_NS: Final = 3_600 * SECOND_NS
_END_OF_TIME_NS: Final = 1 << 63
_V1_SCHEMA: Final = "/age_advisory.json"

#: Status after an event, by its place in the life cycle.
LIFE_CYCLE: Final = (Event.NEW, Event.TIMEOUT, Event.RECOVER, Event.EXPIRE)
STATUS: Final = (Status.UP, Status.TIMEOUT, Status.UP, Status.RETIRED)
_CYCLE: Final = {event.value: place for place, event in enumerate(LIFE_CYCLE)}
#: What a node was before an event, as `previous` tells it; anything else contradicts the event.
_BEFORE: Final[dict[str, tuple[str | None, ...]]] = {
    "new": (None, "retired"),
    "timeout": ("up",),
    "recover": ("timeout",),
    "expire": ("timeout",),
}


class Origin(StrEnum):
    """Who wrote an advisory: the old replicator, the Stream Replicator, or we (what says its `transition`)."""

    V1 = "v1"
    V2 = "v2"
    OURS = "ours"


class Reject(StrEnum):
    """Why a message is kept apart instead of folded. `clock_ahead` is folded all the same when it has a `transition`."""

    TOO_LARGE = "too_large"
    NOT_JSON = "not_json"
    NO_ADVISORY = "no_advisory"
    UNKNOWN_EVENT = "unknown_event"
    BAD_FIELD = "bad_field"
    TOO_LONG = "too_long"
    BAD_TIME = "bad_time"
    IMPOSSIBLE = "impossible_transition"
    CLOCK_AHEAD = "clock_ahead"


# Tuples, because millions of them are made: one a message.
class Advisory(NamedTuple):
    """One advisory, checked. `transition` 0, `name` and `stream` "" are not told; `seen_ns` is the writer's, if any.

    `cycle` is the event's place in `LIFE_CYCLE`. `doubt` says why it is kept apart as well, although it is folded.
    """

    replicator: str
    name: str
    stream: str
    node: str
    transition: int
    event_ns: int
    cycle: int
    seen_ns: int | None
    origin: str
    event_id: str
    age_seconds: float | None
    previous: str | None
    late: bool
    returned: bool
    outage_seconds: float | None
    doubt: Reject | None = None


class Observation(NamedTuple):
    """What a site says of itself (`observer_alive`): that it watches, how far it is, and how soon it speaks again."""

    replicator: str
    name: str
    stream: str
    watermark_ns: int | None
    position: int | None
    lag_messages: int | None
    nodes: int | None
    next_within_ns: int | None


class Rejected(NamedTuple):
    """A message that is no advisory, and why; `what` names the field at fault when there is one."""

    reason: Reject
    what: str = ""


class Standing(NamedTuple):
    """How a node stands by the advisory that won; the fields in the order that decides."""

    transition: int
    event_ns: int
    cycle: int
    seen_ns: int | None
    origin: str
    received_ns: int

    @property
    def status(self) -> Status:
        """Whether the node is up, silent or gone."""
        return STATUS[self.cycle]

    @property
    def last_seen_ns(self) -> int | None:
        """When the node was seen last: by an event that is a sighting then, else as its writer says."""
        return last_seen_ns(self.cycle, self.event_ns, self.seen_ns)


Key = tuple[str, str, str, str]


def last_seen_ns(cycle: int, event_ns: int, seen_ns: int | None) -> int | None:
    """Return when a node was seen last, as an advisory about it tells."""
    return event_ns if STATUS[cycle] is Status.UP else seen_ns


def fold(view: Mapping[Key, Standing], received: Iterable[tuple[Advisory, int]]) -> dict[Key, Standing]:
    """Return the view after advisories with the times (unix ns) at which the centre's stream stored them.

    The order, repetitions and cuts of `received` do not matter: of equals the one received first stays.
    """
    after = dict(view)
    for one, received_ns in received:
        key = (one.replicator, one.name, one.stream, one.node)
        told = Standing(one.transition, one.event_ns, one.cycle, one.seen_ns, one.origin, received_ns)
        known = after.get(key)
        if known is None or _rank(told) > _rank(known):
            after[key] = told
    return after


def _rank(standing: Standing) -> tuple[int, int, int, int, str, int]:
    transition, event_ns, cycle, seen_ns, origin, received_ns = standing
    return transition, event_ns, cycle, -1 if seen_ns is None else seen_ns, origin, -received_ns


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse)


class _UnfitError(Exception):
    """A message is no advisory; `args` are those of `Rejected`."""


def read_message(payload: bytes, received_ns: int) -> Advisory | Observation | Rejected:
    """Read one message of an advisory stream, whatever it holds; never raises.

    `received_ns` is when the centre's stream stored it.
    """
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
        return _advisory(document, received_ns)
    except _UnfitError as unfit:
        return Rejected(*unfit.args)


def _advisory(document: dict[str, Any], received_ns: int) -> Advisory:
    told = _told_by(document)
    event = document.get("event")
    cycle = _CYCLE.get(event) if isinstance(event, str) else None
    if cycle is None:
        raise _UnfitError(Reject.UNKNOWN_EVENT, "event")
    transition = _transition(document)
    replicator, node = _text(document, "replicator"), _text(document, "value")
    name, stream = _text(document, "name", ""), _text(document, "stream", "")
    event_ns = _event_ns(document)
    if "previous" in document and document["previous"] not in _BEFORE[LIFE_CYCLE[cycle]]:
        raise _UnfitError(Reject.IMPOSSIBLE, "previous")
    if transition == 1 and cycle:
        raise _UnfitError(Reject.IMPOSSIBLE, "transition")
    doubt = Reject.CLOCK_AHEAD if event_ns - received_ns > CLOCK_TOLERANCE_NS else None
    if doubt and not transition:
        # Its time alone would decide, for hours, against everything that is true.
        raise _UnfitError(doubt, "timestamp")
    origin = Origin.OURS.value if transition else told
    age = _seconds(document.get("age_seconds", document.get("age")))
    return Advisory(
        replicator,
        name,
        stream,
        node,
        transition,
        event_ns,
        cycle,
        _seen_ns(document.get("seen")),
        origin,
        _identity(document, (replicator, name, stream, node, cycle, event_ns)),
        age,
        document.get("previous"),
        document.get("late") is True,
        document.get("returned") is True,
        _seconds(document.get("outage_seconds")),
        doubt,
    )


def _told_by(document: dict[str, Any]) -> str:
    if document.get("protocol") == PROTOCOL:
        return Origin.V2.value
    schema = document.get("$schema")
    if "protocol" not in document and isinstance(schema, str) and schema.endswith(_V1_SCHEMA):
        return Origin.V1.value
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


def _transition(document: dict[str, Any]) -> int:
    value = document.get("transition")
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _END_OF_TIME_NS:
        raise _UnfitError(Reject.BAD_FIELD, "transition")
    return value


def _event_ns(document: dict[str, Any]) -> int:
    """Return when it happened: `event_time`, or `timestamp` in seconds where there is none."""
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
    """Return seconds rounded down. Raises ValueError for what is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e12 < value < 1e12:
        raise ValueError("not a number of seconds")
    return math.floor(value)


def _seen_ns(value: object) -> int | None:
    """Return when the node was seen, in unix ns; None for what the Stream Replicator writes when it does not know."""
    try:
        ns = _whole_seconds(value) * SECOND_NS
    except ValueError:
        return None
    return ns if 0 < ns < _END_OF_TIME_NS else None


def _seconds(value: object) -> float | None:
    """Return a length of time; None for what is none, or negative: the Stream Replicator's way to say that it does not know."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
        return None
    return float(value)


def _identity(document: dict[str, Any], told: tuple[object, ...]) -> str:
    """Return the advisory's own id, or one made of what it tells, so that a repetition is known as one."""
    value = document.get("event_id")
    if isinstance(value, str) and 0 < len(value) <= MAX_SENDER_BYTES and value.isascii():
        return value
    return str(uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(told, separators=(",", ":"), ensure_ascii=False)))


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


def _count(value: object) -> int | None:
    known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _END_OF_TIME_NS
    return value if known and isinstance(value, int) else None
