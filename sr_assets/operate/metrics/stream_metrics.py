"""Metrics of every stream and feed, from its status; list a new one in the reference too."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from sr_assets.adapters.state.status_file import StreamStatus
from sr_assets.domain.exposition import MetricKind, Sample, labels
from sr_assets.domain.tracking.rules import Status
from sr_assets.settings import Entry, FeedSettings, StreamSettings

_NONE: Final[dict[str, float]] = {}


class StreamNumbers:
    """The numbers of one stream or feed since its site's last publication.

    `labels` belong to this package's metrics, `replicator_labels` to the Stream Replicator's; `worker` is the stream's
    name in its first generation. `idle_at` is the last poll that found no work for the site (unix seconds).
    """

    def __init__(self, entry: Entry, status: StreamStatus, replicator: str, index: int) -> None:
        self.entry, self.status = entry, status
        self.idle_at = 0.0
        self.replicator, self.worker = replicator, f"{entry.name}_{index}"
        self.copied = isinstance(entry, StreamSettings)
        self.feed = isinstance(entry, FeedSettings)
        self.labels = labels(name=entry.name, stream=entry.stream)
        self.replicator_labels = labels(stream=entry.stream, replicator=replicator, worker=entry.name)

    def number(self, key: str) -> float:
        """Return a number from the status, or 0 if it is None."""
        return float(getattr(self.status, key) or 0)

    def counted(self, counter: str) -> float:
        """Return a counter, summed over its labels."""
        return sum(self.status.counters.get(counter, _NONE).values())

    def counted_by(self, counter: str) -> Mapping[str, float]:
        return self.status.counters.get(counter, _NONE)

    @property
    def started(self) -> bool:
        """Whether the stream has a position."""
        return self.status.begun

    @property
    def copied_messages(self) -> float:
        """All copies ever made, including copies that the target lost later and the table no longer counts."""
        return self.number("copied_messages") + self.counted("recalled_messages")

    @property
    def succeeded_at(self) -> float:
        """The last time no work was left, in unix seconds; 0: never."""
        succeeded_at = self.number("last_success_ns") / 1e9
        return succeeded_at if self.status.last_error else max(succeeded_at, self.idle_at)


class Metric(NamedTuple):
    """A metric: its name, type and help text, and a function from all streams and the time (unix seconds) to samples."""

    name: str
    kind: MetricKind
    text: str
    samples: Callable[[Sequence[StreamNumbers], float], Iterable[Sample]]


Value = Callable[[StreamNumbers], float]


def number(key: str) -> Value:
    """Return a function that reads a number of a stream's status."""
    return lambda stream: stream.number(key)


def counted(counter: str) -> Value:
    """Return a function that reads a stream's counter."""
    return lambda stream: stream.counted(counter)


def per_stream(
    name: str,
    kind: MetricKind,
    text: str,
    value: Value,
    applies: Callable[[StreamNumbers], bool] = lambda stream: stream.started,
    labels_of: Callable[[StreamNumbers], str] = lambda stream: stream.labels,
) -> Metric:
    """Return a metric of each stream that it applies to; streams with the same labels are summed."""

    def samples(streams: Sequence[StreamNumbers], _: float) -> Iterator[Sample]:
        return summed(Sample(labels_of(stream), value(stream)) for stream in streams if applies(stream))

    return Metric(name, kind, text, samples)


def summed(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Sum samples with the same labels: streams of the same name at several sites."""
    totals: dict[str, float] = defaultdict(float)
    for sample in samples:
        totals[sample.labels] += sample.value
    return (Sample(*item) for item in totals.items())


def _nodes(streams: Sequence[StreamNumbers], _: float) -> Iterator[Sample]:
    for stream in streams:
        if stream.started and stream.entry.tracked:
            for status in Status:
                yield Sample(f'{stream.labels},status="{status.value}"', stream.number(status.value))


def _watermark_ages(streams: Sequence[StreamNumbers], now: float) -> Iterator[Sample]:
    for stream in streams:
        if watermark_ns := stream.number("watermark_ns"):
            yield Sample(stream.labels, max(0.0, now - watermark_ns / 1e9))


def _is_copied(stream: StreamNumbers) -> bool:
    return stream.started and stream.copied


def _engines(streams: Sequence[StreamNumbers], _: float) -> Iterator[Sample]:
    return summed(
        Sample(f'{stream.labels},engine="{engine}"', stream.number(f"{engine}_messages"))
        for stream in streams
        for engine in ("spark", "local")
        if stream.started
    )


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
        "sr_assets_messages_total",
        "counter",
        "Messages that Spark's tasks, or the runs' own processes, have read or copied.",
        _engines,
    ),
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
        lambda stream: float(stream.status.paused),
        _is_copied,
    ),
)
