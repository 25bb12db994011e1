"""The keys of a leader election: those of the Stream Replicator, and our members' records."""

from urllib.parse import quote


def election_key(name: str, stream: str) -> str:
    """Return the key of an entry, as the Stream Replicator names it."""
    return f"SR_{name}_{stream}"


def heartbeats_key(replicator: str) -> str:
    """Return the key of the publisher of a replicator's heartbeats, as the Stream Replicator names it."""
    return election_key(replicator, "HB")


def heartbeats_site(replicator: str) -> str:
    """Return the name that the heartbeats' election has instead of a site's: of its records, and of its lease's folder."""
    return f".heartbeats-{quote(replicator, safe='')}"


def record_key(site: str, instance: str) -> str:
    """Return the key of a member's record about a site; the instance `*` matches all members."""
    # A key has no '%', and an instance is one token.
    return f"sr_assets.{quote(site, safe='').replace('%', '=').replace('.', '=2E')}.{instance}"


def lock_key(name: str) -> str:
    """Return the key of a lock in its source's bucket, distinct from the keys of values."""
    return f"lock.{name}"
