"""The reaction to each error with which JetStream can refuse a copy."""

from enum import StrEnum
from typing import Final

#: JetStream's error codes in nats-server 2.10 to 2.15: `server/errors.json` leaves no gap between them.
CODES: Final = range(10002, 10228)
MESSAGE_TOO_LARGE: Final = 10054
HEADERS_TOO_LARGE: Final = 10097
_NOT_THE_EXPECTED_STREAM: Final = 10060
_STREAM_SEALED: Final = 10109
_API_LEVEL_TOO_LOW: Final = 10185
#: The publisher's own code for a subject that no server accepts.
INVALID_SUBJECT: Final = 400
#: In the text of 10077 this distinguishes a full subject (`discard_new_per_subject`) from a full stream.
_SUBJECT_FULL: Final = "per subject"


class Reaction(StrEnum):
    """The reaction to a refused copy. Only a parked message leaves the queue."""

    #: Send the message again: the cause lies in the stream, the account, the server or the cluster, and can pass.
    WAIT = "wait"
    #: End the stream's run immediately: no copy can be stored until an operator changes the target.
    STOP = "stop"
    #: Record and skip the message: the target can never store this message, whatever else it holds.
    PARK = "park"


_REACTIONS: Final = {
    **dict.fromkeys(CODES, Reaction.WAIT),
    **dict.fromkeys((_NOT_THE_EXPECTED_STREAM, _STREAM_SEALED, _API_LEVEL_TOO_LOW), Reaction.STOP),
    **dict.fromkeys((MESSAGE_TOO_LARGE, HEADERS_TOO_LARGE, INVALID_SUBJECT), Reaction.PARK),
}


def is_subject_full(text: str | None) -> bool:
    """Return whether an error's text says that the target keeps no further message of one subject."""
    return _SUBJECT_FULL in (text or "")


def reaction(code: int | None, text: str | None) -> Reaction:
    """Return the reaction to a refusal with this error code and text; an unknown code waits.

    A target with `discard_new_per_subject` keeps the first messages of a subject by design, so a later one is parked.
    """
    return Reaction.PARK if is_subject_full(text) else _REACTIONS.get(code or 0, Reaction.WAIT)
