"""The blocks `classes`: kinds of nodes with their own durations and announcements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Self

from pydantic import AfterValidator, model_validator

from sr_assets.domain.classes import Classifier, ClassRule
from sr_assets.domain.positions import SECOND_NS
from sr_assets.domain.tracking.class_policies import ClassPolicies
from sr_assets.domain.tracking.rules import Policy
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.names import FieldPath, SenderHeader
from sr_assets.settings.values import Duration, Flag, Text, Texts, Value, read_text, shown


def _value(value: object) -> str:
    """Read the text, whole number, `true` or `false` that a field or header has."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) else read_text(value)


class ClassBlock(Block):
    """One of `classes`: the nodes of a class, and the rules for them."""

    name: Text = file_key("the class, as the tables show it")
    match: Texts = file_key("globs of nodes", [], default_text="none")
    path: FieldPath | None = file_key("a JSON field that has the `value`", None, name="field")
    header: SenderHeader | None = file_key("a header whose first value is the `value`", None)
    value: Annotated[str, Value(_value, type="text, whole number, `true`, `false`")] | None = file_key(
        "the value of the field or header", None
    )
    warn_duration_ns: Duration | None = file_key(
        "as the stream's",
        None,
        name="warn_duration",
        default_text="half of the class's `inspect_duration`, else the stream's",
    )
    inspect_duration_ns: Duration | None = file_key(
        "as the stream's", None, name="inspect_duration", default_text="the stream's"
    )
    retired_retention_ns: Duration | None = file_key(
        "as the stream's", None, name="retired_retention", default_text="the stream's"
    )
    announce: Flag = file_key("whether transitions of the class are announced", True)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        forms = [form for form in (self.match, self.path, self.header) if form]
        if len(forms) != 1 or (self.value is None) != bool(self.match):
            raise ValueError(
                f"class {shown(self.name)} needs match, or field and value, or header and value; set exactly one of them"
            )
        return self

    @property
    def rule(self) -> ClassRule:
        """The messages of the class."""
        header = self.header.text if self.header else ""
        return ClassRule(self.name, self.match, self.path or (), header, self.value or "")

    @property
    def form(self) -> str:
        """The keys that select the messages, for errors."""
        if self.match:
            return f"match {', '.join(map(shown, self.match))}"
        key, text = ("header", self.header.text) if self.header else ("field", ".".join(self.path or ()))
        return f"{key} {shown(text)}, value {shown(self.value)}"


def _refuse_unused(blocks: tuple[ClassBlock, ...]) -> tuple[ClassBlock, ...]:
    """Refuse a class without messages: an earlier one has its name, or matches all its messages."""
    for number, block in enumerate(blocks):
        for earlier in blocks[:number]:
            if earlier.name == block.name:
                raise ValueError(
                    f"class {shown(block.name)} appears twice; rename one, or give one of them both patterns"
                )
            if earlier.rule.covers(block.rule):
                raise ValueError(
                    f"class {shown(block.name)} ({block.form}) gets no message, because the earlier class"
                    f" {shown(earlier.name)} ({earlier.form}) matches them all; put {shown(block.name)} first, or remove it"
                )
    return blocks


ClassBlocks = Annotated[tuple[ClassBlock, ...], AfterValidator(_refuse_unused)]


@dataclass(frozen=True)
class NodeClasses:
    """The classes of a stream, in the order in which they are tried. A node's class is a name, or None."""

    blocks: tuple[ClassBlock, ...]
    policies: ClassPolicies

    @classmethod
    def of(cls, blocks: Sequence[ClassBlock], own: Policy | None) -> Self | None:
        """Return the classes of a stream with its own policy; None for a stream without classes or without tracking.

        Raises ValueError if the durations of a class contradict the stream's.
        """
        if own is None or not blocks:
            return None
        policies = tuple(_policy(number, block, own) for number, block in enumerate(blocks))
        return cls(tuple(blocks), ClassPolicies(own, tuple(block.name for block in blocks), policies))

    @cached_property
    def classifier(self) -> Classifier:
        """The rules that find a message's class."""
        return Classifier(tuple(block.rule for block in self.blocks))

    @cached_property
    def _by_name(self) -> dict[str | None, tuple[ClassBlock, Policy]]:
        return {block.name: (block, policy) for block, policy in zip(self.blocks, self.policies.policies, strict=True)}

    def policy(self, name: str | None) -> Policy:
        """Return the policy of a class."""
        return self._by_name[name][1] if name in self._by_name else self.policies.own

    def announces(self, name: str | None) -> bool:
        """Return whether the transitions of a class are announced."""
        return self._by_name[name][0].announce if name in self._by_name else True

    @property
    def shortest_warning_ns(self) -> int:
        """The shortest `warn_duration` of the stream and its classes."""
        return min(policy.warning_ns for policy in (self.policies.own, *self.policies.policies))

    @property
    def longest_interval_ns(self) -> int:
        """The longest `inspect_duration` of the stream and its classes."""
        return max(policy.interval_ns for policy in (self.policies.own, *self.policies.policies))

    @property
    def text(self) -> str:
        """The rules and durations as text: another text means that classes and deadlines may have changed."""
        rows = zip(self.blocks, self.policies.policies, strict=True)
        return repr([(block.name, block.form, policy.interval_ns, policy.warning_ns) for block, policy in rows])


def _policy(number: int, block: ClassBlock, own: Policy) -> Policy:
    interval_ns, warning_ns = block.inspect_duration_ns or own.interval_ns, block.warn_duration_ns
    if warning_ns is None:
        warning_ns = own.warning_ns if block.inspect_duration_ns is None else interval_ns // 2
    if not 0 < warning_ns < interval_ns:
        key = "inspect_duration" if block.warn_duration_ns is None else "warn_duration"
        raise ValueError(
            f"classes.{number}.{key}: class {shown(block.name)}: warn_duration ({warning_ns / SECOND_NS:g}s) must be shorter"
            f" than inspect_duration ({interval_ns / SECOND_NS:g}s); change one of them"
        )
    return Policy(interval_ns, warning_ns, own.size_trigger_bytes)
