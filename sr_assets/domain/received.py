"""Interpretation of an advisory stream's messages at the centre: an advisory, a heartbeat, or a rejected message.

A node is the key (replicator, name, stream, value); the Stream Replicator's advisories have no name and no stream,
which become "". The highest advisory of a node by `RANK` wins, so the result does not depend on order of arrival,
repetition or batch boundaries. Ours rank by epoch and `transition`. The Stream Replicator's have neither and rank below
ours, by `timestamp`; within one second the later one in the life cycle wins.
"""

import json
import math
import re
import uuid
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Final, NamedTuple

from sr_assets.domain.advisories import NODE_PROTOCOL, OBSERVER_EVENT, PROTOCOL, SITE_PROTOCOL
from sr_assets.domain.messages import SOURCE_HEADER, Message, header_values, parse_origin
from sr_assets.domain.positions import CLOCK_TOLERANCE_NS, DAY_NS, SECOND_NS, parse_rfc3339_ns
from sr_assets.domain.senders import MAX_SENDER_BYTES, refuse_constant
from sr_assets.domain.subjects import matcher, observer_subject
from sr_assets.domain.tracking.announcements import NodeEvent
from sr_assets.domain.tracking.outages import SiteEvent
from sr_assets.domain.tracking.rules import Event, Status

END_OF_TIME_NS: Final = 1 << 63
#: More transitions than a node has in 60 years at one per second: a number cannot outrank all later ones for ever.
_MOST_TRANSITIONS: Final = 1 << 31
#: Larger payloads are not parsed: an advisory has about 500 bytes.
MAX_PAYLOAD_BYTES: Final = 64 << 10
#: The beginning of the default subjects of heartbeats and events, maybe after a prefix; replicator, name and stream follow.
_DEFAULT_ROOT: Final = re.compile(r"(?:^|\.)sr_assets\.(?:observer_alive|(?:site|node)\.[^.]+)\.")
_V1_SCHEMA: Final = "/age_advisory.json"
#: Events and the resulting status, by event code: the order of the life cycle.
LIFE_CYCLE: Final = (Event.NEW, Event.TIMEOUT, Event.RECOVER, Event.EXPIRE)
STATUS: Final = (Status.UP, Status.TIMEOUT, Status.UP, Status.RETIRED, Status.UP)
#: The names of the events by event code: those of the life cycle, and that of a node's event.
REPORTED: Final = (*(event.value for event in LIFE_CYCLE), NodeEvent.UNRETIRED.value)
_EVENT_CODES: Final = {event: code for code, event in enumerate(REPORTED)}
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
_DECODER: Final = json.JSONDecoder(parse_constant=refuse_constant)


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
    FOREIGN_SITE = "foreign_site"
    TOO_MANY_STREAMS = "too_many_streams"
    TOO_MANY_NODES = "too_many_nodes"


class UnfitError(Exception):
    """Raised for an invalid message; `args` are the fields of `Rejected`."""


def text_of(document: dict[str, Any], field: str, default: str | None = None) -> str:
    """Return a name, `default` if the field is missing. Raises UnfitError."""
    value = document.get(field)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or not (value or default == ""):
        raise UnfitError(Reject.BAD_FIELD, field)
    try:
        length = len(value.encode())
    except UnicodeEncodeError:
        raise UnfitError(Reject.BAD_FIELD, field) from None
    if length > MAX_SENDER_BYTES:
        raise UnfitError(Reject.TOO_LONG, field)
    return value


def transition_of(document: dict[str, Any]) -> int:
    """Return the number of a node's transition, which only our advisories have, or 0. Raises UnfitError."""
    return _counter(document, "transition", 1, _MOST_TRANSITIONS)


def epoch_of(document: dict[str, Any], received_ns: int) -> int:
    """Return the epoch, in unix ns, of the state that wrote an advisory, or 0. Raises UnfitError.

    An epoch far ahead of the stored time would outrank every correct one.
    """
    epoch_ns = _counter(document, "epoch", 0, END_OF_TIME_NS)
    refuse_ahead(epoch_ns, received_ns, "epoch")
    return epoch_ns


