"""Who sent a message: a JSON field of its payload, a header, or a token of its subject; and whether it forces a copy.

Three extractors with the same `extract`, each with the `key` that configures it, and `inspect`, which parses the payload
once for both results. Add another sender extractor here. No content of a message raises: what is not a sender is None. Not
here: the decision on a message without a sender (`tracking.untracked`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NoReturn

import orjson

from sr_assets.domain.heartbeats import is_heartbeat
from sr_assets.domain.messages import header_values
from sr_assets.domain.subjects import token

MAX_SENDER_BYTES: Final = 255
_SEPARATOR: Final = re.compile(r"(?<!\\)\.")


def refuse_constant(constant: str) -> NoReturn:
    """Raise ValueError for NaN and the infinities, which `json` takes; pass it as `parse_constant`."""
    raise ValueError(f"{constant} is not JSON")


# Decides what is JSON, and reads a number as its characters, unchanged. It takes text, so no encoding is guessed.
_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=refuse_constant)


@dataclass(frozen=True, slots=True)
class JsonField:
    """The sender is in this field of the payload; a path as for `parse_path`. Raises ValueError like it."""

    key: ClassVar[str] = "inspect_field"
    reads_payload: ClassVar[bool] = True
    text: str
    path: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Parse the path once."""
        object.__setattr__(self, "path", parse_path(self.text))

    def extract(self, subject: str, headers: bytes, payload: bytes) -> str | None:  # noqa: ARG002
        """Return the sender, or None."""
        return _sender_at(self.path, _parse_object(payload), payload)


@dataclass(frozen=True, slots=True)
class HeaderName:
    """The sender is the first value of this header; the header's name is case-sensitive."""

    key: ClassVar[str] = "inspect_header"
    reads_payload: ClassVar[bool] = False
    text: str

    def extract(self, subject: str, headers: bytes, payload: bytes) -> str | None:  # noqa: ARG002
        """Return the sender, or None; also for bytes that are not UTF-8."""
        values = header_values(headers, self.text.encode())
        try:
            return _accept(values[0].decode()) if values else None
        except UnicodeDecodeError:
            return None


@dataclass(frozen=True, slots=True)
class SubjectToken:
    """The sender is this token of the source subject, counted from 1; -1 is the whole subject."""

    key: ClassVar[str] = "inspect_subject_token"
    reads_payload: ClassVar[bool] = False
    number: int

    @property
    def text(self) -> str:
        """Return the number as an advisory's `inspect_field` shows it."""
        return str(self.number)

    def extract(self, subject: str, headers: bytes, payload: bytes) -> str | None:  # noqa: ARG002
        """Return the sender, or None."""
        return _accept(token(subject, self.number))


SenderExtractor = JsonField | HeaderName | SubjectToken


def parse_path(text: str) -> tuple[str, ...]:
    r"""Cut a path such as `a.b\.c.0` at its dots into `a`, `b.c`, `0`. Raises ValueError for an empty segment."""
    segments = tuple(segment.replace(r"\.", ".") for segment in _SEPARATOR.split(text))
    if not all(segments):
        raise ValueError(f"{text!r} has an empty segment")
    return segments


def needs_payload(extractor: SenderExtractor, force_path: tuple[str, ...] | None) -> bool:
    """Return whether `inspect` looks into payloads: for the sender, or for what forces a copy."""
    return extractor.reads_payload or force_path is not None


def inspect(
    extractor: SenderExtractor, force_path: tuple[str, ...] | None, subject: str, headers: bytes, payload: bytes
) -> tuple[str | None, bool]:
    """Return a message's sender and whether it forces a copy, parsing the payload at most once.

    Only JSON `true` at `force_path` forces one; presence, `"true"` or 1 are not enough. A heartbeat is forced and has no
    sender: nobody is tracked by it. Nothing else has both: what names no sender is copied anyway.
    """
    if is_heartbeat(headers):
        return None, True
    if force_path is None:
        return extractor.extract(subject, headers, payload), False
    document = _parse_object(payload)
    if isinstance(extractor, JsonField):
        sender = _sender_at(extractor.path, document, payload)
    else:
        sender = extractor.extract(subject, headers, payload)
    return sender, sender is not None and _lookup(force_path, document) is True


def _parse_object(payload: bytes) -> dict[str, Any] | None:
    """Parse strict JSON in UTF-8; None for anything but an object. The last of equal keys wins.

    What the fast parser refuses (half a surrogate pair, a number beyond a double) may still be JSON.
    """
    try:
        document = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return _parse_exactly(payload)
    return document if isinstance(document, dict) else None


def _parse_exactly(payload: bytes) -> dict[str, Any] | None:
    """Parse like `_parse_object`, slower; a number is returned as its text."""
    try:
        document = _DECODER.decode(payload.decode())
    except (ValueError, RecursionError):  # both the decoding and the JSON errors are ValueErrors
        return None
    return document if isinstance(document, dict) else None


def _lookup(path: tuple[str, ...], document: dict[str, Any] | None) -> object:
    """Follow a path through objects and, by number, arrays; None when it leads nowhere."""
    value: object = document
    for segment in path:
        if isinstance(value, dict):
            value = value.get(segment)
        elif isinstance(value, list) and segment.isascii() and segment.isdigit() and len(segment) < 10:
            index = int(segment)
            value = value[index] if index < len(value) else None
        else:
            return None
    return value


def _sender_at(path: tuple[str, ...], document: dict[str, Any] | None, payload: bytes) -> str | None:
    value = _lookup(path, document)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = _lookup(path, _parse_exactly(payload))
    return _accept(value) if isinstance(value, str) else None


def _accept(value: str | None) -> str | None:
    """Refuse what cannot be a sender: nothing, more than 255 bytes of UTF-8, lone surrogates."""
    try:
        return value if value and len(value.encode()) <= MAX_SENDER_BYTES else None
    except UnicodeEncodeError:
        return None
