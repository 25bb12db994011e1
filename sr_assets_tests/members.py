"""Members of an election: homes with the same site, a bucket with a short TTL, and keys of a Stream Replicator."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

from sr_assets.adapters.wire import Outgoing, Publisher
from sr_assets.settings import Settings
from sr_assets_tests.rig import SITE, Rig, cluster, connection

TTL_SECONDS = 2.0
#: For tests that must see a key before it expires, also on a busy machine.
SLOW_TTL_SECONDS = 8.0


def make_bucket(rig: Rig, ttl_seconds: float = TTL_SECONDS) -> str:
    """Create a bucket as `nats kv add --ttl` does; return its name."""
    bucket = rig.unique("ELECTION")
    with cluster(rig.source) as opened:
        opened.create_stream(bucket_config(bucket, ttl_seconds))
    return bucket


def bucket_config(bucket: str, ttl_seconds: float = TTL_SECONDS) -> dict[str, Any]:
    """Return the configuration of a bucket's stream."""
    config: dict[str, Any] = {"max_msgs_per_subject": 1, "max_age": int(ttl_seconds * 1e9), "discard": "new"}
    config |= {"allow_rollup_hdrs": True, "deny_delete": True, "allow_direct": True, "duplicate_window": 10**8}
    return {"name": f"KV_{bucket}", "subjects": [f"$KV.{bucket}.>"], **config}


def member(rig: Rig, folder: Path, name: str, bucket: str, **top: Any) -> Settings:
    """Return the configuration of a member with a home of its own and the rig's entries."""
    (folder / name).mkdir(exist_ok=True)
    other = copy(rig)
    other.home = folder / name
    return other.settings(**elected(name, bucket), **top)


def elected(name: str, bucket: str) -> dict[str, Any]:
    """Return the keys of a member's election, with a store of checkpoints of its own."""
    return {
        "leader_election_name": name,
        "leader_election": {"bucket": bucket},
        "checkpoint": {"bucket": f"{bucket}_STATE", "interval": "1s"},
    }


def key_of(stream: str) -> str:
    """Return the key of a stream of the rig's site."""
    return f"SR_{SITE}_{stream}"


def write_key(rig: Rig, bucket: str, key: str, value: str, revision: int | None = 0, **headers: str) -> int | None:
    """Write a key as the Stream Replicator does; return its revision, or None if the server refuses."""
    if revision is not None:
        headers["Nats-Expected-Last-Subject-Sequence"] = str(revision)
    lines = "".join(f"{name.replace('_', '-')}: {text}\r\n" for name, text in headers.items())
    item = Outgoing(1, f"$KV.{bucket}.{key}", f"NATS/1.0\r\n{lines}\r\n".encode(), value.encode())
    with connection(rig.source) as opened:
        (ack,) = Publisher(opened).publish_all([item])
    return ack.target_sequence


def read_key(rig: Rig, bucket: str, key: str) -> bytes | None:
    """Return a key's value, or None if it is missing or deleted."""
    with cluster(rig.source) as opened:
        message = opened.last_message(f"KV_{bucket}", f"$KV.{bucket}.{key}")
    return None if message is None or b"KV-Operation" in message.headers else message.payload
