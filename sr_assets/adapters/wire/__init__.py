"""Bulk traffic with a NATS server over one synchronous connection: reading, and publishing with acknowledgements.

Headers and payloads stay bytes from end to end. Administration is in `nats`.
"""

from sr_assets.adapters.wire.connection import Connection, DeniedError, WireError
from sr_assets.adapters.wire.granted import PermissionProbe, find_denied
from sr_assets.adapters.wire.publishing import (
    Ack,
    BatchEnd,
    BatchPublisher,
    Items,
    Outgoing,
    Outgoings,
    Publisher,
    Stored,
    parse_ack,
)
from sr_assets.adapters.wire.reading import (
    BATCH_BYTES,
    BATCH_MESSAGES,
    next_message,
    read_confirmed,
    read_headers,
    read_range,
    read_sequences,
    stored_headers,
    stored_large,
    stored_message,
)

__all__ = [
    "BATCH_BYTES",
    "BATCH_MESSAGES",
    "Ack",
    "BatchEnd",
    "BatchPublisher",
    "Connection",
    "DeniedError",
    "Items",
    "Outgoing",
    "Outgoings",
    "PermissionProbe",
    "Publisher",
    "Stored",
    "WireError",
    "find_denied",
    "next_message",
    "parse_ack",
    "read_confirmed",
    "read_headers",
    "read_range",
    "read_sequences",
    "stored_headers",
    "stored_large",
    "stored_message",
]
