"""The subjects under which a stream stores its messages, as patterns, from its configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from sr_assets.domain.subjects import covers, overlaps

if TYPE_CHECKING:
    #: The stored patterns of the stream that a source or mirror reads, or None if they are unknown.
    Upstream = Callable[[Mapping[str, Any]], tuple[str, ...] | None]

#: A function of a transform's destination, such as `{{wildcard(1)}}`, or its short form `$1`.
_FUNCTION: Final = re.compile(r"\{\{.*?\}\}|\$\d+")
#: These functions make several tokens of one.
_SPLITTING: Final = re.compile(r"\{\{\s*(split|slice)", re.IGNORECASE)


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
