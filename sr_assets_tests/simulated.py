"""An election without servers and without real time: one bucket in memory, and threads that take turns."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from typing import TypeVar

import pytest

from sr_assets.adapters import times
from sr_assets.adapters.bucket import Entry
from sr_assets.adapters.lease_bucket import LeaseBucket
from sr_assets.domain.clusters import ClusterSettings

T = TypeVar("T")


class Store:
    """The last message of each key of a bucket, until its TTL has passed; `rate` is that of the server's clock."""

    def __init__(self, ttl_seconds: float, rate: float = 1.0) -> None:
        self.ttl_seconds, self.rate = ttl_seconds, rate
        self.created_at = 0.0
        self._entries: dict[str, tuple[float, Entry]] = {}
        self._revisions = itertools.count(1)

    def entries(self) -> dict[str, Entry]:
        """Return the messages that have not expired."""
        oldest = times.boot_seconds() - self.ttl_seconds / self.rate
        self._entries = {key: each for key, each in self._entries.items() if each[0] > oldest}
        return {key: entry for key, (_, entry) in self._entries.items()}

    def recreate(self) -> None:
        """Delete the bucket and create it again."""
        self._entries, self.created_at = {}, times.boot_seconds()

    def write(self, key: str, value: str, expected: int | None, instance: str | None, *, deleted: bool) -> int | None:
        """Store a message; return its revision, or None if the last one of the key has another one than expected."""
        last = self.entries().get(key)
        if expected is not None and expected != (last.revision if last else 0):
            return None
        entry = Entry(value, next(self._revisions), times.time_ns(), instance, deleted)
        self._entries[key] = times.boot_seconds(), entry
        return entry.revision


class SimulatedBucket(LeaseBucket):
    """A member's connection to a `Store`. `request` is called before and after each request takes effect."""

    def __init__(self, store: Store, instance: str, request: Callable[[], None] = lambda: None) -> None:
        super().__init__(ClusterSettings(()), "SIMULATED", instance)
        self._store, self._request = store, request

    def read(self, key: str) -> Entry | None:
        """Return the last message of a key."""
        return self._answer(lambda: self._store.entries().get(key))

    def keys(self, pattern: str) -> list[str]:
        """Return the keys that match a pattern."""
        return self._answer(lambda: [key for key in self._store.entries() if fnmatchcase(key, pattern)])

    def put(self, values: dict[str, tuple[str, int | None]]) -> list[int | None]:  # type: ignore[override]
        """Write values."""
        return [self._write(key, value, expected, deleted=False) for key, (value, expected) in values.items()]

    def delete(self, key: str, revision: int | None) -> bool:
        """Write a deletion."""
        return self._write(key, "", revision, deleted=True) is not None

    def age_seconds(self) -> float:
        """Return the age of the bucket."""
        return self._answer(lambda: times.boot_seconds() - self._store.created_at)

    def close(self) -> None:
        """Close nothing."""

    def _write(self, key: str, value: str, expected: int | None, *, deleted: bool) -> int | None:
        return self._answer(lambda: self._store.write(key, value, expected, self._member, deleted=deleted))

    def _answer(self, effect: Callable[[], T]) -> T:
        self._request()
        answer = effect()
        self._request()
        self.ttl_seconds = self._store.ttl_seconds
        return answer


class World:
    """Time that passes only while threads wait in `sleep`, one of which acts at a time: each seed is one history."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = self.end = 1e6
        self._turns: list[tuple[float, int, threading.Lock]] = []
        self._numbers = itertools.count()
        for name in ("boot_seconds", "monotonic", "time"):
            monkeypatch.setattr(times, name, lambda: self.now)
        monkeypatch.setattr(times, "time_ns", lambda: int(self.now * 1e9))
        monkeypatch.setattr(times, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        """Let the others act until this time has passed."""
        turn = self._queue(seconds)
        self._pass_on()
        turn.acquire()

    def run(self, seconds: float, bodies: list[Callable[[], None]]) -> None:
        """Run bodies, which sleep and end at `end`; raise what one raised."""
        self.end = self.now + seconds
        with ThreadPoolExecutor(len(bodies)) as pool:
            begun = [pool.submit(self._act, body, self._queue(0)) for body in bodies]
            self._pass_on()
        for each in begun:
            each.result()

    def _act(self, body: Callable[[], None], turn: threading.Lock) -> None:
        turn.acquire()
        try:
            body()
        finally:
            self._pass_on()

    def _queue(self, seconds: float) -> threading.Lock:
        turn = threading.Lock()
        turn.acquire()
        heapq.heappush(self._turns, (self.now + seconds, next(self._numbers), turn))
        return turn

    def _pass_on(self) -> None:
        if self._turns:
            self.now, _, turn = heapq.heappop(self._turns)
            turn.release()
