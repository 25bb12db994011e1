"""The sources of `data`: reading values for the configuration, for commands and for users' assets."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sr_assets.adapters import times
from sr_assets.adapters.data.interface import Change, Source
from sr_assets.adapters.data.known import keep_values, read_known
from sr_assets.domain.errors import ConfigurationError, RunError, did_you_mean
from sr_assets.settings.loading import reload_dynamic
from sr_assets.settings.references import Known, MissingValueError

if TYPE_CHECKING:
    from sr_assets.settings import Settings, SourceSettings

__all__ = [
    "READER",
    "Change",
    "Source",
    "SourceReader",
    "current_settings",
    "keep_values",
    "open_source",
    "source_named",
]

logger = logging.getLogger(__name__)

#: An unavailable source is not asked again for this time: a hanging connection must not delay each sensor.
_UNAVAILABLE_SECONDS: Final = 3.0
#: The problems of the last reading, which are logged already.
_logged: set[str] = set()


class SourceReader:
    """Reads values through connections that stay open for the next value; thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._open: dict[tuple[str, str], Source] = {}
        self._errors: dict[tuple[str, str], tuple[float, RunError]] = {}

    def read(self, name: str, source: SourceSettings, key: str) -> Known:
        """Return a value; raises MissingValueError, or RunError if the source is unavailable."""
        connection = (name, source.model_dump_json())
        with self._guard:
            at, error = self._errors.get(connection, (0.0, None))
            if error is not None and times.monotonic() - at < _UNAVAILABLE_SECONDS:
                raise error
            opened = self._open.get(connection) or open_source(name, source).__enter__()
            self._open[connection] = opened
            try:
                return Known(opened.get(key), times.time_ns())
            except MissingValueError:
                raise
            except RunError as unavailable:
                self._errors[connection] = times.monotonic(), unavailable
                raise

    def earlier(self, home: Path, label: str) -> Known | None:
        """Return the last known value of `source/key`, or None."""
        return read_known(home, label)


#: The reader of this process.
READER: Final = SourceReader()


def current_settings(settings: Settings) -> Settings:
    """Return Settings with the present dynamic values; log each problem once, and keep and record the values.

    A value that cannot be read, or is bad, is the previous one.
    """
    loaded = settings.loaded
    if loaded is None or not loaded.dynamic:
        return settings
    try:
        current = reload_dynamic(settings)
    except (ConfigurationError, RunError) as error:
        _log_new([str(error)])
        return loaded.latest[-1] if loaded.latest else settings
    _log_new(current.loaded.warnings if current.loaded else ())
    keep_values(current)
    loaded.latest[:] = [current]
    return current


def _log_new(lines: Iterable[str]) -> None:
    """Log each line that the last reading did not have; the age of a value does not make a new line."""
    now = {line.rpartition(", read ")[0] or line: line for line in lines}
    for key in now.keys() - _logged:
        logger.warning("%s", now[key])
    _logged.clear()
    _logged.update(now)


def source_named(sources: Mapping[str, SourceSettings], name: str) -> Source:
    """Return a configured source, opened by its first use. Raises ConfigurationError for an unknown name."""
    if name not in sources:
        hint, names = did_you_mean(name, sources), ", ".join(sources) or "none"
        raise ConfigurationError(f"source {name!r} is not configured; {hint}add it to data; configured: {names}")
    return open_source(name, sources[name])


def open_source(name: str, settings: SourceSettings) -> Source:
    """Return the source of a block, whose connection opens with its first use."""
    from sr_assets.adapters.data.memory import EnvironmentSource, FileSource, MemorySource

    match settings.type:
        case "kv":
            from sr_assets.adapters.data.kv import KvSource

            return KvSource(name, settings)
        case "consul":
            from sr_assets.adapters.data.consul import ConsulSource

            return ConsulSource(name, settings)
        case "file":
            return FileSource(name, settings)
        case "environment":
            return EnvironmentSource(name, settings)
    return MemorySource(name, settings)
