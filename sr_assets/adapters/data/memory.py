"""Sources without a server: the configuration's own values, the environment, and a YAML or JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sr_assets.adapters import times
from sr_assets.adapters.data.interface import Change, Json, Source
from sr_assets.adapters.locking import locked_folder
from sr_assets.adapters.private import write_private
from sr_assets.domain.errors import ConfigurationError, RunError, TransientError, cannot_write
from sr_assets.settings.document import read_values
from sr_assets.settings.references import MissingValueError

if TYPE_CHECKING:
    from sr_assets.settings import SourceSettings

_POLL_SECONDS = 0.5


class MappingSource(Source):
    """A source whose values are a mapping, held in memory or read from a file at each use."""

    def read(self, key: str) -> Json:
        values = self._values()
        if key not in values:
            raise MissingValueError(f"{self.settings.label} has no key {key!r}; put it")
        return values[key]

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with a prefix, sorted."""
        return sorted(key for key in self._values() if key.startswith(prefix))

    def watch(self, key: str) -> Iterator[Change]:
        """Yield the value, and each change of it, by comparing it twice a second."""
        self._values()
        before: object = self
        while True:
            value = self._until_available(partial(self.get, key, None))
            if value != before:
                before = value
                yield Change(key, value, times.time_ns(), deleted=value is None)
            times.sleep(_POLL_SECONDS)

    def _values(self) -> Mapping[str, Any]:
        raise NotImplementedError


class MemorySource(MappingSource):
    """The values of the block `data`, and changes of this process."""

    def __init__(self, name: str, settings: SourceSettings) -> None:
        super().__init__(name, settings)
        self._held = dict(settings.values)

    def put(self, key: str, value: Json) -> None:
        """Set a value for this process."""
        self._held[key] = value

    def delete(self, key: str) -> None:
        """Delete a value for this process."""
        self.read(key)
        del self._held[key]

    def _values(self) -> Mapping[str, Any]:
        return self._held


class EnvironmentSource(MappingSource):
    """The environment's variables with a prefix, read-only."""

    def _values(self) -> Mapping[str, Any]:
        prefix = self.settings.prefix
        # As in the other sources, bytes that are not UTF-8 are replaced.
        environ = {name: os.fsencode(text).decode("utf-8", "replace") for name, text in os.environ.items()}
        return {name.removeprefix(prefix): text for name, text in environ.items() if name.startswith(prefix)}


class FileSource(MappingSource):
    """A YAML or JSON file; the key `a.b` is the key `b` in the mapping `a`, unless the file has the key `a.b` itself."""

    def read(self, key: str) -> Json:
        value: Json = self._read()
        path = _path(value, key)
        if path is None:
            raise MissingValueError(f"{self.settings.path} has no key {key!r}; add it to the file")
        for part in path:
            value = value[part]
        return value

    def put(self, key: str, value: Json) -> None:
        """Replace a value in the file; the file loses its comments."""
        with self._locked():
            tree = inner = self._read() if self._file.exists() else {}
            *parents, last = _path(tree, key) or key.split(".")
            for part in parents:
                inner = inner.setdefault(part, {})
                if not isinstance(inner, dict):
                    raise RunError(f"{part!r} in {self._file} is not a mapping; put another key")
            inner[last] = value
            self._write(tree)

    def delete(self, key: str) -> None:
        """Delete a value in the file."""
        with self._locked():
            self.read(key)
            tree = inner = self._read()
            *parents, last = _path(tree, key) or [key]
            for part in parents:
                inner = inner[part]
            del inner[last]
            self._write(tree)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file's folder, so that concurrent changes of different keys all take effect."""
        with ExitStack() as stack:
            try:
                stack.enter_context(locked_folder(self._file.parent))
            except OSError as error:
                raise RunError(cannot_write(self._file, error)) from None
            yield

    @property
    def _file(self) -> Path:
        return Path(self.settings.path or "")

    def _values(self) -> Mapping[str, Any]:
        return dict(_leaves(self._read()))

    def _read(self) -> dict[str, Any]:
        if not self._file.exists():
            raise MissingValueError(f"{self._file} does not exist; create it")
        try:
            return read_values(self._file)
        except ConfigurationError as error:
            # Another program may be writing it.
            raise TransientError(str(error)) from None

    def _write(self, tree: dict[str, Any]) -> None:
        import yaml

        is_json = self._file.suffix == ".json"
        text = json.dumps(tree, indent=2) + "\n" if is_json else yaml.safe_dump(tree, sort_keys=False)
        try:
            mode = self._file.stat().st_mode & 0o777 if self._file.exists() else 0o600
            write_private(self._file, text, mode)
        except OSError as error:
            raise RunError(cannot_write(self._file, error)) from None


def _path(tree: Json, key: str) -> list[str] | None:
    """Return the keys that lead to the value of `a.b`, each the longest possible, or None if there is no value."""
    if not isinstance(tree, dict):
        return None
    if key in tree:
        return [key]
    parts = key.split(".")
    for count in range(len(parts) - 1, 0, -1):
        first, rest = ".".join(parts[:count]), ".".join(parts[count:])
        if (inner := _path(tree.get(first), rest)) is not None:
            return [first, *inner]
    return None


def _leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a tree that are not mappings, by their dotted keys."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
