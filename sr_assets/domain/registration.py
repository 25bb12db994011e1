"""Choria's registration messages: the adapter's JSON, the registration inside, the inventory or file inside that.

Here: reading one as far as it can be read, and writing one for an emulated fleet. A payload that is anything else is
not an error, it only has no metadata. Not here: who sent a message (`senders`), where metadata is kept
(`adapters.snapshots`).
"""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

MAX_INFLATED_BYTES: Final = 16 * 1024 * 1024
ADAPTER_PROTOCOLS: Final = frozenset(
    {
        "choria:adapters:choria_streams:output:1",
        "choria:adapters:jetstream:output:1",
        "choria:adapters:natsstream:output:1",
    }
)
INVENTORY_PROTOCOL: Final = "choria:registration:inventorycontent:1"
FILE_PROTOCOL: Final = "choria:registration:filecontent:1"
_GZIP_OR_ZLIB: Final = zlib.MAX_WBITS | 32


@dataclass(frozen=True, slots=True)
class Registration:
    """What an adapter passed on: who sent what kind of registration, and its content as JSON text.

    `metadata` is None when the content cannot be read, is too large, or is no JSON where it must be. The content of a
    file that is text but not JSON comes as a JSON string.
    """

    sender: str
    time: str
    request_id: str
    protocol: str
    metadata: str | None


def decode_registration(payload: bytes) -> Registration | None:
    """Read an adapter's message; None when it is not one or holds no registration."""
    return _registration(_object(payload))


def decode_payload(payload: bytes) -> tuple[str | None, str | None]:
    """Return a payload as JSON text, and the inventory or file content inside a registration message as JSON text.

    None for what is not there; the payload is parsed once for both.
    """
    try:
        value = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None, None
    registration = _registration(value)
    return payload.decode(), registration.metadata if registration else None


def _registration(outer: object) -> Registration | None:
    if not isinstance(outer, dict) or _text(outer.get("protocol")) not in ADAPTER_PROTOCOLS:
        return None
    data = _text(outer.get("data"))
    inner = _object(data)
    if inner is None or inner.get("protocol") not in (INVENTORY_PROTOCOL, FILE_PROTOCOL):
        return None
    return Registration(
        _text(outer.get("sender")),
        _text(outer.get("time")),
        _text(outer.get("requestid")),
        inner["protocol"],
        _metadata(inner, data),
    )


def inflate(packed: bytes, limit_bytes: int = MAX_INFLATED_BYTES) -> bytes | None:
    """Unpack gzip (of any number of members) or zlib; None when it is neither, incomplete, or larger than the limit.

    Never holds more than the limit and one byte, however small the bomb.
    """
    unpacked = b""
    while packed:
        stream = zlib.decompressobj(_GZIP_OR_ZLIB)
        try:
            unpacked += stream.decompress(packed, limit_bytes + 1 - len(unpacked))
        except zlib.error:
            return None
        if len(unpacked) > limit_bytes or not stream.eof:
            return None
        packed = stream.unused_data
    return unpacked


def encode_registration(sender: str, inventory: Mapping[str, Any], time_text: str, request_id: str) -> bytes:
    """Return a message as the adapter publishes it, the inventory packed inside; the same arguments, the same bytes."""
    packed = base64.b64encode(gzip.compress(_dump(inventory).encode(), mtime=0)).decode()
    message = {
        "protocol": "choria:adapters:choria_streams:output:1",
        "data": _dump({"protocol": INVENTORY_PROTOCOL, "zcontent": packed}),
        "sender": sender,
        "time": time_text,
        "requestid": request_id,
    }
    return _dump(message).encode()


def _metadata(inner: dict[str, Any], data: str) -> str | None:
    packed, content = inner.get("zcontent"), inner.get("content")
    if isinstance(packed, str) and packed:
        text = _unpack(packed)
    elif isinstance(content, str):
        text = content
    elif content is not None:
        return _inline(data)
    else:
        return None
    if text is None or is_json(text):
        return text
    return _dump(text) if inner["protocol"] == FILE_PROTOCOL else None


def _inline(data: str) -> str | None:
    """Return content that stands there as it is; large numbers as they are, so it is not what was read that is written."""
    try:
        return _dump(json.loads(data)["content"])
    except RecursionError:
        return None


def _unpack(packed: str) -> str | None:
    try:
        unpacked = inflate(base64.b64decode(packed, validate=True))
        return None if unpacked is None else unpacked.decode()
    except ValueError:  # not base64, or not UTF-8
        return None


def _object(document: bytes | str) -> dict[str, Any] | None:
    try:
        value = orjson.loads(document)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def is_json(text: str) -> bool:
    """Tell whether every reader takes this text for JSON.

    No NaN, no infinity nor what a reader would make one, no escaped half of a surrogate pair, no more than 1,024 levels.
    """
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
