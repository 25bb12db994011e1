"""The status of a site's streams, derived from its state, and as rows of the tables `replication` and `site_summary`.

Joins over the state would take DuckDB 40 ms to plan at each publication; the values come mostly from memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from sr_assets.adapters.published.tables import LATENCY
from sr_assets.adapters.state.status_file import StreamStatus
from sr_assets.domain.positions import DAY_NS

if TYPE_CHECKING:
    from sr_assets.adapters.state.records import StreamState
    from sr_assets.adapters.state.store import SiteState

#: Fields that are the same in `StreamState`.
_READING: Final = (
    "created_ns",
    "next_sequence",
    "source_last_sequence",
    "lag_messages",
    "lag_ns",
    "watermark_ns",
    "as_of_ns",
    "starts",
    "seen_messages",
    "skipped_messages",
    "too_old_messages",
    "no_sender_messages",
    "gap_messages",
    "late_sightings",
)
#: Fields that are the same in `CopyState`.
_COPYING: Final = ("copied_messages", "copied_bytes", "parked_messages", "lost_messages", "target_created_ns")
_OWN_LATENCY: Final = (
    f"SELECT stream, p50_seconds, p95_seconds FROM ({LATENCY}) WHERE hop_stream = stream AND hop_name = ?"
)
_ARROW: Final = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_(), "str": pa.string()}
_SCHEMA: Final = pa.schema(
    [
        ("stream", pa.string()),
        *(
            (each.name, _ARROW[str(each.type).split(" ", 1)[0]])
            for each in fields(StreamStatus)
            if each.name != "counters"
        ),
    ]
)


@dataclass(frozen=True, slots=True)
class PublishedStream:
    """The part of a configured stream, or feed, that its status and the published tables need."""

    stream: str
    target_stream: str | None
    tracked: bool
    paused: bool = False
    is_feed: bool = False


def stream_statuses(state: SiteState, site: str, streams: Iterable[PublishedStream]) -> dict[str, StreamStatus]:
    """Return the status of each stream or feed with a state; call it inside a snapshot."""
    latency = {stream: seconds for stream, *seconds in state.connection.rows(_OWN_LATENCY, [site])}
    return {
        stream.stream: _status(state, stream, loaded, *latency.get(stream.stream, (None, None)))
        for stream in streams
        if (loaded := state.load_stream(stream.stream)) is not None
    }


def status_rows(statuses: Mapping[str, StreamStatus]) -> pa.Table:
    """Return a row per stream: column `stream`, and the fields of its status except `counters`."""
    return pa.Table.from_pylist([{"stream": stream, **asdict(status)} for stream, status in statuses.items()], _SCHEMA)


def _status(
    state: SiteState, stream: PublishedStream, loaded: StreamState, p50_seconds: float | None, p95_seconds: float | None
) -> StreamStatus:
    name, copying = stream.stream, state.load_copying(stream.stream)
    nodes, outage = state.nodes(name), state.guard(name).last()
    counts, deadline_ns = nodes.counts(), nodes.first_deadline()
    advisories, totals = state.outbox(name).size(), state.counters(name).totals()
    return StreamStatus(
        stream.target_stream,
        stream.tracked,
        stream.paused,
        **{column: getattr(loaded, column) for column in _READING},
        **{column: getattr(copying, column) for column in _COPYING},
        queued=state.copy_queue(name).size(),
        target_sequence=max(copying.target_checked, copying.target_sequence),
        unpublished=advisories,
        unpublished_events=state.count_unpublished(name) - advisories,
        last_error=copying.error if loaded.last_error is None else loaded.last_error,
        last_error_since_ns=copying.error_since_ns if loaded.last_error is None else loaded.last_error_since_ns,
        copy_error=copying.error,
        copy_error_since_ns=copying.error_since_ns,
        deadline_ns=deadline_ns,
        next_deadline_ns=(
            state.global_tables.next_silence(name, loaded.watermark_ns) if stream.is_feed else nodes.next_deadline()
        ),
        **{status: counts.get(status, 0) for status in ("up", "timeout", "retired")},
        new_24h=_new(state, loaded) if stream.tracked else 0,
        blind_ns=sum(next_ns - first_ns for first_ns, next_ns in nodes.blind_spans()),
        outage=outage and outage[0],
        outage_ns=outage and outage[1],
        p50_seconds=p50_seconds,
        p95_seconds=p95_seconds,
        **{counter: int(sum(totals.get(counter, {}).values())) for counter in ("spark_messages", "local_messages")},
        counters=totals,
    )


def _new(state: SiteState, loaded: StreamState) -> int:
    """Return the number of nodes that were new within the last day of the stream."""
    if loaded.watermark_ns is None:
        return 0
    return state.outbox(loaded.stream).count_new(loaded.watermark_ns - DAY_NS)
