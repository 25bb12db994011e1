"""`check --explain KEY`: each matching key of the configuration with its value and the origin of the value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from sr_assets.adapters import times
from sr_assets.domain.errors import ConfigurationError, did_you_mean
from sr_assets.domain.secrets import MASK, masked
from sr_assets.settings.mapping import Block

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from sr_assets.settings import Settings
    from sr_assets.settings.document import Location
    from sr_assets.settings.references import Origin

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Explained(NamedTuple):
    """A key, its value as the file would have it, the origin of the value, and its age in seconds if a source has it."""

    key: str
    value: str | None
    origin: str
    age_seconds: float | None = None


def explain(settings: Settings, wanted: str) -> list[Explained]:
    """Return the keys that match a key's path, the end of one, or a pattern such as `*.inspect_duration`.

    Raises ConfigurationError if no key matches.
    """
    loaded = settings.loaded
    trees = _Trees(loaded.origins, _lower(loaded.written), _lower(loaded.tree)) if loaded else _Trees({}, {}, {})
    rows = list(_keys_of(trees, settings, (), ""))
    pattern = wanted.lower()
    chosen = [row for row in rows if _matches(row.key.lower(), pattern)]
    if not chosen:
        names = sorted({row.key.rpartition(".")[2] for row in rows})
        raise ConfigurationError(
            f"--explain {wanted}: is not a key; {did_you_mean(pattern, names)}see docs/configuration.md"
        )
    return chosen


def _matches(key: str, pattern: str) -> bool:
    return key == pattern or key.endswith(f".{pattern}") or fnmatchcase(key, pattern)


class _Trees(NamedTuple):
    """The keys in the file, before (`written`) and after (`read`) the environment, and the origins of those from sources."""

    origins: Mapping[Location, Origin]
    written: object
    read: object


def _keys_of(trees: _Trees, block: Block, loc: Location, path: str) -> Iterator[Explained]:
    """Yield the keys of a block at a location; `path` is the prefix of their paths."""
    for key, name in block.keys().items():
        at = (*loc, key)
        parts = [] if at in trees.origins else _parts(getattr(block, name))
        for index, part in parts:
            inner = at if index is None else (*at, index)
            label = f"{getattr(part, 'name', index)}/{part.stream}" if hasattr(part, "stream") else index
            yield from _keys_of(trees, part, inner, f"{path}{key}." if index is None else f"{path}{key}.{label}.")
        if not parts:
            yield _explained(trees, type(block).model_fields[name], at, f"{path}{key}")


def _explained(trees: _Trees, field: FieldInfo, loc: Location, path: str) -> Explained:
    secret, origin = not field.repr, trees.origins.get(loc)
    if origin is not None:
        age_seconds = max(0.0, times.time() - origin.at_ns / 1e9) if origin.at_ns else None
        value = MASK if secret or origin.secret else masked(origin.reference.label, origin.value)
        return Explained(path, value, _of_source(origin), age_seconds)
    written = _at(trees.written, loc)
    if written is not None and written != "":
        variables = ", ".join(f"${{{each}}}" for each in _VARIABLE.findall(str(written)))
        where = f"the file, with {variables}" if variables else "the file"
        return Explained(path, MASK if secret else masked(path, _at(trees.read, loc)), where)
    extra = field.json_schema_extra
    text = str(extra["default_text"]) if isinstance(extra, dict) and extra["default_text"] else None
    return Explained(path, text or _default(field.default), "the default")


def _default(value: object) -> str | None:
    if value in (None, "", [], {}):
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parts(value: object) -> list[tuple[str | int | None, Block]]:
    """Return the blocks in a value: (None, block), or each block with its index or key."""
    if isinstance(value, Block):
        return [(None, value)]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else ()
    return [(index, item) for index, item in items if isinstance(item, Block)]


def _at(tree: object, loc: Location) -> object:
    """Return the part of a tree at a location, or None."""
    for part in loc:
        if isinstance(tree, dict):
            tree = tree.get(part.lower() if isinstance(part, str) else part)
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return None
    return tree


def _of_source(origin: Origin) -> str:
    reference = origin.reference
    kinds = {
        "read": "",
        "default": "; the key is missing: its default",
        "earlier": "; unavailable: the last known value",
    }
    dynamic = ", dynamic" if reference.dynamic else ""
    return f"data {reference.label} ({origin.source}{dynamic}){kinds[origin.kind]}"


def _lower(tree: object) -> object:
    """Return a tree with lower-case keys."""
    if isinstance(tree, dict):
        return {str(key).lower(): _lower(value) for key, value in tree.items()}
    return [_lower(value) for value in tree] if isinstance(tree, list) else tree
