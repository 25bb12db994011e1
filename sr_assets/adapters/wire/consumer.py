"""A range read through a pull consumer that lives as long as the reading: for every stream, and for headers alone."""

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any, Final

from sr_assets.adapters.wire import frames as f
from sr_assets.adapters.wire.answers import refused, succeeded
from sr_assets.adapters.wire.connection import Connection, WireError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange

CONSUMER_INACTIVE_NS: Final = 300 * 1_000_000_000


def read_consumer(
    connection: Connection,
    stream: str,
    wanted: SequenceRange,
    filter_subject: str | None,
    batch_messages: int,
    max_bytes: int,
    *,
    headers_only: bool = False,
) -> Iterator[list[Message]]:
    """Make an ephemeral consumer, pull the range from it, possibly with messages behind it, and delete it."""
    if not len(wanted):
        return
    name = f"sr_{secrets.token_hex(8)}"
    config: dict[str, Any] = {
        "name": name,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": max(wanted.first, 1),
        "ack_policy": "none",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": CONSUMER_INACTIVE_NS,
    }
    if filter_subject:
        config["filter_subject"] = filter_subject
    if headers_only:
        config["headers_only"] = True
    create = f"$JS.API.CONSUMER.CREATE.{stream}.{name}" + (f".{filter_subject}" if filter_subject else "")
    succeeded(connection, stream, connection.request(create, {"stream_name": stream, "config": config}))
    try:
        yield from _pull(connection, stream, name, wanted, batch_messages, max_bytes, headers_only)
    finally:
        # What is left when this fails is removed by the server once it is inactive.
        with contextlib.suppress(WireError):
            connection.request(f"$JS.API.CONSUMER.DELETE.{stream}.{name}", {})


def _pull(
    connection: Connection,
    stream: str,
    name: str,
    wanted: SequenceRange,
    batch_messages: int,
    max_bytes: int,
    headers_only: bool,
) -> Iterator[list[Message]]:
    """Pull batch after batch until the range is passed or nothing follows; a lost delivery raises WireError."""
    cursor, delivered, limit_bytes, batch = max(wanted.first, 1), 0, max_bytes, batch_messages
    while cursor < wanted.next:
        request: dict[str, Any] = {"batch": min(batch, wanted.next - cursor), "no_wait": True}
        if limit_bytes:
            request["max_bytes"] = limit_bytes
        messages, pending, status = _pulled(connection, stream, name, request, delivered)
        delivered += len(messages)
        if headers_only:
            messages = [
                Message(m.sequence, m.stored_ns, m.subject, f.without_message_size(m.headers), m.payload)
                for m in messages
            ]
        if messages:
            cursor = messages[-1].sequence + 1
            yield messages
        if pending == 0 or status == 404:
            return
        # A message larger than the limit alone is taken by a request without one.
        alone = not messages and status == 409
        limit_bytes, batch = (0, 1) if alone else (max_bytes, batch_messages)


def _pulled(
    connection: Connection, stream: str, name: str, request: dict[str, Any], delivered: int
) -> tuple[list[Message], int | None, int | None]:
    """One pull: its messages, how many follow as far as known, and the status that ended it."""
    inbox = connection.new_inbox()
    consumer = b".%b." % name.encode()
    connection.send(f.encode_pub(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", inbox, b"", f.encode_json(request)))
    messages: list[Message] = []
    pending: int | None = None
    for frame in connection.answers(f"a pull from {stream}"):
        if frame.subject == inbox and not frame.reply:
            too_large = frame.status == 409 and "MaxBytes" in frame.status_text
            if frame.status not in (404, 408) and not too_large:
                raise refused(connection, stream, frame)
            return messages, pending, frame.status
        if consumer not in frame.reply:
            continue
        try:
            message, number, pending = f.delivered_message(frame)
        except ValueError as error:
            raise WireError(f"{connection.address}: {error}") from None
        messages.append(message)
        if number != delivered + len(messages):
            raise WireError(f"{connection.address}: stream {stream}: delivery {delivered + len(messages)} was lost")
        if len(messages) == request["batch"]:
            break
    return messages, pending, None
