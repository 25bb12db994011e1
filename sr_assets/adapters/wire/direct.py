"""A range read by batched direct gets (2.11+, `allow_direct`), which any replica, and any mirror, may answer.

Not here: whether what is missing is really absent (`reading`).
"""

from collections.abc import Iterator
from typing import Any

from sr_assets.adapters.wire import frames as f
from sr_assets.adapters.wire.answers import refused
from sr_assets.adapters.wire.connection import Connection
from sr_assets.adapters.wire.single import stored_message
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange


def read_direct(
    connection: Connection,
    stream: str,
    wanted: SequenceRange,
    filter_subject: str | None,
    batch_messages: int,
    max_bytes: int,
    timeout_seconds: float | None = None,
) -> Iterator[list[Message]]:
    """Ask for batch after batch until the range is passed or nothing follows; messages after it may come too.

    Ends early when another stream answers, a mirror: what it sends is discarded. Raises SilenceError when no answer comes
    in time, `request_seconds` unless given.
    """
    cursor = max(wanted.first, 1)
    while cursor < wanted.next:
        count = min(batch_messages, wanted.next - cursor)
        request: dict[str, Any] = {"seq": cursor, "batch": count, "max_bytes": max_bytes}
        if filter_subject:
            request["next_by_subj"] = filter_subject
        messages, pending = _direct_batch(connection, stream, request, timeout_seconds)
        if messages:
            yield messages
        if not pending:
            return
        cursor = messages[-1].sequence + 1


def _direct_batch(
    connection: Connection, stream: str, request: dict[str, Any], timeout_seconds: float | None
) -> tuple[list[Message], int]:
    """One batched direct get: its messages and how many follow (404: none, and no end marker comes)."""
    inbox, asked = connection.new_inbox(), stream.encode()
    connection.send(f.encode_pub(connection.api(f"DIRECT.GET.{stream}"), inbox, b"", f.encode_json(request)))
    messages: list[Message] = []
    damaged: list[int] = []
    pending: int | None = 0
    for frame in connection.answers(f"a direct get from {stream}", timeout_seconds):
        if frame.subject != inbox:
            continue
        answer = f.direct_get_message(frame)
        if answer is None:
            if frame.status not in (204, 404):
                raise refused(connection, stream, frame)
            break
        message, pending, answering = answer
        if answering != asked:
            return [], 0
        if not f.has_whole_headers(message):
            damaged.append(len(messages))
        messages.append(message)
        if pending is None:
            # A server before 2.11 knows no batches: it answers with one message and no end marker.
            pending = 1
            break
    for at in damaged:
        messages[at] = stored_message(connection, stream, messages[at].sequence) or messages[at]
    return messages, pending or 0
