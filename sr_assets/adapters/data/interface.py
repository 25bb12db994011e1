"""The interface of a source of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Self, TypeVar

from sr_assets.adapters import times
from sr_assets.adapters.logs import print_warning
from sr_assets.domain.errors import ConfigurationError, TransientError
from sr_assets.settings.data import MISSING
from sr_assets.settings.references import MissingValueError

if TYPE_CHECKING:
    from sr_assets.settings import SourceSettings

T = TypeVar("T")
_PAUSE_SECONDS: Final = 1.0
#: A value as YAML or JSON has it.
Json = Any


class Change(NamedTuple):
    """One value of a key over time: its time (unix ns), its revision if the source counts them, or its deletion."""

    key: str
    value: Any
    at_ns: int
    revision: int | None = None
    deleted: bool = False


class Source:
    """One source through its own connection. Inside `with` it stays open; outside, each call opens and closes it.

    Every method raises RunError in one line if the source is unavailable or refuses, MissingValueError if the bucket,
    the file or the key does not exist, and ConfigurationError for a key or a method that the source's type does not have.
    """

    def __init__(self, name: str, settings: SourceSettings) -> None:
        self.name, self.settings = name, settings
        self._kept = False

    def __enter__(self) -> Self:
        self._kept = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept = False
        self.close()

    def close(self) -> None:
        """Close the connection; do nothing if it is not open."""

    def get(self, key: str, default: Json = MISSING) -> Json:
        """Return a value, or `default` if it is given and the bucket, the file or the key does not exist."""
        try:
            return self.read(key)
        except MissingValueError:
            if default is MISSING:
                raise
            return default

    def read(self, key: str) -> Json:
        """Return a value as the source stores it."""
        raise NotImplementedError

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with a prefix, sorted."""
        raise NotImplementedError

    def put(self, key: str, value: Json) -> None:  # noqa: ARG002  the interface
        """Write a value."""
        self._refuse_writing(key)

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._refuse_writing(key)

    def history(self, key: str) -> list[Change]:
        """Return the stored revisions of a key, oldest first."""
        raise ConfigurationError(
            f"{self.name}/{key}: a source of type {self.settings.type} keeps no history; use a source of type kv"
        )

    def watch(self, key: str) -> Iterator[Change]:
        """Yield the value of a key, and each later change, without end.

        Once the source has responded, an outage is one warning, and the watch continues.
        """
        raise NotImplementedError

    def _until_available(self, ask: Callable[[], T]) -> T:
        """Return an answer as soon as the source responds; warn once if it does not."""
        warned = False
        while True:
            try:
                return ask()
            except TransientError as error:
                if not warned:
                    print_warning(f"{self.name}: {error}; the watch continues when it responds")
                warned = True
                times.sleep(_PAUSE_SECONDS)

    def _refuse_writing(self, key: str) -> NoReturn:
        kind = self.settings.type
        raise ConfigurationError(
            f"{self.name}/{key}: a source of type {kind} is read-only; use a source of type kv, file or consul"
        )
