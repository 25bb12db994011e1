"""Positions in a stream: half-open sequence ranges, missing sequences, the watermark, and exact times."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from sr_assets.domain.messages import Message

SECOND_NS: Final = 1_000_000_000
DAY_NS: Final = 86_400 * SECOND_NS
#: Maximum plausible lead of a server's clock over another server's and ours.
CLOCK_TOLERANCE_NS: Final = 3_600 * SECOND_NS
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_RFC3339: Final = re.compile(
    r"(\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d)(?:\.(\d{1,9})\d*)?(?:[Zz]|([+-])(\d\d):(\d\d))", re.ASCII
)


@dataclass(frozen=True, slots=True, order=True)
class SequenceRange:
    """The sequences from `first` up to, but excluding, `next`. Raises ValueError if reversed."""

    first: int
    next: int

    def __post_init__(self) -> None:
        """Refuse a reversed range, which only a planning error can produce."""
        if not 0 <= self.first <= self.next:
            raise ValueError(f"reversed range from {self.first} to {self.next}")

    def __len__(self) -> int:
        """Count the sequences."""
        return self.next - self.first

    def __contains__(self, sequence: int) -> bool:
        """Return whether a sequence is inside."""
        return self.first <= sequence < self.next

    def split(self, parts: int) -> list[SequenceRange]:
        """Split into at most `parts` adjacent non-empty ranges whose lengths differ by at most one."""
        parts = min(parts, len(self))
        cuts = [self.first + len(self) * part // parts for part in range(parts + 1)] if parts > 0 else []
        return [SequenceRange(first, after) for first, after in pairwise(cuts)]


def first_stored_at(time_ns: int, held: SequenceRange, message_from: Callable[[int], Message | None]) -> int:
    """Return the first sequence of a range stored at or after a time (unix ns), by binary search, or the range's end.

    `message_from` returns the stream's first message at or after a sequence.
    """
    low, high = held.first, held.next
    while low < high:
        middle = (low + high) // 2
        message = message_from(middle)
        # From `high` on, all messages have been compared.
        if message is None or message.sequence >= high or message.stored_ns >= time_ns:
            high = middle
        else:
            low = message.sequence + 1
    return low


def merge_ranges(ranges: Iterable[SequenceRange]) -> list[SequenceRange]:
    """Return the same sequences as the fewest ranges, in order: adjacent and overlapping ones merged, empty ones
    dropped.
    """
    merged: list[SequenceRange] = []
    for covered in sorted(covered for covered in ranges if len(covered)):
        if merged and covered.first <= merged[-1].next:
            merged[-1] = SequenceRange(merged[-1].first, max(merged[-1].next, covered.next))
        else:
            merged.append(covered)
    return merged


def missing(wanted: SequenceRange, present: Iterable[int]) -> list[SequenceRange]:
    """Return the absent parts of a range; `present` is ascending and may extend beyond the range."""
    return list(_holes(wanted, present))


def _holes(wanted: SequenceRange, present: Iterable[int]) -> Iterator[SequenceRange]:
    expected = wanted.first
    for sequence in present:
        if sequence >= wanted.next:
            break
        if sequence > expected:
            yield SequenceRange(expected, sequence)
        expected = max(expected, sequence + 1)
    if expected < wanted.next:
        yield SequenceRange(expected, wanted.next)


class Watermark(NamedTuple):
    """The time up to which a source's silence is known (unix ns, or None), and the role of the info's clock.

    `by_clock`: the clock of the stream info set it, so no later message is stored before it. `clock_ahead`: the info's
    clock is wrong and was ignored; callers count and report this.
    """

    ns: int | None
    by_clock: bool
    clock_ahead: bool


def watermark(
    ts_ns: int | None,
    last_processed_ns: int | None,
    *,
    replicas: int,
    warning_ns: int | None,
    caught_up: bool,
    mirror: bool,
    previous_ns: int | None,
    own_clock_ns: int,
) -> Watermark:
    """Return the time for `tracking.rules.sweep`. It never decreases, unless two clocks prove that it is in the future.

    `ts_ns` is the server's clock in a run's stream info, `caught_up` whether all its messages are processed. Only the
    last message counts for a mirror (its clock proves nothing about its origin), in a run that stopped earlier, and if
    the clock is ahead of all other times.
    """
    ahead = clock_is_ahead(ts_ns, last_processed_ns, own_clock_ns)
    by_clock = caught_up and not mirror and ts_ns is not None and not ahead
    fresh_ns = ts_ns - _margin_ns(replicas, warning_ns) if by_clock and ts_ns is not None else last_processed_ns
    if by_clock and previous_ns is not None and previous_ns - max(ts_ns or 0, own_clock_ns) > CLOCK_TOLERANCE_NS:
        # A wrong clock set it, and both clocks have been corrected.
        previous_ns = None
    known_ns = max((ns for ns in (fresh_ns, previous_ns) if ns is not None), default=None)
    return Watermark(known_ns, by_clock, ahead)


def clock_is_ahead(ts_ns: int | None, last_stored_ns: int | None, own_clock_ns: int) -> bool:
    """Return whether a server's clock is wrong: more than an hour ahead of the last message's stored time and of our
    clock.
    """
    return ts_ns is not None and ts_ns - max(last_stored_ns or 0, own_clock_ns) > CLOCK_TOLERANCE_NS


def is_credible(stored_ns: int, own_clock_ns: int) -> bool:
    """Return whether a server's clock may be right: it is at most an hour ahead of ours."""
    return stored_ns - own_clock_ns <= CLOCK_TOLERANCE_NS


