"""The Stream Replicator's metrics: its names, labels and types, so that its dashboards and alert rules go on working.

Those of its second generation, and with `legacy` those of its first, as far as they mean something here; the reference says
which are left out and why. Not here: our own (`ours`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from sr_assets.domain.exposition import MetricKind, Sample, labels
from sr_assets.domain.tracking import Event
from sr_assets.operate.metrics.stream import Metric
from sr_assets.settings import StreamSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sr_assets.operate.metrics.stream import StreamNumbers

    Value = Callable[[StreamNumbers], float]

_PREFIX: Final = "choria_stream_replicator_"
_LEGACY_PREFIX: Final = "stream_replicator_"


def _total_nodes(stream: StreamNumbers) -> float:
    """Return how many senders are tracked: a retired one is forgotten there."""
    counts = stream.status.get("nodes", {})
    return float(counts.get("up", 0) + counts.get("timeout", 0))


def _reading_begun(stream: StreamNumbers) -> float:
    return 1 + stream.number("starts")


def _is_copied(stream: StreamNumbers) -> bool:
    return stream.begun and stream.copied


def _is_sampled(stream: StreamNumbers) -> bool:
    return _is_copied(stream) and stream.entry.tracked


def _worker(
    name: str, kind: MetricKind, text: str, value: Value, wanted: Callable[[StreamNumbers], bool] = _is_copied
) -> Metric:
    """Return a metric with the labels `stream`, `replicator`, `worker`."""

    def samples(streams: Sequence[StreamNumbers], _: float) -> Iterator[Sample]:
        return (Sample(stream.replicator_labels, value(stream)) for stream in streams if wanted(stream))

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
    """Add up samples of the same labels: those of streams of the same name at several sites."""

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
        "Messages that were read, those that are not copied among them.",
        lambda stream: stream.number("seen_messages"),
    ),
    _worker(
        "replicator_total_bytes",
        "counter",
        "Bytes of the payloads that were read.",
        lambda stream: stream.counted("seen_bytes"),
    ),
    _worker(
        "replicator_handler_error_count",
        "counter",
        "Attempts to read or to copy that failed.",
        lambda stream: stream.counted("errors"),
    ),
    Metric(
        f"{_PREFIX}replicator_processing_time_seconds",
        "summary",
        "Time for reading, deciding and copying, by message.",
        lambda streams, _: _summary(streams, lambda stream: stream.replicator_labels),
    ),
    _worker(
        "replicator_stream_sequence",
        "gauge",
        "The last sequence of the source that was read.",
        lambda stream: max(0.0, stream.number("next_sequence") - 1),
    ),
    _worker(
        "replicator_too_old_messages",
        "counter",
        "Messages not copied because of max_age.",
        lambda stream: stream.number("too_old_messages"),
    ),
    _worker(
        "replicator_copied_messages", "counter", "Messages that were copied.", lambda stream: stream.copied_messages
    ),
    _worker(
        "replicator_copied_bytes",
        "counter",
        "Bytes of the payloads that were copied.",
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
        "Bytes of the payloads not copied because of sampling.",
        lambda stream: stream.counted("skipped_bytes"),
    ),
    _worker(
        "replicator_meta_parse_failed_count",
        "counter",
        "Always 0: sequence and time of a message are part of the answer that has it.",
        lambda _: 0.0,
    ),
    _worker(
        "replicator_ack_failed_count",
        "counter",
        "Always 0: the source is asked for messages by their sequence, and no message of it is acknowledged.",
        lambda _: 0.0,
    ),
    _worker(
        "replicator_consumer_recreated",
        "counter",
        "How often reading began: the first time, and after each change of the source.",
        _reading_begun,
    ),
    _limiter(
        "limiter_messages_without_limit_field_count",
        "Messages without a sender.",
        lambda stream: stream.number("no_sender_messages"),
    ),
    _limiter(
        "limiter_messages_copy_forced_count",
        "Messages copied because their force field says so.",
        lambda stream: stream.counted("forced_messages"),
    ),
    _worker("tracker_total_items", "gauge", "Senders that are tracked.", _total_nodes, _is_sampled),
    _advisor("advisor_total_messages", "Attempts to send an advisory, failed ones included.", "advisories"),
    _advisor("advisor_publish_errors", "Advisories that were refused or not acknowledged.", "advisory_errors"),
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
    _legacy("received_msgs", "counter", "Messages that were read.", lambda stream: stream.number("seen_messages")),
    _legacy("received_bytes", "counter", "Bytes that were read.", lambda stream: stream.counted("seen_bytes")),
    _legacy("copied_msgs", "counter", "Messages that were copied.", lambda stream: stream.copied_messages),
    _legacy("copied_bytes", "counter", "Bytes that were copied.", lambda stream: stream.number("copied_bytes")),
    _legacy("failed_msgs", "counter", "Attempts that failed.", lambda stream: stream.counted("errors")),
    _legacy("acks_failed", "counter", "Always 0: no message of the source is acknowledged.", lambda _: 0.0),
    Metric(
        f"{_LEGACY_PREFIX}processing_time",
        "summary",
        "Time for reading, deciding and copying, by message.",
        lambda streams, _: _summary(streams, _legacy_labels),
    ),
    _legacy(
        "current_sequence",
        "gauge",
        "The last sequence of the source that was read.",
        lambda stream: max(0.0, stream.number("next_sequence") - 1),
    ),
    _legacy_limiter("limiter_memory_seen", "gauge", "Senders that are tracked.", _total_nodes),
    _legacy_limiter(
        "limiter_memory_skipped",
        "counter",
        "Messages not copied because of sampling.",
        lambda stream: stream.number("skipped_messages"),
    ),
    _legacy_limiter(
        "limiter_memory_passed", "counter", "Messages that were copied.", lambda stream: stream.copied_messages
    ),
    _legacy_limiter(
        "limiter_memory_errors",
        "counter",
        "Messages without a sender.",
        lambda stream: stream.number("no_sender_messages"),
    ),
    _legacy_advisor("timeout", "Advisories about silence.", "advisories", (Event.TIMEOUT,)),
    _legacy_advisor("recover", "Advisories about a return.", "advisories", (Event.RECOVER,)),
    _legacy_advisor("expire", "Advisories about a retirement.", "advisories", (Event.EXPIRE,)),
    _legacy_advisor("errors", "Advisories that were refused or not acknowledged.", "advisory_errors", tuple(Event)),
)
