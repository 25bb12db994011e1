"""Absent sequences of a source: the evidence for their reason, and their rows in table `gaps`.

Without a filter, an absent sequence was deleted. With a filter, it may belong to an unmatched message. Only the server
can prove that; an absence without proof counts as lost.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.state.stream_tables import Gap, gap_row
from sr_assets.domain.errors import RunError, TransientError
from sr_assets.domain.positions import SequenceRange, merge_ranges, missing
from sr_assets.settings import Entry, StreamSettings

FILTERED: Final = "filtered"
DELETED: Final = "deleted"
_MAX_GAP_ROWS: Final = 1_000
#: Maximum number of sequences in a sparse batch.
_WIDEST: Final = 500_000
#: The server lists up to this many deleted sequences of a stream without a check whether the range has any.
_FEW: Final = 10_000
#: The server is never made to list more: ten bytes each.
_MANY: Final = 100_000


class Hole(NamedTuple):
    """Absent sequences with one reason, as in table `gaps`."""

    covered: SequenceRange
    reason: str


def find_holes(entry: Entry, cluster: Cluster, source: StreamInfo, absent: Iterable[SequenceRange]) -> list[Hole]:
    """Return the absent ranges with their reasons, in order: `filtered`, `per_subject_limit` or `deleted`.

    Call it after the range was read: the server's answer then covers everything that was deleted before.
    """
    ranges = [hole for hole in absent if len(hole)]
    lost = "per_subject_limit" if source.max_msgs_per_subject > 0 else DELETED
    if not entry.filter_subject or not ranges:
        return [Hole(hole, lost) for hole in ranges]
    whole = SequenceRange(ranges[0].first, ranges[-1].next)
    info = cluster.stream_info(entry.stream)
    first = min(max(whole.first, info.first_sequence), whole.next)
    deleted = _deleted(cluster, info, SequenceRange(first, whole.next))
    if deleted is None:
        return [Hole(hole, lost) for hole in ranges]
    return [part for hole in ranges for part in _split(hole, first, deleted, lost)]


def lost_sequences(entry: Entry, cluster: Cluster, source: StreamInfo, covered: SequenceRange) -> list[int] | None:
    """Return the sequences of a range that a source has deleted, or None if every absent one counts as lost."""
    return _deleted(cluster, source, covered) if entry.filter_subject else None


def without_hole(
    stream: StreamSettings, cluster: Cluster, covered: SequenceRange, available: int
) -> tuple[SequenceRange, int]:
    """Return a range and its first available sequence, after a hole at its start.

    A sparse range is shortened, because a writer gets a row per sequence. A range of one normal batch needs no look at the
    source.
    """
    if covered.next - available <= stream.batch_messages:
        return covered, available
    message = cluster.next_message(stream.stream, available, stream.filter_subject or ">")
    first = covered.next if message is None else min(message.sequence, covered.next)
    return SequenceRange(covered.first, min(covered.next, first + max(_WIDEST, stream.batch_messages))), first


def _split(hole: SequenceRange, first: int, deleted: Sequence[int], lost: str) -> list[Hole]:
    """Split a hole into lost sequences (before the source's first one, or deleted) and those of unmatched messages."""
    first = min(max(hole.first, first), hole.next)
    inside = deleted[bisect_left(deleted, first) : bisect_left(deleted, hole.next)]
    held = missing(SequenceRange(first, hole.next), inside)
    gone = merge_ranges([SequenceRange(hole.first, first), *(SequenceRange(number, number + 1) for number in inside)])
    return sorted([*(Hole(part, lost) for part in gone), *(Hole(part, FILTERED) for part in held)])


def _deleted(cluster: Cluster, info: StreamInfo, covered: SequenceRange) -> list[int] | None:
    """Return the sequences of a range that a source has deleted, whatever their subject, or None if unknown."""
    count = info.num_deleted
    if not count or not len(covered) or (count > _FEW and _holds_all(cluster, info.stream, covered)):
        return []
    return None if count > _MANY else cluster.deleted_in(info.stream, covered)


def _holds_all(cluster: Cluster, stream: str, covered: SequenceRange) -> bool:
    """Return whether a source provably holds every sequence of a range."""
    try:
        return cluster.count_from(stream, covered.first) - cluster.count_from(stream, covered.next) == len(covered)
    except TransientError:
        raise
    except RunError:
        # The user may not create a consumer without the filter.
        return False


def gap_rows(entry: Entry, covered: SequenceRange, available: int, holes: Sequence[Hole], noticed_ns: int) -> list[Gap]:
    """Return gap rows for a range: retention deleted its messages before `available`; then the holes, by reason.

    Many holes of one reason become one row: filtered ones, those of a limit per subject, or more than 1,000.
    """
    rows = []
    if available > covered.first:
        rows.append(_gap(entry, [SequenceRange(covered.first, available)], "overtaken", noticed_ns))
    for reason in dict.fromkeys(hole.reason for hole in holes):
        ranges = [hole.covered for hole in holes if hole.reason == reason]
        single = reason == DELETED and len(ranges) <= _MAX_GAP_ROWS
        rows += [
            _gap(entry, part, reason, noticed_ns) for part in ([[each] for each in ranges] if single else [ranges])
        ]
    return rows


def _gap(entry: Entry, ranges: Sequence[SequenceRange], reason: str, noticed_ns: int) -> Gap:
    whole = SequenceRange(ranges[0].first, ranges[-1].next)
    return gap_row(entry.stream, whole, sum(map(len, ranges)), reason, noticed_ns)
