"""One member's part in the election of a site, or a run's part in its locks: taking, renewing and deleting their keys.

A member leads while it holds all keys. The order of the steps, and why a new leader starts only after the previous one's
deadline, are in docs/decisions/0023-leadership.md.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sr_assets.adapters import times
from sr_assets.adapters.bucket import Entry, close_all
from sr_assets.adapters.lease_bucket import LeaseBucket, sound_name
from sr_assets.adapters.state.lease import Lease, forget_lease, instance_of
from sr_assets.adapters.state.orders import is_pending
from sr_assets.domain.election_keys import election_key
from sr_assets.domain.errors import RunError
from sr_assets.domain.foreign_text import visible
from sr_assets.domain.positions import parse_rfc3339_ns

if TYPE_CHECKING:
    from sr_assets.settings import ClusterSettings, Settings

#: Mean pauses between two campaigns; a TTL below 2 s shortens them.
_LEADER_SECONDS: Final = 0.5
_CANDIDATE_SECONDS: Final = 1.0
#: A Stream Replicator whose key was deleted notices it at its next renewal, at most 0.75 s later.
_NOTICE_SECONDS: Final = 1.0
#: The share of the TTL by which a leader's deadline precedes the expiry of its keys, for different rates of clocks.
_MARGIN: Final = 0.1
_LONGEST_MARGIN_SECONDS: Final = 5.0
_LEADER: Final = "leader"
#: A follower that would not lead better than another one: it rests after a step-down, or lacks the site's state.
_RELUCTANT: Final = "reluctant"
#: The characters of a lock's holder that are shown.
_LONGEST_HOLDER: Final = 100
#: Instead of the last message of a key that is free.
_NOBODY: Final = Entry("", 0, 0, None, deleted=True)


class Key(NamedTuple):
    """A key, its holder's name if this member takes it, and the cluster and bucket with the key.

    A lock has its name as `label`, a `ttl_seconds` of its own, and a value that names the holder.
    """

    key: str
    member: str
    cluster: ClusterSettings
    bucket: str
    label: str = ""
    ttl_seconds: float | None = None
    lock_value: str = ""

    @property
    def value(self) -> str:
        return self.lock_value or self.member

    @property
    def location(self) -> tuple[ClusterSettings, str]:
        return self.cluster, self.bucket


def election_keys(settings: Settings, site: str) -> list[Key]:
    """Return the keys of a site's entries with an election, in the order in which every member takes them."""
    return sorted(
        (
            Key(
                election_key(entry.name, entry.stream),
                entry.leader_election_name,
                settings.election_cluster(entry),
                settings.leader_election.bucket,
            )
            for entry in settings.sites[site]
            if entry.leader_election_name
        ),
        key=lambda key: key.key,
    )


