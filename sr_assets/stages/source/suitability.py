"""Requirements on a source: it is readable by sequence without being changed, and its messages name their senders."""

from typing import Final

from sr_assets.adapters.nats.administration import Cluster, held_subjects
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.wire import Connection, read_range
from sr_assets.domain.classes import Classifier, count_text
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.hops import is_heartbeat
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.senders import inspect_class
from sr_assets.domain.subjects import advisory_pattern, lane_finder, matcher, omitted_error, overlaps, printable
from sr_assets.settings import Entry, StreamSettings

#: Number of messages that are tested for a sender, and for classes.
_NEWEST: Final = 100
_NEWEST_OF_NODES: Final = 1_000


def check_source(stream: Entry, source: StreamInfo) -> None:
    """Refuse a source that cannot be read by sequence without being changed, or that takes its own advisories."""
    if source.retention != "limits":
        raise RunError(
            f"source stream {stream.stream} has retention {source.retention}, so reading would compete with its"
            " consumers; copy a stream with limits retention (for example a mirror of it)"
        )
    if isinstance(stream, StreamSettings):
        _refuse_omitted_pattern(stream, source)
    if stream.advisory is not None and stream.advisory.cluster == "source":
        for key, subject in (
            ("subject", stream.advisory.subject),
            ("observer_subject", stream.advisory.observer_subject),
        ):
            overlapping = [pattern for pattern in source.subjects if overlaps(pattern, advisory_pattern(subject))]
            if overlapping:
                raise ConfigurationError(
                    f"stream {stream.label}: advisory.{key} {subject!r} belongs to the source stream"
                    f" itself (subject {overlapping[0]}); choose another"
                )


def _refuse_omitted_pattern(stream: StreamSettings, source: StreamInfo) -> None:
    """Refuse partitions that take no message of a subject of the source, unless the source rewrites its subjects."""
    subjects = [] if source.config.get("subject_transform") or not stream.lanes else source.subjects
    omitted = [subject for subject in subjects if not any(overlaps(subject, lane) for lane in stream.lanes)]
    if omitted:
        raise ConfigurationError(
            f"stream {stream.label}: partitions {', '.join(stream.lanes)} take no message of subject {omitted[0]!r} of the"
            " source stream; add it"
        )


def try_partitions(stream: StreamSettings, source: Cluster, info: StreamInfo, begins: int) -> str:
    """Return, as text, how many of the newest messages show that a sender's subject decides its partition.

    Messages before `begins` are processed without lanes. Raises RunError if a sender has later messages in two partitions,
    or a later message, or the newest one, is in none.
    """
    lane_of, extractor = lane_finder(stream.lanes), stream.extractor
    messages = _newest_messages(stream, source, info, _NEWEST_OF_NODES)
    if messages and lane_of(messages[-1].subject) is None:
        raise omitted_error(stream.stream, messages[-1])
    if begins > info.last_sequence > 0:
        return f"new partitions after message {info.last_sequence}, which is in one; the others are copied without them"
    _refuse_omitted(stream, source, max(begins, info.first_sequence))
    messages = [message for message in messages if message.sequence >= begins]
    known: dict[str, tuple[int | None, str]] = {}
    for message in messages:
        sender = extractor.extract(message.subject, message.headers, message.payload) if extractor else None
        if sender is None:
            continue
        lane, subject = known.setdefault(sender, (lane_of(message.subject), message.subject))
        if (other := lane_of(message.subject)) != lane:
            raise RunError(
                f"sender {sender} is in partition {lane} (subject {printable(subject)}) and in partition {other} (subject"
                f" {printable(message.subject)}): copies of a plain stream lose its order; let the token of the"
                " sender in the subject decide the partition"
            )
    if extractor is None:
        return f"{len(messages)} newest messages, each in a partition; no inspect_… key names their senders"
    return f"{len(messages)} newest messages of {len(known)} senders, each sender in one partition"


def _refuse_omitted(stream: StreamSettings, source: Cluster, begin: int) -> None:
    """Raise RunError if a message at or after a sequence is in no partition."""
    held = sum(source.count_from(stream.stream, begin, lane) for lane in stream.lanes)
    if held < source.count_from(stream.stream, begin):
        takes = matcher(stream.lanes)
        for subject in held_subjects(source, stream.stream):
            message = None if takes(subject) else source.last_message(stream.stream, subject)
            if message is not None and message.sequence >= begin:
                raise omitted_error(stream.stream, message)


def try_senders(stream: StreamSettings, source: Cluster, info: StreamInfo) -> str:
    """Return, as text, the number of newest messages of a tracked stream with a sender.

    Raises RunError if most have none: a misspelt `inspect_field` copies every message and tracks no node.
    """
    extractor = stream.extractor
    messages = _newest_messages(stream, source, info, _NEWEST)
    if extractor is None or not messages:
        return "no message to test"
    senders = [extractor.extract(message.subject, message.headers, message.payload) for message in messages]
    named = [sender for sender in senders if sender is not None]
    counted = f"{len(named)} of the newest {len(senders)} messages have one"
    if len(named) * 2 < len(senders):
        raise RunError(
            f"{counted}; correct {extractor.key} ({extractor.text}), or messages without a sender are copied and not tracked"
        )
    return f"{counted}, such as {named[-1]}" if named else counted


def try_classes(stream: StreamSettings, classifier: Classifier, source: Cluster, info: StreamInfo) -> str:
    """Return, as text, how many nodes of the newest messages of a tracked stream each class matches."""
    assert stream.extractor is not None  # settings require it of a tracked stream
    classes: dict[str, str | None] = {}
    for message in _newest_messages(stream, source, info, _NEWEST_OF_NODES):
        content = message.subject, message.headers, message.payload
        sender, _, node_class = inspect_class(stream.extractor, None, classifier, *content)
        if sender is not None:
            classes[sender] = node_class
    return count_text(classifier.rules, list(classes.values()))


def _newest_messages(stream: StreamSettings, source: Cluster, info: StreamInfo, count: int) -> list[Message]:
    """Return the newest messages of a stream in order, without heartbeats."""
    last = info.last_sequence
    # The leader's response with a message may be too large for a leaf node's link.
    if not source.settings.api_owner:
        newest = source.last_message(stream.stream, stream.filter_subject or ">")
        last = newest.sequence if newest else 0
    if not last:
        return []
    wanted = SequenceRange(max(1, last + 1 - count), last + 1)
    direct = info.supports_batched_direct_get
    with Connection(stream.source, "sr-assets check") as connection:
        lists = read_range(connection, stream.stream, wanted, filter_subject=stream.filter_subject, direct=direct)
        return [message for part in lists for message in part if not is_heartbeat(message.subject, message.headers)]
