"""Subjects: tokens, wildcards, the subjects of copies and advisories, and the subjects that a stream stores. String rules."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message

if TYPE_CHECKING:
    Upstream = Callable[[Mapping[str, Any]], tuple[str, ...] | None]

_TEMPLATE_FIELD: Final = re.compile("%[sv]")
_UNSAFE: Final = re.compile(rb"[^A-Za-z0-9_-]")
# Characters that the server refuses in a token, or that would end a protocol line.
_FORBIDDEN: Final = re.compile(r"[\x00-\x20\x7f]")
#: A function of a transform's destination, such as `{{wildcard(1)}}`, or its short form `$1`.
_FUNCTION: Final = re.compile(r"\{\{.*?\}\}|\$\d+")
#: These functions make several tokens of one.
_SPLITTING: Final = re.compile(r"\{\{\s*(split|slice)", re.IGNORECASE)


def token(subject: str, number: int) -> str | None:
    """Return the n-th token, counted from 1; -1 is the whole subject; None if there is none."""
    if number == -1:
        return subject
    tokens = subject.split(".")
    return tokens[number - 1] if 1 <= number <= len(tokens) else None


def is_valid_filter(pattern: str) -> bool:
    """Return whether a server accepts a subject with wildcards: no empty token, no blank, `>` only at the end."""
    tokens = pattern.split(".")
    return all(tokens) and ">" not in tokens[:-1] and not _FORBIDDEN.search(pattern)


def matcher(patterns: Iterable[str]) -> Callable[[str], object]:
    """Return a fast function that matches a literal subject against the patterns.

    `*` matches one token, a final `>` one or more.
    """
    tokens = {"*": "[^.]*", ">": ".*"}
    either = (r"\.".join(tokens.get(part) or re.escape(part) for part in pattern.split(".")) for pattern in patterns)
    return re.compile("|".join(either) or "(?!)", re.DOTALL).fullmatch


def covers(pattern: str, subset: str) -> bool:
    """Return whether every subject that matches the pattern `subset` also matches `pattern`."""
    wide, narrow = pattern.split("."), subset.split(".")
    for index, wanted in enumerate(wide):
        if wanted == ">":
            return len(narrow) > index
        if index >= len(narrow) or narrow[index] == ">":
            return False
        if wanted not in ("*", narrow[index]):
            return False
    return len(wide) == len(narrow)


def overlaps(left: str, right: str) -> bool:
    """Return whether some subject matches both patterns."""
    tokens, others = left.split("."), right.split(".")
    for a, b in zip(tokens, others, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(tokens) == len(others)


def target_subject(subject: str, prefix: str = "", remove: str = "") -> str:
    """Return the subject of a copy: `prefix.` is prepended, every `remove` removed, runs of dots merged.

    Patterns work too, for the subjects of a target stream.
    """
    if prefix:
        subject = f"{prefix}.{subject}"
    if remove:
        subject = subject.replace(remove, "")
    while ".." in subject:
        subject = subject.replace("..", ".")
    return subject


def source_subject(subject: str, prefix: str = "") -> str:
    """Return the subject of a copy's original as far as possible: removed parts are unknown."""
    return subject.removeprefix(f"{prefix}.") if prefix else subject


def printable(subject: str) -> str:
    """Return a subject as text for tables: invalid UTF-8 (lone surrogates) becomes `�`."""
    return subject.encode(errors="surrogateescape").decode(errors="replace")


def advisory_subject(template: str, event: str, sender: str) -> str:
    """Fill `%s` with the event and `%v` with the sender, encoded so that a name cannot inject protocol.

    In each dot-separated token, characters outside `A-Za-z0-9_-` are percent-encoded (UTF-8, upper-case hex); an empty
    token becomes `%`.
    """
    values = {"%s": _encode(event), "%v": _encode(sender)}
    return _TEMPLATE_FIELD.sub(lambda field: values[field[0]], template)


def advisory_pattern(template: str) -> str:
    """Return a pattern that matches every subject of a template."""
    tokens = ["*" if "%" in token else token for token in template.split(".")]
    return ".".join([*tokens[:-1], ">"] if "%v" in template.rpartition(".")[2] else tokens)


