"""The data source `kv`: a bucket of NATS KV."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from sr_assets.adapters import times
from sr_assets.adapters.bucket import Entry, KeyBucket
from sr_assets.adapters.data.interface import Change, Json, Source
from sr_assets.adapters.jetstream import MESSAGE_NOT_FOUND, STREAM_NOT_FOUND
from sr_assets.adapters.wire.connection import DeniedError, RefusedError, WireError
from sr_assets.domain.errors import ConfigurationError, RunError, TransientError
from sr_assets.settings.references import MissingValueError

if TYPE_CHECKING:
    from sr_assets.settings import SourceSettings

T = TypeVar("T")
_KEY: Final = re.compile(r"[A-Za-z0-9_=/-]+(\.[A-Za-z0-9_=/-]+)*")
_POLL_SECONDS: Final = 0.5


class KvSource(Source):
    """A bucket; one lock lets several threads share the connection."""

    def __init__(self, name: str, settings: SourceSettings) -> None:
        super().__init__(name, settings)
        self._guard = threading.Lock()
        self._bucket = KeyBucket(settings.cluster, settings.bucket or "", client="sr-assets data")

    def close(self) -> None:
        with self._guard:
            self._bucket.close()

    def read(self, key: str) -> Json:
        entry = self._ask(key, lambda bucket: bucket.read(key))
        if entry is None or entry.deleted:
            raise MissingValueError(f"{self.settings.label} has no key {key!r}; put it")
        return entry.value

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with a prefix, without deleted ones, sorted."""

        def stored(bucket: KeyBucket) -> list[str]:
            keys = sorted(key for key in bucket.keys(">") if key.startswith(prefix))
            return [key for key in keys if (entry := bucket.read(key)) is not None and not entry.deleted]

        return self._ask("key", stored)

    def put(self, key: str, value: Json) -> None:
        text = value if isinstance(value, str) else json.dumps(value)

        def write(bucket: KeyBucket) -> None:
            if bucket.info() is None:
                raise self._no_bucket()
            bucket.put({key: (text, None)})

        self._ask(key, write)

    def delete(self, key: str) -> None:
        """Delete a key; its history stays."""
        self.read(key)
        self._ask(key, lambda bucket: bucket.delete(key, None))

    def history(self, key: str) -> list[Change]:
        """Return the stored revisions of a key, oldest first."""
        return [_change(key, entry) for entry in self._ask(key, lambda bucket: list(bucket.revisions(key)))]

    def watch(self, key: str) -> Iterator[Change]:
        """Yield the value of a key, and each later change, by asking for the next revision twice a second."""
        entry = self._ask(key, lambda bucket: bucket.read(key))
        while True:
            if entry is not None:
                yield _change(key, entry)
            later = partial(KeyBucket.next, key=key, revision=entry.revision + 1 if entry else 1)
            while (entry := self._until_available(partial(self._ask, key, later))) is None:
                times.sleep(_POLL_SECONDS)

    def _ask(self, key: str, question: Callable[[KeyBucket], T]) -> T:
        """Return the answer to a question; a connection that was lost since its last use is opened again."""
        if not _KEY.fullmatch(key):
            raise ConfigurationError(
                f"{self.name}/{key}: is not a key of a bucket; use letters, digits, '_', '-', '=', '/' and '.'"
            )
        with self._guard, contextlib.nullcontext() if self._kept else contextlib.closing(self._bucket):
            for attempt in range(2):
                try:
                    return question(self._bucket)
                except RefusedError as error:
                    raise self._refused(error) from None
                except DeniedError as error:
                    self._bucket.close()
                    raise RunError(f"{self.settings.label}: {error}") from None
                except WireError as error:
                    self._bucket.close()
                    if attempt:
                        raise TransientError(f"{self.settings.label} is unavailable: {error}") from None
        raise AssertionError

    def _refused(self, error: RefusedError) -> RunError:
        if error.code == STREAM_NOT_FOUND:
            return self._no_bucket()
        if error.code == MESSAGE_NOT_FOUND:
            return MissingValueError(f"{self.settings.label}: {error}")
        return RunError(f"{self.settings.label}: {error}")

    def _no_bucket(self) -> MissingValueError:
        return MissingValueError(
            f"{self.settings.label} does not exist; create it: nats kv add {self.settings.bucket} --history 5"
        )


def _change(key: str, entry: Entry) -> Change:
    return Change(key, None if entry.deleted else entry.value, entry.stored_ns, entry.revision, entry.deleted)
