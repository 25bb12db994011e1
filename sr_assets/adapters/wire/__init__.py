"""Bulk traffic with a NATS server over our own socket: read ranges and single messages, publish with acknowledgements.

Synchronous, one connection for one task, headers and payloads as bytes from end to end. `frames` has the protocol's
bytes, `link` the socket, `connection` login and requests, `reading` (by `direct`, `consumer`, `single`) and `publishing`
what is asked of a stream. What is read, sent again or given up is decided by the callers; administration is in `nats`.
"""

from sr_assets.adapters.wire.connection import Connection
from sr_assets.adapters.wire.link import DeniedError, WireError
from sr_assets.adapters.wire.publishing import (
    HEADERS_TOO_LARGE,
    INVALID_SUBJECT,
    MESSAGE_TOO_LARGE,
    NO_STREAM,
    Ack,
    Outgoing,
    Publisher,
    parse_ack,
)
from sr_assets.adapters.wire.reading import (
    BATCH_BYTES,
    BATCH_MESSAGES,
    read_confirmed,
    read_headers,
    read_range,
    read_sequences,
)
from sr_assets.adapters.wire.single import next_message, stored_message

__all__ = [
    "BATCH_BYTES",
    "BATCH_MESSAGES",
    "HEADERS_TOO_LARGE",
    "INVALID_SUBJECT",
    "MESSAGE_TOO_LARGE",
    "NO_STREAM",
    "Ack",
    "Connection",
    "DeniedError",
    "Outgoing",
    "Publisher",
    "WireError",
    "next_message",
    "parse_ack",
    "read_confirmed",
    "read_headers",
    "read_range",
    "read_sequences",
    "stored_message",
]
