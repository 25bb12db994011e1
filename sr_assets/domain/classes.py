"""The class of a message: the first rule that its node, a field of its payload or one of its headers meets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import translate

from sr_assets.domain.messages import header_values
from sr_assets.domain.senders import Document

#: Replacements of `*` in a pattern, to compare it with another one.
_ANYTHING = ("", "\0", "\0\1\2")
#: So many nodes' matches are remembered.
_MOST_NODES = 1 << 18


@dataclass(frozen=True, slots=True)
class ClassRule:
    """The messages of a class: those of nodes that meet one of the glob `patterns`, or those with a value.

    The value is in the payload's field at `path`, or is the first one of the header `header`.
    """

    name: str
    patterns: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    header: str = ""
    value: str = ""
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compile the patterns once."""
        object.__setattr__(self, "_pattern", re.compile("|".join(map(translate, self.patterns))))

    def matches(self, node: str) -> bool:
        """Return whether a rule with patterns matches a node."""
        return bool(self.patterns) and self._pattern.match(node) is not None

    def covers(self, other: ClassRule) -> bool:
        """Return whether this rule matches every message that another one matches."""
        if not self.patterns:
            return (self.path, self.header, self.value) == (other.path, other.header, other.value)
        samples = [pattern.replace("*", text).replace("?", "\0") for pattern in other.patterns for text in _ANYTHING]
        return all(map(self.matches, samples or _ANYTHING))


@dataclass(frozen=True, slots=True)
class Classifier:
    """The rules of a stream, in the order in which they are tried."""

    rules: tuple[ClassRule, ...]
    _by_node: dict[str, tuple[bool, ...]] = field(init=False, repr=False, compare=False, default_factory=dict)

    @property
    def reads_payload(self) -> bool:
        """Whether a rule reads payloads."""
        return any(bool(rule.path) for rule in self.rules)

    def classify(self, node: str, headers: bytes, document: Document) -> str | None:
        """Return the class of a message, or None."""
        if (matched := self._by_node.get(node)) is None:
            # Publishers choose the names. All at once, because several threads share a classifier.
            if len(self._by_node) >= _MOST_NODES:
                self._by_node.clear()
            matched = self._by_node[node] = tuple(rule.matches(node) for rule in self.rules)
        for rule, matches in zip(self.rules, matched, strict=True):
            if matches or (not rule.patterns and self._value(rule, headers, document) == rule.value):
                return rule.name
        return None

    def reclassify(self, node: str, before: str | None) -> str | None:
        """Return the class of a node after a change of the rules, if its newest message had the class `before`.

        Patterns decide; the value of a field or header is as known as its class.
        """
        return next((rule.name for rule in self.rules if rule.matches(node) or self._keeps(rule, before)), None)

    @staticmethod
    def _keeps(rule: ClassRule, before: str | None) -> bool:
        return not rule.patterns and rule.name == before

    @staticmethod
    def _value(rule: ClassRule, headers: bytes, document: Document) -> str | None:
        if rule.path:
            return document.text_at(rule.path)
        values = header_values(headers, rule.header.encode())
        return values[0].decode(errors="replace") if values else None


def count_text(rules: Iterable[ClassRule], classes: Sequence[str | None]) -> str:
    """Return the number of nodes of each class as text; a class without nodes counts 0."""
    counts = Counter(classes)
    parts = [f"{rule.name} {counts[rule.name]}" for rule in rules]
    return f"{', '.join(parts)}, no class {counts[None]}; of the {len(classes)} newest nodes"