def refuse_ahead(time_ns: int, received_ns: int, field: str) -> None:
    """Raise UnfitError for a time far ahead of the stored time: it would hide all later ones."""
    if time_ns - received_ns > CLOCK_TOLERANCE_NS:
        raise UnfitError(Reject.CLOCK_AHEAD, field)


def _counter(document: dict[str, Any], field: str, least: int, end: int) -> int:
    value = document.get(field)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < end:
        raise UnfitError(Reject.BAD_FIELD, field)
    return value


def event_time_ns(document: dict[str, Any]) -> int:
    """Return the event's time in unix ns: `event_time`, else `timestamp` in seconds."""
    text = document.get("event_time")
    field = "timestamp" if text is None else "event_time"
    try:
        ns = _whole_seconds(document.get("timestamp")) * SECOND_NS if text is None else parse_rfc3339_ns(text)
    except (TypeError, ValueError):
        raise UnfitError(Reject.BAD_TIME, field) from None
    if not 0 <= ns < END_OF_TIME_NS:
        raise UnfitError(Reject.BAD_TIME, field)
    return ns


def _whole_seconds(value: object) -> int:
    """Return seconds rounded down. Raises ValueError unless it is a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e12 < value < 1e12:
        raise ValueError("is not a number of seconds")
    return math.floor(value)


def seen_ns_of(value: object) -> int | None:
    """Return the node's last sighting in unix ns, or None for the Stream Replicator's value for unknown."""
    try:
        ns = _whole_seconds(value) * SECOND_NS
    except ValueError:
        return None
    return ns if 0 < ns < END_OF_TIME_NS else None


def seconds_of(value: object) -> float | None:
    """Return a duration in seconds, or None if it is not a number or negative, as the Stream Replicator writes an
    unknown one.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
        return None
    return float(value)


def identity_of(document: dict[str, Any], fields: tuple[object, ...]) -> str:
    """Return the advisory's own id, or an id computed from `fields`, so that repetitions have the same id."""
    value = document.get("event_id")
    if isinstance(value, str) and 0 < len(value) <= MAX_SENDER_BYTES and value.isascii():
        return value
    return str(uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(fields, separators=(",", ":"), ensure_ascii=False)))


def count_of(value: object) -> int | None:
    """Return a number of messages or nodes, or None if it is not one."""
    known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < END_OF_TIME_NS
    return value if known and isinstance(value, int) else None


class AdvisoryFormat(StrEnum):
    """The format of an advisory: the old replicator's, the Stream Replicator's, or ours (with a `transition`)."""

    V1 = "v1"
    V2 = "v2"
    SR_ASSETS = "ours"


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


class NodeNotice(NamedTuple):
    """An event of a node that tells the centre its state, as an advisory would."""

    state: Advisory


class SiteNotice(NamedTuple):
    """An event of a site's outage, or of a node without its state, which the centre ignores."""

    replicator: str
    name: str
    stream: str
    event: str
    event_ns: int


class Rejected(NamedTuple):
    """An invalid message and its reason; `field` names the wrong field, or is ""."""

    reason: Reject
    field: str = ""


def read_message(payload: bytes, received_ns: int) -> Advisory | Observation | NodeNotice | SiteNotice | Rejected:
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
            return _observation(document, received_ns)
        if document.get("protocol") in (SITE_PROTOCOL, NODE_PROTOCOL):
            return _node_notice(document, received_ns) if "state" in document else _site_notice(document, received_ns)
        return _advisory(document, received_ns)
    except UnfitError as unfit:
        return Rejected(*unfit.args)


class SitePath(NamedTuple):
    """The way of a site's messages: their subjects in the feed's stream, and the entries that copied them, first to last.

    `name` is "" for a Stream Replicator's site. An empty field does not restrict.
    """

    replicator: str
    name: str
    subjects: tuple[str, ...] = ()
    copied_by: tuple[str, ...] = ()


