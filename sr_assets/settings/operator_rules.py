"""The blocks that decide what is announced: `flapping`, `outage_guard`, `maintenance`, and the `classes` of nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Annotated, Final, Self

from croniter import CroniterBadDateError, CroniterError, croniter
from pydantic import AfterValidator, model_validator

from sr_assets.domain.classes import Classifier, ClassRule
from sr_assets.domain.durations import duration
from sr_assets.domain.errors import did_you_mean
from sr_assets.domain.positions import SECOND_NS, format_rfc3339_ns
from sr_assets.domain.tracking.announcements import Flapping
from sr_assets.domain.tracking.class_policies import ClassPolicies
from sr_assets.domain.tracking.maintenance import Window
from sr_assets.domain.tracking.outages import WHOLE, Guard
from sr_assets.domain.tracking.rules import Policy
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.names import FieldPath, SenderHeader
from sr_assets.settings.values import Duration, Flag, Positive, Text, Texts, Time, Value, read_text, shown, whole_number

_PERCENT: Final = WHOLE // 100


class FlappingBlock(Block):
    """`flapping` of a stream."""

    transitions: Annotated[int, whole_number(2)] = file_key("a node flaps with this number of transitions", 6)
    within_ns: Duration = file_key("in this time; it settles after the same time without one", "1h", name="within")

    @property
    def rule(self) -> Flapping:
        return Flapping(self.transitions, self.within_ns)


def read_percentage(value: object) -> int:
    """Read a percentage above 0 and up to 100, in millionths; a number has no percent sign."""
    text = read_text(value)
    try:
        share = round(float(text.removesuffix("%")) * _PERCENT)
    except (ValueError, OverflowError):
        share = 0
    if not 0 < share <= WHOLE:
        raise ValueError(f"{shown(text)} is not a percentage; use more than 0% and at most 100%, such as 55%")
    return share


Percentage = Annotated[int, Value(read_percentage, type="percentage")]


class OutageGuardBlock(Block):
    """`outage_guard` of a stream."""

    partial: Percentage = file_key("an outage begins with this share of silent nodes", "55%")
    dark: Percentage = file_key("with this share, the site is dark", "100%")
    quiet_ns: Duration | None = file_key(
        "a node is silent after this time", None, name="quiet", default_text="half of `warn_duration`"
    )
    hold_ns: Duration = file_key("the longest time that announcements are delayed", "1d", name="hold")
    min_nodes: Positive = file_key("fewer nodes have no outage", 10)

    def guard(self, warning_ns: int, classes: Mapping[str, int]) -> Guard:
        """Return the guard of a stream with its `warn_duration` and those of its classes.

        Raises ValueError if the keys contradict each other.
        """
        if self.dark < self.partial:
            percent = f"{self.dark / _PERCENT:g}%"
            raise ValueError(
                f"outage_guard: dark: {percent} is below partial; use at least {self.partial / _PERCENT:g}%"
            )
        quiet_ns = self._quiet_of(warning_ns, "warn_duration")
        limits: dict[str | None, tuple[int, int]] = {
            name: (self._quiet_of(own_ns, f"warn_duration of class {shown(name)}"), own_ns)
            for name, own_ns in classes.items()
        }
        return Guard(self.partial, self.dark, quiet_ns, self.hold_ns, self.min_nodes, warning_ns, limits)

    def _quiet_of(self, warning_ns: int, key: str) -> int:
        quiet_ns = warning_ns // 2 if self.quiet_ns is None else self.quiet_ns
        if quiet_ns >= warning_ns:
            quiet, limit = duration(quiet_ns / SECOND_NS), duration(warning_ns / SECOND_NS)
            raise ValueError(f"outage_guard: quiet: {quiet} is not shorter than {key} ({limit}); use a shorter time")
        return quiet_ns


def _cron(value: object) -> str:
    """Read a cron expression of five fields that fires at least once."""
    text = read_text(value)
    try:
        if len(text.split()) != 5:
            raise ValueError
        croniter(text, datetime(2000, 1, 1, tzinfo=UTC)).get_next()
    except CroniterBadDateError:
        raise ValueError(f"{shown(text)} never fires; use a day that its month has") from None
    except (CroniterError, ValueError):
        raise ValueError(
            f"{shown(text)} is not a cron expression; use five fields (minute hour day month weekday) such as '0 2 * * 6'"
        ) from None
    return text


class MaintenanceBlock(Block):
    """One of `maintenance`: a window, once (`from`, `to`) or by `cron` with a length (`for`)."""

    match: Texts = file_key("globs of nodes", [], default_text="all nodes")
    classes: Texts = file_key("[classes](#block-classes) of nodes", [], name="class", default_text="all nodes")
    site: Text | None = file_key("glob of sites", None, default_text="all sites")
    from_ns: Time | None = file_key("the beginning of a single window", None, name="from")
    to_ns: Time | None = file_key("its end, which is no longer part of it", None, name="to")
    cron: Annotated[str, Value(_cron, type="cron expression, UTC")] | None = file_key(
        "the beginnings of repeated windows: minute, hour, day, month, weekday", None
    )
    for_ns: Duration | None = file_key("their length", None, name="for")
    reason: Text = file_key("the reason, for people", "")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        once, repeated = (self.from_ns, self.to_ns), (self.cron, self.for_ns)
        if None in (once if repeated == (None, None) else repeated) or (any(once) and any(repeated)):
            raise ValueError("needs from and to, or cron and for; set one of the two pairs")
        if self.from_ns is not None and self.to_ns is not None and self.from_ns >= self.to_ns:
            times = [format_rfc3339_ns(ns).replace(".000000000Z", "Z") for ns in (self.to_ns, self.from_ns)]
            raise ValueError(f"to: {times[0]} is not after from ({times[1]}); set a later time")
        return self

    def about(self, site: str) -> bool:
        return self.site is None or fnmatchcase(site, self.site)

    @property
    def window(self) -> Window:
        """The window of the rules; the same keys and values always have the same id."""
        keys = (self.match, self.site, self.from_ns, self.to_ns, self.cron, self.for_ns)
        name = hashlib.sha256(repr(keys + (self.classes and (self.classes,))).encode()).hexdigest()[:8]
        times = self.from_ns or 0, self.to_ns or 0, self.cron, self.for_ns or 0
        return Window(name, self.match, *times, self.reason, self.classes)


def unknown_class(names: Iterable[str], known: Collection[str]) -> str | None:
    """Return the problem and the remedy of the first name that is no known class, or None."""
    for name in names:
        if name not in known:
            classes = f"classes: {', '.join(dict.fromkeys(known))}" if known else "add it to classes"
            return f"{shown(name)} is not a class of these streams; {did_you_mean(name, known)}{classes}"
    return None


def refuse_unknown_classes(blocks: Iterable[MaintenanceBlock], known: Collection[str]) -> None:
    """Raise ValueError for a block about a class that is not known."""
    for block in blocks:
        if problem := unknown_class(block.classes, known):
            raise ValueError(f"maintenance: class: {problem}")


def refuse_other_sites(blocks: Iterable[MaintenanceBlock], sites: Collection[str]) -> None:
    """Raise ValueError for a block about none of the sites."""
    for block in blocks:
        if not any(map(block.about, sites)):
            raise ValueError(f"maintenance: site: {shown(block.site)} matches no site; sites: {', '.join(sites)}")


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
