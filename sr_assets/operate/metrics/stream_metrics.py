"""Metrics of every stream and feed, with the labels `name` and `stream`; list a new one in the reference too."""

from collections.abc import Iterator, Sequence
from typing import Final

from sr_assets.domain.exposition import Sample
from sr_assets.domain.tracking.rules import Status
from sr_assets.operate.metrics.stream import Metric, StreamNumbers, counted, number, per_stream


def _nodes(streams: Sequence[StreamNumbers], _: float) -> Iterator[Sample]:
    for stream in streams:
        if stream.started and stream.entry.tracked:
            counts = stream.status.get("nodes", {})
            for status in Status:
                yield Sample(f'{stream.labels},status="{status.value}"', float(counts.get(status.value, 0)))


def _watermark_ages(streams: Sequence[StreamNumbers], now: float) -> Iterator[Sample]:
    for stream in streams:
        if watermark_ns := stream.number("watermark_ns"):
            yield Sample(stream.labels, max(0.0, now - watermark_ns / 1e9))


def _is_copied(stream: StreamNumbers) -> bool:
    return stream.started and stream.copied


STREAM_METRICS: Final = (
    per_stream(
        "sr_assets_lag_messages", "gauge", "Unread messages in the source at the last poll.", number("lag_messages")
    ),
    per_stream(
        "sr_assets_lag_seconds",
        "gauge",
        "Age of the first unread message at the last poll.",
        lambda stream: stream.number("lag_ns") / 1e9,
    ),
    Metric("sr_assets_nodes", "gauge", "Tracked nodes by status.", _nodes),
    Metric(
        "sr_assets_watermark_age_seconds",
        "gauge",
        "Age of the watermark: the source's time up to which all messages were read, and which decides about silence.",
        _watermark_ages,
    ),
    per_stream(
        "sr_assets_gap_messages_total",
        "counter",
        "Messages that the source lost before they were read or copied.",
        lambda stream: stream.number("gap_messages") + stream.number("lost_messages"),
    ),
    per_stream(
        "sr_assets_parked_messages_total",
        "counter",
        "Messages that the target cannot store; for a feed: messages that cannot be decoded.",
        number("parked_messages"),
    ),
    per_stream(
        "sr_assets_impossible_hops_total",
        "counter",
        "Values of Choria-SR-Source in measured copies that are no possible hop; they are not measured.",
        counted("impossible_hops"),
        _is_copied,
    ),
    per_stream(
        "sr_assets_forged_copies_total",
        "counter",
        "Messages of the target that claim to be copies and differ from their originals; they are ignored.",
        counted("forged_copies"),
        _is_copied,
    ),
    per_stream(
        "sr_assets_refused_senders_total",
        "counter",
        "Messages of senders that are no node because the stream has max_nodes.",
        counted("refused_senders"),
        lambda stream: _is_copied(stream) and stream.entry.tracked,
    ),
    per_stream(
        "sr_assets_refused_metadata_total",
        "counter",
        "Copied registrations without metadata: their content is unreadable or too large.",
        counted("refused_metadata"),
        lambda stream: _is_copied(stream) and stream.entry.tracked,
    ),
    per_stream(
        "sr_assets_outbox_messages",
        "gauge",
        "Advisories that no server has acknowledged yet.",
        number("unpublished"),
        lambda stream: stream.started and stream.entry.advisory is not None,
    ),
    per_stream(
        "sr_assets_copy_queue_messages", "gauge", "Copies that are due but not made yet.", number("queued"), _is_copied
    ),
    per_stream(
        "sr_assets_last_success_timestamp_seconds",
        "gauge",
        "Last time no work was left: after a run without errors, or a poll of an idle site.",
        lambda stream: stream.succeeded_at,
        lambda stream: stream.succeeded_at > 0,
    ),
    per_stream(
        "sr_assets_paused",
        "gauge",
        "1 while copying is paused.",
        lambda stream: float(bool(stream.status.get("paused"))),
        _is_copied,
    ),
)
