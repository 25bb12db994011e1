"""The sender of a message: a JSON field of its payload, a header, or a token of its subject; and the force flag.

`inspect` parses the payload once for both. Invalid content never raises: its sender is None.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NoReturn, Protocol

import orjson

from sr_assets.domain.hops import is_heartbeat
from sr_assets.domain.messages import header_values
from sr_assets.domain.subjects import token

MAX_SENDER_BYTES: Final = 255
_SEPARATOR: Final = re.compile(r"(?<!\\)\.")
_ESCAPED: Final = re.compile(r"\\([.#*?|@!{\[])")
#: The parts of a gjson path that select several values or compute one, as unescaped text of a segment.
_GJSON: Final = (
    (re.compile(r"#"), "array query"),
    (re.compile(r"[*?]"), "wildcard"),
    (re.compile(r"\|"), "pipe"),
    (re.compile(r"^@"), "modifier"),
    (re.compile(r"^!"), "literal"),
    (re.compile(r"^[{\[]"), "multipath"),
)


def refuse_constant(constant: str) -> NoReturn:
    """Raise ValueError for NaN and infinities, which `json` accepts; used as `parse_constant`."""
    raise ValueError(f"{constant} is not JSON")


# Validates JSON and keeps a number's characters unchanged. It takes text, so no encoding is guessed.
_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=refuse_constant)


@dataclass(frozen=True, slots=True)
class JsonField:
    """The sender is in this field of the payload, a path as in `parse_path`. Raises ValueError."""

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
        """Return the sender, or None; None also for invalid UTF-8."""
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
        """Return the number as shown in an advisory's `inspect_field`."""
        return str(self.number)

    def extract(self, subject: str, headers: bytes, payload: bytes) -> str | None:  # noqa: ARG002
        """Return the sender, or None."""
        return _accept(token(subject, self.number))


SenderExtractor = JsonField | HeaderName | SubjectToken


def parse_path(text: str) -> tuple[str, ...]:
    r"""Split a path such as `a.b\.c.0` at its dots into `a`, `b.c`, `0`; a backslash makes a special character literal.

    Raises ValueError for an empty segment and for gjson's queries, wildcards, pipes, modifiers, literals and multipaths.
    """
    segments = _SEPARATOR.split(text)
    if not all(segments):
        raise ValueError(f"{text!r} has an empty segment")
    for segment in segments:
        plain = _ESCAPED.sub("x", segment)
        for pattern, kind in _GJSON:
            if special := pattern.search(plain):
                raise ValueError(f"{text!r} has the gjson {kind} {special[0]!r}")
    return tuple(_ESCAPED.sub(r"\1", segment) for segment in segments)


class Document:
    """The payload of a message, parsed at most once, and only if a field is read."""

    __slots__ = ("_parsed", "_payload", "_value")

    def __init__(self, payload: bytes) -> None:
        self._payload, self._parsed = payload, False
        self._value: dict[str, Any] | None = None

    @property
    def value(self) -> dict[str, Any] | None:
        """The object of the payload, or None if the payload is not one."""
        if not self._parsed:
            self._value, self._parsed = _parse_object(self._payload), True
        return self._value

    def text_at(self, path: tuple[str, ...]) -> str | None:
        """Return the text, number, `true` or `false` at a path as text, or None."""
        value = _lookup(path, self.value)
        return str(value).lower() if isinstance(value, bool) else _sender_at(path, self.value, self._payload)


class MessageClassifier(Protocol):
    """The rules of a stream's classes."""

    @property
    def reads_payload(self) -> bool:
        """Whether a rule reads payloads."""

    def classify(self, node: str, headers: bytes, document: Document) -> str | None:
        """Return the class of a message, or None."""


def needs_payload(
    extractor: SenderExtractor, force_path: tuple[str, ...] | None, classifier: MessageClassifier | None = None
) -> bool:
    """Return whether `inspect` reads payloads: for the sender, the force flag, or the class."""
    return extractor.reads_payload or force_path is not None or (classifier is not None and classifier.reads_payload)


def inspect_class(
    extractor: SenderExtractor,
    force_path: tuple[str, ...] | None,
    classifier: MessageClassifier,
    subject: str,
    headers: bytes,
    payload: bytes,
) -> tuple[str | None, bool, str | None]:
    """Return a message's sender, force flag and class, as `inspect`; a message without a sender has no class."""
    if is_heartbeat(subject, headers):
        return None, True, None
    document = Document(payload)
    if isinstance(extractor, JsonField):
        sender = _sender_at(extractor.path, document.value, payload)
    else:
        sender = extractor.extract(subject, headers, payload)
    if sender is None:
        return None, False, None
    forced = force_path is not None and _lookup(force_path, document.value) is True
    return sender, forced, classifier.classify(sender, headers, document)


def inspect(
    extractor: SenderExtractor, force_path: tuple[str, ...] | None, subject: str, headers: bytes, payload: bytes
) -> tuple[str | None, bool]:
    """Return a message's sender and force flag, parsing the payload at most once.

    Only JSON `true` at `force_path` forces a copy; presence, `"true"` or 1 do not. A heartbeat is forced and has no
    sender, so it tracks no node. Otherwise the flag needs a sender, because messages without one are copied anyway.
    """
    if is_heartbeat(subject, headers):
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
    """Parse strict JSON in UTF-8; None for anything except an object. The last of equal keys wins.

    The fast parser refuses some valid JSON: unpaired surrogates, numbers beyond a double.
    """
    try:
        document = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return _parse_exactly(payload)
    return document if isinstance(document, dict) else None


def _parse_exactly(payload: bytes) -> dict[str, Any] | None:
    """Parse like `_parse_object`, but slower; numbers are returned as text."""
    try:
        document = _DECODER.decode(payload.decode())
    except (ValueError, RecursionError):  # the decoding and the JSON errors are ValueErrors
        return None
    return document if isinstance(document, dict) else None


def _lookup(path: tuple[str, ...], document: dict[str, Any] | None) -> object:
    """Follow a path through objects and, by number, arrays; None if it does not exist."""
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
    """Refuse invalid senders: empty text, more than 255 bytes of UTF-8, unpaired surrogates."""
    try:
        return value if value and len(value.encode()) <= MAX_SENDER_BYTES else None
    except UnicodeEncodeError:
        return None
