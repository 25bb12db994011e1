"""Metrics of every stream and feed, with the labels `name` and `stream`; list a new one in the reference too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sr_assets.domain.exposition import MetricKind, Sample
from sr_assets.domain.tracking.rules import Status
from sr_assets.operate.metrics.stream import Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sr_assets.operate.metrics.stream import StreamNumbers


def _each(
    name: str,
    kind: MetricKind,
    text: str,
    value: Callable[[StreamNumbers, float], float],
    applies: Callable[[StreamNumbers], bool] = lambda stream: stream.started,
) -> Metric:
    """Return a metric with one sample for each stream that it applies to."""

    def samples(streams: Sequence[StreamNumbers], now: float) -> Iterator[Sample]:
        return (Sample(stream.labels, value(stream, now)) for stream in streams if applies(stream))

    return Metric(name, kind, text, samples)


def _nodes(streams: Sequence[StreamNumbers], _: float) -> Iterator[Sample]:
    for stream in streams:
        if stream.started and stream.entry.tracked:
            counts = stream.status.get("nodes", {})
            for status in Status:
                yield Sample(f'{stream.labels},status="{status.value}"', float(counts.get(status.value, 0)))


STREAM_METRICS: Final = (
    _each(
        "sr_assets_lag_messages",
        "gauge",
        "Unread messages in the source at the last poll.",
        lambda stream, _: stream.number("lag_messages"),
    ),
    _each(
        "sr_assets_lag_seconds",
        "gauge",
        "Age of the first unread message at the last poll.",
        lambda stream, _: stream.number("lag_ns") / 1e9,
    ),
    Metric("sr_assets_nodes", "gauge", "Tracked nodes by status.", _nodes),
    _each(
        "sr_assets_watermark_age_seconds",
        "gauge",
        "Age of the watermark: the source's time up to which all messages were read, and which decides about silence.",
        lambda stream, now: max(0.0, now - stream.number("watermark_ns") / 1e9),
        lambda stream: bool(stream.status.get("watermark_ns")),
    ),
    _each(
        "sr_assets_gap_messages_total",
        "counter",
        "Messages that the source lost before they were read or copied.",
        lambda stream, _: stream.number("gap_messages") + stream.number("lost_messages"),
    ),
    _each(
        "sr_assets_parked_messages_total",
        "counter",
        "Messages that the target cannot store; for a feed: messages that cannot be decoded.",
        lambda stream, _: stream.number("parked_messages"),
    ),
    _each(
        "sr_assets_outbox_messages",
        "gauge",
        "Advisories that no server has acknowledged yet.",
        lambda stream, _: stream.number("unpublished"),
        lambda stream: stream.started and stream.entry.advisory is not None,
    ),
    _each(
        "sr_assets_copy_queue_messages",
        "gauge",
        "Copies that are due but not made yet.",
        lambda stream, _: stream.number("queued"),
        lambda stream: stream.started and stream.copied,
    ),
    _each(
        "sr_assets_last_success_timestamp_seconds",
        "gauge",
        "Last time no work was left: after a run without errors, or a poll of an idle site.",
        lambda stream, _: stream.succeeded_at,
        lambda stream: stream.succeeded_at > 0,
    ),
    _each(
        "sr_assets_paused",
        "gauge",
        "1 while copying is paused.",
        lambda stream, _: float(bool(stream.status.get("paused"))),
        lambda stream: stream.started and stream.copied,
    ),
)
