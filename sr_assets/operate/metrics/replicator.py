"""The Stream Replicator's metric names, labels and types, so that its dashboards and alert rules keep working.

Covers its second generation and, with `legacy`, its first. The reference lists the omitted metrics and the reasons.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from sr_assets.domain.exposition import MetricKind, Sample, labels
from sr_assets.domain.tracking.rules import Event
from sr_assets.operate.metrics.stream_metrics import Metric, StreamNumbers, Value, counted, number, per_stream, summed
from sr_assets.settings import StreamSettings

_PREFIX: Final = "choria_stream_replicator_"
_LEGACY_PREFIX: Final = "stream_replicator_"


def _total_nodes(stream: StreamNumbers) -> float:
    """Return the number of tracked senders without retired ones, which the Stream Replicator forgets."""
    return float(stream.status.up + stream.status.timeout)


def _is_copied(stream: StreamNumbers) -> bool:
    return stream.started and stream.copied


def _is_sampled(stream: StreamNumbers) -> bool:
    return _is_copied(stream) and stream.entry.tracked


def _advises(stream: StreamNumbers) -> bool:
    return _is_sampled(stream) and stream.entry.advisory is not None


def _read_sequence(stream: StreamNumbers) -> float:
    return max(0.0, stream.number("next_sequence") - 1)


def _worker(
    name: str, kind: MetricKind, text: str, value: Value, applies: Callable[[StreamNumbers], bool] = _is_copied
) -> Metric:
    """Return a metric with the labels `stream`, `replicator`, `worker`."""
    return per_stream(_PREFIX + name, kind, text, value, applies, lambda stream: stream.replicator_labels)


def _limiter(name: str, text: str, value: Value) -> Metric:
    return per_stream(_PREFIX + name, "counter", text, value, _is_sampled, _limiter_labels)


def _limiter_labels(stream: StreamNumbers) -> str:
    return labels(limiter="memory", stream=stream.entry.stream, replicator=stream.replicator)


def _advisor(name: str, text: str, counter: str) -> Metric:
    def samples(streams: Sequence[StreamNumbers], _: float) -> Iterator[Sample]:
        return summed(
            Sample(
                labels(advisory=event.value, stream=stream.entry.stream, replicator=stream.replicator),
                stream.counted_by(counter).get(event.value, 0.0),
            )
            for stream in streams
            if _advises(stream)
            for event in Event
        )

    return Metric(_PREFIX + name, "counter", text, samples)


def _summary(streams: Sequence[StreamNumbers], named: Callable[[StreamNumbers], str]) -> Iterator[Sample]:
    for stream in filter(_is_copied, streams):
        yield Sample(named(stream), stream.counted("processing_seconds"), "_sum")
        yield Sample(named(stream), stream.counted("processed_messages"), "_count")


REPLICATOR: Final = (
    _worker("replicator_total_messages", "counter", "Messages that were read, copied or not.", number("seen_messages")),
    _worker("replicator_total_bytes", "counter", "Payload bytes that were read.", counted("seen_bytes")),
    _worker("replicator_handler_error_count", "counter", "Failed attempts to read or copy.", counted("errors")),
    Metric(
        f"{_PREFIX}replicator_processing_time_seconds",
        "summary",
        "Time per message for reading, deciding and copying.",
        lambda streams, _: _summary(streams, lambda stream: stream.replicator_labels),
    ),
    _worker("replicator_stream_sequence", "gauge", "Last source sequence that was read.", _read_sequence),
    _worker(
        "replicator_stream_lag_messages",
        "gauge",
        "Messages of the source that are not processed yet.",
        number("lag_messages"),
    ),
    _worker(
        "replicator_too_old_messages", "counter", "Messages not copied because of max_age.", number("too_old_messages")
    ),
    _worker("replicator_copied_messages", "counter", "Copied messages.", lambda stream: stream.copied_messages),
    _worker("replicator_copied_bytes", "counter", "Copied payload bytes.", number("copied_bytes")),
    _worker(
        "replicator_skipped_messages", "counter", "Messages not copied because of sampling.", number("skipped_messages")
    ),
    _worker(
        "replicator_skipped_bytes", "counter", "Payload bytes not copied because of sampling.", counted("skipped_bytes")
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
    _worker("connection_errors", "counter", "Failed attempts because of a connection.", counted("connection_errors")),
    _worker("connection_closed", "counter", "Losses of the connections of a stream.", counted("connections_closed")),
    _worker("connection_reconnections", "counter", "Returns after such a loss.", counted("reconnections")),
    _limiter("limiter_messages_without_limit_field_count", "Messages without a sender.", number("no_sender_messages")),
    _limiter(
        "limiter_messages_copy_forced_count",
        "Messages copied because of their force field.",
        counted("forced_messages"),
    ),
    _worker("tracker_total_items", "gauge", "Tracked senders.", _total_nodes, _is_sampled),
    _advisor("advisor_total_messages", "Attempts to send an advisory, including failed ones.", "advisories"),
    _advisor("advisor_publish_errors", "Advisories that a server refused or did not acknowledge.", "advisory_errors"),
)


# ------------------------------------------------------------------------------------------------ the first generation


def _legacy_labels(stream: StreamNumbers) -> str:
    return labels(name=stream.worker, worker=stream.entry.name)


def _legacy(name: str, kind: MetricKind, text: str, value: Value) -> Metric:
    return per_stream(_LEGACY_PREFIX + name, kind, text, value, _is_copied, _legacy_labels)


def _legacy_limiter(name: str, kind: MetricKind, text: str, value: Value) -> Metric:
    return per_stream(_LEGACY_PREFIX + name, kind, text, value, _is_sampled, _legacy_limiter_labels)


def _legacy_limiter_labels(stream: StreamNumbers) -> str:
    extractor = stream.entry.extractor if isinstance(stream.entry, StreamSettings) else None
    return labels(key=extractor.text if extractor else "", name=stream.worker)


def _legacy_advisor(name: str, text: str, counter: str, events: Sequence[Event]) -> Metric:
    def total(stream: StreamNumbers) -> float:
        return sum(stream.counted_by(counter).get(event.value, 0.0) for event in events)

    return per_stream(
        f"{_LEGACY_PREFIX}advisories_{name}",
        "counter",
        text,
        total,
        _advises,
        lambda stream: labels(name=f"{stream.entry.name}_advisor"),
    )


LEGACY: Final = (
    _legacy("received_msgs", "counter", "Messages that were read, copied or not.", number("seen_messages")),
    _legacy("received_bytes", "counter", "Bytes that were read.", counted("seen_bytes")),
    _legacy("copied_msgs", "counter", "Copied messages.", lambda stream: stream.copied_messages),
    _legacy("copied_bytes", "counter", "Copied bytes.", number("copied_bytes")),
    _legacy("failed_msgs", "counter", "Failed attempts.", counted("errors")),
    _legacy("acks_failed", "counter", "Always 0: source messages are never acknowledged.", lambda _: 0.0),
    _legacy("stream_reconnections", "counter", "Returns after a loss of the connections.", counted("reconnections")),
    _legacy(
        "connection_reconnections", "counter", "Returns after a loss of the connections.", counted("reconnections")
    ),
    _legacy("connection_closed", "counter", "Losses of the connections of a stream.", counted("connections_closed")),
    _legacy("connection_errors", "counter", "Failed attempts because of a connection.", counted("connection_errors")),
    Metric(
        f"{_LEGACY_PREFIX}processing_time",
        "summary",
        "Time per message for reading, deciding and copying.",
        lambda streams, _: _summary(streams, _legacy_labels),
    ),
    _legacy("current_sequence", "gauge", "Last source sequence that was read.", _read_sequence),
    _legacy_limiter("limiter_memory_seen", "gauge", "Tracked senders.", _total_nodes),
    _legacy_limiter(
        "limiter_memory_skipped", "counter", "Messages not copied because of sampling.", number("skipped_messages")
    ),
    _legacy_limiter("limiter_memory_passed", "counter", "Copied messages.", lambda stream: stream.copied_messages),
    _legacy_limiter("limiter_memory_errors", "counter", "Messages without a sender.", number("no_sender_messages")),
    _legacy_advisor("timeout", "Advisories about silence.", "advisories", (Event.TIMEOUT,)),
    _legacy_advisor("recover", "Advisories about a return.", "advisories", (Event.RECOVER,)),
    _legacy_advisor("expire", "Advisories about a retirement.", "advisories", (Event.EXPIRE,)),
    _legacy_advisor(
        "errors", "Advisories that a server refused or did not acknowledge.", "advisory_errors", tuple(Event)
    ),
)