class Candidate:
    """This member in the election of one site, or a run that takes its locks; for one thread.

    Each method writes the resulting lease and returns it.

    An instance of a member is a home on a machine since its boot: after a crash, the same home continues its own term.
    """

    def __init__(self, settings: Settings, site: str, keys: Sequence[Key]) -> None:
        self.keys = keys
        self._site, self._folder = site, settings.home / "sites" / site
        self._lease = before = Lease.read(self._folder)
        self._instance = instance_of(self._folder)
        self._buckets = {
            key.location: LeaseBucket(key.cluster, key.bucket, self._instance, key.ttl_seconds) for key in self.keys
        }
        #: The bucket with the members' records; locks have none.
        self._records = None if self.keys[0].label else self._buckets[self.keys[0].location]
        #: The key that another member held last.
        self._contested = self.keys[0]
        #: The revision of each key while this member holds all of them.
        self._held: dict[str, int] = {}
        self._since_ns: int | None = None
        self._waits_until = self._recorded_at = 0.0
        self._campaigns = Counter(before.campaigns)
        self._is_writable = True

    @property
    def ttl_seconds(self) -> float:
        """The shortest TTL of the buckets; 0 before the first response."""
        return min(bucket.ttl_seconds for bucket in self._buckets.values())

    @property
    def pause_seconds(self) -> float:
        """The mean pause before the next campaign."""
        ttl_seconds = self.ttl_seconds or 2.0
        return min(_LEADER_SECONDS, ttl_seconds / 4) if self._held else min(_CANDIDATE_SECONDS, ttl_seconds / 2)

    @property
    def holds_keys(self) -> bool:
        """Whether this member holds all keys; it may still have to wait for the previous leader's deadline."""
        return bool(self._held)

    def heirs(self) -> list[str]:
        """Return `MEMBER on HOST` of each other member that may lead. Raises RunError as `campaign` does."""
        return [label for label, role in self._others() if role != _RELUCTANT]

    def campaign(self) -> Lease:
        """Take or renew the keys.

        Raises RunError if the buckets' servers do not respond or a bucket is unusable, and OSError if the lease cannot be
        written.

        After an error the last lease remains valid until its deadline.
        """
        if not self._is_writable:
            # A member that holds the keys without a lease would keep the others from leading.
            self._keep(self._made(Lease(problem="this member could not write its lease")))
        began = times.boot_seconds()
        self._campaigns[_LEADER if self._since_ns else "candidate"] += 1
        holder = None if self._held else self._take()
        problem = self._announce() if self._held else None
        if self._held and not self._renew():
            holder = self._drop()
        if holder is not None:
            return self._keep(self._follow(holder))
        return self._keep(self._made(Lease(problem=problem)) if problem else self._lead(began))

    def observe(self) -> Lease:
        """Find out who leads, without campaigning."""
        return self._keep(self._follow(self._read(self.keys[0]) or _NOBODY))

    def stop(self, problem: str, failing_since: float | None = None) -> Lease:
        """Forbid all work of this home as a leader from now on; the keys remain until they are released or expire."""
        with contextlib.suppress(OSError):
            self._keep(self._made(Lease(problem=problem, failing_since=failing_since)))
        return self._lease

    def release(self, *, rest: bool = False) -> Lease:
        """Delete our keys and our record, after all work has stopped; with `rest`, do not campaign for two TTLs.

        Keys that cannot be deleted expire.
        """
        with contextlib.suppress(RunError):
            for key in self.keys:
                entry = self._read(key)
                if entry is not None and self._is_ours(entry):
                    self._buckets[key.location].delete(key.key, entry.revision)
            if self._records is not None:
                self._records.forget_record(self._site)
        self._held, self._since_ns = {}, None
        rests_until = times.boot_seconds() + 2 * self.ttl_seconds if rest else self._lease.rests_until
        with contextlib.suppress(OSError):
            self._keep(self._made(Lease(problem="this member gave up the leadership", rests_until=rests_until)))
        return self._lease

    def close(self) -> None:
        """Close the connections; the next campaign opens them again."""
        close_all(self._buckets.values())

    # ------------------------------------------------------------------------------------------------------ the keys

    def _take(self) -> Entry | None:
        """Take all keys in order; if one is held by another member, release the others and return its last message."""
        held: dict[str, int] = {}
        for key in self.keys:
            revision, before = self._buckets[key.location].create(key.key, key.value)
            if revision is None:
                # Taken in a campaign whose response was lost, or before a crash of this home's process.
                if before is not None and self._is_ours(before):
                    held[key.key] = before.revision
                    continue
                for other in (other for other in self.keys if other.key in held):
                    self._buckets[other.location].delete(other.key, held[other.key])
                self._contested = key
                return before or _NOBODY
            # A leader of our kind stops its work before it deletes its keys.
            if before is not None and before.instance is None:
                self._waits_until = times.boot_seconds() + self._notice_seconds(before)
            held[key.key] = revision
        self._held = held
        return None

    def _renew(self) -> bool:
        """Renew all keys; return False if another member has taken or deleted one."""
        pending = self.keys
        # The second attempt is for keys whose earlier renewal succeeded although its response was lost.
        for _ in range(2):
            for location, bucket in self._buckets.items():
                keys = [key for key in pending if key.location == location]
                revisions = bucket.put({key.key: (key.value, self._held[key.key]) for key in keys})
                renewed = {key.key: revision for key, revision in zip(keys, revisions, strict=True) if revision}
                self._held |= renewed
                pending = [key for key in pending if key.key not in renewed]
            for key in pending:
                entry = self._read(key)
                if entry is None or not self._is_ours(entry):
                    return False
                self._held[key.key] = entry.revision
        return not pending

    def _drop(self) -> Entry:
        """Release the keys that this member still holds; return the last message of the first lost one."""
        held, self._held, self._since_ns = self._held, {}, None
        # No process of this home may continue while the keys are given back.
        self._keep(self._made(Lease(problem="a key was taken or deleted")))
        # Our record as a leader remains until it expires: a new leader of our kind waits for that.
        self._recorded_at = times.boot_seconds() + self.ttl_seconds
        lost = _NOBODY
        for key in self.keys:
            entry = self._read(key)
            if entry is not None and self._is_ours(entry):
                self._buckets[key.location].delete(key.key, held[key.key])
            elif entry is not None:
                lost, self._contested = entry, key
        return lost

    def _notice_seconds(self, before: Entry) -> float:
        """Return how long another holder may work on after its key was deleted."""
        if self._records is not None:
            return _NOTICE_SECONDS
        # A holder of a lock whose key was deleted by hand, and which hangs, may commit until its deadline.
        return 0.0 if before.expired else self.ttl_seconds

    def _is_ours(self, entry: Entry) -> bool:
        return entry.instance == self._instance and not entry.deleted

    def _read(self, key: Key) -> Entry | None:
        return self._buckets[key.location].read(key.key)

    # ------------------------------------------------------------------------------------------------------- the role

    def _announce(self) -> str | None:
        """Write our record; return why this member does not lead yet although it holds all keys, or None.

        The renewals come after it, so another member that takes a key deleted after its renewal finds our record.
        """
        if self._since_ns is None and (problem := self._wait_for_predecessor()):
            self._record("candidate")
            return problem
        self._since_ns = self._since_ns or self._own_since() or times.time_ns()
        if self._records is not None:
            self._records.keep_record(self._site, self._about(_LEADER))
        return None

    def _lead(self, began: float) -> Lease:
        """Return the lease of a member that has written its record and renewed all keys since `began`."""
        margin = min(_MARGIN * self.ttl_seconds, _LONGEST_MARGIN_SECONDS)
        lease = Lease(
            leader=self.keys[0].member,
            leader_host=None if self._records is None else socket.gethostname(),
            since_ns=self._since_ns,
            deadline=began + self.ttl_seconds - margin,
        )
        return self._made(lease)

    def _wait_for_predecessor(self) -> str | None:
        """Return why a previous leader may still be before its deadline, or None."""
        if self._records is None:
            return "an earlier holder may still work" if times.boot_seconds() < self._waits_until else None
        if any(bucket.age_seconds() < bucket.ttl_seconds for bucket in self._buckets.values()):
            return "this member will lead when the bucket is older than its TTL: a leader may know a deleted bucket"
        if times.boot_seconds() < self._waits_until:
            return "this member will lead when the previous leader has noticed that its key was deleted"
        leading = [label for label, role in self._others() if role == _LEADER]
        return f"this member will lead when the lease of {leading[0]} has expired" if leading else None

    def _others(self) -> list[tuple[str, object]]:
        """Return `MEMBER on HOST` and the role of each other member with a record."""
        records = {} if self._records is None else self._records.records(self._site)
        others = [record for instance, record in records.items() if instance != self._instance]
        return [(f"{each.get('member')} on {each.get('host')}", each.get("role")) for each in others]

    def _own_since(self) -> int | None:
        """Return the start of our own term if a crashed process of this home began it."""
        record = (self._records and self._records.record(self._site, self._instance)) or {}
        since_ns = record.get("since_ns")
        return since_ns if record.get("role") == _LEADER and isinstance(since_ns, int) else None

    def _follow(self, holder: Entry) -> Lease:
        """Return the lease of a member that does not hold all keys."""
        if self._records is None:
            return self._made(lock_lease(holder))
        rests = times.boot_seconds() < self._lease.rests_until
        self._record(_RELUCTANT if rests or is_pending(self._folder, "yield") else "follower")
        if holder.deleted:
            return self._made(Lease(problem="no member leads yet"))
        name = sound_name(holder.value)
        record = (holder.instance and self._records.record(self._site, holder.instance)) or {}
        if holder.instance and record.get("role") != _LEADER:
            return self._made(Lease(problem=f"{name} will lead when its predecessor's lease has expired"))
        host, since_ns = record.get("host"), record.get("since_ns")
        before = self._lease
        if since_ns is None:
            # A Stream Replicator's term is known only since we first saw it.
            same = (before.leader, before.leader_host) == (name, host)
            since_ns = before.since_ns if same and before.since_ns else holder.stored_ns
        return self._made(Lease(leader=name, leader_host=host, since_ns=since_ns))

    def _record(self, role: str) -> None:
        """Keep our record alive, unless it is new enough."""
        if self._records is not None and times.boot_seconds() >= self._recorded_at + self.ttl_seconds / 3:
            self._records.keep_record(self._site, self._about(role))
            self._recorded_at = times.boot_seconds()

    def _about(self, role: str) -> dict[str, Any]:
        about = {"member": self.keys[0].member, "host": socket.gethostname(), "role": role}
        return {**about, "since_ns": self._since_ns} if role == _LEADER else about

    def _made(self, lease: Lease) -> Lease:
        """Return a lease with the numbers of this member."""
        return replace(
            lease,
            rests_until=lease.rests_until or self._lease.rests_until,
            ttl_seconds=self.ttl_seconds,
            interval_seconds=self.pause_seconds,
            campaigns=dict(self._campaigns),
            keys={key.key: key.member for key in self.keys},
            locks=self._contested.label,
        )

    def _keep(self, lease: Lease) -> Lease:
        """Write a lease. Raises OSError on a full disk: a lease of a leader then ends at its deadline, another one now."""
        self._lease = lease
        try:
            lease.write(self._folder)
        except OSError:
            self._is_writable = False
            if not lease.holds:
                # Needs no space. Without a lease, no process of this home leads.
                forget_lease(self._folder)
            raise
        self._is_writable = True
        return lease


def lock_lease(holder: Entry) -> Lease:
    """Return the lease of a run that does not hold all locks; another program's value is its name."""
    if holder.deleted:
        return Lease(problem="the lock is free")
    try:
        value = json.loads(holder.value)
        name, since_ns = str(value["holder"]), parse_rfc3339_ns(value["since"])
    except (ValueError, TypeError, KeyError, RecursionError):
        name, since_ns = holder.value, holder.stored_ns
    # Tables have no times after 2262.
    since_ns = since_ns if 0 <= since_ns < 1 << 63 else holder.stored_ns
    return Lease(leader=visible(name[:_LONGEST_HOLDER]) or "an unnamed holder", since_ns=since_ns)
