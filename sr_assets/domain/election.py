"""The keys of a leader election: those of the Stream Replicator, and our members' records."""

from urllib.parse import quote


def election_key(name: str, stream: str) -> str:
    """Return the key of an entry, as the Stream Replicator names it."""
    return f"SR_{name}_{stream}"


def record_key(site: str, instance: str) -> str:
    """Return the key of a member's record about a site; the instance `*` matches all members."""
    # A key has no '%', and an instance is one token.
    return f"sr_assets.{quote(site, safe='').replace('%', '=').replace('.', '=2E')}.{instance}"