def observer_subject(template: str | None, replicator: str, name: str, stream: str) -> str:
    """Return the subject of a site's heartbeat: `%s` is `observer_alive`, `%v` the entry's name.

    The default has its own root, so that no subscription to advisories receives it:
    `sr_assets.observer_alive.<replicator>.<name>.<stream>`, encoded like an advisory's.
    """
    if template is not None:
        return advisory_subject(template, "observer_alive", name)
    return ".".join(("sr_assets.observer_alive", _encode(replicator), _encode(name), _encode(stream)))


def rule_subject(kind: str, event: str, replicator: str, name: str, stream: str) -> str:
    """Return the subject of a site's event (`kind` is `site`), or of an event of one of its nodes (`node`)."""
    return ".".join((f"sr_assets.{kind}", event, _encode(replicator), _encode(name), _encode(stream)))


def object_subject(bucket: str, name: str) -> str:
    """Return the subject of the messages that let a name stand for an object of an object store."""
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def _encode(value: str) -> str:
    return ".".join(
        _UNSAFE.sub(lambda byte: b"%" + byte[0].hex().upper().encode(), part.encode()).decode() or "%"
        for part in value.split(".")
    )


def stored_patterns(config: Mapping[str, Any], upstream: Upstream) -> tuple[str, ...] | None:
    """Return patterns that cover every stored subject, or None if an origin's subjects are unknown.

    The server first applies the transforms of a source or mirror, then the stream's own `subject_transform`.
    """
    patterns = list(config.get("subjects") or ())
    origins = [*(config.get("sources") or ()), *filter(None, [config.get("mirror")])]
    for origin in origins:
        received = _received(origin, upstream)
        if received is None:
            return None
        patterns += received
    own = config.get("subject_transform")
    if own:
        patterns = [stored for pattern in patterns for stored in _transformed(pattern, own)]
    return tuple(dict.fromkeys(patterns))


def _received(origin: Mapping[str, Any], upstream: Upstream) -> list[str] | None:
    """Return the patterns of the messages that a source or mirror delivers."""
    transforms = origin.get("subject_transforms")
    if transforms:
        # They also filter: only messages that match a transform are read.
        return [_destination(each["src"], each.get("dest") or each["src"]) for each in transforms]
    if filtered := origin.get("filter_subject"):
        return [filtered]
    patterns = upstream(origin)
    return None if patterns is None else list(patterns)


def _transformed(pattern: str, transform: Mapping[str, Any]) -> list[str]:
    """Return the patterns that a transform makes of a pattern; it leaves other subjects unchanged."""
    source = transform.get("src") or ">"
    if not overlaps(pattern, source):
        return [pattern]
    destination = _destination(source, transform["dest"])
    return [destination] if covers(source, pattern) else [pattern, destination]


def _destination(source: str, destination: str) -> str:
    """Return a transform's destination as a pattern."""
    if source == destination:
        return destination
    text = _FUNCTION.sub(lambda function: ">" if _SPLITTING.match(function[0]) else "*", destination)
    tokens: list[str] = []
    for part in text.split("."):
        tokens.append(part if part == ">" or "*" not in part else "*")
        if part == ">":
            break
    return ".".join(tokens)


def lane_check(stream: str, lanes: Sequence[str]) -> Callable[[Iterable[Message]], None]:
    """Return a function that raises RunError if no lane takes one of a source's messages; without lanes it does nothing."""
    takes = matcher(lanes)

    def check(messages: Iterable[Message]) -> None:
        for message in messages:
            if not takes(message.subject):
                raise omitted_error(stream, message)

    return check if lanes else lambda _: None


def lane_finder(lanes: Sequence[str]) -> Callable[[str], int | None]:
    """Return a function that returns the number of the lane of a subject, or None."""
    takers = [matcher([lane]) for lane in lanes]
    return lambda subject: next((number for number, takes in enumerate(takers) if takes(subject)), None)


def omitted_error(stream: str, message: Message) -> RunError:
    """Return the error about a message that no lane takes."""
    return RunError(
        f"source stream {stream} holds message {message.sequence} with subject {printable(message.subject)}, which no"
        " partition takes; add the subject to partitions"
    )
