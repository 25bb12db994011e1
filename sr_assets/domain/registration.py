"""Choria's registration messages: the adapter's JSON, the registration inside, and its inventory or file.

Other payloads are valid; they have no metadata.
"""

import contextlib
import json
from typing import Any, Final

import orjson

# An executor of a cluster may lack the faster modules: the slower ones return the same.
try:
    import pybase64 as base64
    import simdjson
    from isal import isal_zlib as zlib
except ImportError:
    import base64  # type: ignore[no-redef]
    import zlib  # type: ignore[no-redef]

    simdjson = None  # type: ignore[assignment]

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


def decode_payload(payload: bytes) -> tuple[str | None, str | None]:
    """Return a payload as JSON text, and the inventory or file of a registration message as JSON text.

    Each is None if it is not JSON, missing, unreadable or too large. A text file that is not JSON becomes a JSON
    string. The payload is parsed once.
    """
    try:
        value = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None, None
    return payload.decode(), _content(value)


def _content(outer: object) -> str | None:
    if not isinstance(outer, dict) or _text(outer.get("protocol")) not in ADAPTER_PROTOCOLS:
        return None
    data = _text(outer.get("data"))
    inner = _object(data)
    if inner is None or inner.get("protocol") not in (INVENTORY_PROTOCOL, FILE_PROTOCOL):
        return None
    return _metadata(inner, data)


def inflate(packed: bytes, limit_bytes: int = MAX_INFLATED_BYTES) -> bytes | None:
    """Unpack gzip (any number of members) or zlib; None if it is neither, incomplete, or larger than the limit.

    Even for a decompression bomb, memory holds at most the limit and one byte.
    """
    unpacked = b""
    while packed:
        stream = zlib.decompressobj(_GZIP_OR_ZLIB)
        try:
            unpacked += stream.decompress(packed, limit_bytes + 1 - len(unpacked))
        except zlib.error:  # type: ignore[misc]
            return None
        if len(unpacked) > limit_bytes or not stream.eof:
            return None
        packed = stream.unused_data
    return unpacked


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
    return _quote(text) if inner["protocol"] == FILE_PROTOCOL else None


def _quote(text: str) -> str | None:
    """Return text as a JSON string, which has six times as many letters for control characters; None if it is too large."""
    quoted = _dump(text)
    return quoted if len(quoted) <= MAX_INFLATED_BYTES else None


def _inline(data: str) -> str | None:
    """Return unpacked content as its original text, because re-encoding parsed values would change numbers."""
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


def _object(document: str) -> dict[str, Any] | None:
    try:
        value = orjson.loads(document)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def is_json(text: str) -> bool:
    """Return whether every JSON reader accepts this text.

    NaN, infinities, numbers that overflow to infinity, unpaired surrogates, a byte order mark and more than 1,024 levels are
    refused.
    """
    if simdjson is not None and not text.startswith("\ufeff"):
        # It also refuses integers of more than 64 bits, which `orjson` then accepts.
        with contextlib.suppress(ValueError, RuntimeError):
            simdjson.Parser().parse(text)
            return True
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
