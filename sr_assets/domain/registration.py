"""Choria's registration messages: the adapter's JSON, the registration inside, and its inventory or file.

Other payloads are valid; they have no metadata.
"""

import contextlib
import json
from typing import Any, Final, NamedTuple

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

#: The largest metadata of a message, unless the configuration says otherwise.
METADATA_BYTES: Final = 1 << 20
#: Metadata that is this many times as large as its message comes from no inventory.
_MOST_EXPANSION: Final = 200
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


class Decoded(NamedTuple):
    """A payload as JSON text, and the inventory or file of a registration message as JSON text.

    `payload` is None if it is not JSON that every reader accepts. `metadata` is None if it is missing, unreadable or too
    large; `refused` tells that a registration has content without metadata.
    """

    payload: str | None
    metadata: str | None = None
    refused: bool = False


def decode_payload(payload: bytes, most_bytes: int = METADATA_BYTES) -> Decoded:
    """Decode a payload, which is parsed once. A text file that is not JSON becomes a JSON string.

    Metadata has at most `most_bytes` of UTF-8, and at most 200 times the bytes of the payload.
    """
    try:
        value = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return Decoded(None)
    text, data = payload.decode(), _registration(value)
    inner = _object(data)
    if inner is None or inner.get("protocol") not in (INVENTORY_PROTOCOL, FILE_PROTOCOL):
        return Decoded(text)
    packed, content = inner.get("zcontent"), inner.get("content")
    if packed in (None, "") and content is None:
        return Decoded(text)
    most_bytes = min(most_bytes, _MOST_EXPANSION * len(payload))
    metadata = _metadata(inner, data, most_bytes)
    # Dumping adds escapes.
    if metadata is not None and len(metadata.encode()) > most_bytes:
        metadata = None
    return Decoded(text, metadata, refused=metadata is None)


def _registration(outer: object) -> str:
    if not isinstance(outer, dict) or _text(outer.get("protocol")) not in ADAPTER_PROTOCOLS:
        return ""
    return _text(outer.get("data"))


def inflate(packed: bytes, most_bytes: int) -> bytes | None:
    """Unpack one gzip member or zlib stream; None if it is neither, incomplete, followed by bytes, or too large.

    Even for a decompression bomb, memory holds at most the limit and one byte.
    """
    stream = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        unpacked: bytes = stream.decompress(packed, most_bytes + 1)
    except zlib.error:  # type: ignore[misc]
        return None
    return unpacked if stream.eof and not stream.unused_data and len(unpacked) <= most_bytes else None


def _metadata(inner: dict[str, Any], data: str, most_bytes: int) -> str | None:
    packed, content = inner.get("zcontent"), inner.get("content")
    if isinstance(packed, str) and packed:
        text = _unpack(packed, most_bytes)
    elif isinstance(content, str):
        text = content
    else:
        return None if content is None else _inline(data)
    if text is None or is_json(text):
        return text
    return _dump(text) if inner["protocol"] == FILE_PROTOCOL else None


def _inline(data: str) -> str | None:
    """Return unpacked content as its original text, because re-encoding parsed values would change numbers."""
    try:
        return _dump(json.loads(data)["content"])
    except RecursionError:
        return None


def _unpack(packed: str, most_bytes: int) -> str | None:
    try:
        unpacked = inflate(base64.b64decode(packed, validate=True), most_bytes)
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
