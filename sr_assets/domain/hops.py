"""The hops of a copied message: its transit time from each stream to the next, and their latencies in logarithmic buckets.

Each hop adds a `Choria-SR-Source` with the stored time in the stream that it read. A heartbeat also has the header
`Choria-SR-Subject`.

Bucket 0 is below a millisecond, the precision of the headers. Each further bucket is 4 % wider, so a value read from one is
at most 2 % wrong; a negative bucket is a negative latency, of clocks that differ.
"""

import math
from typing import Final, NamedTuple

from sr_assets.domain.messages import LAST_NS, SOURCE_HEADER, Origin, header_values, parse_origin
from sr_assets.domain.positions import CLOCK_TOLERANCE_NS, SECOND_NS

SUBJECT_HEADER: Final = b"Choria-SR-Subject"
ORIGINATOR_HEADER: Final = b"Choria-SR-Originator"
_MARK: Final = b"\r\n" + SUBJECT_HEADER + b":"
_MILLISECOND_NS: Final = 1_000_000
_MOST_DIGITS: Final = 10
#: The longest chain of streams that is measured, and the longest name of a hop or subject of a heartbeat.
_MOST_HOPS: Final = 8
_MOST_LETTERS: Final = 255
#: So many last tokens of a subject are compared after a hop, which may have removed others.
_MOST_TOKENS: Final = 3
GROWTH: Final = 1.04
#: Latencies are counted in slots of this length.
SLOT_NS: Final = 300 * SECOND_NS


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


def is_heartbeat(subject: str, headers: bytes) -> bool:
    """Return whether a message is a heartbeat: its header names the subject on which it was published.

    Each hop may have prefixed the subject and removed text from it. Without a hop the header's subject is the end of the
    message's, so that whoever may not publish on a heartbeat's subject cannot forge it.
    """
    if _MARK not in headers:
        return False
    named = _text(headers, SUBJECT_HEADER)
    if not named:
        return False
    if subject == named or subject.endswith(f".{named}"):
        return True
    tokens, own = named.split("."), subject.split(".")
    count = min(len(tokens), len(own), _MOST_TOKENS)
    return bool(header_values(headers, SOURCE_HEADER)) and tokens[-count:] == own[-count:]


def hops(headers: bytes, payload: bytes, arrived_ns: int, *, heartbeat: bool) -> tuple[list[Hop], int]:
    """Return the hops, from the first copy on, of a message that a stream stored at `arrived_ns`, and how many of its
    `Choria-SR-Source` are no possible hop. Only a `heartbeat` has a subject.

    The last hop is the copier's own. Any publisher may have written the earlier ones: at most 7 count, each stored no later
    than the next one (by clocks that differ by an hour at most), and none that claims to be the last one. Every number of a
    returned hop fits 64 bits.
    """
    values = header_values(headers, SOURCE_HEADER)
    subject, originator = (_text(headers, name) if heartbeat else "" for name in (SUBJECT_HEADER, ORIGINATOR_HEADER))
    origins: list[Origin] = []
    next_ns = arrived_ns if 0 <= arrived_ns <= LAST_NS else -1
    for value in reversed(values[-_MOST_HOPS:]):
        origin = parse_origin(value)
        if origin is None or not _is_possible(origin, next_ns) or any(map(origin.is_of_same_entry, origins[:1])):
            break
        origins.append(origin)
        next_ns = origin.stored_ms * _MILLISECOND_NS
    origins.reverse()
    latest_ns = min(arrived_ns + CLOCK_TOLERANCE_NS, LAST_NS)
    sent_ns = int(payload) * SECOND_NS if payload.isdigit() and len(payload) <= _MOST_DIGITS else None
    sent_ns = sent_ns if sent_ns is not None and sent_ns <= latest_ns else None
    stored = [origin.stored_ms * _MILLISECOND_NS for origin in origins]
    arrived = [*stored, arrived_ns][1:]
    measured = [
        Hop(origin.name, origin.stream, subject, originator, sent_ns, at_ns, next_ns)
        for origin, at_ns, next_ns in zip(origins, stored, arrived, strict=True)
    ]
    return measured, len(values) - len(measured)


def _is_possible(origin: Origin, next_ns: int) -> bool:
    names = max(len(origin.name), len(origin.stream))
    stored_ns = origin.stored_ms * _MILLISECOND_NS
    return next_ns >= 0 and stored_ns <= min(next_ns + CLOCK_TOLERANCE_NS, LAST_NS) and names <= _MOST_LETTERS


def _text(headers: bytes, name: bytes) -> str:
    values = header_values(headers, name)
    return values[-1].decode(errors="replace")[:_MOST_LETTERS] if values else ""


def bucket_of(took_ns: int) -> int:
    milliseconds = abs(took_ns) / _MILLISECOND_NS
    if milliseconds < 1:
        return 0
    steps = int(math.log(milliseconds) / math.log(GROWTH)) + 1
    return steps if took_ns > 0 else -steps


def bucket_seconds(bucket: str) -> str:
    """Return the SQL for the latency of a bucket, in seconds."""
    return f"round(sign({bucket}) * pow({GROWTH}, abs({bucket}) - 0.5) / 1e3, 3)"
