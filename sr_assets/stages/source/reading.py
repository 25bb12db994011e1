"""Reading a stream: the next range, reading it, and the rows of table `gaps` for absent sequences.

Not here: where a stream begins (`position`), using the rows (`tracking`, `replication`, `feeds`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sr_assets.adapters.spark.remote import read_remotely
from sr_assets.adapters.spark.source import FORMAT, read_here
from sr_assets.adapters.state.gaps import MOST_ROWS, gap_row
from sr_assets.domain.errors import TransientError
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.sizing import catch_up_size, is_far, partitions, reads_headers_only
from sr_assets.stages.source.position import changed_since

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import pyarrow as pa

    from sr_assets.adapters.nats.cluster import Cluster
    from sr_assets.adapters.nats.stream_info import StreamInfo
    from sr_assets.adapters.state.gaps import Gap
    from sr_assets.adapters.state.records import StreamState
    from sr_assets.adapters.state.store import SiteState
    from sr_assets.settings import Entry
    from sr_assets.stages.connections import ConnectionFiles, SparkConnection
    from sr_assets.stages.report import StreamReport

#: Where a run stops that only drains: each source's last sequence as first seen by the run, by stream and beginning; None
#: for a run that lingers.
Ends = dict[tuple[str, int], int] | None

_MAX_GAP_ROWS = 1_000
#: A batch may read this many times `batch_bytes`, which bounds what it holds in memory: far less than it reads.
_READ_FACTOR = 10


def reading_end(ends: Ends, state: StreamState, source: StreamInfo) -> int:
    """Return the last sequence that a run may read: never one that this info does not know of."""
    if ends is None:
        return source.last_sequence
    return min(ends.setdefault((state.stream, state.starts), source.last_sequence), source.last_sequence)


def next_range(
    entry: Entry,
    next_sequence: int,
    source: StreamInfo,
    end: int,
    cluster: Cluster | None = None,
    *,
    payloads: bool = True,
    cores: Callable[[], int] | None = None,
) -> SequenceRange | None:
    """Plan the next range: from a position, as far as there is something up to `end`, bounded by messages and by bytes.

    The bound on bytes, at the source's average size, is for memory: a sampled stream and a feed hold narrow rows and a
    tenth of the payloads, a plain copy holds its window of unacknowledged messages. Without `payloads` none is read, and
    messages alone count. Far behind it grows to what the engine's `cores` read, if they are given. With the source's
    `cluster` a hole at the beginning is skipped at once, and a range of a source with many holes spans more sequences.
    """
    held_bytes = average_bytes(source) if payloads else 1
    count = min(entry.batch_messages, max(1, _READ_FACTOR * entry.batch_bytes // held_bytes))
    begin = max(next_sequence, source.first_sequence)
    if cores is not None and count < entry.catch_up_messages and is_far(end + 1 - begin, count):
        count = catch_up_size(held_bytes, cores(), count, entry.catch_up_messages)
    after = min(end + 1, begin + count)
    if after <= next_sequence:
        return None
    if cluster is not None and after < end + 1 and source.messages < source.last_sequence + 1 - source.first_sequence:
        after = _sparse_end(entry, cluster, SequenceRange(begin, end + 1), count)
    return SequenceRange(next_sequence, after)


def average_bytes(source: StreamInfo) -> int:
    """Return how many bytes a message of a source has on average, as the server counts them; at least 1."""
    return max(1, source.bytes // max(1, source.messages))


def _sparse_end(entry: Entry, cluster: Cluster, rest: SequenceRange, count: int) -> int:
    """Return where a range with about `count` messages ends in a source with holes; asks the server how many follow.

    Halving finds the end by the number of messages that a consumer from there on would get.
    """
    subject = entry.filter_subject

    def behind(sequence: int) -> int:
        return cluster.count_from(entry.stream, sequence, subject) if sequence < rest.next else 0

    total = behind(rest.first)
    if total <= count:
        return rest.next
    low, high = rest.first + count, rest.next
    # Invariant: from `rest.first` to `low` there are at most `count` messages, to `high` more.
    while high - low > count and (middle := (low + high) // 2):
        if total - behind(middle) <= count:
            low = middle
        else:
            high = middle
    return low


def too_old_before(max_age_ns: int | None, source: StreamInfo) -> int | None:
    """Return the stored time (unix ns) before which a message is too old to be copied; None without a limit."""
    return None if max_age_ns is None or source.ts_ns is None else source.ts_ns - max_age_ns


def read_unless_changed(cluster: Cluster, source: StreamInfo, read: Callable[[], pa.Table]) -> pa.Table | None:
    """Return what was read of a range that an info planned; None when the source was made again or went back meanwhile.

    Then the rows may be of either source, and the range means nothing: plan again.
    """
    try:
        rows = read()
    except TransientError:
        if not changed_since(cluster, source):
            raise
        return None
    return None if changed_since(cluster, source) else rows


class Reader:
    """Reads ranges of streams: a large one with Spark, a small one in this process."""

    def __init__(self, spark: SparkConnection, files: ConnectionFiles) -> None:
        """Take the Spark session and the files with which its tasks connect."""
        self._spark, self._files = spark, files

    def read(
        self, entry: Entry, source: StreamInfo, wanted: SequenceRange, *, payloads: bool = True, **options: str
    ) -> pa.Table:
        """Return one row per message of a range, in sequence order; `options` choose the columns. Raises RunError.

        Without `payloads`, where nothing in them is looked at, they stay where they are if that saves work.
        """
        payload_bytes = len(wanted) * average_bytes(source)
        direct = source.supports_batched_direct_get
        if reads_headers_only(payload_bytes, needed=payloads, direct=direct and not entry.filter_subject):
            options["headers_only"] = "true"
            payload_bytes = 0
        options |= {
            "connection": self._files.path(entry.source),
            "stream": entry.stream,
            "direct": str(direct).lower(),
            "first": str(wanted.first),
            "next": str(wanted.next),
        }
        if entry.filter_subject:
            options["filter"] = entry.filter_subject
        if not self._spark.needed(len(wanted), payload_bytes):
            return read_here(options).sort_by("sequence")
        options["partitions"] = str(partitions(len(wanted), self._spark.cores()))
        with self._spark.use() as session:
            if self._spark.remote:
                table = read_remotely(session, options)
            else:
                table = session.read.format(FORMAT).options(**options).load().toArrow()
        return table.sort_by("sequence")


def first_available(source: StreamInfo, covered: SequenceRange) -> int:
    """Return the first sequence of a range that the source still holds; its end when there is none."""
    return min(max(covered.first, source.first_sequence), covered.next)


def absence_reason(entry: Entry, source: StreamInfo) -> str:
    """Return why sequences inside a source are absent: `filtered`, `per_subject_limit` or `deleted`."""
    if entry.filter_subject:
        return "filtered"
    return "per_subject_limit" if source.max_msgs_per_subject > 0 else "deleted"


def gap_rows(
    entry: Entry,
    source: StreamInfo,
    covered: SequenceRange,
    available: int,
    absent: list[SequenceRange],
    noticed_ns: int,
) -> list[Gap]:
    """Return the rows for the absent sequences of a range: first those up to `available`, which retention deleted, then holes.

    Holes of a filtered stream or of one with a per-subject limit become one row, and so do more than 1,000 others.
    """

    def gap(hole: SequenceRange, reason: str, messages: int | None = None) -> Gap:
        return gap_row(entry.stream, hole, len(hole) if messages is None else messages, reason, noticed_ns)

    rows = []
    if available > covered.first:
        rows.append(gap(SequenceRange(covered.first, available), "overtaken"))
    holes = [hole for hole in absent if len(hole)]
    if not holes:
        return rows
    reason = absence_reason(entry, source)
    if reason != "deleted" or len(holes) > _MAX_GAP_ROWS:
        return [*rows, gap(SequenceRange(holes[0].first, holes[-1].next), reason, sum(map(len, holes)))]
    return [*rows, *(gap(hole, reason) for hole in holes)]


def save_gaps(store: SiteState, entry: Entry, gaps: Iterable[Gap], report: StreamReport) -> None:
    """Add gaps to the table as neighbours of those before; called inside a transaction."""
    left = MOST_ROWS - report.gap_rows
    report.gap_rows += store.gaps(entry.stream).add(gaps, apart=entry.batch_messages, most=left)
