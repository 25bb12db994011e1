"""The YAML file as a tree of plain values with the environment filled in, and the location of an error in it."""

import grp
import os
import pwd
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import yaml

from sr_assets.domain.errors import ConfigurationError
from sr_assets.domain.secrets import as_text
from sr_assets.settings.values import shown

Location = tuple[str | int, ...]

#: Maximum number of values that aliases may repeat. Entries that share their keys need 20 to 100 each.
_MOST_REPEATED = 500_000
#: Number of characters of a text that count as one value.
_TEXT_CHARACTERS = 100
_DEEPEST = 20
_REFERENCE = re.compile(r"\$\{(?:([A-Za-z_][A-Za-z0-9_]*)\})?")


class _TooManyRepeatedError(Exception):
    """Aliases repeat more values than a configuration needs."""


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses repeated keys and leaves times as text.

    A timestamp would lose its nanoseconds; YAML 1.1 reads `22:30` as the number 1350.
    """

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        of_text = kind is yaml.ScalarNode and ":" in value and implicit[0]
        return "tag:yaml.org,2002:str" if of_text else super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"key {shown(key.value)} appears twice; rename or remove one", key.start_mark
                    )
                seen.add(key.value)
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def with_folders(file: Path) -> tuple[Path, ...]:
    """Return a file, its target if it is a link, and the folders of both: who may write one of them decides the content."""
    return tuple(dict.fromkeys((file, file.resolve(), file.absolute().parent, file.resolve().parent)))


def foreign_writer(*paths: Path) -> str | None:
    """Return who else may change one of these files and folders, in one line about it; None: only this user and root.

    The user who called sudo counts as this user. A group of one user only, as Debian makes one for each user, may write. What
    nobody can change, such as a mounted ConfigMap, is as safe as its mount.
    """
    ours = {0, os.geteuid()}
    if os.geteuid() == 0 and (caller := os.environ.get("SUDO_UID", "")).isdecimal():
        ours.add(int(caller))
    for path in paths:
        try:
            link = path.lstat()
            if stat.S_ISLNK(link.st_mode) and link.st_uid not in ours and path.parent.stat().st_mode & stat.S_IWOTH:
                return f"the link {path} belongs to {_user_name(link.st_uid) or f'user {link.st_uid}'}"
            status = path.stat()
            is_fixed = os.statvfs(path).f_flag & os.ST_RDONLY
        except OSError:
            continue
        sticky_folder = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_uid not in ours and not is_fixed:
            return f"{path} belongs to {_user_name(status.st_uid) or f'user {status.st_uid}'}"
        if status.st_mode & stat.S_IWOTH and not is_fixed and not sticky_folder:
            return f"every user can write {path}"
        shared = status.st_mode & stat.S_IWGRP and not any(_is_group_of(status.st_gid, user) for user in ours)
        if shared and not is_fixed and not sticky_folder:
            return f"group {_group_name(status.st_gid) or status.st_gid} can write {path}"
    return None


def _is_group_of(group: int, user: int) -> bool:
    """Return whether a group is a user's own: it has the user's name or number."""
    name = _group_name(group)
    return group == user or (name is not None and name == _user_name(user))


def _user_name(user: int) -> str | None:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return None


def _group_name(group: int) -> str | None:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return None


def read_tree(path: Path) -> dict[Any, Any]:
    """Read a YAML file; raises ConfigurationError unless it is a mapping of unique keys."""
    tree = _read(path)
    if tree is None:
        raise ConfigurationError(f"{path}: is empty; it needs at least name and streams")
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path}: must be a mapping of keys such as name and streams")
    return tree


def read_values(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file of values, with all keys as text; raises ConfigurationError unless it is empty or a mapping."""
    tree = _read(path)
    if not isinstance(tree, dict | None):
        raise ConfigurationError(f"{path}: must be a mapping of keys to values")
    values: dict[str, Any] = _with_text_keys(tree or {})
    return values


