"""The check of the newest messages for senders: a misspelt `inspect_field` copies every message and tracks no node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sr_assets.adapters.wire import Connection, read_range
from sr_assets.domain.errors import RunError
from sr_assets.domain.heartbeats import is_heartbeat
from sr_assets.domain.positions import SequenceRange

if TYPE_CHECKING:
    from sr_assets.adapters.nats.cluster import Cluster
    from sr_assets.adapters.nats.stream_info import StreamInfo
    from sr_assets.settings import StreamSettings

_NEWEST: Final = 100


def try_senders(stream: StreamSettings, source: Cluster, info: StreamInfo) -> str:
    """Return, as text, the number of newest messages of a tracked stream with a sender.

    Raises RunError if most have none.
    """
    extractor = stream.extractor
    newest = source.last_message(stream.stream, stream.filter_subject or ">")
    if extractor is None or newest is None:
        return "no message to test"
    wanted = SequenceRange(max(1, newest.sequence + 1 - _NEWEST), newest.sequence + 1)
    direct = info.supports_batched_direct_get
    with Connection(stream.source, "sr-assets check") as connection:
        lists = read_range(connection, stream.stream, wanted, filter_subject=stream.filter_subject, direct=direct)
        messages = [message for part in lists for message in part if not is_heartbeat(message.headers)]
    senders = [extractor.extract(message.subject, message.headers, message.payload) for message in messages]
    named = [sender for sender in senders if sender is not None]
    counted = f"{len(named)} of the newest {len(senders)} messages have one"
    if len(named) * 2 < len(senders):
        raise RunError(
            f"{counted}; correct {extractor.key} ({extractor.text}), or messages without a sender are copied and not tracked"
        )
    return f"{counted}, such as {named[-1]}" if named else counted
