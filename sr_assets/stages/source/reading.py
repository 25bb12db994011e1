"""What every reader of a stream shares: how much is read next, reading it with Spark, and the rows for what was not there.

Not here: where a stream begins (`position`), what is made of the rows (`batch`, `advisory_feed`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sr_assets.adapters.spark.session import spark_error
from sr_assets.adapters.spark.source import FORMAT
from sr_assets.adapters.state.store import gap_row
from sr_assets.domain.positions import SequenceRange

if TYPE_CHECKING:
    import pyarrow as pa

    from sr_assets.adapters.nats.stream_info import StreamInfo
    from sr_assets.adapters.state.store import StreamState
    from sr_assets.settings import Entry
    from sr_assets.stages.site import Site

_MAX_GAP_ROWS = 1_000
#: A batch may read this many times `batch_bytes`: that is for what it holds, and it holds far less than it reads.
_READ_SHARE = 10


def next_range(entry: Entry, state: StreamState, source: StreamInfo, end: int) -> SequenceRange | None:
    """Plan the next range: from the position, as far as there is something up to `end`, bounded by messages and by bytes
    at the source's average size.

    What bounds the bytes is what is held: of a sampled stream and of a feed narrow rows and a tenth of the payloads, of
    a plain copy no more than the window that waits for its acks.
    """
    average_bytes = max(1, source.bytes // max(1, source.messages))
    count = min(entry.batch_messages, max(1, _READ_SHARE * entry.batch_bytes // average_bytes))
    after = min(end + 1, max(state.next_sequence, source.first_sequence) + count)
    return SequenceRange(state.next_sequence, after) if after > state.next_sequence else None


def reads_direct(source: StreamInfo) -> bool:
    """Tell whether batched direct get can be used."""
    return source.supports_batched_direct_get


def read_with_spark(site: Site, entry: Entry, source: StreamInfo, wanted: SequenceRange, **options: str) -> pa.Table:
    """Return one row per message of a range, in sequence order; `options` choose their shape. Raises RunError."""
    options |= {
        "connection": site.connection_file(entry.source),
        "stream": entry.stream,
        "direct": str(reads_direct(source)).lower(),
        "first": str(wanted.first),
        "next": str(wanted.next),
        "partitions": str(2 if len(wanted) > _MAX_GAP_ROWS else 1),
    }
    if entry.filter_subject:
        options["filter"] = entry.filter_subject
    try:
        table = site.spark().read.format(FORMAT).options(**options).load().toArrow()
    except Exception as error:
        raise spark_error(error) from error
    return table.sort_by("sequence")


def gap_rows(
    site: Site, entry: Entry, source: StreamInfo, covered: SequenceRange, available: int, absent: list[SequenceRange]
) -> list[dict[str, Any]]:
    """Return the rows for what a range did not hold: what retention took, up to `available`, first, then the holes.

    Many of them as one row.
    """

    def gap(hole: SequenceRange, reason: str, messages: int | None = None) -> dict[str, Any]:
        return gap_row(entry.stream, hole, len(hole) if messages is None else messages, reason, site.now_ns())

    rows = []
    if available > covered.first:
        rows.append(gap(SequenceRange(covered.first, available), "overtaken"))
    holes = [hole for hole in absent if len(hole)]
    if not holes:
        return rows
    reason = (
        "filtered" if entry.filter_subject else "per_subject_limit" if source.max_msgs_per_subject > 0 else "deleted"
    )
    if reason != "deleted" or len(holes) > _MAX_GAP_ROWS:
        return [*rows, gap(SequenceRange(holes[0].first, holes[-1].next), reason, sum(map(len, holes)))]
    return [*rows, *(gap(hole, reason) for hole in holes)]
