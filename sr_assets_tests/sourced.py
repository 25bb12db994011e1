"""Data sources of tests: a bucket as `nats kv add` makes it, and the block `data` that names it."""

from __future__ import annotations

from typing import Any

from sr_assets_tests.rig import Rig, cluster


def make_data_bucket(rig: Rig, *, per_message_ttl: bool = True) -> str:
    """Create a bucket with a history of 5 on the rig's source; return its name."""
    bucket = rig.unique("OPS")
    config: dict[str, Any] = {"max_msgs_per_subject": 5, "discard": "new", "allow_msg_ttl": per_message_ttl}
    config |= {"allow_rollup_hdrs": True, "deny_delete": True, "allow_direct": True}
    with cluster(rig.source) as opened:
        opened.create_stream({"name": f"KV_{bucket}", "subjects": [f"$KV.{bucket}.>"], **config})
    return bucket


def kv(rig: Rig, bucket: str) -> dict[str, Any]:
    """Return the block of a source `kv`."""
    return {"type": "kv", "url": rig.source.url, "bucket": bucket}
