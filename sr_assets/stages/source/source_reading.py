"""The range of a source that a batch covers, and its rows, read by Spark or in this process."""

from collections.abc import Callable, Iterable

import pyarrow as pa

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.range_rows import RangeRead, RowKind
from sr_assets.adapters.spark.run_session import SparkConnection
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.adapters.state.stream_tables import MOST_GAP_ROWS, Gap
from sr_assets.domain.errors import TransientError
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.sizing import (
    MAX_FOLD_MESSAGES,
    catch_up_size,
    copying_size,
    is_far,
    partitions,
    reads_headers_only,
)
from sr_assets.settings import Entry
from sr_assets.stages.clock import Clock
from sr_assets.stages.connections import ConnectionFiles
from sr_assets.stages.report import StreamReport
from sr_assets.stages.source.position import changed_since

#: The end of a draining run: each source's last sequence as first seen by the run, by stream and restart; None for a
#: lingering run.
Ends = dict[tuple[str, int], int] | None

#: A batch may read this many times `batch_bytes`, because memory holds only a part of the bytes read.
_READ_FACTOR = 10


def reading_end(ends: Ends, state: StreamState, source: StreamInfo, begins: int = 0) -> int:
    """Return the last sequence that a run may read next, limited to the sequences of this info.

    A batch does not cross `begins`, the sequence at which the lanes of partitions begin.
    """
    end = min(source.last_sequence, begins - 1) if state.next_sequence < begins else source.last_sequence
    return end if ends is None else min(ends.setdefault((state.stream, state.starts), source.last_sequence), end)


def next_range(
    entry: Entry,
    next_sequence: int,
    source: StreamInfo,
    end: int,
    cluster: Cluster | None = None,
    *,
    payloads: bool = True,
    cores: Callable[[], int] | None = None,
    copied_per_second: float = 0.0,
) -> SequenceRange | None:
    """Plan the next range from a position up to `end`, bounded by messages and bytes.

    The bound on bytes, at the source's average size, limits memory: a sampled stream and a feed hold narrow rows and a
    tenth of the payloads, a plain copy its window of unacknowledged messages. Without `payloads` only messages count.
    A stream that is behind gets a larger range. A tracked one passes the engine's `cores`: its range grows with them when it
    is far behind, up to the fold's limit. A plain one passes its rate, if it is known.

    With the source's `cluster`, a hole at the start is skipped immediately, and a sparse source gets a wider range.
    """
    held_bytes = average_bytes(source) if payloads else 1
    most = max(1, _READ_FACTOR * entry.batch_bytes // held_bytes)
    count = min(entry.batch_messages, most)
    begin = max(next_sequence, source.first_sequence)
    if cores is not None:
        count = min(count, MAX_FOLD_MESSAGES)
        if count < entry.catch_up_messages and is_far(end + 1 - begin, count):
            count = catch_up_size(held_bytes, cores(), count, entry.catch_up_messages)
    else:
        count = min(most, copying_size(copied_per_second, count, entry.catch_up_messages))
    after = min(end + 1, begin + count)
    if after <= next_sequence:
        return None
    if cluster is not None and after < end + 1 and source.messages < source.last_sequence + 1 - source.first_sequence:
        after = _sparse_end(entry, cluster, SequenceRange(begin, end + 1), count)
    return SequenceRange(next_sequence, after)


def average_bytes(source: StreamInfo) -> int:
    """Return a source's average bytes per message, as the server counts them; at least 1."""
    return max(1, source.bytes // max(1, source.messages))


def _sparse_end(entry: Entry, cluster: Cluster, rest: SequenceRange, count: int) -> int:
    """Return the end of a range with about `count` messages in a sparse source, by queries to the server.

    A binary search uses the number of pending messages of a consumer.
    """
    subject = entry.filter_subject

    def behind(sequence: int) -> int:
        return cluster.count_from(entry.stream, sequence, subject) if sequence < rest.next else 0

    total = behind(rest.first)
    if total <= count:
        return rest.next
    low, high = rest.first + count, rest.next
    # Invariant: at most `count` messages from `rest.first` to `low`, more than that to `high`.
    while high - low > count and (middle := (low + high) // 2):
        if total - behind(middle) <= count:
            low = middle
        else:
            high = middle
    return low


def too_old_before(max_age_ns: int | None, source: StreamInfo) -> int | None:
    """Return the stored time (unix ns) before which a message is too old to copy, or None without a limit.

    A clock far ahead would make every message too old, so it sets no limit.
    """
    ts_ns = Clock.credible_ns(source.ts_ns)
    return None if max_age_ns is None or ts_ns is None else ts_ns - max_age_ns


def read_unless_changed(cluster: Cluster, source: StreamInfo, read: Callable[[], pa.Table]) -> pa.Table | None:
    """Return the rows of a range planned with an info, or None if the source was recreated or rolled back meanwhile.

    In that case the rows may belong to either source, and the caller must plan again.
    """
    try:
        rows = read()
    except TransientError:
        if not changed_since(cluster, source):
            raise
        return None
    return None if changed_since(cluster, source) else rows


class Reader:
    """Reads ranges of streams: large ones with Spark, small ones in this process."""

    def __init__(self, store: SiteState, spark: SparkConnection, files: ConnectionFiles) -> None:
        self._store, self._spark, self._files = store, spark, files
        #: Whether Spark has read the last range.
        self.in_spark = False

    def read(
        self, entry: Entry, source: StreamInfo, wanted: SequenceRange, kind: RowKind, *, payloads: bool = True
    ) -> pa.Table:
        """Return one row per message of a range, in sequence order. Raises RunError.

        A message that no lane of the stream takes is an error. Without `payloads`, the server need not send them if that
        saves work.
        """
        payload_bytes = len(wanted) * average_bytes(source)
        direct = source.supports_batched_direct_get
        headers_only = reads_headers_only(payload_bytes, needed=payloads, direct=direct and not entry.filter_subject)
        read = RangeRead(
            self._files.path(entry.source),
            entry.stream,
            kind,
            direct=direct,
            filter_subject=entry.filter_subject or None,
            lanes=tuple(self._store.partitions(entry.stream).at(wanted.first)),
            headers_only=headers_only,
        )
        self.in_spark = self._spark.takes(len(wanted), 0 if headers_only else payload_bytes, f"{entry.label}: reading")
        if not self.in_spark:
            return read.table(wanted).sort_by("sequence")
        # With an engine, because it imports Spark.
        from sr_assets.adapters.spark.jobs import read_in_tasks

        tasks = partitions(len(wanted), self._spark.cores())
        with self._spark.use() as session:
            rows = read_in_tasks(session, read, wanted, tasks, remote=self._spark.remote)
        return rows.sort_by("sequence")


def first_available(source: StreamInfo, covered: SequenceRange) -> int:
    """Return the first sequence of a range that the source still holds, or its end."""
    return min(max(covered.first, source.first_sequence), covered.next)


def save_gaps(store: SiteState, entry: Entry, gaps: Iterable[Gap], report: StreamReport) -> None:
    """Add gaps to the table, extending adjacent rows, inside the caller's transaction."""
    left = MOST_GAP_ROWS - report.gap_rows
    report.gap_rows += store.gaps(entry.stream).add(gaps, apart=entry.batch_messages, most=left)
