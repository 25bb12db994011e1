"""Blind spans: ranges of stored time whose messages the source lost before they were read.

They define which holes make a span, how much of a silence the spans cover, and when a silence exceeds a limit without
the covered time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final

from sr_assets.domain.positions import SequenceRange, merge_ranges

#: Maximum number of spans of a stream; beyond it the closest ones are merged.
MAX_BLIND_SPANS: Final = 1_000
#: The stored times of these messages are not credible, so it is unknown when they were sent.
CLOCK_AHEAD: Final = "clock_ahead"
#: Reasons of a hole with unread messages, or of messages without a known time. Filtered messages do not belong to the
#: stream.
BLINDING_REASONS: Final = frozenset({"overtaken", "deleted", "per_subject_limit", CLOCK_AHEAD})

#: A half-open span of stored time, in unix ns.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BlindSpans:
    """A stream's blind spans: ascending and disjoint; created from spans in any order, without empty ones."""

    spans: tuple[Span, ...] = ()
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _before: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The blind time before each span, and the total after the last one."""
    _watched: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Each span's start, minus the blind time before it."""

    def __post_init__(self) -> None:
        """Sort and merge the spans once, so that every lookup is a binary search."""
        spans = _merge_closest(merge_spans(self.spans))
        before = (0, *accumulate(until - since for since, until in spans))
        object.__setattr__(self, "spans", spans)
        object.__setattr__(self, "_starts", tuple(since for since, _ in spans))
        object.__setattr__(self, "_before", before)
        object.__setattr__(self, "_watched", tuple(map(int.__sub__, self._starts, before)))

    def add(self, spans: Iterable[Span]) -> BlindSpans:
        """Return the union with other spans."""
        added = tuple(spans)
        return BlindSpans((*self.spans, *added)) if added else self

    def forget_before(self, time_ns: int) -> BlindSpans:
        """Return the spans that end after a time; earlier ones do not affect a silence that started later.

        Pass the earliest `seen` of a sender that is not retired, or the watermark if that is earlier.
        """
        return BlindSpans(tuple(span for span in self.spans if span[1] > time_ns))

    def blind_ns(self, since_ns: int, until_ns: int) -> int:
        """Return how much of the time from `since_ns` to `until_ns` the spans cover; 0 for a reversed range."""
        if not self.spans or until_ns <= since_ns:
            return 0
        return self._blind_before(until_ns) - self._blind_before(since_ns)

    def exceeds_at_ns(self, since_ns: int, limit_ns: int) -> int:
        """Return the last instant at which a silence since `since_ns` does not exceed a limit."""
        if not self.spans:
            return since_ns + limit_ns
        watched_ns = since_ns - self._blind_before(since_ns) + limit_ns
        return watched_ns + self._before[bisect_right(self._watched, watched_ns)]

    def _blind_before(self, time_ns: int) -> int:
        index = bisect_right(self._starts, time_ns)
        return self._before[index] - (max(0, self.spans[index - 1][1] - time_ns) if index else 0)


def find_blind_spans(
    holes: Iterable[tuple[SequenceRange, str]],
    sequences: Sequence[int],
    stored_ns: Sequence[int],
    *,
    before_ns: int | None,
    after_hole: bool,
    until_ns: int | None,
) -> tuple[list[Span], bool]:
    """Return the blind spans of a batch's holes, and whether a hole at its end is still open.

    `holes` are confirmed absent ranges with their reasons, in any order; `sequences` (ascending) and `stored_ns` are
    the batch's messages with a credible time, with or without a sender. `before_ns` is the highest stored time before
    the batch, or None. `after_hole` is the second result for the previous batch. `until_ns` is the planning info's
    clock if all its messages are processed and that clock set the watermark, else None.

    A hole lasts from the last message before it to the first later-stored message after it. Without such a message it
    ends at `until_ns`; without that it stays open until the next batch, so that a batch boundary inside or after a hole
    changes nothing. A batch may be empty. A hole without a message before it makes no span.
    """
    blinding = merge_ranges(hole for hole, reason in holes if reason in BLINDING_REASONS)
    # The index of the message after each hole; for a hole at the end, the number of messages.
    indexes = {bisect_left(sequences, hole.first) for hole in blinding}
    if after_hole:
        indexes.add(0)
    if not indexes:
        return [], False
    # Stored times may decrease; a message before a hole counts with the highest time so far.
    earlier = list(accumulate(stored_ns, max, initial=-1 if before_ns is None else before_ns))
    later = [index for index, ns in enumerate(stored_ns) if ns > earlier[index]]
    spans: list[Span] = []
    is_open = False
    for index in sorted(indexes):
        since, end = earlier[index], bisect_left(later, index)
        until = stored_ns[later[end]] if end < len(later) else until_ns
        if until is None or until <= since:
            is_open = True
        elif since >= 0:
            spans.append((since, until))
    return spans, is_open


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order, with adjacent and overlapping ones merged and empty ones dropped."""
    merged: list[Span] = []
    for since, until in sorted(span for span in spans if span[0] < span[1]):
        if merged and since <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], until))
        else:
            merged.append((since, until))
    return merged


def _merge_closest(spans: list[Span]) -> tuple[Span, ...]:
    """Return at most `MAX_BLIND_SPANS` spans: the shortest gaps between them, the earliest first, become blind too."""
    if len(spans) <= MAX_BLIND_SPANS:
        return tuple(spans)
    distances = [after[0] - before[1] for before, after in pairwise(spans)]
    kept = sorted(sorted(range(len(distances)), key=distances.__getitem__)[len(spans) - MAX_BLIND_SPANS :])
    firsts, lasts = [0, *(index + 1 for index in kept)], [*kept, len(distances)]
    return tuple((spans[first][0], spans[last][1]) for first, last in zip(firsts, lasts, strict=True))


NO_BLIND_SPANS: Final = BlindSpans()
