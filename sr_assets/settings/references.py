"""Resolution of references to `data`: the values that take their place in the tree, the origin of each, and mistakes as text.

The sources are read through a `Reader`, so this module needs no connection.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn, Protocol

from pydantic import ValidationError

from sr_assets.domain.errors import ConfigurationError, RunError, did_you_mean
from sr_assets.domain.secrets import masked, quoted
from sr_assets.settings.data import (
    MISSING,
    Reference,
    SourceSettings,
    is_reference,
    parse_reference,
    refuse_dynamic,
    split_label,
)
from sr_assets.settings.document import Location, key_path
from sr_assets.settings.mapping import Key
from sr_assets.settings.values import shown

#: Types whose values are text; a text that is a JSON list or object is read as such.
_TEXT_TYPES: Final = frozenset({"kv", "environment", "consul"})
_DEEPEST: Final = 20
#: Values that are not read again, by `source/key` and whether the reference is dynamic.
Fixed = Mapping[tuple[str, bool], Any]


def problem_of(error: Mapping[str, Any]) -> str:
    """Return the message for a value that pydantic refused; messages of our validators stay unchanged."""
    match error["type"]:
        case "value_error":
            return str(error["ctx"]["error"])
        case "missing":
            return "is required"
        case "tuple_type":
            return "must be a list, each entry beginning with '- '"
        case "too_short":
            return "is empty; add at least one entry"
        case "dict_type":
            return "must be a mapping of keys to values"
    return str(error["msg"])


class MissingValueError(RunError):
    """A source responds, but the bucket, file or key does not exist."""


class Known(NamedTuple):
    """A value that was read at a time (unix ns), and its age then."""

    value: Any
    at_ns: int
    age: str = ""


class Reader(Protocol):
    """Access to sources, and to the last known values in the home."""

    def read(self, name: str, source: SourceSettings, key: str) -> Known:
        """Return a value; raises MissingValueError, or RunError if the source is unavailable."""

    def earlier(self, home: Path, label: str) -> Known | None:
        """Return the last known value of `source/key`, or None."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a value: its reference, the source, and how it was obtained at a time (unix ns; 0: unknown).

    `kind` is `read`, `default`, or `earlier` for the last known value.
    """

    reference: Reference
    source: str
    value: Any
    kind: Literal["read", "default", "earlier"]
    at_ns: int = 0
    #: Whether it fills a secret key, or a block with one.
    secret: bool = False

    @property
    def masked(self) -> str:
        """The value as text, without secrets."""
        return masked(self.reference.label, self.value, secret=self.secret)

    def quoted(self, value: object = MISSING) -> str:
        """Return its value, or another one for the same key, for a message."""
        return quoted(self.reference.label, self.value if value is MISSING else value, secret=self.secret)


@dataclass(frozen=True, slots=True)
class Loaded:
    """How Settings were made: the file, its tree before (`written`) and after (`tree`) the environment, and the origins.

    `latest` holds the Settings of the last `reload_dynamic`.
    """

    path: Path
    written: Any
    tree: Any
    origins: Mapping[Location, Origin]
    warnings: tuple[str, ...] = ()
    latest: list[Any] = field(default_factory=list)

    @property
    def dynamic(self) -> dict[str, Origin]:
        """The dynamic values by `source/key`."""
        return self._by_label(dynamic=True)

    @property
    def values(self) -> dict[str, Any]:
        """The present dynamic values."""
        return {label: origin.value for label, origin in self.dynamic.items()}

    @property
    def static(self) -> dict[str, Origin]:
        """The static values by `source/key`."""
        return self._by_label(dynamic=False)

    def _by_label(self, *, dynamic: bool) -> dict[str, Origin]:
        chosen = [origin for origin in self.origins.values() if origin.reference.dynamic == dynamic]
        # A value is secret if one of its keys is.
        return {each.reference.label: each for each in sorted(chosen, key=lambda origin: origin.secret)}


@dataclass(slots=True)
class Resolver:
    """One resolution of all references of a tree.

    `sources` is the tree's block `data`, `schema` the type of the whole tree. `home` may be None as long as it is unknown.
    `refuse` raises ConfigurationError about a location.
    """

    sources: Mapping[str, Any]
    reader: Reader
    refuse: Callable[[Location, str], NoReturn]
    fixed: Fixed
    schema: Key
    home: Path | None = None
    origins: dict[Location, Origin] = field(default_factory=dict)
    warnings: dict[str, None] = field(default_factory=dict)
    _settings: dict[str, SourceSettings] = field(default_factory=dict)
    _raw: dict[tuple[str, bool], tuple[Any, Literal["read", "default", "earlier"], int]] = field(default_factory=dict)

    def filled(self, value: Any, loc: Location = (), chain: tuple[str, ...] = ()) -> Any:
        """Return a part of the tree with the values of all references inside it."""
        if is_reference(value):
            return self._value(value, loc, chain)
        if len(loc) > _DEEPEST or not isinstance(value, (dict, list)):
            return value
        if isinstance(value, list):
            return [self.filled(item, (*loc, index), chain) for index, item in enumerate(value)]
        return {key: self.filled(item, (*loc, str(key).lower()), chain) for key, item in value.items()}

    def source(self, name: str, loc: Location, chain: tuple[str, ...] = ()) -> SourceSettings:
        """Return the settings of a source, whose own keys may be references."""
        if name not in self._settings:
            if name not in self.sources:
                hint = did_you_mean(name, self.sources)
                configured = ", ".join(self.sources) or "none"
                self.refuse(loc, f"source {name!r} is not configured; {hint}add it to data; configured: {configured}")
            link = f"data.{name}"
            self._refuse_cycle(link, loc, chain)
            here: Location = ("data", name)
            try:
                self._settings[name] = SourceSettings.model_validate(self.source_tree(name, (*chain, link)))
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                self.refuse((*here, *first["loc"]), problem_of(first))
        return self._settings[name]

    def source_tree(self, name: str, chain: tuple[str, ...] = ()) -> Any:
        """Return the block of a source; the values of `memory` are resolved when they are read."""
        block = self.sources[name]
        if not isinstance(block, dict):
            return block
        kept = {key: value for key, value in block.items() if str(key).lower() == "values"}
        rest = {key: value for key, value in block.items() if key not in kept}
        return {**self.filled(rest, ("data", name), chain), **kept}

    def _value(self, written: dict[Any, Any], loc: Location, chain: tuple[str, ...]) -> Any:
        try:
            reference = parse_reference(written)
            if reference.dynamic:
                refuse_dynamic(key_path(loc), reference.label)
        except ValueError as error:
            self.refuse(loc, str(error))
        self._refuse_cycle(reference.label, loc, chain)
        source = self.source(reference.source, loc, chain)
        try:
            raw, kind, at_ns = self._read(reference, source, loc)
            value = self._resolved(raw, kind, reference, source, loc, chain)
        except ConfigurationError as error:
            # As for any bad dynamic value: a run continues with the previous one.
            earlier = self._earlier(reference.label) if reference.dynamic else None
            if earlier is None:
                raise
            value = self._resolved(earlier.value, "earlier", reference, source, loc, chain)
            self._warn_of_earlier(str(error), reference.label, earlier, loc)
            kind, at_ns = "earlier", earlier.at_ns
        self.origins[loc] = Origin(reference, source.label, value, kind, at_ns, self.schema.at(*loc).holds_secret)
        return value

    def _resolved(
        self,
        raw: Any,
        kind: Literal["read", "default", "earlier"],
        reference: Reference,
        source: SourceSettings,
        loc: Location,
        chain: tuple[str, ...],
    ) -> Any:
        """Return the value of a reference. One from a remote source is data: it refers to nothing, and fills no local key."""
        if kind == "default" or not source.is_remote:
            whole = raw if kind == "default" else parsed(source, raw, self.schema.at(*loc))
            return self.filled(whole, loc, (*chain, reference.label))
        key = self.schema.at(*loc)
        value = parsed(source, raw, key)
        local = next((path or str(loc[-1]) for path, inner in key.inside(value) if inner.local), None)
        if local is not None and not source.trusted:
            self.refuse(
                loc,
                f"data {reference.label}: {shown(local)} executes or locates something, so {source.label} cannot set it; write it"
                f" in this file, or set trusted: true in data.{reference.source} if all its writers may act as this service",
            )
        return value

    def _read(
        self, reference: Reference, source: SourceSettings, loc: Location
    ) -> tuple[Any, Literal["read", "default", "earlier"], int]:
        """Return the value that a source holds, or the value that takes its place."""
        cached = (reference.label, reference.dynamic)
        if cached in self.fixed:
            raw: tuple[Any, Literal["read", "default", "earlier"], int] = (self.fixed[cached], "read", 0)
        else:
            if cached not in self._raw:
                self._raw[cached] = self._read_source(reference, source, loc)
            raw = self._raw[cached]
        if raw[0] is not MISSING:
            return raw
        if reference.default is MISSING:
            self.refuse(
                loc, f"data {reference.label}: {source.label} has no key {reference.key!r}; put it, or set default"
            )
        return reference.default, "default", 0

    def _read_source(
        self, reference: Reference, source: SourceSettings, loc: Location
    ) -> tuple[Any, Literal["read", "default", "earlier"], int]:
        label = reference.label
        try:
            known = self.reader.read(reference.source, source, reference.key)
        except MissingValueError as error:
            if reference.default is MISSING:
                self.refuse(loc, f"data {label}: {error}, or set default")
            default = quoted(label, reference.default, secret=self.schema.at(*loc).holds_secret)
            self.warnings[f"data {label}: {error}; using the default {default}"] = None
            return MISSING, "default", 0
        except RunError as error:
            earlier = self._earlier(label)
            if earlier is None:
                self._fail(
                    loc,
                    f"data {label}: {error}; no earlier value is known: start or repair the source, or write the value",
                )
            self._warn_of_earlier(f"data {label}: {error}", label, earlier, loc)
            return earlier.value, "earlier", earlier.at_ns
        except ConfigurationError as error:
            self.refuse(loc, f"data {label}: {str(error).removeprefix(f'{label}: ')}")
        return known.value, "read", known.at_ns

    def _earlier(self, label: str) -> Known | None:
        return self.reader.earlier(self.home, label) if self.home is not None else None

    def _warn_of_earlier(self, problem: str, label: str, earlier: Known, loc: Location) -> None:
        value = quoted(label, earlier.value, secret=self.schema.at(*loc).holds_secret)
        self.warnings[f"{problem}; using the value {value}, read {earlier.age} ago"] = None

    def _fail(self, loc: Location, problem: str) -> NoReturn:
        """Raise RunError about a location: the configuration is right, but a source is unavailable."""
        try:
            self.refuse(loc, problem)
        except ConfigurationError as error:
            raise RunError(str(error)) from None

    def _refuse_cycle(self, link: str, loc: Location, chain: tuple[str, ...]) -> None:
        if link in chain:
            circle = " -> ".join((*chain[chain.index(link) :], link))
            self.refuse(loc, f"data {link}: refers to itself ({circle}); replace one of these references by a value")
        if len(chain) > _DEEPEST:
            self.refuse(loc, f"data {link}: more than {_DEEPEST} references lead to it; replace one of them by a value")


def references_in(value: Any, loc: Location = ()) -> Iterator[tuple[Location, str]]:
    """Yield the location and the `source/key` of each valid reference of a tree."""
    if is_reference(value):
        with contextlib.suppress(ValueError):
            yield loc, parse_reference(value).label
    elif len(loc) <= _DEEPEST and isinstance(value, (dict, list)):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in inner:
            yield from references_in(item, (*loc, key if isinstance(value, list) else str(key).lower()))


def parsed(source: SourceSettings, value: Any, key: Key) -> Any:
    """Return a value; a text that is a JSON list or object becomes that, where the key's type is a list or a block."""
    is_text = source.type in _TEXT_TYPES and isinstance(value, str)
    if is_text and key.is_structured and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def sources_of(tree: Mapping[Any, Any], refuse: Callable[[Location, str], NoReturn]) -> dict[str, Any]:
    """Return the sources in the block `data` of a tree; refuses two of one name."""
    block = next((value for key, value in tree.items() if str(key).lower() == "data"), None) or {}
    if not isinstance(block, dict):
        refuse(("data",), f"{shown(block)} is not a mapping of names to sources; use data: {{ops: {{type: kv, …}}}}")
    names: dict[str, str] = {}
    for name in block:
        try:
            split_label(f"{name}/key")
        except ValueError:
            refuse(("data",), f"{shown(name)} is not a name of a source; use letters, digits, '_' and '-'")
        other = names.setdefault(str(name).lower(), str(name))
        if other != name:
            refuse(("data", str(name)), f"source {name!r} has the name of source {other!r}; rename one")
    return {str(name): source for name, source in block.items()}
