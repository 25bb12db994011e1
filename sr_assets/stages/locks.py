"""Locks: keys in the bucket of a data source that one run at a time holds, taken and renewed like a leadership.

The key of `ops/maintenance` is `lock.maintenance` in the bucket of `ops`. Its value names the holder and the start of its
run, and it expires with its own TTL.
"""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Final, Self

from sr_assets.adapters import times
from sr_assets.adapters.state.status_file import record_alive
from sr_assets.domain.durations import duration
from sr_assets.domain.election_keys import lock_key
from sr_assets.domain.errors import RunError, TransientError
from sr_assets.domain.positions import SECOND_NS, format_rfc3339_ns
from sr_assets.settings.data import split_label
from sr_assets.stages.campaign import Key
from sr_assets.stages.leadership import Leadership

if TYPE_CHECKING:
    from sr_assets.settings import Entry, Settings

_POLL_SECONDS: Final = 0.1


def site_locks(settings: Settings, site: str) -> list[str]:
    """Return the locks of a site's entries, in the order in which every run takes them."""
    return sorted({lock for entry in settings.sites[site] for lock in entry.locks or ()})


def _locking(settings: Settings, site: str) -> list[Entry]:
    return [entry for entry in settings.sites[site] if entry.locks]


def _keys(settings: Settings, site: str, run_id: str) -> list[Key]:
    holder = f"{settings.replicator}/{site} on {socket.gethostname()} (pid {os.getpid()}, run {run_id})"
    value = json.dumps({"holder": holder, "since": format_rfc3339_ns(times.time_ns())})
    ttl_ns = min((entry.lock_ttl_ns or settings.lock_ttl_ns for entry in _locking(settings, site)), default=0)
    keys = []
    for lock in site_locks(settings, site):
        source, name = split_label(lock)
        cluster, bucket = settings.data[source].cluster, settings.data[source].bucket or ""
        keys.append(Key(lock_key(name), holder, cluster, bucket, lock, ttl_ns / SECOND_NS, value))
    return keys


class Locks:
    """All locks of a site's run, as a context manager; `acquired` waits for them."""

    def __init__(self, settings: Settings, site: str, run_id: str) -> None:
        self._site, self._keys = site, _keys(settings, site, run_id)
        #: The campaign for the keys, which holds the locks while it leads.
        self.campaign = Leadership(settings, f"{site}/locks", keys=self._keys)
        self._folder = settings.home / "sites" / site
        entries = _locking(settings, site)
        waits_ns = (settings.lock_timeout_ns if e.lock_timeout_ns is None else e.lock_timeout_ns for e in entries)
        self._timeout_seconds = min(waits_ns, default=0) / SECOND_NS

    def __enter__(self) -> Self:
        try:
            self.campaign.begin()
        except RunError as error:
            kind = TransientError if isinstance(error, TransientError) else RunError
            labels = ", ".join(key.label for key in self._keys)
            raise kind(f"{self._site}: lock {labels}: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        self.campaign.__exit__()

    def acquired(self) -> Leadership | None:
        """Wait until the locks are held, and return their campaign; None if the site has none.

        Raises RunError with the holder's name after `lock_timeout`.
        """
        if not self._keys:
            return None
        deadline = times.monotonic() + self._timeout_seconds
        while not self.campaign.leads:
            if times.monotonic() > deadline:
                raise RunError(self._timed_out())
            record_alive(self._folder)
            times.sleep(_POLL_SECONDS)
        return self.campaign

    def _timed_out(self) -> str:
        lease = self.campaign.lease
        source, name = split_label(lease.locks)
        waited = f"waited {duration(self._timeout_seconds)} (lock_timeout)"
        remedy = f"wait for its end, or free the lock of a dead holder: sr-assets data delete {source}/{lock_key(name)}"
        return f"{self._site}: lock {lease.locks}: {lease.line}; {waited}; {remedy}"