class SitePaths:
    """Decides who may speak for a site, by the way that a message took.

    Without configured paths, only a subject with the default root of heartbeats or events says whose message it is.
    """

    def __init__(self, paths: Iterable[SitePath]) -> None:
        self._paths = [(path, matcher(path.subjects)) for path in paths]

    def read(self, message: Message) -> Advisory | Observation | NodeNotice | SiteNotice | Rejected:
        """Interpret a message as `read_message`; one about a site that may not send it is rejected.

        Times of a node far ahead of the stored time become the stored time.
        """
        content = read_message(message.payload, message.stored_ns)
        if isinstance(content, Rejected):
            return content
        said = content.state if isinstance(content, NodeNotice) else content
        allowed = self._allows(message, said.replicator, said.name) if self._paths else self._is_own(message, said)
        if not allowed:
            return Rejected(Reject.FOREIGN_SITE, "name")
        if isinstance(content, NodeNotice):
            return NodeNotice(_credible(content.state, message.stored_ns))
        return _credible(content, message.stored_ns) if isinstance(content, Advisory) else content

    def told_state(self, message: Message) -> Advisory | None:
        """Return the state of a node in a message: of an advisory, or of a node's event that tells it; None without one."""
        content = self.read(message)
        content = content.state if isinstance(content, NodeNotice) else content
        return content if isinstance(content, Advisory) else None

    def _allows(self, message: Message, replicator: str, name: str) -> bool:
        for path, matches in self._paths:
            if (path.replicator, path.name) != (replicator, name) or (path.subjects and not matches(message.subject)):
                continue
            if not path.copied_by:
                return True
            # All of them: a publisher may write the first ones itself, but each copy adds the entry that made it.
            hops = map(parse_origin, header_values(message.headers, SOURCE_HEADER))
            if [hop and f"{hop.replicator}/{hop.name}" for hop in hops] == list(path.copied_by):
                return True
        return False

    def _is_own(self, message: Message, said: Advisory | Observation | SiteNotice) -> bool:
        """Return False if a subject with a default root names another site than the body.

        A rewritten subject with another number of tokens says nothing.
        """
        root = _DEFAULT_ROOT.search(message.subject)
        if root is None:
            return True
        own = observer_subject(None, said.replicator, said.name, said.stream).split(".")[2:]
        named = message.subject[root.end() :].split(".")
        return len(own) != len(named) or own == named


def _credible(state: Advisory, received_ns: int) -> Advisory:
    latest_ns = received_ns + CLOCK_TOLERANCE_NS
    if state.event_ns > latest_ns:
        state = state._replace(event_ns=received_ns, warning=Reject.CLOCK_AHEAD)
    return state if (state.seen_ns or 0) <= latest_ns else state._replace(seen_ns=received_ns)


def _advisory(document: dict[str, Any], received_ns: int) -> Advisory:
    written_as = _format(document)
    event = document.get("event")
    event_code = _EVENT_CODES.get(event) if isinstance(event, str) else None
    if event_code is None or event_code >= len(LIFE_CYCLE):
        raise UnfitError(Reject.UNKNOWN_EVENT, "event")
    transition, epoch_ns = transition_of(document), epoch_of(document, received_ns)
    replicator, node = text_of(document, "replicator"), text_of(document, "value")
    name, stream = text_of(document, "name", ""), text_of(document, "stream", "")
    event_ns = event_time_ns(document)
    if "previous" in document and document["previous"] not in _BEFORE[LIFE_CYCLE[event_code]]:
        raise UnfitError(Reject.IMPOSSIBLE, "previous")
    if transition == 1 and event_code:
        raise UnfitError(Reject.IMPOSSIBLE, "transition")
    warning = Reject.CLOCK_AHEAD if event_ns - received_ns > CLOCK_TOLERANCE_NS else None
    if warning and not transition:
        # Without a transition only the time ranks it, so it would outrank every correct advisory for hours.
        raise UnfitError(warning, "timestamp")
    age = seconds_of(document.get("age_seconds", document.get("age")))
    return Advisory(
        replicator,
        name,
        stream,
        node,
        epoch_ns if transition else 0,
        transition,
        event_ns,
        event_code,
        seen_ns_of(document.get("seen")),
        AdvisoryFormat.SR_ASSETS.value if transition else written_as.value,
        identity_of(document, (replicator, name, stream, node, event_code, event_ns)),
        age,
        document.get("previous"),
        document.get("late") is True,
        document.get("returned") is True,
        seconds_of(document.get("outage_seconds")),
        warning,
    )


