"""Our own metrics of every stream and feed, with the labels `name` and `stream`.

Add a metric of a stream here, and its name to the reference. Not here: those of the Stream Replicator (`replicator`), those
that published tables give (`centre`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sr_assets.domain.exposition import MetricKind, Sample
from sr_assets.domain.tracking import Status
from sr_assets.operate.metrics.stream import Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sr_assets.operate.metrics.stream import StreamNumbers


def _each(
    name: str,
    kind: MetricKind,
    text: str,
    value: Callable[[StreamNumbers, float], float],
    wanted: Callable[[StreamNumbers], bool] = lambda stream: stream.begun,
) -> Metric:
    """Return a metric with one sample for each wanted stream."""

    def samples(streams: Sequence[StreamNumbers], now: float) -> Iterator[Sample]:
        return (Sample(stream.labels, value(stream, now)) for stream in streams if wanted(stream))

    return Metric(name, kind, text, samples)


def _nodes(streams: Sequence[StreamNumbers], _: float) -> Iterator[Sample]:
    for stream in streams:
        if stream.begun and stream.entry.tracked:
            counts = stream.status.get("nodes", {})
            for status in Status:
                yield Sample(f'{stream.labels},status="{status.value}"', float(counts.get(status.value, 0)))


STREAM_METRICS: Final = (
    _each(
        "sr_assets_lag_messages",
        "gauge",
        "Messages of the source that are not read yet, at the last look.",
        lambda stream, _: stream.number("lag_messages"),
    ),
    _each(
        "sr_assets_lag_seconds",
        "gauge",
        "How long the first unread message has been stored, at the last look.",
        lambda stream, _: stream.number("lag_ns") / 1e9,
    ),
    Metric("sr_assets_nodes", "gauge", "Tracked nodes by status.", _nodes),
    _each(
        "sr_assets_watermark_age_seconds",
        "gauge",
        "Age of the watermark: the source's time up to which everything is known, and by which silence is judged.",
        lambda stream, now: max(0.0, now - stream.number("watermark_ns") / 1e9),
        lambda stream: bool(stream.status.get("watermark_ns")),
    ),
    _each(
        "sr_assets_gap_messages_total",
        "counter",
        "Messages that were gone before they were read or copied.",
        lambda stream, _: stream.number("gap_messages") + stream.number("lost_messages"),
    ),
    _each(
        "sr_assets_parked_messages_total",
        "counter",
        "Messages that the target cannot take, of a feed those that cannot be read.",
        lambda stream, _: stream.number("parked_messages"),
    ),
    _each(
        "sr_assets_outbox_messages",
        "gauge",
        "Advisories that are not acknowledged yet.",
        lambda stream, _: stream.number("unpublished"),
        lambda stream: stream.begun and stream.entry.advisory is not None,
    ),
    _each(
        "sr_assets_copy_queue_messages",
        "gauge",
        "Copies that are decided and not made yet.",
        lambda stream, _: stream.number("queued"),
        lambda stream: stream.begun and stream.copied,
    ),
    _each(
        "sr_assets_last_success_timestamp_seconds",
        "gauge",
        "When all work that there was had last been done without an error, or nothing was left to do.",
        lambda stream, _: stream.succeeded_at,
        lambda stream: stream.succeeded_at > 0,
    ),
    _each(
        "sr_assets_paused",
        "gauge",
        "1: copying is paused.",
        lambda stream, _: float(bool(stream.status.get("paused"))),
        lambda stream: stream.begun and stream.copied,
    ),
)