def _with_text_keys(value: Any) -> Any:
    """Return a value whose keys are text, also if YAML reads them as numbers, flags or null."""
    if isinstance(value, list):
        return [_with_text_keys(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {as_text(key): _with_text_keys(item) for key, item in value.items()}


def _read(path: Path) -> Any:
    """Return the values of a YAML file; raises ConfigurationError if it is unreadable or not YAML."""
    try:
        return _parse(path.read_text(encoding="utf-8-sig"))
    except _TooManyRepeatedError:
        raise ConfigurationError(
            f"{path}: its aliases (*name) repeat more than {_MOST_REPEATED:,} values; use fewer of them"
        ) from None
    except OSError as error:
        hint = "; create it, or set SR_ASSETS_CONFIG to another file" if isinstance(error, FileNotFoundError) else ""
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}{hint}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigurationError(f"{path}: is not valid YAML{where}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        # Control characters, impossible numbers or dates, endless nesting.
        raise ConfigurationError(f"{path}: is not valid YAML: it has forbidden characters or values") from None


def _parse(text: str) -> Any:
    """Return the values of a YAML text; raises _TooManyRepeatedError before aliases are expanded."""
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None
    sizes: dict[int, int] = {}
    written = sum(_own_size(part) for part in _nodes(node, {}))
    if _size(node, sizes) - written > _MOST_REPEATED:
        raise _TooManyRepeatedError
    return loader.construct_document(node)


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return a node's number of values, with aliases counted at full size; `sizes` caches them by id."""
    if id(node) not in sizes:
        sizes[id(node)] = 0  # an alias inside its own anchor: refused later as nested too deeply
        sizes[id(node)] = _own_size(node) + sum(_size(part, sizes) for part in _parts(node))
    return sizes[id(node)]


def _nodes(node: yaml.Node, seen: dict[int, yaml.Node]) -> Collection[yaml.Node]:
    """Return a node and all nodes inside it, each once."""
    if id(node) not in seen:
        seen[id(node)] = node
        for part in _parts(node):
            _nodes(part, seen)
    return seen.values()


def _parts(node: yaml.Node) -> Iterator[yaml.Node]:
    children = node.value if isinstance(node, yaml.CollectionNode) else ()
    return (part for child in children for part in (child if isinstance(child, tuple) else (child,)))


def _own_size(node: yaml.Node) -> int:
    """Return how many values a node counts for: a long text counts as many short ones."""
    return 1 + (len(node.value) // _TEXT_CHARACTERS if isinstance(node, yaml.ScalarNode) else 0)


def with_environment(tree: Any, environ: Mapping[str, str], refuse: Callable[[Location, str], NoReturn]) -> Any:
    """Replace every `${NAME}` in values by the environment's value; keys and numbers stay unchanged."""
    replaced: dict[int, Any] = {}  # a value shared by aliases is replaced once and stays shared

    def replace_in(value: Any, loc: Location) -> Any:
        if isinstance(value, str):
            return _REFERENCE.sub(lambda match: _look_up(match[1], environ, partial(refuse, loc)), value)
        if not isinstance(value, (dict, list)):
            return value
        if len(loc) > _DEEPEST:
            refuse(loc[:1], "is nested too deeply")
        if id(value) not in replaced:
            replaced[id(value)] = (
                {key: replace_in(item, (*loc, str(key))) for key, item in value.items()}
                if isinstance(value, dict)
                else [replace_in(item, (*loc, index)) for index, item in enumerate(value)]
            )
        return replaced[id(value)]

    return replace_in(tree, ())


def variables_of(tree: Any) -> frozenset[str]:
    """Return the names of the environment's variables that a file's values refer to."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list):
        return frozenset().union(*map(variables_of, tree))
    return frozenset(match for match in _REFERENCE.findall(tree) if match) if isinstance(tree, str) else frozenset()


def _look_up(name: str | None, environ: Mapping[str, str], refuse: Callable[[str], NoReturn]) -> str:
    if not name:
        refuse("has a '${' without a name; use ${NAME}")
    if name not in environ:
        refuse(f"environment variable {name} is not set")
    return environ[name]


def key_path(loc: Location) -> str:
    """Return a location without its indexes, such as `streams.batch_messages`."""
    return ".".join(part.lower() for part in loc if isinstance(part, str))


def refuse(path: Path, tree: Any, loc: Location, problem: str) -> NoReturn:
    """Raise the error about `loc`, with a stream or feed named by its keys instead of its index."""
    parts, keys = [str(path)], loc
    if str(loc[0] if loc else "").lower() == "topology":
        parts.append("topology")
        tree, loc = _get(tree, "topology"), loc[1:]
        keys = loc
    if len(loc) > 1 and (kind := str(loc[0]).lower()) in ("streams", "feeds"):
        entry = _get(_get(tree, kind), loc[1])
        stream, name = _get(entry, "stream"), _get(entry, "name")
        title = f"{kind[:-1]} {shown(stream)}" if isinstance(stream, str) else f"{kind} entry {int(loc[1]) + 1}"
        parts.append(title + (f" (name {shown(name)})" if isinstance(name, str) else ""))
        keys = loc[2:]
    parts.append(".".join(str(key) for key in keys))
    raise ConfigurationError(": ".join(part for part in (*parts, problem) if part)) from None


def _get(container: Any, key: Any) -> Any:
    """Return the part of a raw tree at a key (case-insensitive) or an index, or None."""
    if isinstance(container, list) and isinstance(key, int):
        return container[key]
    if isinstance(container, dict):
        return next((value for name, value in container.items() if str(name).lower() == key), None)
    return None
