"""The check that every message of a partitioned source belongs to a lane."""

from collections.abc import Sequence

from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.domain.errors import TransientError
from sr_assets.domain.lanes import omitted_error
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.subjects import matcher
from sr_assets.settings import StreamSettings


def refuse_omitted(
    stream: StreamSettings, source: Cluster, covered: SequenceRange, absent: Sequence[SequenceRange]
) -> None:
    """Raise RunError if the source holds a message of a range that no lane takes.

    `absent` are the range's sequences that no lane has read. Raises TransientError if a lane has missed its own message.
    """
    after = source.count_from(stream.stream, covered.next)
    if source.count_from(stream.stream, covered.first) - after <= len(covered) - sum(map(len, absent)):
        return
    accepts = matcher(stream.lanes)
    for hole in absent:
        message = source.next_message(stream.stream, hole.first)
        if message is None or message.sequence >= hole.next:
            continue
        if accepts(message.subject):
            raise TransientError(
                f"{stream.label}: a lane did not read message {message.sequence}; the batch is repeated"
            )
        raise omitted_error(stream.stream, message)
