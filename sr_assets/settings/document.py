"""The file as text → a tree of plain values with the environment in it; and the line that says where in it a mistake is.

Not here: what the tree may hold (`shape`).
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from sr_assets.domain.errors import ConfigurationError
from sr_assets.settings.values import shown

Location = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """YAML with every key once, and times left as text: their nanoseconds would be lost."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"key {shown(key.value)} is there twice", key.start_mark
                    )
                seen.add(key.value)
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_tree(path: Path) -> dict[Any, Any]:
    """Read a YAML file; raises ConfigurationError when it is no mapping of keys that stand there once."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_Loader)  # noqa: S506  a SafeLoader
    except OSError as error:
        hint = "; create it, or name another with SR_ASSETS_CONFIG" if isinstance(error, FileNotFoundError) else ""
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}{hint}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigurationError(f"{path}: is not valid YAML{where}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        # Control characters, impossible numbers or dates, endless nesting.
        raise ConfigurationError(
            f"{path}: is not valid YAML: it has characters or values YAML does not allow"
        ) from None
    if tree is None:
        raise ConfigurationError(f"{path}: is empty; it needs at least name and streams")
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path}: must be a mapping of keys such as name and streams")
    return tree


def with_environment(
    value: Any, environ: Mapping[str, str], refuse: Callable[[Location, str], NoReturn], loc: Location = ()
) -> Any:
    """Replace every `${NAME}` in values by the environment's value; keys and numbers stay."""
    if len(loc) > 20:
        refuse(loc[:1], "is nested too deeply")
    if isinstance(value, dict):
        return {key: with_environment(item, environ, refuse, (*loc, str(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [with_environment(item, environ, refuse, (*loc, place)) for place, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def lookup(found: re.Match[str]) -> str:
        if not found[1]:
            refuse(loc, "has a '${' that does not begin ${NAME}")
        if found[1] not in environ:
            refuse(loc, f"environment variable {found[1]} is not set")
        return environ[found[1]]

    return re.sub(r"\$\{(?:([A-Za-z_][A-Za-z0-9_]*)\})?", lookup, value)


def refuse(path: Path, tree: Any, loc: Location, problem: str) -> NoReturn:
    """Raise the error about `loc`, with a stream or feed called by its name instead of its place in the list."""
    place, keys = [str(path)], loc
    if len(loc) > 1 and (kind := str(loc[0]).lower()) in ("streams", "feeds"):
        entry = _get(_get(tree, kind), loc[1])
        stream, name = _get(entry, "stream"), _get(entry, "name")
        called = f"{kind[:-1]} {shown(stream)}" if isinstance(stream, str) else f"{kind} entry {int(loc[1]) + 1}"
        place.append(called + (f" (name {shown(name)})" if isinstance(name, str) else ""))
        keys = loc[2:]
    place.append(".".join(str(key) for key in keys))
    raise ConfigurationError(": ".join(part for part in (*place, problem) if part)) from None


def _get(container: Any, key: Any) -> Any:
    """Look into a raw tree, whatever it is, by key in any case or by place."""
    if isinstance(container, list) and isinstance(key, int):
        return container[key]
    if isinstance(container, dict):
        return next((value for name, value in container.items() if str(name).lower() == key), None)
    return None