def _format(document: dict[str, Any]) -> AdvisoryFormat:
    if document.get("protocol") == PROTOCOL:
        return AdvisoryFormat.V2
    schema = document.get("$schema")
    if "protocol" not in document and isinstance(schema, str) and schema.endswith(_V1_SCHEMA):
        return AdvisoryFormat.V1
    raise UnfitError(Reject.NO_ADVISORY, "protocol")


def _observation(document: dict[str, Any], received_ns: int) -> Observation:
    names = text_of(document, "replicator"), text_of(document, "name", ""), text_of(document, "stream", "")
    text = document.get("watermark")
    try:
        watermark_ns = None if text is None else parse_rfc3339_ns(text)
    except (TypeError, ValueError):
        raise UnfitError(Reject.BAD_TIME, "watermark") from None
    if watermark_ns is not None:
        refuse_ahead(watermark_ns, received_ns, "watermark")
    within = seconds_of(document.get("next_within_seconds"))
    return Observation(
        *names,
        watermark_ns if watermark_ns is not None and watermark_ns >= 0 else None,
        count_of(document.get("position")),
        count_of(document.get("lag_messages")),
        count_of(document.get("nodes")),
        None if within is None else min(round(within * SECOND_NS), DAY_NS),
    )


def _site_notice(document: dict[str, Any], received_ns: int) -> SiteNotice:
    if document.get("event") not in (*SiteEvent, *NodeEvent):
        raise UnfitError(Reject.UNKNOWN_EVENT, "event")
    names = text_of(document, "replicator"), text_of(document, "name", ""), text_of(document, "stream", "")
    event_ns = event_time_ns(document)
    # The latest event counts, so one far ahead would hide every later outage.
    refuse_ahead(event_ns, received_ns, "event_time")
    return SiteNotice(*names, document["event"], event_ns)


def _node_notice(document: dict[str, Any], received_ns: int) -> NodeNotice:
    """Read the state in a node's event: an advisory's fields, ranked by the number of the node's last transition."""
    state = document["state"]
    if not isinstance(state, dict):
        raise UnfitError(Reject.BAD_FIELD, "state")
    event, previous = state.get("event"), state.get("previous")
    code = _EVENT_CODES.get(event) if isinstance(event, str) else None
    if code is None:
        raise UnfitError(Reject.UNKNOWN_EVENT, "state.event")
    if previous not in (None, *Status):
        raise UnfitError(Reject.BAD_FIELD, "state.previous")
    transition = transition_of(state)
    if not transition:
        raise UnfitError(Reject.BAD_FIELD, "state.transition")
    names = text_of(document, "replicator"), text_of(document, "name", ""), text_of(document, "stream", "")
    node, event_ns = text_of(document, "value"), event_time_ns(state)
    return NodeNotice(
        Advisory(
            *names,
            node,
            epoch_of(document, received_ns),
            transition,
            event_ns,
            code,
            seen_ns_of(state.get("seen")),
            AdvisoryFormat.SR_ASSETS.value,
            identity_of(document, (*names, node, code, event_ns)),
            None,
            previous,
            late=False,
            returned=False,
            outage_seconds=None,
        )
    )
