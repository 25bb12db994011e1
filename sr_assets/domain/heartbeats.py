"""The hops of a copied message: its transit time from each stream to the next.

Each hop adds a `Choria-SR-Source` with the stored time in the stream that it read. A heartbeat also has the header
`Choria-SR-Subject`.
"""

from typing import Final, NamedTuple

from sr_assets.domain.messages import SOURCE_HEADER, header_values, parse_origin
from sr_assets.domain.positions import SECOND_NS

SUBJECT_HEADER: Final = b"Choria-SR-Subject"
ORIGINATOR_HEADER: Final = b"Choria-SR-Originator"
_MARK: Final = b"\r\n" + SUBJECT_HEADER + b":"
_MILLISECOND_NS: Final = 1_000_000
_MOST_DIGITS: Final = 10


class Hop(NamedTuple):
    """One hop of a message from a stream, of the entry `name`, to the next; times in unix ns.

    `subject`, `originator` and `sent_ns` are those of a heartbeat; the texts are empty for any other message.
    The times come from two clocks, so `arrived_ns` may be earlier than `stored_ns`.
    """

    name: str
    stream: str
    subject: str
    originator: str
    sent_ns: int | None
    stored_ns: int
    arrived_ns: int


def is_heartbeat(headers: bytes) -> bool:
    """Return whether a message is a heartbeat."""
    return _MARK in headers


def hops(headers: bytes, payload: bytes, arrived_ns: int) -> list[Hop]:
    """Return the hops, from the first copy on, of a message that a stream stored at `arrived_ns`."""
    subject, originator = (_text(headers, name) for name in (SUBJECT_HEADER, ORIGINATOR_HEADER))
    origins = [origin for value in header_values(headers, SOURCE_HEADER) if (origin := parse_origin(value))]
    sent_ns = int(payload) * SECOND_NS if payload.isdigit() and len(payload) <= _MOST_DIGITS else None
    stored = [origin.stored_ms * _MILLISECOND_NS for origin in origins]
    arrived = [*stored, arrived_ns][1:]
    return [
        Hop(origin.name, origin.stream, subject, originator, sent_ns, at_ns, next_ns)
        for origin, at_ns, next_ns in zip(origins, stored, arrived, strict=True)
    ]


def _text(headers: bytes, name: bytes) -> str:
    values = header_values(headers, name)
    return values[-1].decode(errors="replace") if values else ""
