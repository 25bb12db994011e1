"""The members of every site's election, as the servers know them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.election import ElectionBucket, sound_name
from sr_assets.adapters.state.lease import Lease
from sr_assets.domain.errors import RunError
from sr_assets.stages.candidate import election_keys

if TYPE_CHECKING:
    from sr_assets.settings import Settings

#: A reader is no member: it writes no key.
_READER: Final = "reader"


@dataclass(frozen=True, slots=True)
class SiteMembers:
    """A site's leader, the start of its term (unix ns), and the names of the followers.

    All are unknown without an election; `leader_host` also for a Stream Replicator. `since_ns` of a Stream Replicator is
    when this home first saw it lead. `problem` is why the election could not be read.
    """

    name: str
    leader: str | None = None
    leader_host: str | None = None
    since_ns: int | None = None
    followers: tuple[str, ...] = ()
    problem: str | None = None


def find_members(settings: Settings) -> list[SiteMembers]:
    """Query the elections of all sites."""
    return [_members(settings, site) for site in settings.sites]


def _members(settings: Settings, site: str) -> SiteMembers:
    keys = election_keys(settings, site)
    if not keys:
        return SiteMembers(site)
    bucket = ElectionBucket(keys[0].cluster, settings.leader_election.bucket, _READER, creates=False)
    try:
        with contextlib.closing(bucket):
            if not bucket.exists():
                return SiteMembers(site)
            records, entry = bucket.records(site), bucket.read(keys[0].key)
    except RunError as error:
        return SiteMembers(site, problem=str(error))
    followers = tuple(sorted(str(record.get("member")) for record in records.values() if not _leads(record)))
    if entry is None or entry.deleted:
        return SiteMembers(site, followers=followers)
    name = sound_name(entry.value)
    if entry.instance is None:
        lease = Lease.read(settings.home / "sites" / site)
        since_ns = lease.since_ns if (lease.leader, lease.leader_host) == (name, None) else entry.stored_ns
        return SiteMembers(site, name, None, since_ns, followers)
    record = records.get(entry.instance, {})
    if not _leads(record):
        return SiteMembers(site, followers=followers)
    return SiteMembers(site, name, record.get("host"), record.get("since_ns"), followers)


def _leads(record: dict[str, Any]) -> bool:
    return record.get("role") == "leader"
