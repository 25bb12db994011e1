"""Blind spans: ranges of stored time whose messages the source had deleted, or lost as it went back, before they were read.

Here: which holes make a span, the set of a stream's spans, how much of a silence they cover, and when a silence exceeds a
limit without the covered time. Add a rule on what an absent message proves here. Not here: what silence leads to
(`tracking`), the reason of a hole and where the spans are stored (`stages`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

from sr_assets.domain.positions import merge_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sr_assets.domain.positions import SequenceRange

#: The most spans of a stream; beyond that the closest ones are merged.
MAX_BLIND_SPANS: Final = 1_000
#: Reasons of a hole whose messages were there and were not read. A filtered message is none of the stream's.
BLINDING_REASONS: Final = frozenset({"overtaken", "deleted", "per_subject_limit"})

#: A half-open span of stored time, in unix ns.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BlindSpans:
    """A stream's blind spans: ascending and disjoint; made of spans in any order, empty ones are dropped."""

    spans: tuple[Span, ...] = ()
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _before: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The blind time before each span, and behind the last one all of it."""
    _watched: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Each span's start, less the blind time before it."""

    def __post_init__(self) -> None:
        """Sort and merge the spans once, so that every lookup is a binary search."""
        spans = _merge_closest(_merge(self.spans))
        before = (0, *accumulate(until - since for since, until in spans))
        object.__setattr__(self, "spans", spans)
        object.__setattr__(self, "_starts", tuple(since for since, _ in spans))
        object.__setattr__(self, "_before", before)
        object.__setattr__(self, "_watched", tuple(map(int.__sub__, self._starts, before)))

    def add(self, spans: Iterable[Span]) -> BlindSpans:
        """Return these spans together with others."""
        added = tuple(spans)
        return BlindSpans((*self.spans, *added)) if added else self

    def forget_before(self, time_ns: int) -> BlindSpans:
        """Return the spans that end after a time: the others cover nothing of a silence that began then or later.

        Pass the earliest `seen` of a sender that is not retired, or the watermark if that is earlier: no silence begins
        before it.
        """
        return BlindSpans(tuple(span for span in self.spans if span[1] > time_ns))

    def blind_ns(self, since_ns: int, until_ns: int) -> int:
        """Return how much of the time from `since_ns` to `until_ns` the spans cover; 0 when that runs backwards."""
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
    """Return the spans that a batch's holes blind, and whether a hole at its end is still open.

    `holes` are ranges that the leader confirmed absent, each with its reason, in any order; `sequences`, ascending, and
    `stored_ns` are the batch's messages, with a sender or without. `before_ns` is the highest stored time of the messages
    before the batch, None for none. `after_hole` is the second result of the previous batch's call. `until_ns` is the
    planning info's clock when everything up to its last sequence is processed and that clock set the watermark, else None.

    A hole lasts from the last message before it to the first one after it that was stored later. Without such a message
    it ends at `until_ns`; without that it stays open, and the next batch ends it: so a cut inside or after a hole changes
    nothing. A batch may have no messages. A hole without a message before it makes no span.
    """
    blinding = merge_ranges(hole for hole, reason in holes if reason in BLINDING_REASONS)
    # The index of the message that follows each hole; for a hole after the last message their number.
    indexes = {bisect_left(sequences, hole.first) for hole in blinding}
    if after_hole:
        indexes.add(0)
    if not indexes:
        return [], False
    # Stored times may go back; a message before a hole counts with the highest time so far.
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


def _merge(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order: neighbours and overlaps become one."""
    merged: list[Span] = []
    for since, until in sorted(span for span in spans if span[0] < span[1]):
        if merged and since <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], until))
        else:
            merged.append((since, until))
    return merged


def _merge_closest(spans: list[Span]) -> tuple[Span, ...]:
    """Return at most `MAX_BLIND_SPANS`: the shortest distances, of equals the earlier ones, become blind too."""
    if len(spans) <= MAX_BLIND_SPANS:
        return tuple(spans)
    distances = [after[0] - before[1] for before, after in pairwise(spans)]
    kept = sorted(sorted(range(len(distances)), key=distances.__getitem__)[len(spans) - MAX_BLIND_SPANS :])
    firsts, lasts = [0, *(index + 1 for index in kept)], [*kept, len(distances)]
    return tuple((spans[first][0], spans[last][1]) for first, last in zip(firsts, lasts, strict=True))


NO_BLIND_SPANS: Final = BlindSpans()
