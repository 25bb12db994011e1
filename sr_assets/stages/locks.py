"""Locks: keys in the bucket of a data source that one run at a time holds, taken and renewed like a leadership.

The key of `ops/maintenance` is `lock.maintenance` in the bucket of `ops`. Its value names the holder and the start of its
run, and it expires with its own TTL.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

from sr_assets.adapters import times
from sr_assets.adapters.bucket import Entry
from sr_assets.adapters.election_bucket import ElectionBucket, LockBucket
from sr_assets.adapters.state.lease import Lease
from sr_assets.adapters.state.status_file import record_alive
from sr_assets.domain.durations import duration
from sr_assets.domain.election_keys import lock_key
from sr_assets.domain.errors import RunError, TransientError
from sr_assets.domain.foreign_text import visible
from sr_assets.domain.positions import SECOND_NS, format_rfc3339_ns, parse_rfc3339_ns
from sr_assets.settings.data import split_label
from sr_assets.stages.candidate import Candidate, Key
from sr_assets.stages.leadership import Leadership

if TYPE_CHECKING:
    from sr_assets.settings import Entry as ConfiguredEntry
    from sr_assets.settings import Settings

_POLL_SECONDS: Final = 0.1
#: The characters of a holder that are shown.
_LONGEST_HOLDER: Final = 100


def site_locks(settings: Settings, site: str) -> list[str]:
    """Return the locks of a site's entries, in the order in which every run takes them."""
    return sorted({lock for entry in settings.sites[site] for lock in entry.locks or ()})


def _locking(settings: Settings, site: str) -> list[ConfiguredEntry]:
    return [entry for entry in settings.sites[site] if entry.locks]


def _keys(settings: Settings, site: str, run_id: str) -> list[Key]:
    holder = f"{settings.replicator}/{site} on {socket.gethostname()} (pid {os.getpid()}, run {run_id})"
    value = json.dumps({"holder": holder, "since": format_rfc3339_ns(times.time_ns())})
    keys = []
    for lock in site_locks(settings, site):
        source, name = split_label(lock)
        keys.append(Key(lock_key(name), value, settings.data[source].cluster, settings.data[source].bucket or "", lock))
    return keys


class LockCandidate(Candidate):
    """A run that takes the locks of its site."""

    def _bucket(self, settings: Settings, key: Key) -> ElectionBucket:
        site = self._site.rpartition("/")[0]
        ttl_ns = min(entry.lock_ttl_ns or settings.lock_ttl_ns for entry in _locking(settings, site))
        return LockBucket(key.cluster, key.bucket, self._instance, ttl_ns / SECOND_NS)

    def _notice_seconds(self, before: Entry) -> float:
        # A holder whose key was deleted by hand, and which hangs, may commit until its deadline.
        return 0.0 if before.expired else self.ttl_seconds

    def _follow(self, holder: Entry) -> Lease:
        if holder.deleted:
            return self._made(Lease(problem="the lock is free"))
        name, since_ns = read_holder(holder)
        return self._made(Lease(leader=name, since_ns=since_ns))

    def _made(self, lease: Lease) -> Lease:
        if lease.leader == self.keys[0].member:
            lease = replace(lease, leader=json.loads(lease.leader)["holder"], leader_host=None)
        return replace(super()._made(lease), locks=self._contested.label)

    def _wait_for_predecessor(self) -> str | None:
        return "an earlier holder may still work" if times.boot_seconds() < self._waits_until else None


def read_holder(entry: Entry) -> tuple[str, int]:
    """Return the holder in the value of a lock, and since when it holds it (unix ns); another program's value is its name."""
    try:
        value = json.loads(entry.value)
        name, since_ns = str(value["holder"]), parse_rfc3339_ns(value["since"])
    except (ValueError, TypeError, KeyError, RecursionError):
        name, since_ns = entry.value, entry.stored_ns
    # Tables have no times after 2262.
    since_ns = since_ns if 0 <= since_ns < 1 << 63 else entry.stored_ns
    return visible(name[:_LONGEST_HOLDER]) or "an unnamed holder", since_ns


class Locks(Leadership):
    """All locks of a site's run, as a context manager; `acquired` waits for them."""

    _kind = LockCandidate

    def __init__(self, settings: Settings, site: str, run_id: str) -> None:
        super().__init__(settings, f"{site}/locks", keys=_keys(settings, site, run_id))
        self._name = site
        entries = _locking(settings, site)
        waits_ns = (settings.lock_timeout_ns if e.lock_timeout_ns is None else e.lock_timeout_ns for e in entries)
        self._timeout_seconds = min(waits_ns, default=0) / SECOND_NS

    def __enter__(self) -> Self:
        try:
            return super().__enter__()
        except RunError as error:
            kind = TransientError if isinstance(error, TransientError) else RunError
            labels = ", ".join(key.label for key in self._keys)
            raise kind(f"{self._name}: lock {labels}: {error}") from None

    def acquired(self) -> Self | None:
        """Wait until the locks are held, and return them; None if the site has none.

        Raises RunError with the holder's name after `lock_timeout`.
        """
        if not self.elects:
            return None
        deadline = times.monotonic() + self._timeout_seconds
        while not self.leads:
            if times.monotonic() > deadline:
                raise RunError(self._timed_out())
            record_alive(self._folder.parent)
            times.sleep(_POLL_SECONDS)
        return self

    def _timed_out(self) -> str:
        lease = self.lease
        source, name = split_label(lease.locks)
        waited = f"waited {duration(self._timeout_seconds)} (lock_timeout)"
        remedy = f"wait for its end, or free the lock of a dead holder: sr-assets data delete {source}/{lock_key(name)}"
        return f"{self._name}: lock {lease.locks}: {lease.line}; {waited}; {remedy}"

    def _show(self) -> None:
        """Show nothing: the published tables have no locks."""
