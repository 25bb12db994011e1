"""The Stream Replicator's metric names, labels and types, so that its dashboards and alert rules keep working.

Covers its second generation and, with `legacy`, its first. The reference lists the omitted metrics and the reasons.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from sr_assets.domain.exposition import MetricKind, Sample, labels
from sr_assets.domain.tracking.rules import Event
from sr_assets.operate.metrics.stream import Metric
from sr_assets.settings import StreamSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sr_assets.operate.metrics.stream import StreamNumbers

    Value = Callable[[StreamNumbers], float]

_PREFIX: Final = "choria_stream_replicator_"
_LEGACY_PREFIX: Final = "stream_replicator_"


def _total_nodes(stream: StreamNumbers) -> float:
    """Return the number of tracked senders without retired ones, which the Stream Replicator forgets."""
    counts = stream.status.get("nodes", {})
    return float(counts.get("up", 0) + counts.get("timeout", 0))


def _is_copied(stream: StreamNumbers) -> bool:
    return stream.started and stream.copied


def _is_sampled(stream: StreamNumbers) -> bool:
    return _is_copied(stream) and stream.entry.tracked


def _worker(
    name: str, kind: MetricKind, text: str, value: Value, applies: Callable[[StreamNumbers], bool] = _is_copied
) -> Metric:
    """Return a metric with the labels `stream`, `replicator`, `worker`."""

    def samples(streams: Sequence[StreamNumbers], _: float) -> Iterator[Sample]:
        return (Sample(stream.replicator_labels, value(stream)) for stream in streams if applies(stream))

    return Metric(_PREFIX + name, kind, text, samples)


def _limiter(name: str, text: str, value: Value) -> Metric:
    def samples(streams: Sequence[StreamNumbers], _: float) -> Iterator[Sample]:
        for stream in streams:
            if _is_sampled(stream):
                named = labels(limiter="memory", stream=stream.entry.stream, replicator=stream.replicator)
                yield Sample(named, value(stream))

    return Metric(_PREFIX + name, "counter", text, _summed(samples))


def _advisor(name: str, text: str, counter: str) -> Metric:
    def samples(streams: Sequence[StreamNumbers], _: float) -> Iterator[Sample]:
        for stream in streams:
            if _is_sampled(stream) and stream.entry.advisory is not None:
                counts = stream.counted_by(counter)
                for event in Event:
                    named = labels(advisory=event.value, stream=stream.entry.stream, replicator=stream.replicator)
                    yield Sample(named, counts.get(event.value, 0.0))

    return Metric(_PREFIX + name, "counter", text, _summed(samples))


def _summed(
    samples: Callable[[Sequence[StreamNumbers], float], Iterator[Sample]],
) -> Callable[[Sequence[StreamNumbers], float], Iterator[Sample]]:
    """Sum samples with the same labels: streams of the same name at several sites."""

    def summed(streams: Sequence[StreamNumbers], now: float) -> Iterator[Sample]:
        totals: dict[str, float] = defaultdict(float)
        for sample in samples(streams, now):
            totals[sample.labels] += sample.value
        return (Sample(*item) for item in totals.items())

    return summed


def _summary(streams: Sequence[StreamNumbers], named: Callable[[StreamNumbers], str]) -> Iterator[Sample]:
    for stream in filter(_is_copied, streams):
        yield Sample(named(stream), stream.counted("processing_seconds"), "_sum")
        yield Sample(named(stream), stream.counted("processed_messages"), "_count")


REPLICATOR: Final = (
    _worker(
        "replicator_total_messages",
        "counter",
        "Messages that were read, copied or not.",
        lambda stream: stream.number("seen_messages"),
    ),
    _worker(
        "replicator_total_bytes",
        "counter",
        "Payload bytes that were read.",
        lambda stream: stream.counted("seen_bytes"),
    ),
    _worker(
        "replicator_handler_error_count",
        "counter",
        "Failed attempts to read or copy.",
        lambda stream: stream.counted("errors"),
    ),
    Metric(
        f"{_PREFIX}replicator_processing_time_seconds",
        "summary",
        "Time per message for reading, deciding and copying.",
        lambda streams, _: _summary(streams, lambda stream: stream.replicator_labels),
    ),
    _worker(
        "replicator_stream_sequence",
        "gauge",
        "Last source sequence that was read.",
        lambda stream: max(0.0, stream.number("next_sequence") - 1),
    ),
    _worker(
        "replicator_too_old_messages",
        "counter",
        "Messages not copied because of max_age.",
        lambda stream: stream.number("too_old_messages"),
    ),
    _worker("replicator_copied_messages", "counter", "Copied messages.", lambda stream: stream.copied_messages),
    _worker(
        "replicator_copied_bytes",
        "counter",
        "Copied payload bytes.",
        lambda stream: stream.number("copied_bytes"),
    ),
    _worker(
        "replicator_skipped_messages",
        "counter",
        "Messages not copied because of sampling.",
        lambda stream: stream.number("skipped_messages"),
    ),
    _worker(
        "replicator_skipped_bytes",
        "counter",
        "Payload bytes not copied because of sampling.",
        lambda stream: stream.counted("skipped_bytes"),
    ),
    _worker(
        "replicator_meta_parse_failed_count",
        "counter",
        "Always 0: a message arrives with its sequence and time.",
        lambda _: 0.0,
    ),
    _worker(
        "replicator_ack_failed_count",
        "counter",
        "Always 0: messages are read by sequence and never acknowledged.",
        lambda _: 0.0,
    ),
    _worker(
        "replicator_consumer_recreated",
        "counter",
        "Starts of reading: the first one, and a restart after each change of the source.",
        lambda stream: 1 + stream.number("starts"),
    ),
    _limiter(
        "limiter_messages_without_limit_field_count",
        "Messages without a sender.",
        lambda stream: stream.number("no_sender_messages"),
    ),
    _limiter(
        "limiter_messages_copy_forced_count",
        "Messages copied because of their force field.",
        lambda stream: stream.counted("forced_messages"),
    ),
    _worker("tracker_total_items", "gauge", "Tracked senders.", _total_nodes, _is_sampled),
    _advisor("advisor_total_messages", "Attempts to send an advisory, including failed ones.", "advisories"),
    _advisor("advisor_publish_errors", "Advisories that a server refused or did not acknowledge.", "advisory_errors"),
)


# ------------------------------------------------------------------------------------------------ the first generation


def _legacy_labels(stream: StreamNumbers) -> str:
    return labels(name=stream.worker, worker=stream.entry.name)


def _legacy(name: str, kind: MetricKind, text: str, value: Value) -> Metric:
    def samples(streams: Sequence[StreamNumbers], _: float) -> Iterator[Sample]:
        return (Sample(_legacy_labels(stream), value(stream)) for stream in streams if _is_copied(stream))

    return Metric(_LEGACY_PREFIX + name, kind, text, samples)


def _legacy_limiter(name: str, kind: MetricKind, text: str, value: Value) -> Metric:
    def samples(streams: Sequence[StreamNumbers], _: float) -> Iterator[Sample]:
        for stream in streams:
            if _is_sampled(stream):
                yield Sample(labels(key=_limiter_key(stream), name=stream.worker), value(stream))

    return Metric(_LEGACY_PREFIX + name, kind, text, samples)


def _limiter_key(stream: StreamNumbers) -> str:
    extractor = stream.entry.extractor if isinstance(stream.entry, StreamSettings) else None
    return extractor.text if extractor else ""


def _legacy_advisor(name: str, text: str, counter: str, events: Sequence[Event]) -> Metric:
    def samples(streams: Sequence[StreamNumbers], _: float) -> Iterator[Sample]:
        for stream in streams:
            if _is_sampled(stream) and stream.entry.advisory is not None:
                counts = stream.counted_by(counter)
                total = sum(counts.get(event.value, 0.0) for event in events)
                yield Sample(labels(name=f"{stream.entry.name}_advisor"), total)

    return Metric(f"{_LEGACY_PREFIX}advisories_{name}", "counter", text, _summed(samples))


LEGACY: Final = (
    _legacy(
        "received_msgs",
        "counter",
        "Messages that were read, copied or not.",
        lambda stream: stream.number("seen_messages"),
    ),
    _legacy("received_bytes", "counter", "Bytes that were read.", lambda stream: stream.counted("seen_bytes")),
    _legacy("copied_msgs", "counter", "Copied messages.", lambda stream: stream.copied_messages),
    _legacy("copied_bytes", "counter", "Copied bytes.", lambda stream: stream.number("copied_bytes")),
    _legacy("failed_msgs", "counter", "Failed attempts.", lambda stream: stream.counted("errors")),
    _legacy("acks_failed", "counter", "Always 0: source messages are never acknowledged.", lambda _: 0.0),
    Metric(
        f"{_LEGACY_PREFIX}processing_time",
        "summary",
        "Time per message for reading, deciding and copying.",
        lambda streams, _: _summary(streams, _legacy_labels),
    ),
    _legacy(
        "current_sequence",
        "gauge",
        "Last source sequence that was read.",
        lambda stream: max(0.0, stream.number("next_sequence") - 1),
    ),
    _legacy_limiter("limiter_memory_seen", "gauge", "Tracked senders.", _total_nodes),
    _legacy_limiter(
        "limiter_memory_skipped",
        "counter",
        "Messages not copied because of sampling.",
        lambda stream: stream.number("skipped_messages"),
    ),
    _legacy_limiter("limiter_memory_passed", "counter", "Copied messages.", lambda stream: stream.copied_messages),
    _legacy_limiter(
        "limiter_memory_errors",
        "counter",
        "Messages without a sender.",
        lambda stream: stream.number("no_sender_messages"),
    ),
    _legacy_advisor("timeout", "Advisories about silence.", "advisories", (Event.TIMEOUT,)),
    _legacy_advisor("recover", "Advisories about a return.", "advisories", (Event.RECOVER,)),
    _legacy_advisor("expire", "Advisories about a retirement.", "advisories", (Event.EXPIRE,)),
    _legacy_advisor(
        "errors", "Advisories that a server refused or did not acknowledge.", "advisory_errors", tuple(Event)
    ),
)
