"""The fields of a message of an advisory stream: their types, limits and defaults, and the reasons to reject a message."""

import json
import math
import uuid
from enum import StrEnum
from typing import Any, Final

from sr_assets.domain.positions import CLOCK_TOLERANCE_NS, SECOND_NS, parse_rfc3339_ns
from sr_assets.domain.senders import MAX_SENDER_BYTES

END_OF_TIME_NS: Final = 1 << 63
#: More transitions than a node has in 60 years at one per second: a number cannot outrank all later ones for ever.
_MOST_TRANSITIONS: Final = 1 << 31


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
