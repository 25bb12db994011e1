"""Messages read one by one, by their sequence: the leader's word, or many gets that overlap."""

from collections.abc import Iterator
from typing import Any, Final

from sr_assets.adapters.wire import frames as f
from sr_assets.adapters.wire.answers import refused, succeeded
from sr_assets.adapters.wire.connection import Connection, WireError
from sr_assets.adapters.wire.frames import Frame
from sr_assets.domain.messages import Message

_NO_MESSAGE: Final = 10037


def stored_message(connection: Connection, stream: str, sequence: int) -> Message | None:
    """The message as the leader has it (`STREAM.MSG.GET`); None when it is not there."""
    subject = f"$JS.API.STREAM.MSG.GET.{stream}"
    return _stored(connection, stream, connection.request(subject, {"seq": sequence}))


def next_message(
    connection: Connection, stream: str, sequence: int, filter_subject: str | None = None
) -> Message | None:
    """The first message at or after a sequence as the leader has it; None when there is none."""
    subject = f"$JS.API.STREAM.MSG.GET.{stream}"
    request = {"seq": sequence, "next_by_subj": filter_subject or ">"}
    return _stored(connection, stream, connection.request(subject, request))


def _stored(connection: Connection, stream: str, answer: dict[str, Any]) -> Message | None:
    if (answer.get("error") or {}).get("err_code") == _NO_MESSAGE:
        return None
    stored = succeeded(connection, stream, answer)
    try:
        return f.stored_message(stored)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise WireError(f"{connection.address}: stream {stream} answered what is no message") from None


def read_singles(
    connection: Connection, stream: str, sequences: list[int], direct: bool, batch_messages: int, max_bytes: int
) -> Iterator[list[Message]]:
    """Overlapping single gets. How many are under way follows the largest message seen: together about `max_bytes`."""
    subject = f"$JS.API.{'DIRECT.GET' if direct else 'STREAM.MSG.GET'}.{stream}"
    answers = connection.answers(f"a message of {stream}")
    window, largest_bytes, position = 32, 1, 0
    while position < len(sequences):
        under_way: set[bytes] = set()
        found: list[Message] = []
        end, left_bytes = min(position + batch_messages, len(sequences)), max_bytes
        while under_way or (position < end and left_bytes > 0):
            if position < end and left_bytes > 0 and len(under_way) <= window // 2:
                asked = sequences[position : min(position + window - len(under_way), end)]
                inboxes = [connection.new_inbox() for _ in asked]
                pairs = zip(inboxes, asked, strict=True)
                connection.send(b"".join(f.encode_pub(subject, inbox, b"", b'{"seq":%d}' % s) for inbox, s in pairs))
                under_way.update(inboxes)
                position += len(asked)
            frame = next(answers)
            if frame.subject not in under_way:
                continue
            under_way.remove(frame.subject)
            message = _single(connection, stream, frame, direct)
            if message is None:
                continue
            found.append(message)
            size_bytes = len(frame.headers) + len(frame.payload)
            left_bytes -= size_bytes
            largest_bytes = max(largest_bytes, size_bytes)
            window = max(1, min(256, window + 1, max_bytes // largest_bytes))
        found.sort(key=lambda message: message.sequence)
        for at, message in enumerate(found):
            if direct and not f.has_whole_headers(message):
                found[at] = stored_message(connection, stream, message.sequence) or message
        if found:
            yield found


def _single(connection: Connection, stream: str, frame: Frame, direct: bool) -> Message | None:
    if frame.status == 404:
        return None
    if not direct and frame.status is None:
        return _stored(connection, stream, connection.decoded(frame.payload, f"stream {stream}"))
    found = f.direct_get_message(frame)
    if found is None:
        raise refused(connection, stream, frame)
    return found[0]