def retention_clock_ns(watermark_ns: int | None, own_clock_ns: int) -> int | None:
    """Return the time from which a retention counts back, or None for no deletion; a clock that jumps ahead deletes
    nothing.
    """
    return None if watermark_ns is None else min(watermark_ns, own_clock_ns)


def retention_begins_ns(now_ns: int, retention_ns: int) -> int:
    """Return the start of a retention period; it advances in steps of a hundredth of the retention.

    Deleting rows rewrites large tables, which then happens a hundred times per retention instead of in each run.
    """
    step_ns = max(1, retention_ns // 100)
    return (now_ns - retention_ns) // step_ns * step_ns


def _margin_ns(replicas: int, warning_ns: int | None) -> int:
    """Return the margin of the watermark behind `ts`.

    A server reads the stream's state before it sets `ts`, so the state may lack a message stored just before `ts`.
    """
    if replicas <= 1:
        return SECOND_NS
    return 5 * SECOND_NS if warning_ns is None else min(5 * SECOND_NS, warning_ns // 2)


def parse_rfc3339_ns(text: str) -> int:
    """Parse an RFC 3339 time into nanoseconds since 1970; digits after the ninth are cut. Raises ValueError."""
    parts = _RFC3339.fullmatch(text)
    if not parts:
        raise ValueError(f"{text!r} is not a time such as 2026-03-15T13:48:10Z")
    seconds, fraction, sign, hours, minutes = parts.groups()
    ns = _epoch_seconds(seconds) * SECOND_NS
    if fraction:
        ns += int(fraction.ljust(9, "0"))
    if sign:
        offset_ns = (int(hours) * 3600 + int(minutes) * 60) * SECOND_NS
        ns += offset_ns if sign == "-" else -offset_ns
    return ns


@lru_cache(maxsize=1024)
def _epoch_seconds(text: str) -> int:
    # Adjacent messages share their second, so the cache answers almost every call.
    at = datetime.fromisoformat(text.upper())
    return (at.toordinal() - _EPOCH_DAY) * 86_400 + at.hour * 3600 + at.minute * 60 + at.second


def format_rfc3339_ns(ns: int) -> str:
    """Return nanoseconds since 1970 as RFC 3339 in UTC with nine digits: 2026-03-15T13:48:10.000000000Z."""
    seconds, fraction = divmod(ns, SECOND_NS)
    return f"{(_EPOCH + timedelta(seconds=seconds)).strftime('%Y-%m-%dT%H:%M:%S')}.{fraction:09d}Z"
